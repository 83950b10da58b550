"""Checkpoints that a user gives as files: what is no weight is refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from generators.architecture import tensor_table
from zoo.errors import NFNError
from zoo.nfn.data import read_checkpoint_files


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {spec.name: torch.ones(spec.shape, dtype=dtype) for spec in tensor_table("mnist")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_point_weights_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file(weights(dtype), tmp_path / "a.safetensors")
    assert read_checkpoint_files([tmp_path / "a.safetensors"], "mnist").weights.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_others_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file(weights(dtype), tmp_path / "a.safetensors")
    with pytest.raises(NFNError, match=rf"a\.safetensors: .*weight: found {dtype}, expected floating-point weights"):
        read_checkpoint_files([tmp_path / "a.safetensors"], "mnist")
