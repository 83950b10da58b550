"""Does a dataset load with another version of the datasets library? Two steps, in two environments:

    python tests/compat.py build FOLDER SEED    with this project: random weights, and expected.json beside the dataset
    python tests/compat.py check FOLDER         with nothing but datasets and torch: everything that users do with it

`tests/compat.sh` runs both.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TENSOR = "encoder.1.fc2.weight"
SHAPE = (32, 64)
COLUMNS = ["checkpoint_id", "test_accuracy", TENSOR]


def build_dataset(folder: Path, seed: str) -> None:
    """Build a dataset of 192 checkpoints, in place of an older one, and note what its rows are."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # ahead of tests/, which has folders of these names
    from large_sweep import write_large_sweep

    from zoo.builder import build
    from zoo.dataset import open_zoo

    with tempfile.TemporaryDirectory() as sweep:
        write_large_sweep(Path(sweep), 48, epochs=4, labels=("0", "2", "4", "best"), seed=int(seed))
        build([sweep], folder, progress=False)
    chosen = open_zoo(folder).checkpoints()
    values = chosen.tensors()[TENSOR].numpy()
    rows = chosen.metadata.select(["checkpoint_id", "split", "test_accuracy"]).to_pylist()
    for row, array in zip(rows, values, strict=True):
        row["digest"] = hashlib.sha256(array.tobytes()).hexdigest()
    (folder.parent / "expected.json").write_text(json.dumps(rows))


def check_dataset(folder: Path) -> None:
    """Load it in all ways; raises AssertionError where a row differs."""
    import datasets
    import torch
    from datasets import load_dataset

    rows = json.loads((folder.parent / "expected.json").read_text())
    of_split = {
        split: {row["checkpoint_id"]: row for row in rows if row["split"] == split}
        for split in ("train", "validation", "test")
    }
    cache = {"cache_dir": str(folder.parent / f"cache-{datasets.__version__}")}

    def compare(found: Any, expected: dict[str, Any], what: str) -> None:
        names = []
        for row in found:
            names.append(row["checkpoint_id"])
            array = torch.as_tensor(row[TENSOR])
            assert array.shape == SHAPE and array.dtype == torch.float32, what
            assert hashlib.sha256(array.numpy().tobytes()).hexdigest() == expected[names[-1]]["digest"], what
        assert sorted(names) == sorted(expected), what
        print(f"datasets {datasets.__version__}: {what}: {len(names)} rows")

    os.chdir(folder.parent)
    for split, loaded in load_dataset(folder.name, **cache).items():
        compare(loaded.with_format("torch"), of_split[split], f"the default config, {split}")
    train = of_split["train"]
    threshold = sorted(row["test_accuracy"] for row in train.values())[len(train) // 2]
    good = {name: row for name, row in train.items() if row["test_accuracy"] >= threshold}
    for streaming in (False, True):
        arguments = {"split": "train", "streaming": streaming, **({} if streaming else cache)}
        found = load_dataset(folder.name, "mnist", **arguments).with_format("torch")
        compare(found, train, f"streaming={streaming}")
        filters = [("test_accuracy", ">=", threshold)]
        found = load_dataset(folder.name, "mnist", columns=COLUMNS, filters=filters, **arguments).with_format("torch")
        compare(found, good, f"streaming={streaming}, columns and filters")
    index = load_dataset(folder.name, "index", split="train", **cache)
    assert sorted(index["checkpoint_id"]) == sorted(row["checkpoint_id"] for row in rows)
    print(f"datasets {datasets.__version__}: index: {len(index)} rows")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build", folder, seed]:
            build_dataset(Path(folder).absolute(), seed)
        case ["check", folder]:
            check_dataset(Path(folder).absolute())
        case _:
            sys.exit(__doc__)
