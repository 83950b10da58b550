"""What a task gives to training: train and test tensors, on the device as integers; and how they become inputs."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from generators.architecture import IMAGE, IMAGE_TOKENS

CROP_PADDING = 2
"""Pixels of zero padding around an image before a random crop of 28 x 28."""


@dataclass(frozen=True)
class Split:
    """Samples of a task.

    inputs: MNIST uint8 images [N, 28, 28]; AG News int32 token ids [N, T], padded with 0.
    labels: int64 [N].
    lengths: AG News only, int64 [N], the number of real tokens, 1 to T.
    """

    inputs: Tensor
    labels: Tensor
    lengths: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def head(self, count: int) -> "Split":
        """The first `count` samples; all of them are this very split."""
        if count >= len(self):
            return self
        # A copy of the few, for a view would carry all samples along to the workers.
        lengths = None if self.lengths is None else self.lengths[:count].clone()
        return Split(self.inputs[:count].clone(), self.labels[:count].clone(), lengths)

    def select(self, indices: Tensor) -> "Split":
        lengths = None if self.lengths is None else self.lengths[indices]
        return Split(self.inputs[indices], self.labels[indices], lengths)

    def to(self, device: torch.device | str) -> "Split":
        lengths = None if self.lengths is None else self.lengths.to(device)
        return Split(self.inputs.to(device), self.labels.to(device), lengths)


@dataclass(frozen=True)
class TaskData:
    """The data of one task, prepared.

    word_vectors: AG News only, float32 [V, 32], row 0 for padding and unknown words.
    vocabulary: AG News only, the words of rows 1 to V - 1.
    origin: where the data comes from and how it was prepared (JSON-ready; for provenance, not part of the digest).
    """

    task: str
    train: Split
    test: Split
    word_vectors: Tensor | None = None
    vocabulary: tuple[str, ...] = ()
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that the task allows."""
        return IMAGE_TOKENS if self.task == "mnist" else self.train.inputs.shape[1]

    def to(self, device: torch.device | str) -> "TaskData":
        vectors = None if self.word_vectors is None else self.word_vectors.to(device)
        return dataclasses.replace(self, train=self.train.to(device), test=self.test.to(device), word_vectors=vectors)

    def digest(self) -> str:
        """Return the first 16 hexadecimal digits of the SHA-256 over all tensors, with their names and shapes."""
        tensors: dict[str, Tensor | None] = {"word_vectors": self.word_vectors}
        for name, split in (("train", self.train), ("test", self.test)):
            tensors |= {
                f"{name}.inputs": split.inputs,
                f"{name}.labels": split.labels,
                f"{name}.lengths": split.lengths,
            }
        sha = hashlib.sha256(self.task.encode())
        for name, tensor in tensors.items():
            if tensor is not None:
                sha.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
                sha.update(tensor.cpu().contiguous().numpy().data)
        return sha.hexdigest()[:16]


def crop(images: Tensor, offsets: Tensor) -> Tensor:
    """Cut 28 x 28 windows out of zero-padded images.

    Args:
        images: uint8 [B, 28, 28].
        offsets: int64 [B, 2], row and column of the window in the padded image, 0 to 4; 2 leaves an image as it is.
    """
    padded = F.pad(images, [CROP_PADDING] * 4)
    window = torch.arange(IMAGE, device=images.device)
    rows = offsets[:, 0, None] + window
    columns = offsets[:, 1, None] + window
    batch = torch.arange(len(images), device=images.device)
    return padded[batch[:, None, None], rows[:, :, None], columns[:, None, :]]


def scale(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [B, 28, 28] to [-1, 1], [B, 1, 28, 28]: (x / 255 - 0.5) / 0.5, as torchvision's ToTensor and Normalize."""
    return ((images.to(dtype) / 255 - 0.5) / 0.5)[:, None]
