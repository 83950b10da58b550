import errno
import json
import os
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load, save
from sweep_tools import block, rows, tiny

from generators.architecture import SmallTransformer, flatten, tensor_table
from generators.initialisation import initial_weights
from generators.tasks.data import TaskData
from zoo import worker
from zoo.plan import Population, make_plan
from zoo.signs import Sign
from zoo.store import Store
from zoo.threads import torch_threads
from zoo.worker import HEADER_KEY, WorkerSettings, run_population, safetensors_header

LABELS = ("0", "2", "4", "best")
SETTINGS = WorkerSettings(LABELS, state_seconds=0)


@pytest.fixture(scope="module")
def data(digits_dir: Path) -> TaskData:
    return tiny().data.load(digits_dir)


@pytest.fixture(params=["sgd", "sgd_momentum", "adam", "rmsprop"])
def population(request: pytest.FixtureRequest, data: TaskData) -> Population:
    config = tiny(grid=[block(optimizer=[request.param], dropout=[0.1])])
    return make_plan(config, data.digest(), len(data.train)).populations[0]


def plan_of(data: TaskData, **changes: Any) -> list[Population]:
    return list(make_plan(tiny(**changes), data.digest(), len(data.train)).populations)


def without_weights(state: bytes) -> bytes:
    tensors = load(state)
    del tensors["weights"]
    return save(tensors, {HEADER_KEY: safetensors_header(state)})


def stop_at(epoch: int) -> Iterator[bool]:
    """Answers of `should_stop`: one before training, one after each of the epochs 0, 1, ..."""
    yield from [False] * (epoch + 1)
    yield True


@pytest.mark.parametrize(("engine", "epoch"), [("fused", 0), ("fused", 1), ("fused", 3), ("torch", 1)])
def test_a_stop_and_a_restart_change_no_bit(
    engine: str, epoch: int, population: Population, data: TaskData, tmp_path: Path
) -> None:
    # catalyst#764, transformers#17032: resume repeats an epoch or loses the random state.
    settings = WorkerSettings(LABELS, engine, state_seconds=1e9)
    whole, parts = Store(tmp_path / "whole"), Store(tmp_path / "parts")
    assert run_population(whole, population, "a1", data, settings) == "sealed"
    answers = stop_at(epoch)
    assert run_population(parts, population, "a1", data, settings, lambda: next(answers)) == "stopped"
    assert [int(name[:5]) for name in parts.states(population.id)] == [epoch]
    assert parts.attempts(population.id) == []
    assert run_population(parts, population, "a2", data, settings) == "sealed"
    assert rows(parts.root) == rows(whole.root)
    assert parts.states(population.id) == []


def test_it_goes_on_from_the_state_and_not_from_the_start(
    data: TaskData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, population = Store(tmp_path), plan_of(data)[0]
    answers = stop_at(2)
    run_population(store, population, "a1", data, SETTINGS, lambda: next(answers))
    seen = []
    write_sign = Store.write_sign
    monkeypatch.setattr(Store, "write_sign", lambda *a: (seen.append(a[3].epoch), write_sign(*a)))
    run_population(store, population, "a2", data, SETTINGS)
    assert seen == [2, 3, 4]


def test_a_damaged_state_and_one_of_another_engine_are_not_continued(data: TaskData, tmp_path: Path) -> None:
    store, other, population = Store(tmp_path / "a"), Store(tmp_path / "b"), plan_of(data)[0]
    torch_engine = WorkerSettings(LABELS, "torch", state_seconds=0)
    answers = stop_at(2)
    run_population(store, population, "a1", data, torch_engine, lambda: next(answers))
    assert run_population(store, population, "a2", data, SETTINGS) == "sealed"
    run_population(other, population, "a1", data, SETTINGS)
    assert rows(store.root) == rows(other.root)
    assert store.commit(population.id).engine == "fused"


@pytest.mark.parametrize(
    "spoil", [lambda state: b"\x02" + bytes(7) + b"[]", lambda state: save(load(state)), without_weights]
)
def test_a_state_of_another_shape_is_as_good_as_none(
    spoil: Callable[[bytes], bytes], data: TaskData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is right: whoever wrote it meant it."""
    store, population = Store(tmp_path), plan_of(data)[0]
    answers = stop_at(2)
    run_population(store, population, "a1", data, SETTINGS, lambda: next(answers))
    whole = next(store.load_states(population.id))
    store.save_state(population.id, 3, spoil(whole))
    store.save_state(population.id, 2, whole)
    first = []
    write_sign = Store.write_sign
    monkeypatch.setattr(Store, "write_sign", lambda *a: (first.append(a[3].first_epoch), write_sign(*a)))
    assert run_population(store, population, "a2", data, SETTINGS) == "sealed"
    assert set(first) == {2}


def test_a_sealed_population_is_skipped_without_training(
    data: TaskData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, population = Store(tmp_path), plan_of(data)[0]
    run_population(store, population, "a1", data, SETTINGS)
    monkeypatch.setattr(worker, "train_population", None)
    assert run_population(store, population, "a2", data, SETTINGS) == "skipped"
    assert store.attempts(population.id) == ["a1"]


def test_a_zombie_that_wakes_after_another_has_sealed_changes_nothing(data: TaskData, tmp_path: Path) -> None:
    store, population = Store(tmp_path), plan_of(data)[0]
    for epoch in (1, 3):
        answers = iter([False] * (epoch + 1))

        def sealed_meanwhile(answers: Iterator[bool] = answers) -> bool:
            if next(answers, None) is None and not store.is_sealed(population.id):
                assert run_population(store, population, "healthy", data, SETTINGS) == "sealed"
            return False

        before = rows(store.root)
        outcome = run_population(store, population, f"zombie-{epoch}", data, SETTINGS, sealed_meanwhile)
        assert outcome == "skipped"
        assert store.attempts(population.id) == ["healthy"]
        assert store.states(population.id) == []
        assert not before or rows(store.root) == before
        assert store.commit(population.id).attempt == "healthy"


def test_a_zombie_at_its_last_step_loses_to_the_seal(
    data: TaskData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, population = Store(tmp_path), plan_of(data)[0]
    seal = Store.seal

    def late(self: Store, commit: Any) -> bool:
        monkeypatch.setattr(Store, "seal", seal)
        assert run_population(store, population, "healthy", data, SETTINGS) == "sealed"
        return seal(self, commit)

    monkeypatch.setattr(Store, "seal", late)
    assert run_population(store, population, "zombie", data, SETTINGS) == "skipped"
    assert store.attempts(population.id) == ["healthy"]
    assert store.commit(population.id).attempt == "healthy"


def test_epoch_0_is_the_initialisation_byte_for_byte_and_labels_count_completed_passes(
    data: TaskData, tmp_path: Path
) -> None:
    # lightning#527, torchtune#2910: epochs off by one in saved checkpoints.
    store, population = Store(tmp_path), plan_of(data, epochs=2, save_epochs=[0, 1, 2])[0]
    run_population(store, population, "a1", data, WorkerSettings(("0", "1", "2")))
    for row, run in enumerate(population.runs):
        tensors = load(store.read(population.id, "a1", "epoch-0.safetensors"))
        flat = flatten("mnist", {name: tensor[row] for name, tensor in tensors.items()})
        assert torch.equal(flat, initial_weights(run))
    header = json.loads(safetensors_header(store.read(population.id, "a1", "epoch-2.safetensors")))
    assert (header["label"], header["epochs"]) == ("2", [2, 2])


def test_any_member_of_a_stack_loads_into_the_model(data: TaskData, tmp_path: Path) -> None:
    # safetensors#469: saving non-contiguous or shared tensors fails.
    store, population = Store(tmp_path), plan_of(data)[0]
    run_population(store, population, "a1", data, SETTINGS)
    for label in LABELS:
        name = "best.safetensors" if label == "best" else f"epoch-{label}.safetensors"
        tensors = load(store.read(population.id, "a1", name))
        assert sorted((n, tuple(t.shape[1:])) for n, t in tensors.items()) == sorted(
            (spec.name, spec.shape) for spec in tensor_table("mnist")
        )
        for row in range(2):
            member = {name: tensor[row] for name, tensor in tensors.items()}
            missing, unexpected = SmallTransformer("mnist").load_state_dict(member, strict=False)
            assert (missing, unexpected) == (["embedding.pos_embedding"], [])


def test_a_diverged_run_is_never_best_and_changes_no_bit_of_its_neighbour(data: TaskData, tmp_path: Path) -> None:
    # ray#23812: a NaN checkpoint stays "best".
    rates = [1e-2, 1e30]
    poisoned = plan_of(data, grid=[block(learning_rate=rates, dropout=[0.0], optimizer=["sgd"])])[0]
    alone = plan_of(data, grid=[block(learning_rate=rates[:1], dropout=[0.0], optimizer=["sgd"])])[0]
    together, apart = Store(tmp_path / "together"), Store(tmp_path / "apart")
    run_population(together, poisoned, "a1", data, SETTINGS)
    run_population(apart, alone, "a1", data, SETTINGS)
    healthy, diverged = (run.run_id for run in poisoned.runs)
    runs = together.commit(poisoned.id).runs
    assert (runs[healthy].status, runs[healthy].diverged_epoch, runs[healthy].labels) == (
        "finished",
        None,
        list(LABELS),
    )
    assert (runs[diverged].status, runs[diverged].diverged_epoch, runs[diverged].labels) == ("diverged", 1, ["0"])
    assert {k: v for k, v in rows(together.root).items() if k.startswith(healthy)} == rows(apart.root)
    best = json.loads(safetensors_header(together.read(poisoned.id, "a1", "best.safetensors")))
    assert best["run_ids"] == [healthy]
    metrics = pq.read_table(BytesIO(together.read(poisoned.id, "a1", "metrics.parquet"))).to_pylist()[1]
    assert np.isfinite(metrics["test_loss"][0])
    assert np.isnan(metrics["test_loss"][1:]).all()


def test_best_is_the_earliest_epoch_of_highest_accuracy_and_never_the_initialisation(
    data: TaskData, tmp_path: Path
) -> None:
    store, population = Store(tmp_path), plan_of(data)[0]
    run_population(store, population, "a1", data, SETTINGS)
    best = json.loads(safetensors_header(store.read(population.id, "a1", "best.safetensors")))
    table = pq.read_table(BytesIO(store.read(population.id, "a1", "metrics.parquet")))
    for epoch, accuracies in zip(best["epochs"], table["test_accuracy"].to_pylist(), strict=True):
        assert epoch == 1 + int(np.argmax(accuracies[1:]))


def test_a_sign_of_life_is_there_while_it_trains_and_gone_afterwards(data: TaskData, tmp_path: Path) -> None:
    store, population = Store(tmp_path), plan_of(data)[0]
    seen: list[Sign | None] = []

    def look() -> bool:
        seen.append(store.read_sign(population.id, "a1"))
        return False

    run_population(store, population, "a1", data, SETTINGS, look)
    assert [sign.epoch for sign in seen if sign] == [0, 0, 1, 2, 3]
    assert store.signs(population.id) == {}
    names = store.storage.children(f"populations/{population.id}/a1")
    assert names == sorted(store.commit(population.id).files)


def test_an_error_leaves_the_state_but_no_sign(data: TaskData, tmp_path: Path) -> None:
    store, population = Store(tmp_path), plan_of(data)[0]
    answers = iter([False, False, False])
    with pytest.raises(StopIteration):
        run_population(store, population, "a1", data, SETTINGS, lambda: next(answers))
    assert store.signs(population.id) == {}
    assert [int(name[:5]) for name in store.states(population.id)] == [1]


def test_states_are_saved_by_time(data: TaskData, tmp_path: Path) -> None:
    rare, always = Store(tmp_path / "rare"), Store(tmp_path / "always")
    population, saved = plan_of(data)[0], {rare.root: [], always.root: []}
    for store, seconds in ((rare, 1e9), (always, 0.0)):
        save = store.save_state
        store.save_state = lambda *a, s=store, f=save: (saved[s.root].append(a[1]), f(*a))  # type: ignore[method-assign]
        run_population(store, population, "a1", data, WorkerSettings(LABELS, state_seconds=seconds))
    assert saved == {rare.root: [], always.root: [0, 1, 2, 3]}


def test_an_attempt_at_what_is_sealed_leaves_nothing(data: TaskData, tmp_path: Path) -> None:
    store, population = Store(tmp_path), plan_of(data)[0]
    run_population(store, population, "a1", data, SETTINGS)
    store.write_sign(population.id, "a2", Sign.now(0))  # the driver's claim
    assert run_population(store, population, "a2", data, SETTINGS) == "skipped"
    assert store.attempts(population.id) == ["a1"]


@pytest.mark.parametrize(("code", "outcome"), [(errno.ESTALE, "sealed"), (errno.EIO, "sealed"), (errno.ENOSPC, None)])
def test_a_sign_of_life_that_cannot_be_written_costs_nothing_but_a_full_disk_is_told(
    data: TaskData, tmp_path: Path, code: int, outcome: str | None
) -> None:
    store, population = Store(tmp_path), plan_of(data)[0]
    write = store.storage.write_hint

    def failing(name: str, content: bytes) -> None:
        if json.loads(content)["epoch"] > 0:
            raise OSError(code, os.strerror(code))
        write(name, content)

    store.storage.write_hint = failing  # type: ignore[method-assign]
    if outcome is None:
        with pytest.raises(OSError, match="No space left"):
            run_population(store, population, "a1", data, SETTINGS)
    else:
        assert run_population(store, population, "a1", data, SETTINGS) == outcome


def test_the_callers_number_of_threads_comes_back_even_after_an_error(data: TaskData, tmp_path: Path) -> None:
    population, seen = plan_of(data)[0], []

    def look() -> bool:
        seen.append(torch.get_num_threads())
        if len(seen) == 3:
            raise KeyboardInterrupt
        return False

    with torch_threads(2):
        with pytest.raises(KeyboardInterrupt):
            run_population(Store(tmp_path), population, "a1", data, SETTINGS, look)
        assert torch.get_num_threads() == 2
    assert seen == [1, 1, 1]
