"""Engines: the same arithmetic by different means. `make_engine` chooses one by name."""

import logging

import torch

from generators import ENGINES
from generators.engines.base import Engine
from generators.engines.fused.build import FusedUnavailableError
from generators.engines.fused_engine import FusedEngine
from generators.engines.torch_engine import TorchEngine
from generators.errors import InputError
from generators.tasks.data import TaskData

_log = logging.getLogger(__name__)


def make_engine(
    name: str,
    data: TaskData,
    device: torch.device | str = "cpu",
    threads: int = 1,
    dtype: torch.dtype = torch.float32,
    gpu_share: float = 1.0,
) -> Engine:
    """Return the engine called `name` for a task's data.

    Args:
        name: "torch", "compiled" (torch through torch.compile), "fused", or "auto": fused where it serves (CPU,
            float32) and can be built, with one line of warning where it cannot; torch otherwise.
        threads: of the fused engine; torch has its own setting.
        gpu_share: share of a GPU's memory for the torch engines.

    Raises:
        InputError: an unknown name, "fused" where it does not serve or cannot be built, or "compiled" where
            torch.compile does not work.
    """
    if name not in ENGINES:
        raise InputError(f"engine: found {name!r}, expected one of {', '.join(ENGINES)}")
    served = torch.device(device).type == "cpu" and dtype == torch.float32
    if name == "fused" and not served:
        raise InputError(f"engine: fused serves float32 on the CPU, found {dtype} on {device}; use torch or auto")
    if name in ("torch", "compiled") or not served:
        return TorchEngine(data, device, dtype, gpu_share=gpu_share, compiled=name == "compiled")
    try:
        return FusedEngine(data.to("cpu"), threads)
    except FusedUnavailableError as error:
        if name == "fused":
            raise InputError(
                f"engine: fused is not available: {error}; torch and auto work, 7 to 17 times slower"
            ) from error
        _log.warning("fused engine not available, using torch (7 to 17 times slower): %s", error)
        return TorchEngine(data, device, dtype)
