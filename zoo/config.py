"""A sweep as a person writes it: YAML -> SweepConfig. Every unknown key is refused, every value is checked here."""

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generators import ENGINES
from generators.errors import InputError
from generators.hyperparameters import RANGES
from generators.tasks import SOURCES
from zoo.errors import ConfigError
from zoo.plain_values import build, from_yaml, shown
from zoo.shipped import shipped_folder

WARMUP_EPOCHS = 10
MOST_RUNS = 1_000_000
"""Of one grid, before a run of two blocks counts once: its runs are all held in memory when it is planned."""


@dataclass(frozen=True)
class GridBlock:
    """One block of the grid: the Cartesian product of its lists."""

    optimizer: tuple[str, ...]
    learning_rate: tuple[float, ...]
    init_std: tuple[float, ...]
    l2: tuple[float, ...]
    dropout: tuple[float, ...]
    train_fraction: tuple[float, ...]
    seed: tuple[int, ...] | None = None
    """Replicates of every configuration of the block; the sweep's seed where it is not given."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            values = getattr(self, f.name)
            if values is not None and not values:
                raise ConfigError(f"{f.name}: found an empty list, expected at least one value")
            for value in values or ():
                _require(f.name, value, RANGES[f.name].fits(value), RANGES[f.name].plural)

    @property
    def size(self) -> int:
        """Number of runs: the product of the lists' lengths."""
        return math.prod(len(getattr(self, f.name) or (None,)) for f in dataclasses.fields(self))


@dataclass(frozen=True)
class StoreConfig:
    """How a sweep is kept."""

    state_seconds: float = 300.0
    """A population saves its state at the first epoch boundary after so many seconds."""

    def __post_init__(self) -> None:
        _require("state_seconds", self.state_seconds, self.state_seconds >= 0, "0 or more")


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep is run; nothing of it changes a result."""

    grace_seconds: float = 120.0
    """After SIGINT or SIGTERM, running populations have so long to reach an epoch's end and save their state."""
    hang_seconds: float = 3600.0
    """A worker that finishes no epoch for so long is taken for hanging and ended."""
    wait_for_others: bool = True
    """Whether a driver stays until populations that other drivers train are sealed too, to take over what they lose."""
    gpus_per_population: float = 1.0
    """Less than 1 puts several populations on one GPU."""

    def __post_init__(self) -> None:
        _require("grace_seconds", self.grace_seconds, self.grace_seconds >= 0, "0 or more")
        _require("hang_seconds", self.hang_seconds, self.hang_seconds > 0, "more than 0")
        fits = 0 < self.gpus_per_population <= 1
        _require("gpus_per_population", self.gpus_per_population, fits, "more than 0, at most 1")


@dataclass(frozen=True)
class SweepConfig:
    """A sweep: one task, one recipe, a grid of hyperparameters."""

    task: str
    """mnist or ag_news."""
    epochs: int
    """Passes over the training data."""
    save_epochs: tuple[int | str, ...]
    """Epochs whose checkpoints are kept; 0 is the initialisation, "best" the epoch of highest accuracy."""
    grid: tuple[GridBlock, ...]
    """Blocks of hyperparameter lists; the sweep trains the union of their products."""
    batch_size: int = 128
    """Samples a step."""
    warmup_epochs: int = WARMUP_EPOCHS
    """Epochs of linear warm-up, at most `epochs`. A file that does not give them gets fewer where `epochs` is less."""
    min_learning_rate: float = 1e-5
    """Where the cosine part of the schedule ends."""
    seed: int = 3
    """Names the order of the data, crops and dropout (and a shared initialisation)."""
    best_by: str = "test"
    """test (as in the paper) or validation (a fixed twelfth of the training data is held out)."""
    initialisation: str = "per_run"
    """per_run (every run draws its own weights) or shared (one draw for a seed, as in the paper)."""
    population_size: int | str = "auto"
    """Runs trained together, at most; auto: 200 on a GPU, on a CPU about a minute of the fused engine an epoch."""
    engine: str = "auto"
    """auto, torch, compiled or fused."""
    data: Any = None
    """Where the task's data comes from: a source of `generators.tasks` or its keys, which depend on the task. None, or
    leaving it out, takes their defaults."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """How the sweep is kept."""
    sweep: SweepOptions = field(default_factory=SweepOptions)
    """How the sweep is run."""

    def __post_init__(self) -> None:
        _require("task", self.task, self.task in SOURCES, f"one of {', '.join(SOURCES)}")
        source = SOURCES[self.task]
        if not isinstance(self.data, source):
            object.__setattr__(self, "data", build(source, {} if self.data is None else self.data, "data."))
        for name in ("epochs", "batch_size", "min_learning_rate", "seed", "best_by", "initialisation"):
            value = getattr(self, name)
            _require(name, value, RANGES[name].fits(value), RANGES[name].expected)
        _require(
            "warmup_epochs", self.warmup_epochs, 0 <= self.warmup_epochs <= self.epochs, f"0 to epochs ({self.epochs})"
        )
        size_fits = self.population_size == "auto" or (
            isinstance(self.population_size, int) and self.population_size >= 1
        )
        _require("population_size", self.population_size, size_fits, "auto or a whole number of 1 or more")
        _require("engine", self.engine, self.engine in ENGINES, f"one of {', '.join(ENGINES)}")
        _require("grid", [], bool(self.grid), "at least one block")
        _require("save_epochs", [], bool(self.save_epochs), "at least one epoch")
        for label in self.save_epochs:
            fits = label == "best" or (isinstance(label, int) and 0 <= label <= self.epochs)
            _require("save_epochs", label, fits, f'epochs from 0 to epochs ({self.epochs}), or "best"')
        if len(set(self.save_epochs)) < len(self.save_epochs):
            raise ConfigError(f"save_epochs: found {shown(repr(list(self.save_epochs)))}, expected no epoch twice")
        runs = sum(block.size for block in self.grid)
        if runs > MOST_RUNS:
            raise ConfigError(f"grid: found {runs} runs, expected at most {MOST_RUNS}; shorten its lists or split it")

    @property
    def labels(self) -> tuple[str, ...]:
        """Epoch labels in order: numbers ascending, then "best"."""
        return tuple(sorted(map(str, self.save_epochs), key=label_order))


def label_order(label: str) -> float:
    """Sort key of epoch labels: numbers ascending, then "best"."""
    return math.inf if label == "best" else int(label)


def load_config(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> SweepConfig:
    """Read a sweep from a YAML file, a preset, or plain values.

    Args:
        source: a path, the name of a preset in configs/ without its ending ("mnist"), or a dict as such a file has it.
        overrides: "key=value" texts, dots for nested keys, the value read as YAML.

    Raises:
        ConfigError: one line with the file, the field, what was found and what was expected.
    """
    if isinstance(source, Mapping):
        content, name = copy.deepcopy(dict(source)), "configuration"
    else:
        text, name = _read(source)
        content = from_yaml(text, f"{name}: ")
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: found {type(content).__name__}, expected keys and values such as `task: mnist`")
    for override in overrides:
        _apply_override(content, override)
    try:
        return parse_config(content)
    except InputError as error:
        raise ConfigError(f"{name}: {error}") from error


def parse_config(content: Mapping[str, Any]) -> SweepConfig:
    """Build a SweepConfig from plain values, as `load_config` does; errors name the field only."""
    content = dict(content)
    task = content.get("task")
    if not isinstance(task, str) or task not in SOURCES:
        raise ConfigError(f"task: found {shown(repr(task))}, expected one of {', '.join(SOURCES)}")
    epochs = content.get("epochs")
    if isinstance(epochs, int):
        content.setdefault("warmup_epochs", min(WARMUP_EPOCHS, max(epochs, 0)))
    return build(SweepConfig, content, "")


def presets() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(path.stem for path in shipped_folder("configs").glob("*.yaml"))


def _require(name: str, value: Any, fulfilled: bool, expected: str) -> None:
    if not fulfilled:
        raise ConfigError(f"{name}: found {shown(repr(value))}, expected {expected}")


def _apply_override(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override}: expected key=value, for example --set epochs=10")
    value = from_yaml(text, f"--set {override}: the value is ")
    *parents, last = key.split(".")
    for parent in parents:
        if content.get(parent) is None:  # missing, or `parent:` with nothing below
            content[parent] = {}
        content = content[parent]
        if not isinstance(content, dict):
            raise ConfigError(f"--set {override}: {parent} is no group of keys; set {parent} as a whole")
    content[last] = value


def _read(source: str | Path) -> tuple[str, str]:
    """Return the text of a configuration and the name by which errors call it."""
    path = Path(source)
    if path.suffix not in (".yaml", ".yml") and not _is_file(path):
        if str(source) in presets():
            return (shipped_folder("configs") / f"{source}.yaml").read_text(encoding="utf-8"), f"preset {source}"
        raise ConfigError(f"{source}: no such file or preset; presets: {', '.join(presets())}")
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected a YAML file") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False
