"""What tests that measure a dataset again do with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zoo.dataset import open_zoo


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Apply `change` to the index's row of the most accurate checkpoint."""
    (path,) = (folder / "index").glob("*.parquet")
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(next(row for row in rows if row["file"] is not None))
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def top(folder: Path) -> dict[str, Any]:
    return open_zoo(folder).checkpoints("mnist").metadata.to_pylist()[0]
