import dataclasses
import hashlib
import itertools
import json
import re

import pytest
from sweep_tools import block, tiny

from generators.population import PER_RUN_FIELDS
from zoo.config import load_config
from zoo.errors import PlanError
from zoo.plan import Plan, Population, cpu_population_size, differences, expand_grid, make_plan, run_steps

DIGEST = "0123456789abcdef"
GOLDEN_RUNS = ["dcf734dfc3658633", "840716fb025b28ac"]
GOLDEN_POPULATION = "b0be5e4a3e0e90a3"
GOLDEN_PLAN = "85ac6b88493ad2ba"


@pytest.mark.parametrize(
    ("preset", "epochs", "initialisation"), [("mnist", 50, "per_run"), ("mnist_paper", 100, "shared")]
)
def test_the_papers_grid_has_16000_distinct_runs(preset: str, epochs: int, initialisation: str) -> None:
    runs = expand_grid(load_config(preset), DIGEST)
    assert len({run.run_id for run in runs}) == len(runs) == 16_000
    assert {(run.epochs, run.initialisation, run.seed) for run in runs} == {(epochs, initialisation, 3)}
    for optimizer in ("sgd", "sgd_momentum", "adam", "rmsprop"):
        assert sum(run.optimizer == optimizer for run in runs) == 4_000
    adaptive = {run.learning_rate for run in runs if run.optimizer in ("adam", "rmsprop")}
    assert adaptive == {3e-4, 5e-4, 1e-3, 3e-3, 5e-3, 1e-2, 3e-2, 5e-2}
    assert {run.learning_rate for run in runs} - adaptive == {7e-3, 7e-2}


def test_every_run_is_in_one_population_of_runs_that_can_train_together() -> None:
    plan = make_plan(load_config("mnist"), DIGEST, 60_000)
    assert len({run.run_id for run in plan.runs}) == len(plan.runs) == 16_000
    for population in plan.populations:
        shared = [
            {getattr(run, name) for run in population.runs}
            for name in population.runs[0].to_dict()
            if name not in PER_RUN_FIELDS
        ]
        assert all(len(values) == 1 for values in shared)
    # 200 runs share optimizer, dropout and fraction; 13 even parts of 15 or 16 rather than 12 of 16 and one of 8.
    assert (plan.population_size, {len(p.runs) for p in plan.populations}) == (16, {15, 16})
    assert len(plan.populations) == 80 * 13


def test_a_gpus_population_is_a_whole_group() -> None:
    plan = make_plan(load_config("mnist"), DIGEST, 60_000, on_gpu=True)
    assert (len(plan.populations), {len(p.runs) for p in plan.populations}) == (80, {200})


@pytest.mark.parametrize(("steps", "size"), [(468, 16), (937, 8), (5000, 8), (100, 64), (0, 64)])
def test_an_automatic_population_takes_about_a_minute_an_epoch(steps: int, size: int) -> None:
    assert cpu_population_size(steps) == size


def test_ids_are_golden() -> None:
    plan = make_plan(tiny(), DIGEST, 128)
    first = plan.populations[0]
    assert [run.run_id for run in first.runs] == GOLDEN_RUNS
    assert first.id == GOLDEN_POPULATION
    assert first.id == hashlib.sha256(",".join(GOLDEN_RUNS).encode()).hexdigest()[:16]


def test_json_is_canonical_and_comes_back_equal() -> None:
    plan = make_plan(tiny(), DIGEST, 128)
    text = plan.to_json()
    assert Plan.from_json(text, "000.json") == plan
    assert Plan.from_json(text, "000.json").to_json() == text
    assert text == make_plan(tiny(), DIGEST, 128).to_json()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN_PLAN


def test_a_flipped_bit_of_a_plan_file_is_noticed_wherever_it_is() -> None:
    content = make_plan(tiny(), DIGEST, 128).to_json().encode()
    for bit in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PlanError, match=r"^plans/000\.json: "):
            Plan.from_json(flipped.decode(errors="replace"), "plans/000.json")


def test_a_plan_whose_ids_do_not_follow_from_its_runs_is_refused() -> None:
    plan = make_plan(tiny(), DIGEST, 128)
    renamed = dataclasses.replace(plan, populations=(Population("0" * 16, plan.populations[0].runs),))
    with pytest.raises(PlanError, match=r"plans/000.json: population 0{16}: ids do not follow from the runs"):
        Plan.from_json(renamed.to_json(), "plans/000.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "columns": []}', "\x00"])
def test_a_broken_plan_file_is_one_line(text: str) -> None:
    with pytest.raises(PlanError, match=r"plans/000\.json: ") as caught:
        Plan.from_json(text, "plans/000.json")
    assert "\n" not in str(caught.value)


def test_another_format_is_refused() -> None:
    content = json.loads(make_plan(tiny(), DIGEST, 128).to_json()) | {"format": 99}
    with pytest.raises(PlanError, match="format: found 99, expected 2"):
        Plan.from_json(json.dumps(content), "plans/000.json")


def test_a_run_of_two_blocks_counts_once() -> None:
    both = tiny(grid=[block(), block(learning_rate=[1e-2, 1e-1])])
    assert len(expand_grid(both, DIGEST)) == 6


def test_a_seed_list_replicates_every_configuration_in_populations_of_its_own() -> None:
    plan = make_plan(tiny(grid=[block(seed=[3, 4, 5])]), DIGEST, 128)
    assert len(plan.runs) == len({run.run_id for run in plan.runs}) == 12
    assert all(len({run.seed for run in p.runs}) == 1 for p in plan.populations)
    # Without a list the sweep's seed holds, and gives the same runs.
    of_the_sweep = {run.run_id for run in make_plan(tiny(seed=4), DIGEST, 128).runs}
    assert of_the_sweep == {run.run_id for run in plan.runs if run.seed == 4}


def test_population_size_and_save_epochs_change_no_run_id() -> None:
    ids = [run.run_id for run in expand_grid(tiny(), DIGEST)]
    for change in ({"population_size": 7}, {"save_epochs": [1]}, {"engine": "torch"}, {"sweep": {"grace_seconds": 1}}):
        assert [run.run_id for run in expand_grid(tiny(**change), DIGEST)] == ids
    assert [run.run_id for run in expand_grid(tiny(), "f" * 16)] != ids


def test_parts_are_even() -> None:
    rates = [0.001 * (1 + i) for i in range(7)]
    sizes = (1, 2, 3, 4, 7, 9)
    for size in sizes:
        plan = make_plan(tiny(population_size=size, grid=[block(learning_rate=rates, dropout=[0.0])]), DIGEST, 128)
        widths = [len(p.runs) for p in plan.populations]
        assert max(widths) <= size
        assert max(widths) - min(widths) <= 1
        assert list(itertools.chain.from_iterable(p.runs for p in plan.populations)) == expand_grid(
            tiny(grid=[block(learning_rate=rates, dropout=[0.0])]), DIGEST
        )


def test_differences_name_field_and_both_values() -> None:
    plan = make_plan(tiny(), DIGEST, 128)
    other = make_plan(tiny(epochs=3, save_epochs=[0, 3], population_size=1), "f" * 16, 128)
    assert differences(other, plan) == [
        "labels: found ('0', '2', '4', 'best'), configuration has ('0', '3')",
        "epochs: found 4; configuration has 3",
        f"data_digest: found {DIGEST}; configuration has {'f' * 16}",
    ]
    swapped = make_plan(
        tiny(grid=[block(learning_rate=[1e-2], dropout=[0.0]), block(learning_rate=[3e-3], dropout=[0.1])]), DIGEST, 128
    )
    crossed = make_plan(
        tiny(grid=[block(learning_rate=[1e-2], dropout=[0.1]), block(learning_rate=[3e-3], dropout=[0.0])]), DIGEST, 128
    )
    assert differences(swapped, crossed) == ["grid: the same values are combined differently"]


def test_nothing_left_to_extend_by_is_said() -> None:
    done = [run.run_id for run in expand_grid(tiny(), DIGEST)]
    with pytest.raises(PlanError, match="every run of the configuration is in the sweep already"):
        make_plan(tiny(), DIGEST, 128, exclude=done)


def test_bytes_and_steps_of_a_plan() -> None:
    plan = make_plan(tiny(), DIGEST, 128)
    assert plan.checkpoint_bytes() == 4 * 4 * 18_506 * 4
    assert plan.run_steps(128) == 4 * 4 * 4  # runs, epochs, steps of 32 samples
    assert make_plan(tiny(grid=[block(train_fraction=[0.7])]), DIGEST, 128).run_steps(128) == 4 * 4 * 2
    assert make_plan(tiny(best_by="validation"), DIGEST, 128).run_steps(128) == 4 * 4 * 3  # 11 samples are held out
    assert run_steps(plan.runs, 128, first_epoch=3) == 4 * 1 * 4


@pytest.mark.parametrize(
    ("changes", "fraction", "message"),
    [
        ({"batch_size": 90}, 0.7, None),  # round(0.7 * 128) = 90
        ({"batch_size": 91}, 0.7, "train_fraction: found 0.7, which leaves 90 of 128 training samples, expected"),
        ({"batch_size": 117, "best_by": "validation"}, 1.0, None),  # 128 - round(128 / 12) = 117
        (
            {"batch_size": 118, "best_by": "validation"},
            1.0,
            "which leaves 117 of 128 training samples, of which 11 are held out, expected at least one batch "
            "(batch_size 118)",
        ),
    ],
)
def test_less_than_one_batch_is_refused_when_planned(changes: dict, fraction: float, message: str | None) -> None:
    config = tiny(grid=[block(train_fraction=[1.0]), block(train_fraction=[fraction])], **changes)
    if message is None:
        assert make_plan(config, DIGEST, 128).run_steps(128) > 0
    else:
        with pytest.raises(PlanError, match=re.escape(message)):
            make_plan(config, DIGEST, 128)


def test_the_order_of_runs_names_the_population() -> None:
    first = make_plan(tiny(), DIGEST, 128).populations[0]
    assert Population.of(reversed(first.runs)).id != first.id
    assert Population.of(dataclasses.replace(run, seed=9) for run in first.runs).id != first.id
    assert re.fullmatch(r"[0-9a-f]{16}", first.id)
