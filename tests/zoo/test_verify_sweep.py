import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load, save
from sweep_tools import assert_undisturbed, tiny

from zoo import repair
from zoo.commit import FileRecord
from zoo.errors import StoreError
from zoo.files import LocalStorage
from zoo.repair import repair_sweep
from zoo.signs import Sign
from zoo.store import Store
from zoo.sweep import generate
from zoo.verify_sweep import verify_sweep
from zoo.worker import HEADER_KEY, safetensors_header


@pytest.fixture
def sweep(tmp_path: Path, undisturbed: Path) -> Path:
    """A copy of a finished sweep, to be damaged."""
    return Path(shutil.copytree(undisturbed, tmp_path / "sweep"))


def victim(sweep: Path) -> tuple[str, Path]:
    """Return a population and its folder."""
    commit = next(Store(sweep).commits())
    return commit.population, sweep / "populations" / commit.population / commit.attempt


def files_of(sweep: Path) -> list[str]:
    return sorted(p.relative_to(sweep).as_posix() for p in sweep.rglob("*") if p.is_file())


def flip_bit(path: Path, seed: int = 0) -> None:
    content = bytearray(path.read_bytes())
    position = random.Random(seed).randrange(len(content) * 8)
    content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)


KINDS = ("plans/", "commits/", "metrics.parquet", "epoch-0.", "epoch-4.", "best.", "data/record")


def of_kind(sweep: Path, kind: str) -> Path:
    return sweep / next(name for name in files_of(sweep) if kind in name)


def test_a_folder_that_is_no_sweep_is_not_tidied_up(tmp_path: Path) -> None:
    mine = tmp_path / "populations" / "a" / "b" / ".tmp-thesis.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(StoreError, match="expected a sweep directory"):
        repair_sweep(tmp_path, apply=True, orphans=True, orphan_seconds=0.0)
    assert mine.read_text() == "mine"


def test_a_finished_sweep_has_no_problem(undisturbed: Path) -> None:
    assert verify_sweep(undisturbed) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "data/record"])
@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_found_wherever_it_is(kind: str, seed: int, sweep: Path) -> None:
    flip_bit(of_kind(sweep, kind), seed)
    assert any(kind in problem for problem in verify_sweep(sweep))


def test_a_flipped_bit_of_a_plans_settings_is_one_line(sweep: Path) -> None:
    path = sweep / "plans/000.json"
    path.write_bytes(path.read_bytes().replace(b'"population_size":2', b'"population_size":3'))
    told = "not the content that was written (SHA-256 differs); restore the file from a copy"
    assert verify_sweep(sweep) == [f"plans: {path}: {told}"]


def test_a_record_of_other_data_is_found(sweep: Path) -> None:
    path = sweep / "data/record.json"
    path.write_text(path.read_text().replace('"data_digest": "', '"data_digest": "0'))
    [problem] = verify_sweep(sweep)
    assert problem.startswith("data/record.json: data_digest: found 0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 0.5, -1])
def test_a_truncated_file_is_named(kind: str, keep: float, sweep: Path) -> None:
    path = of_kind(sweep, kind)
    size = path.stat().st_size
    os.truncate(path, size - 1 if keep == -1 else int(size * keep))
    problems = verify_sweep(sweep)
    assert any(kind in problem for problem in problems)


@pytest.mark.parametrize("kind", ["plans/", "commits/", "metrics.parquet", "epoch-0.", "best.", "data/record"])
def test_a_missing_file_is_named(kind: str, sweep: Path) -> None:
    of_kind(sweep, kind).unlink()
    problems = verify_sweep(sweep)
    if kind == "commits/":
        assert problems == ["commits: found 1 of 2 populations, expected all of the plan; run `zoo generate` again"]
    else:
        assert any(kind in problem and ("missing" in problem or "found no" in problem) for problem in problems)


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "plans/notes.json",
        "plans/002.json",
        "commits/0123456789abcdef.json",
        "commits/notes.txt",
        "populations/0123456789abcdef/a1/best.safetensors",
        "data/extra.bin",
        "quarantine/0123456789abcdef.json",
    ],
)
def test_a_foreign_file_is_named(name: str, sweep: Path) -> None:
    plan = (sweep / "plans/000.json").read_bytes()
    (sweep / name).parent.mkdir(parents=True, exist_ok=True)
    (sweep / name).write_bytes(plan if name == "plans/002.json" else b"{}")
    named = "/".join(name.split("/")[:2])
    assert any(
        p.startswith(f"{named}: ") or (p.startswith("plans: ") and "plans/" in name) for p in verify_sweep(sweep)
    )


def test_a_file_beside_those_of_a_commit_is_foreign(sweep: Path) -> None:
    _, folder = victim(sweep)
    (folder / "epoch-3.safetensors").write_bytes(b"")
    [problem] = verify_sweep(sweep)
    assert problem.endswith("epoch-3.safetensors: foreign, expected the files of the commit only")


def rewrite(sweep: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and give its commit the new digest, so that only the content tells."""
    population, folder = victim(sweep)
    content = change((folder / name).read_bytes())
    (folder / name).write_bytes(content)
    commit = Store(sweep).commit(population)
    changed = replace(commit, files=commit.files | {name: FileRecord.of(content)})
    (sweep / "commits" / f"{population}.json").write_text(changed.to_json())


def changed_bias(change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        tensors = load(content)
        bias = change(tensors.pop("classifier.fc1.bias"))
        added = {} if bias is None else {"classifier.fc1.bias": np.ascontiguousarray(bias)}
        return save(tensors | added, {HEADER_KEY: safetensors_header(content)})

    return apply


def changed_header(**values: Any) -> Callable[[bytes], bytes]:
    return lambda c: save(load(c), {HEADER_KEY: json.dumps(json.loads(safetensors_header(c)) | values)})


def changed_curve(name: str, value: float) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        table = pq.read_table(BytesIO(content))
        curves = table[name].to_pylist()
        curves[0][2] = value
        sink = BytesIO()
        position = table.column_names.index(name)
        pq.write_table(table.set_column(position, name, pa.array(curves, pa.list_(pa.float64()))), sink)
        return sink.getvalue()

    return apply


def without_last_run(content: bytes) -> bytes:
    sink = BytesIO()
    pq.write_table(pq.read_table(BytesIO(content)).slice(0, 1), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("best.safetensors", changed_bias(lambda bias: np.full_like(bias, np.nan)), "expected finite float32"),
        ("best.safetensors", changed_bias(lambda bias: None), "tensors: found"),
        ("best.safetensors", changed_bias(lambda bias: bias[:, :31]), "tensors: found"),
        ("best.safetensors", changed_bias(lambda bias: bias.astype("f8")), "found float64"),
        ("best.safetensors", changed_header(label="4"), "label: found 4, expected best"),
        ("epoch-4.safetensors", changed_header(epochs=[4, 3]), "epochs: found [4, 3], expected 4 of every run"),
        ("epoch-4.safetensors", changed_header(run_ids=["a", "b"]), "run_ids: found ['a', 'b']"),
        ("epoch-4.safetensors", changed_header(epochs=4), "not readable"),
        ("epoch-4.safetensors", lambda content: save(load(content), {HEADER_KEY: "[]"}), "not readable"),
        ("epoch-4.safetensors", lambda content: b"\x02" + bytes(7) + b"[]", "not readable"),
        ("epoch-4.safetensors", lambda content: b"\x00" * 100, "not readable"),
        ("metrics.parquet", changed_curve("test_loss", float("inf")), "test_loss of run"),
        ("metrics.parquet", changed_curve("test_accuracy", 1.5), "test_accuracy of run"),
        ("metrics.parquet", changed_curve("train_loss", float("nan")), "train_loss of run"),
        ("metrics.parquet", without_last_run, "run_id: found 1 rows"),
        ("metrics.parquet", lambda content: b"PAR1", "not readable"),
    ],
)
def test_content_that_its_digest_covers_is_checked_too(
    name: str, change: Callable[[bytes], bytes], message: str, sweep: Path
) -> None:
    rewrite(sweep, name, change)
    [problem] = verify_sweep(sweep)
    assert name in problem
    assert message in problem


def test_a_commit_of_other_runs_is_found(sweep: Path) -> None:
    first, second = sorted((sweep / "commits").iterdir())
    shutil.copy(first, second)
    problems = verify_sweep(sweep)
    assert [p.split(":")[0] for p in problems] == [f"commits/{second.name}"] * 2
    assert f"population: found {first.stem}, expected {second.stem}" in problems[0]


def test_the_first_run_says_what_and_changes_nothing_then_exactly_the_damaged_is_redone(
    sweep: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    population, folder = victim(sweep)
    flip_bit(folder / "best.safetensors")
    before = files_of(sweep)
    report = repair_sweep(sweep)
    assert (list(report.damaged), report.applied) == ([population], False)
    assert f"to move: commits/{population}.json to removed/" in report.text()
    assert report.text().endswith("nothing was changed; --apply does it")
    assert files_of(sweep) == before

    other = next(p for p in (sweep / "commits").iterdir() if p.stem != population)
    kept = other.read_bytes()
    report = repair_sweep(sweep, apply=True)
    assert f"moved: commits/{population}.json to removed/" in report.text()
    [removed] = (sweep / "removed").iterdir()
    assert removed.name.endswith(f"-{population}.json")
    assert generate(tiny(), sweep, digits_dir, workers=0, progress=False).trained == 1
    assert other.read_bytes() == kept
    assert_undisturbed(sweep, expected)


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"\xff{")])
def test_a_commit_that_cannot_be_read_is_repaired_too(
    damage: Callable[[Path], Any], sweep: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    population, _ = victim(sweep)
    damage(sweep / "commits" / f"{population}.json")
    assert list(repair_sweep(sweep, apply=True).damaged) == [population]
    generate(tiny(), sweep, digits_dir, workers=0, progress=False)
    assert_undisturbed(sweep, expected)


def test_a_commit_of_no_planned_population_is_moved_away(sweep: Path) -> None:
    (sweep / "commits/0123456789abcdef.json").write_bytes(b"{}")
    repair_sweep(sweep, apply=True)
    assert verify_sweep(sweep) == []


def test_a_whole_sweep_needs_no_repair(sweep: Path) -> None:
    before = files_of(sweep)
    report = repair_sweep(sweep, apply=True, orphans=True, orphan_seconds=0)
    assert report.text() == f"{sweep}: nothing to repair"
    assert files_of(sweep) == before


def test_damaged_states_are_deleted_and_whole_ones_kept(tmp_path: Path, undisturbed: Path) -> None:
    store = Store(tmp_path / "s")
    store.add_plan(Store(undisturbed).plans()[0], 0)
    population = store.todo()[0].id
    store.save_state(population, 2, b"whole")
    bad = f"populations/{population}/state/00001-0123456789abcdef.safetensors"
    store.storage.write(bad, b"torn")
    assert any(problem.startswith(f"{bad}: damaged") for problem in verify_sweep(store.root))
    assert repair_sweep(store.root, apply=True, orphans=True, orphan_seconds=0).states == [bad]
    assert list(store.load_states(population)) == [b"whole"]
    assert len(store.states(population)) == 1


def test_left_overs_are_listed_and_only_removed_on_request(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    population, folder = victim(sweep)
    store = Store(sweep)
    store.write(population, "dead", "best.safetensors", b"1234")
    store.save_state(population, 1, b"of a zombie")
    (folder.parent / ".tmp-0").write_bytes(b"123")
    expected_names = {f"populations/{population}/{name}" for name in ("dead", "state", ".tmp-0")}
    assert verify_sweep(sweep) == []  # no reader follows them
    assert repair_sweep(sweep).orphans == []  # too young: somebody may be at work
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + repair.ORPHAN_SECONDS)
    for apply, orphans in ((False, True), (True, False)):
        report = repair_sweep(sweep, apply, orphans)
        assert {orphan.name for orphan in report.orphans} == expected_names
        assert (
            f"left over (--orphans --apply deletes it): populations/{population}/dead: 1 files, 4 bytes"
            in report.text()
        )
    before = set(files_of(sweep))
    report = repair_sweep(sweep, apply=True, orphans=True)
    assert f"deleted: populations/{population}/dead: 1 files, 4 bytes" in report.text()
    gone = before - set(files_of(sweep))
    assert {name.split("/")[2] for name in gone} == {"dead", "state", ".tmp-0"}
    assert verify_sweep(sweep) == []


def test_a_living_attempt_and_a_state_to_resume_from_are_no_left_overs(tmp_path: Path, undisturbed: Path) -> None:
    store = Store(tmp_path / "s")
    store.add_plan(Store(undisturbed).plans()[0], 0)
    population = store.todo()[0].id
    store.write(population, "living", "epoch-0.safetensors", b"1")
    store.write_sign(population, "living", Sign.now(2))
    store.save_state(population, 2, b"state")
    assert repair_sweep(store.root, orphan_seconds=0).orphans == []
    store.clear_sign(population, "living")
    assert [o.name for o in repair_sweep(store.root, orphan_seconds=0).orphans] == [f"populations/{population}/living"]


def test_a_broken_plan_is_beyond_repair(sweep: Path) -> None:
    (sweep / "plans/000.json").write_bytes(b"{")
    before = files_of(sweep)
    report = repair_sweep(sweep, apply=True, orphans=True, orphan_seconds=0)
    assert "cannot be repaired: plans: " in report.text()
    assert files_of(sweep) == before


def test_what_goes_away_while_a_running_sweep_is_read_is_no_problem(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer state replaces an older one, and a driver that starts takes populations out of quarantine."""
    store = Store(tmp_path / "s")
    store.add_plan(Store(undisturbed).plans()[0], 0)
    population = store.todo()[0].id
    store.save_state(population, 2, b"state")
    store.quarantine(population, "error: poison")
    children = LocalStorage.children

    def then_gone(self: LocalStorage, folder: str) -> list[str]:
        names = children(self, folder)
        if folder == "quarantine" or folder.endswith("/state"):
            self.remove_folder(folder)
        return names

    monkeypatch.setattr(LocalStorage, "children", then_gone)
    found = ["commits: found 0 of 2 populations, expected all of the plan; run `zoo generate` again"]
    assert [p for p in verify_sweep(store.root) if not p.startswith("data/record.json: missing")] == found
