"""Signs of life that somebody else, or a power cut, has written: read as none."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from zoo.signs import Sign
from zoo.store import Store


@pytest.mark.parametrize(
    "change",
    [
        {"time": "x"},
        {"time": None},
        {"epoch": float("nan")},
        {"started": []},
        {"host": 5},
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**80},
        {"pid": "1"},
        {"pid": True},
        {"more": 1},
        {"time": 10**400},
        {"time": True},
        {"time": -1.0},
        {"started": 1e-320},
        {"epoch": 10**400},
        {"epoch": 2.5},
        {"epoch": True},
        {"epoch": -1},
        {"first_epoch": {}},
    ],
)
def test_a_sign_of_other_types_is_none(change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, signal: pytest.fail(f"asked for process {pid}"))
    store, path = Store(tmp_path), tmp_path / "populations" / "p" / "a" / "progress.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(Sign.now(3).to_bytes())
    assert store.signs("p").keys() == {"a"}
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert store.signs("p") == {}


def test_a_deeply_nested_sign_is_none(tmp_path: Path) -> None:
    path = tmp_path / "populations" / "p" / "a" / "progress.json"
    path.parent.mkdir(parents=True)
    path.write_text("[" * 100_000)
    assert Store(tmp_path).signs("p") == {}
