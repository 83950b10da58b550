"""One question, whatever is at hand: is this sweep, or this dataset, what it should be?"""

from pathlib import Path

from zoo.errors import DatasetError
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
    if "://" in str(path) or ((folder / "plans").is_dir() and not (folder / "SHA256SUMS").is_file()):
        return verify_sweep(path)
    if not folder.is_dir():
        raise DatasetError(
            f"{path}: found no such folder, expected a sweep directory or a dataset folder; "
            f"for a published dataset use `zoo verify --repo USER/NAME`"
        )
    return verify_dataset(folder)
