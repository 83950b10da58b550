"""A sweep and its plan: what is trained, what a changed configuration does, what is checked before the start."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripted_worker import ScriptedWorker, run
from sweep_tools import assert_undisturbed, block, drive, kill_when, rows, start, tiny

from zoo import sweep as sweep_module
from zoo.errors import PlanError, StoreError
from zoo.plan import Plan, make_plan
from zoo.store import Store
from zoo.sweep import settle_plan


def test_a_sweep_seals_every_population_of_its_plan(undisturbed: Path, expected: dict[str, Any]) -> None:
    assert_undisturbed(undisturbed, expected)
    assert len([key for key in expected if " " not in key]) == 4
    assert len(expected) == 4 + 4 * 4
    assert sorted(path.name for path in undisturbed.iterdir()) == ["commits", "data", "plans", "populations"]


def test_the_summary_counts(tmp_path: Path, digits_dir: Path) -> None:
    config = tiny(grid=[block(optimizer=["sgd"], learning_rate=[1e-2, 1e30])])
    summary = run(config, tmp_path / "s", digits_dir)
    assert (summary.populations, summary.runs, summary.sealed, summary.trained, summary.diverged) == (2, 4, 2, 2, 2)
    assert summary.run_steps == 4 * 4 * 4
    again = run(config, tmp_path / "s", digits_dir)
    assert (again.sealed, again.trained, again.run_steps, again.diverged) == (2, 0, 0, 2)


def test_the_rate_of_a_resumed_sweep_counts_what_this_call_has_trained(tmp_path: Path, digits_dir: Path) -> None:
    config = tiny(store={"state_seconds": 0.0})
    store = Store(tmp_path / "s")
    process = start(drive, config, tmp_path / "s", digits_dir)
    kill_when(process, lambda: any(store.saved_epoch(p) for p in store.begun()))
    begun = [store.saved_epoch(p) for p in store.populations() if not store.is_sealed(p)]
    summary = run(config, tmp_path / "s", digits_dir)
    assert any(begun)
    assert summary.run_steps == sum(2 * (4 - epoch) * 4 for epoch in begun)  # runs, epochs, steps


def test_results_do_not_depend_on_the_population_size(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    run(tiny(population_size=1), tmp_path / "s", digits_dir)
    assert_undisturbed(tmp_path / "s", expected)


def test_after_a_kill_the_same_command_redoes_nothing_and_misses_nothing(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: ScriptedWorker
) -> None:
    # ray#27790: what exists is decided by commits alone.
    process = start(drive, tiny(), tmp_path / "s", digits_dir)
    store = Store(tmp_path / "s")
    kill_when(process, lambda: bool(store.sealed()))
    sealed = store.sealed()
    commits = {id_: store.storage.read(f"commits/{id_}.json") for id_ in sealed}
    run(tiny(), tmp_path / "s", digits_dir)
    assert not sealed & set(worker_task.calls)
    assert {id_: store.storage.read(f"commits/{id_}.json") for id_ in sealed} == commits
    assert_undisturbed(tmp_path / "s", expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epochs": 5}, "epochs: found 4; configuration has 5"),
        ({"save_epochs": [0, 4]}, "labels: found ('0', '2', '4', 'best'), configuration has ('0', '4')"),
        ({"grid": [block(l2=[1e-3])]}, "l2: found 1e-06; configuration has 0.001"),
        ({"data": {"source": "idx", "train_limit": 96, "test_limit": 50}}, "data_digest: found "),
        ({"seed": 4}, "seed: found 3; configuration has 4"),
    ],
)
def test_another_configuration_or_other_data_is_refused_with_what_differs(
    change: dict[str, Any], named: str, undisturbed: Path, digits_dir: Path
) -> None:
    with pytest.raises(PlanError, match=re.escape(named)) as caught:
        run(tiny(**change), undisturbed, digits_dir)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; use another --sweep-dir")


def test_a_configuration_with_more_runs_is_refused_with_the_way_to_add_them(
    undisturbed: Path, digits_dir: Path
) -> None:
    with pytest.raises(PlanError, match="use another --sweep-dir, or --extend to add runs to this one"):
        run(tiny(grid=[block(), block(l2=[1e-3])]), undisturbed, digits_dir)


def test_what_changes_no_result_may_change(undisturbed: Path, digits_dir: Path) -> None:
    changed = tiny(population_size=1, engine="torch", sweep={"grace_seconds": 5}, store={"state_seconds": 9})
    assert run(changed, undisturbed, digits_dir).trained == 0


def test_extending_adds_a_plan_of_the_new_runs_only(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: ScriptedWorker
) -> None:
    sweep = tmp_path / "s"
    run(tiny(), sweep, digits_dir)
    first = (sweep / "plans/000.json").read_bytes()
    worker_task.calls.clear()
    wider = tiny(grid=[block(learning_rate=[1e-2, 3e-3, 1e-3]), block(seed=[4], dropout=[0.0])])
    summary = run(wider, sweep, digits_dir, extend=True)
    plans = Store(sweep).plans()
    assert (sweep / "plans/000.json").read_bytes() == first
    assert len(plans) == 2
    assert {(r.learning_rate, r.seed) for r in plans[1].runs} == {(1e-3, 3), (1e-2, 4), (3e-3, 4)}
    assert set(worker_task.calls) == {p.id for p in plans[1].populations}
    assert (summary.runs, summary.sealed) == (8, len(plans[0].populations) + len(plans[1].populations))
    assert expected.items() <= rows(sweep).items()
    # From now on the wider configuration is the sweep's, with or without --extend; the old one is not.
    assert run(wider, sweep, digits_dir).trained == 0
    assert run(wider, sweep, digits_dir, extend=True).trained == 0
    named = "4 more runs (learning_rate: found 0.001, 0.003, 0.01; configuration has 0.003, 0.01; seed: found 3, 4; "
    with pytest.raises(PlanError, match=re.escape(named)) as caught:
        run(tiny(), sweep, digits_dir)
    assert str(caught.value).endswith("; use the configuration that extended it, or another --sweep-dir")


def test_a_configuration_that_lacks_a_runs_combination_is_refused_with_how_many(
    undisturbed: Path, digits_dir: Path
) -> None:
    crossed = [block(dropout=[0.0]), block(dropout=[0.1], learning_rate=[1e-2])]
    named = "the sweep has 1 more runs (grid: the same values are combined differently); use the configuration that "
    with pytest.raises(PlanError, match=re.escape(named + "planned it")):
        run(tiny(grid=crossed, population_size=1), undisturbed, digits_dir)


@pytest.mark.parametrize("extend", [False, True])
def test_two_drivers_that_start_together_make_one_plan(
    extend: bool, tmp_path: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, data = Store(tmp_path / "s"), tiny().data.load(digits_dir)
    if extend:
        settle_plan(store, tiny(), data, on_gpu=False, extend=False)
    config = tiny(grid=[block(), block(l2=[1e-3])]) if extend else tiny()

    def while_another_starts(*arguments: Any, **options: Any) -> Plan:
        monkeypatch.setattr(sweep_module, "make_plan", make_plan)
        settle_plan(store, config, data, on_gpu=False, extend=extend)
        return make_plan(*arguments, **options)

    monkeypatch.setattr(sweep_module, "make_plan", while_another_starts)
    plans = settle_plan(store, config, data, on_gpu=False, extend=extend)
    assert plans == store.plans()
    assert [len(plan.runs) for plan in plans] == [4, 4][: 1 + extend]
    run_ids = [run.run_id for plan in plans for run in plan.runs]
    assert len(set(run_ids)) == len(run_ids)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"grid": [block(learning_rate=[1e-2, 1e-3])]}, "2 runs of .* are not in the configuration.*learning_rate"),
        ({"epochs": 5}, "4 runs of .* are not in the configuration, expected a superset.*epochs: found 4"),
        ({"save_epochs": [0, 4, "best"]}, "save_epochs: found .*one sweep keeps the same epochs of every run"),
    ],
)
def test_extending_by_anything_but_a_superset_is_refused(
    change: dict[str, Any], named: str, undisturbed: Path, digits_dir: Path
) -> None:
    with pytest.raises(PlanError, match=named):
        run(tiny(**change), undisturbed, digits_dir, extend=True)
    assert len(Store(undisturbed).plans()) == 1


def test_too_little_room_is_refused_before_the_start(
    tmp_path: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch, worker_task: ScriptedWorker
) -> None:
    monkeypatch.setattr("zoo.files.LocalStorage.free_bytes", lambda self: 1_000_000)
    with pytest.raises(
        StoreError, match=r"found 0\.00 GB free, expected 0\.00 GB for 2 populations to come; make room"
    ):
        run(tiny(), tmp_path / "s", digits_dir)
    # 4 runs x 4 labels, and twice 2 runs with 8 tensors of their weights' size in the states.
    needed = 18_506 * 4 * (4 * 4 + 2 * 2 * 8)
    monkeypatch.setattr("zoo.files.LocalStorage.free_bytes", lambda self: needed - 1)
    with pytest.raises(StoreError, match="make room"):
        run(tiny(), tmp_path / "s", digits_dir)
    assert worker_task.calls == []
    monkeypatch.setattr("zoo.files.LocalStorage.free_bytes", lambda self: needed)
    assert run(tiny(), tmp_path / "s", digits_dir).sealed == 2


def test_the_record_of_the_data_is_kept(undisturbed: Path) -> None:
    record = json.loads((undisturbed / "data/record.json").read_text())
    assert record["data_digest"] == Store(undisturbed).plans()[0].data_digest
    assert (record["train_samples"], record["test_samples"]) == (128, 50)
