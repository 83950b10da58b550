"""Stacked checkpoint files: what comes back, and what is refused, whoever has written it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from generators.architecture import tensor_table
from zoo.errors import StoreError
from zoo.stacked import HEADER_KEY, StackedCheckpoints

HEADER: dict[str, Any] = {"task": "mnist", "run_ids": ["a", "b"], "epochs": [3, None]}


def tensors() -> dict[str, np.ndarray]:
    table = {spec.name: (2, *spec.shape) for spec in tensor_table("mnist")}
    return {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + number
        for number, (name, shape) in enumerate(table.items())
    }


def with_raw_header(header: Any) -> bytes:
    """A file with any JSON in the place of its header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def test_rows_and_places_come_back(tmp_path: Path) -> None:
    written = tensors()
    (tmp_path / "best").write_bytes(save(written, {HEADER_KEY: json.dumps(HEADER)}))
    stacked = StackedCheckpoints(tmp_path / "best")
    assert stacked.places == {"a": (0, 3), "b": (1, None)}
    assert stacked.tensors.keys() == written.keys()
    assert all(np.array_equal(stacked.row(1)[name], values[1]) for name, values in written.items())


@pytest.mark.parametrize(
    "content",
    [
        lambda: b"",
        lambda: b"\xff" * 100,
        lambda: save(tensors(), {HEADER_KEY: json.dumps(HEADER)})[:-1],
        lambda: with_raw_header([]),
        lambda: with_raw_header({"__metadata__": {HEADER_KEY: json.dumps(HEADER)}}),
        lambda: with_raw_header({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}),
        lambda: save(tensors()),
        lambda: save(tensors(), {"other": "{}"}),
        *(
            lambda header=header: save(tensors(), {HEADER_KEY: json.dumps(header)})
            for header in (
                [],
                3,
                {},
                HEADER | {"task": "cifar"},
                HEADER | {"task": []},
                HEADER | {"epochs": 3},
                HEADER | {"epochs": [3]},
                HEADER | {"run_ids": [{}, {}]},
                HEADER | {"run_ids": ["a"], "epochs": [3]},
            )
        ),
        lambda: save({"other": np.zeros(2, np.float32)}, {HEADER_KEY: json.dumps(HEADER)}),
        lambda: save({n: t.astype(np.int32) for n, t in tensors().items()}, {HEADER_KEY: json.dumps(HEADER)}),
    ],
)
def test_what_is_no_stack_of_its_runs_is_one_line(content: Callable[[], bytes], tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    path.write_bytes(content())
    with pytest.raises(StoreError, match=rf"{path.name}: not a readable checkpoint file .*; see `zoo ver") as caught:
        StackedCheckpoints(path)
    assert "\n" not in str(caught.value)
