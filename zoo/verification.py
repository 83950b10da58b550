"""One question, whatever is at hand: is this sweep, or this dataset, what it should be?"""

from pathlib import Path

from zoo.dataset import INDEX
from zoo.errors import DatasetError
from zoo.hub_folder import CHECKSUMS, PROVENANCE
from zoo.verify_dataset import verify_dataset
from zoo.verify_sweep import verify_sweep


def verify(path: Path | str) -> list[str]:
    """Check a sweep directory (a folder or an s3 address) or a dataset folder; return the problems, a line each.

    Raises:
        DatasetError: there is no such folder, or it is neither.
    """
    if str(path).startswith("hf://"):
        raise DatasetError(f"{path}: found a published dataset, expected a folder; use `zoo verify --repo USER/NAME`")
    folder = Path(path)
    built = any((folder / name).exists() for name in (CHECKSUMS, PROVENANCE, INDEX))
    if "://" in str(path) or ((folder / "plans").is_dir() and not built):  # a dataset has plans, too
        return verify_sweep(path)
    if not folder.is_dir():
        raise DatasetError(
            f"{path}: found no such folder, expected a sweep directory or a dataset folder; "
            f"for a published dataset use `zoo verify --repo USER/NAME`"
        )
    return verify_dataset(folder)
