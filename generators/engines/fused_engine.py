"""The fused engine: a training step of one sample at a time, all of it in cache, in C++, for the CPU and float32.

It computes what the torch engine computes, up to float rounding and from the same random numbers; how, stands in
fused/network.h. On one machine its results are bit-identical for any number of threads and any width of the
population (between machines, the width of the processor's vectors orders some sums).

Dimensions: R run, N sample of a split, C class, P parameter.
"""

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from generators.architecture import CLASSES, IMAGE, IMAGE_TOKENS, WIDTH, parameter_count, sinusoidal_positions
from generators.engines.base import Batch, Evaluation, StepResult
from generators.engines.fused.build import FusedUnavailableError, build
from generators.errors import InputError
from generators.streams import dropout_threshold
from generators.tasks.data import CROP_PADDING, Split, TaskData

CAPACITY_STEP = 32
"""The library for texts is compiled for a largest number of tokens, in steps of this."""


class _Split(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("labels", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("samples", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("indices", ctypes.c_void_p),
        ("crops", ctypes.c_void_p),
        ("samples", ctypes.c_int64),
        ("dropout_key", ctypes.c_uint64),
        ("dropout_threshold", ctypes.c_uint32),
    )


class FusedEngine:
    """Population arithmetic in C++ on the CPU, in float32. One call at a time; calls release the interpreter lock.

    Args:
        data: the task's data, on the CPU.
        threads: how many threads share the runs of a population.
        definitions: further preprocessor flags of the build (-DFUSED_PROFILE, -DFUSED_LANES=8).

    Tensors of another type, shape or device than said here, and values out of their range, raise InputError: C++ reads
    by address alone. (Looking at a batch takes 5 microseconds; a step of one run, some milliseconds.)

    Raises:
        InputError: fewer than one thread, or data that is not as in generators.tasks.data.
        FusedUnavailableError: the engine cannot be built here.
    """

    name = "fused"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, data: TaskData, threads: int = 1, definitions: Sequence[str] = ()) -> None:
        if threads < 1:
            raise InputError(f"threads: found {threads}, expected 1 or more")
        self.data = data
        self._parameters = parameter_count(data.task)
        self._tokens = max(data.max_tokens, _row(data.test))
        if (data.word_vectors is None) != (data.task == "mnist"):
            found = "none" if data.word_vectors is None else "some"
            raise InputError(f"word_vectors: found {found}, expected them for texts and none for images")
        self._vectors = None
        if data.word_vectors is not None:
            self._vectors = _checked("word_vectors", data.word_vectors, torch.float32, (None, WIDTH))
        for split in (data.train, data.test):
            self._check_values(split)
        self._library = _load((*definitions, _task_definition(data.task, self._tokens)))
        self._positions = sinusoidal_positions(self._tokens)
        handle = self._library.fused_create(threads, data.max_tokens, _at(self._positions), _at(self._vectors))
        self._handle = ctypes.c_void_p(handle)
        weakref.finalize(self, self._library.fused_destroy, self._handle)

    def train_step(self, weights: Tensor, batch: Batch) -> StepResult:
        weights = self._checked_weights(weights)
        train = self._view(self.data.train)
        indices = _checked("indices", batch.indices, torch.int64, (None,))
        _check_range("indices", indices, 0, len(self.data.train) - 1)
        crops = None if batch.crops is None else _checked("crops", batch.crops, torch.int64, (len(indices), 2))
        if crops is not None:
            _check_range("crops", crops, 0, 2 * CROP_PADDING)
        loss = torch.empty(len(weights))
        correct = torch.empty(len(weights), dtype=torch.int64)
        gradient = torch.empty_like(weights)
        self._library.fused_train_step(
            self._handle,
            train,
            _Batch(_at(indices), _at(crops), len(indices), batch.dropout_key, dropout_threshold(batch.dropout)),
            len(weights),
            *map(_at, (weights, loss, correct, gradient)),
        )
        return StepResult(loss, correct, gradient)

    def logits(self, weights: Tensor, split: Split) -> Tensor:
        weights = self._checked_weights(weights)
        logits = torch.empty(len(weights), len(split), CLASSES[self.data.task])
        self._library.fused_logits(self._handle, self._view(split), len(weights), _at(weights), _at(logits))
        return logits

    def evaluate(self, weights: Tensor, split: Split) -> Evaluation:
        weights = self._checked_weights(weights)
        loss = torch.empty(len(weights), dtype=torch.float64)
        correct = torch.empty(len(weights), dtype=torch.int64)
        self._library.fused_evaluate(self._handle, self._view(split), len(weights), *map(_at, (weights, loss, correct)))
        return Evaluation(loss / len(split), correct.double() / len(split))

    def _checked_weights(self, weights: Tensor) -> Tensor:
        return _checked("weights", weights, torch.float32, (None, self._parameters))

    def _check_values(self, split: Split) -> None:
        """Refuse values that would be read out of bounds."""
        _check_range("labels", split.labels, 0, CLASSES[self.data.task] - 1)
        if split.lengths is not None and self._vectors is not None:
            _check_range("lengths", split.lengths, 1, _row(split))
            _check_range("inputs", split.inputs, 0, len(self._vectors) - 1)

    def _view(self, split: Split) -> _Split:
        """Return pointers to a split's tensors, and keep the tensors alive with them."""
        if (split.lengths is None) != (self.data.task == "mnist"):
            found = "no lengths" if split.lengths is None else "lengths"
            raise InputError(
                f"split: found {found}, expected lengths for texts and none for images; take the task's data"
            )
        if _row(split) > self._tokens:
            raise InputError(
                f"split: found texts of up to {_row(split)} tokens, expected at most {self._tokens} as in the engine's "
                "data; make an engine for data with this split"
            )
        if split is not self.data.train and split is not self.data.test:
            self._check_values(split)
        if split.lengths is None:
            inputs, lengths = _checked("inputs", split.inputs, torch.uint8, (len(split), IMAGE, IMAGE)), None
        else:
            inputs = _checked("inputs", split.inputs, torch.int32, (len(split), None))
            lengths = _checked("lengths", split.lengths, torch.int64, (len(split),))
        tensors = [inputs, _checked("labels", split.labels, torch.int64, (None,)), lengths]
        view = _Split(*map(_at, tensors), len(split), _row(split))
        view.tensors = tensors
        return view


def _check_range(name: str, values: Tensor, low: int, high: int) -> None:
    if len(values) and not (low <= int(values.min()) and int(values.max()) <= high):
        raise InputError(
            f"{name}: found {int(values.min())} to {int(values.max())}, expected {low} to {high}; take the task's data"
        )


def _checked(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> Tensor:
    """Return a tensor laid out as C++ reads it, after a look at its type and shape; None stands for any size."""
    fits = len(shape) == tensor.dim() and all(size in (None, n) for size, n in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype != dtype or tensor.device.type != "cpu":
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(
            f"{name}: found {tensor.dtype} {list(tensor.shape)} on {tensor.device}, expected {dtype} [{sizes}] on cpu; "
            "convert it, or use the torch engine"
        )
    return tensor.contiguous()


def _row(split: Split) -> int:
    """Tokens in a row of a split's inputs."""
    return IMAGE_TOKENS if split.lengths is None else split.inputs.shape[1]


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _task_definition(task: str, tokens: int) -> str:
    if task == "mnist":
        return "-DFUSED_TASK=Images"
    capacity = -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
    return f"-DFUSED_TASK=Texts<{capacity}>"


@cache
def _load(definitions: tuple[str, ...]) -> ctypes.CDLL:
    path = build(definitions)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise FusedUnavailableError(f"{path}: cannot be loaded ({error}); remove it to build it anew") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    split, batch = ctypes.POINTER(_Split), ctypes.POINTER(_Batch)
    library.fused_create.argtypes = (number, number, pointer, pointer)
    library.fused_create.restype = pointer
    library.fused_destroy.argtypes = (pointer,)
    library.fused_destroy.restype = None
    library.fused_train_step.argtypes = (pointer, split, batch, number, *[pointer] * 4)
    library.fused_logits.argtypes = (pointer, split, number, pointer, pointer)
    library.fused_evaluate.argtypes = (pointer, split, number, *[pointer] * 3)
    for call in (library.fused_train_step, library.fused_logits, library.fused_evaluate):
        call.restype = None
    return library
