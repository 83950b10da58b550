"""Selected checkpoints as files for other tools: one safetensors file each, and a table of their metadata."""

import csv
import json
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from zoo.dataset import Checkpoints
from zoo.errors import DatasetError
from zoo.files import TEMPORARY_PREFIX, held, named_in_errors
from zoo.schema import INDEX_PLACE
from zoo.stacked import HEADER_KEY
from zoo.storage import local_path

TABLE = "checkpoints.csv"
ENDING = ".safetensors"
SELECTION_FORMAT = 1


def select(checkpoints: Checkpoints, out: Path | str) -> list[Path]:
    """Write a selection to the folder `out`, all of it or nothing; an earlier selection there is replaced.

    A process that is killed leaves the earlier selection, or the new one; or, between the two renames of a replacement,
    no `out`, but both of them beside it, in a folder `.tmp-...`. The next call for `out` puts the earlier one back
    where it is missing, and removes that folder.

    Each file is named by its checkpoint_id, holds the tensors under their state_dict names, and has the row's metadata
    as JSON in its header, under the key "zoo". checkpoints.csv has a row a file, in the same order.

    Returns the paths of the safetensors files, highest test accuracy first.

    Raises:
        DatasetError: nothing is selected, `out` is no folder or holds something else than an earlier selection, or
            another call is writing there.
    """
    out = local_path(out, "--out").resolve()  # through a link, to what it stands for
    if not len(checkpoints):
        raise DatasetError("filters: found no checkpoint that fulfils them, expected at least one; loosen a condition")
    private = out.with_name(f"{TEMPORARY_PREFIX}{out.name}")
    try:
        with held(private):
            names = _replace(out, checkpoints, private)
    except BlockingIOError as error:
        raise DatasetError(f"--out {out}: another selection is being written there; wait for it") from error
    return [out / name for name in names]


def _replace(out: Path, checkpoints: Checkpoints, private: Path) -> list[str]:
    """Write a selection, and put it in the place of an earlier one; `private` is gone in the end."""
    new, old = private / "new", private / "old"
    try:
        _restore(out, old)
        _require_replaceable(out)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir()
        names = _write(checkpoints, new)
        if out.exists():
            out.rename(old)
        new.rename(out)
    finally:
        _restore(out, old)
        shutil.rmtree(private, ignore_errors=True)
    return names


def _restore(out: Path, old: Path) -> None:
    """Put an earlier selection back if something came between the two renames of its replacement."""
    if old.exists() and not out.exists():
        old.rename(out)


def _write(checkpoints: Checkpoints, folder: Path) -> list[str]:
    table = StringIO()
    columns = [name for name in checkpoints.metadata.column_names if name not in INDEX_PLACE]
    writer = csv.DictWriter(table, ["filename", *columns], lineterminator="\n")
    writer.writeheader()
    names = []
    for piece in checkpoints.pieces():
        tensors = piece.tensors()
        for row, metadata in enumerate(piece.metadata.select(columns).to_pylist()):
            name = f"{metadata['checkpoint_id']}{ENDING}"
            if not re.fullmatch(r"[\w-]+\.safetensors", name):
                raise DatasetError(
                    f"checkpoint_id: found {name!r}, expected letters and digits; do not trust the dataset"
                )
            write_checkpoint(folder / name, {key: values[row] for key, values in tensors.items()}, metadata)
            writer.writerow({"filename": name, **metadata})
            names.append(name)
    (folder / TABLE).write_text(table.getvalue(), encoding="utf-8")
    return names


def write_checkpoint(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write one checkpoint; tensors may be rows of a stack, or share memory."""
    header = {"format": SELECTION_FORMAT, **metadata}
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    with named_in_errors(path):
        path.write_bytes(save(own, {HEADER_KEY: json.dumps(header)}))


def _require_replaceable(out: Path) -> None:
    """Refuse a folder that holds anything that a selection does not: it would be lost."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DatasetError(f"--out {out}: found a file, expected a new folder or an earlier selection")
    found = {path.name for path in out.iterdir()}
    if found and TABLE not in found:
        raise DatasetError(f"--out {out}: found files and no {TABLE}, expected an empty folder or an earlier selection")
    with (out / TABLE).open(encoding="utf-8", newline="") if found else StringIO() as file:
        made = {TABLE, *(row.get("filename") for row in csv.DictReader(file))}
    if foreign := sorted(found - made):
        raise DatasetError(
            f"--out {out}: found {foreign[0]}, which is no part of the selection there and would be lost; "
            f"move it, or use another folder"
        )
