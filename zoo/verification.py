"""One question, whatever is at hand: is this sweep, or this dataset, what it should be?"""

from pathlib import Path

from zoo.verify_dataset import verify_dataset
from zoo.verify_sweep import verify_sweep


def verify(path: Path | str) -> list[str]:
    """Check a sweep directory (a folder or an s3 address) or a dataset folder; return the problems, a line each."""
    folder = Path(path)
    if "://" in str(path) or ((folder / "plans").is_dir() and not (folder / "SHA256SUMS").is_file()):
        return verify_sweep(path)
    return verify_dataset(folder)
