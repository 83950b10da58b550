"""A small dataset folder in the layout that `zoo build` makes, for tests of what happens to such folders later."""

import hashlib
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from safetensors.numpy import save_file

REPO = "user/small-transformer-zoo"
"""Where tests publish it."""
WIDTH = 64
"""Float32 weights a row."""


def write_dataset(folder: Path, rows: int = 40, shards: int = 2, version: int = 0, extra_column: bool = False) -> None:
    """Writes card, shards, index, picture, plan, provenance, embedding and SHA256SUMS; an old folder is replaced.

    Rows are sorted by test accuracy, from 1 down to 0; run ids start with the version. The index has one row more, of a
    diverged run without weights. Other versions have other weights, and so other shard names.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("mnist", "index", "assets", "plans", "ag_news"):
        (folder / name).mkdir(parents=True)
    weights = np.random.default_rng(version).standard_normal((rows, WIDTH)).astype(np.float32)
    table = pa.table(
        {
            "run_id": [f"v{version}-{row}" for row in range(rows)],
            "test_accuracy": np.linspace(1, 0, rows),
            "weight": pa.FixedSizeListArray.from_arrays(pa.array(weights.ravel()), WIDTH),
        }
    )
    if extra_column:
        table = table.append_column("epoch", pa.array(np.arange(rows)))
    bounds = [rows * shard // shards for shard in range(shards + 1)]
    names = [
        _write_shard(folder, f"mnist/train-{shard:05d}-of-{shards:05d}", table.slice(start, end - start))
        for shard, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    spans = zip(names, itertools.pairwise(bounds), strict=True)
    places = [name for name, (start, end) in spans for _ in range(start, end)]
    index = table.drop_columns(["weight"]).append_column("file", pa.array(places))
    diverged = pa.table({"run_id": ["diverged"], "test_accuracy": pa.nulls(1, pa.float64())})
    index = pa.concat_tables([index, diverged], promote_options="default")
    index_name = _write_shard(folder, "index/index-00000-of-00001", index)
    configs = [
        {"config_name": "mnist", "default": True, "data_files": [{"split": "train", "path": names}]},
        {"config_name": "index", "data_files": [{"split": "index", "path": [index_name]}]},
    ]
    card = yaml.safe_dump({"license": "mit", "configs": configs}, sort_keys=False)
    (folder / "README.md").write_text(f"---\n{card}---\n# A small zoo, version {version}\n")
    (folder / "assets" / "accuracy.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(200)))
    (folder / "plans" / "000.json").write_text(json.dumps({"runs": rows}))
    (folder / "provenance.json").write_text(json.dumps({"version": version}))
    (folder / "ag_news" / "vocabulary.txt").write_text("the\na\n")
    save_file({"embedding": np.ones((3, 2), np.float32)}, folder / "ag_news" / "embedding.safetensors")
    seal(folder)


def _write_shard(folder: Path, stem: str, table: pa.Table) -> str:
    """Writes a Parquet file whose name ends in a piece of its digest; the name."""
    unnamed = folder / "shard"
    pq.write_table(table, unnamed, row_group_size=5, compression="zstd")
    name = f"{stem}-{hashlib.sha256(unnamed.read_bytes()).hexdigest()[:8]}.parquet"
    unnamed.rename(folder / name)
    return name


def seal(folder: Path) -> None:
    """Writes SHA256SUMS over every visible file."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    visible = [path for path in paths if path != "SHA256SUMS" and not any(part[0] == "." for part in path.split("/"))]
    lines = (f"{hashlib.sha256((folder / path).read_bytes()).hexdigest()}  {path}\n" for path in visible)
    (folder / "SHA256SUMS").write_text("".join(lines))


def contents(folder: Path) -> dict[str, bytes]:
    """What of the folder belongs on the Hub: the files of SHA256SUMS and itself."""
    listed = [line[66:] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    return {name: (folder / name).read_bytes() for name in [*listed, "SHA256SUMS"]}
