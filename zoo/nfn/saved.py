"""A predictor on disk, finished or on its way.

DIR/predictor.safetensors and DIR/predictor.json are a finished predictor: tensors, and configuration with result.
DIR/state.safetensors is the state after the last whole epoch; it goes when the predictor is finished. Files are
replaced atomically, and nothing that is read can hold code.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from zoo.errors import NFNError, one_line
from zoo.files import write
from zoo.nfn.data import WeightData
from zoo.nfn.fit import FitState, predict_network
from zoo.nfn.predictors import NetworkPredictor, TreePredictor, make_predictor
from zoo.nfn.record import TrainingResult, read_record, require_same

FORMAT = 2
TRAIN_AGAIN = "train the predictor again, in an empty folder"
TENSORS, CONFIG, STATE = "predictor.safetensors", "predictor.json", "state.safetensors"


@dataclass(frozen=True)
class SavedPredictor:
    """A predictor ready to use. config: the setting of its training, as a dictionary; result: what came out."""

    predictor: NetworkPredictor | TreePredictor
    config: dict[str, Any]
    result: dict[str, Any]

    @property
    def task(self) -> str:
        return self.config["task"]

    def predict(self, data: WeightData) -> Any:
        """Return predicted accuracies [N], a numpy array. Raises NFNError for checkpoints of another task."""
        if data.task != self.task:
            raise NFNError(f"task: found checkpoints of {data.task}, expected {self.task}, the predictor's task")
        if isinstance(self.predictor, NetworkPredictor):
            return predict_network(self.predictor, self.predictor.inputs(data), data.names)
        return self.predictor.predict(self.predictor.inputs(data).numpy())


def save_predictor(
    out: Path, predictor: NetworkPredictor | TreePredictor, config: dict[str, Any], result: dict[str, Any]
) -> None:
    """Write a finished predictor; predictor.json comes last and makes it one."""
    state = predictor.state_dict() if isinstance(predictor, NetworkPredictor) else predictor.state()
    content = save({name: tensor.cpu().contiguous() for name, tensor in state.items()})
    write(out / TENSORS, content)
    record = {"format": FORMAT, "sha256": hashlib.sha256(content).hexdigest(), "config": config, "result": result}
    write(out / CONFIG, (json.dumps(record, indent=1) + "\n").encode())
    (out / STATE).unlink(missing_ok=True)


def load_predictor(folder: str | Path, device: torch.device | str = "cpu") -> SavedPredictor:
    """Load a finished predictor.

    Raises:
        NFNError: there is none, its files are damaged, or its tensors are not those of its configuration.
    """
    folder = Path(folder)
    record = _read_predictor(folder)
    if record is None:
        raise NFNError(f"{folder}: found no {CONFIG}, expected the folder of a trained predictor; see `zoo nfn train`")
    config = record["config"]
    content = _read_tensors(folder, record)
    try:
        predictor = make_predictor(config["predictor"], config["task"], config["components"], **config["options"])
        state = load(content)
        if isinstance(predictor, NetworkPredictor):
            predictor.load_state_dict(state)
            predictor.to(device).eval()
        else:
            predictor.load_state(state)
    except (SafetensorError, RuntimeError, KeyError, TypeError) as error:
        reason = one_line(error)
        raise NFNError(f"{folder / TENSORS}: does not fit {CONFIG} ({reason}); {TRAIN_AGAIN}") from error
    return SavedPredictor(predictor, config, record["result"])


def finished_result(out: Path, config: dict[str, Any]) -> TrainingResult | None:
    """Return the result of the predictor that `out` holds, None if it holds none.

    Raises:
        NFNError: it was trained with another configuration or on other checkpoints, or is damaged.
    """
    record = _read_predictor(out)
    if record is None:
        return None
    require_same(out / CONFIG, record["config"], config)
    return TrainingResult(**record["result"])


def save_state(out: Path, config: dict[str, Any], state: FitState) -> None:
    """Write the state after an epoch in place of the one before."""
    tensors = {f"network.{name}": tensor for name, tensor in state.network.items()}
    tensors |= {f"best.{name}": tensor for name, tensor in state.best.items()}
    for number, moments in state.optimizer["state"].items():
        tensors |= {f"adam.{number}.{name}": tensor for name, tensor in moments.items()}
    rest = {
        "config": config,
        "epoch": state.epoch,
        "best_epoch": state.best_epoch,
        "history": state.history,
        "seconds": state.seconds,
        "groups": state.optimizer["param_groups"],
    }
    content = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, {"fit": json.dumps(rest)})
    write(out / STATE, content)


def load_state(out: Path, config: dict[str, Any]) -> FitState | None:
    """Return the state to go on from, None if there is none.

    Raises:
        NFNError: it belongs to another configuration or to other checkpoints, or is damaged.
    """
    path = out / STATE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            rest = json.loads(file.metadata()["fit"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("adam.", tensors).items():
            number, moment = name.split(".")
            moments.setdefault(int(number), {})[moment] = tensor
        state = FitState(
            epoch=rest["epoch"],
            network=_under("network.", tensors),
            optimizer={"state": moments, "param_groups": rest["groups"]},
            best=_under("best.", tensors),
            best_epoch=rest["best_epoch"],
            history=rest["history"],
            seconds=rest["seconds"],
        )
        made_with = dict(rest["config"])
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise NFNError(f"{path}: damaged ({one_line(error)}); remove it to start again") from error
    require_same(path, made_with, config)
    return state


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _read_tensors(folder: Path, record: dict[str, Any]) -> bytes:
    """Return the bytes of a predictor's tensors if they are those that were written: the libraries of trees may end the
    process over damaged ones."""
    path = folder / TENSORS
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NFNError(f"{path}: cannot be read ({error.strerror}); {TRAIN_AGAIN}") from error
    found, expected = hashlib.sha256(content).hexdigest(), record.get("sha256")
    if found != expected:
        raise NFNError(f"{path}: damaged: found SHA-256 {found}, expected {expected} as in {CONFIG}; {TRAIN_AGAIN}")
    return content


def _read_predictor(folder: Path) -> dict[str, Any] | None:
    record = read_record(folder / CONFIG, TRAIN_AGAIN)
    if record is not None and record.get("format") != FORMAT:
        raise NFNError(f"{folder / CONFIG}: format: found {record.get('format')!r}, expected {FORMAT}; {TRAIN_AGAIN}")
    return record
