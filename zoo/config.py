"""A sweep as a person writes it: YAML -> SweepConfig. Every unknown key is refused, every value is checked here."""

import copy
import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from generators import ENGINES
from generators.errors import InputError
from generators.hyperparameters import RANGES
from generators.tasks import SOURCES
from zoo.errors import ConfigError, one_line
from zoo.shipped import shipped_folder

WARMUP_EPOCHS = 10
INTEGER_BITS = 63
"""Without the sign; numbers end in int64 columns."""
MOST_RUNS = 1_000_000
"""Of one grid, before a run of two blocks counts once: its runs are all held in memory when it is planned."""
NAMES = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true or false"),
    type(None): ("nothing", "nothing"),
}
"""Type of a field -> what errors call one of its values, and several."""
LONGEST_QUOTE = 200
LONGEST_REASON = 600
"""Characters of a value that a message quotes, and of what the YAML parser says."""


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
            raise ConfigError(f"save_epochs: found {_shown(repr(list(self.save_epochs)))}, expected no epoch twice")

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
        content = _from_yaml(text, f"{name}: ")
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
        raise ConfigError(f"task: found {_shown(repr(task))}, expected one of {', '.join(SOURCES)}")
    epochs = content.get("epochs")
    if isinstance(epochs, int):
        content.setdefault("warmup_epochs", min(WARMUP_EPOCHS, max(epochs, 0)))
    return build(SweepConfig, content, "")


def presets() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(path.stem for path in shipped_folder("configs").glob("*.yaml"))


def build(cls: type, content: Any, prefix: str) -> Any:
    """Make a frozen dataclass from plain values; unknown keys and wrong types are errors that name the field."""
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{prefix.rstrip('.') or 'top level'}: found {_shown(repr(content))}, expected keys and values"
        )
    hints = get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{prefix}{_shown(str(key))}: unknown key; {hint}")
    for f in dataclasses.fields(cls):
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if missing and f.name not in content:
            raise ConfigError(f"{prefix}{f.name}: missing; it has no default")
    values = {key: _convert(value, hints[key], f"{prefix}{key}") for key, value in content.items()}
    try:
        return cls(**values)
    except InputError as error:
        raise ConfigError(f"{prefix}{error}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check a plain value against a type hint and return it in that type (lists become tuples, 1 becomes 1.0)."""
    if hint is Any:
        return value
    if type(value) is int and value.bit_length() > INTEGER_BITS:
        raise ConfigError(
            f"{where}: found a whole number of {value.bit_length()} bits, expected one that fits into "
            f"{INTEGER_BITS} bits and a sign"
        )
    if get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            if get_origin(option) is tuple and isinstance(value, list | tuple):
                return _convert(value, option, where)  # its errors name the item
            try:
                return _convert(value, option, where)
            except ConfigError:
                continue
        raise ConfigError(f"{where}: found {_shown(repr(value))}, expected {_expected(hint)}")
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: found {_shown(repr(value))}, expected {_expected(hint)}")
        return tuple(_convert(item, get_args(hint)[0], f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, f"{where}.")
    if hint is float and type(value) is int:
        return float(value)
    if (hint is type(None) and value is None) or type(value) is hint:
        if hint is float and not abs(value) < float("inf"):
            raise ConfigError(f"{where}: found {value}, expected a finite number")
        return value
    raise ConfigError(f"{where}: found {_shown(repr(value))}, expected {_expected(hint)}")


def _expected(hint: Any, several: bool = False) -> str:
    """Return what errors call the values of a type hint: one of them, or several in a list."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_expected(option, several) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {_expected(get_args(hint)[0], several=True)}"
    return NAMES.get(hint, ("keys and values", "groups of keys and values"))[several]


def _shown(text: str, longest: int = LONGEST_QUOTE) -> str:
    """Return what a message quotes, on one line and cut where it is long."""
    text = one_line(text)
    return text if len(text) <= longest else f"{text[:longest]}..."


def _require(name: str, value: Any, fulfilled: bool, expected: str) -> None:
    if not fulfilled:
        raise ConfigError(f"{name}: found {_shown(repr(value))}, expected {expected}")


def _apply_override(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override}: expected key=value, for example --set epochs=10")
    value = _from_yaml(text, f"--set {override}: the value is ")
    *parents, last = key.split(".")
    for parent in parents:
        if content.get(parent) is None:  # missing, or `parent:` with nothing below
            content[parent] = {}
        content = content[parent]
        if not isinstance(content, dict):
            raise ConfigError(f"--set {override}: {parent} is no group of keys; set {parent} as a whole")
    content[last] = value


def _from_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    # PyYAML lets through what int(), date() and its own tables say of `!!int abc`, 2020-99-99 or `!!bool abc`.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where}not valid YAML: {_shown(str(error), LONGEST_REASON)}") from error


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


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, with YAML 1.2's numbers (1e-3 is a number) and without repeated keys.

    Aliases and merge keys are refused: no sweep needs them, and ten lines of them can stand for more values than memory
    holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(
                f"alias *{event.anchor}, line {event.start_mark.line + 1}: no aliases here; write the value itself"
            )
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(
                    f"merge key <<, line {key_node.start_mark.line + 1}: no merge keys here; write the keys themselves"
                )
        super().flatten_mapping(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping = super().construct_mapping(node, deep=deep)  # refuses what is no mapping, and keys without a hash
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.YAMLError(f"key {key!r} stands twice, line {key_node.start_mark.line + 1}")
            seen.add(key)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
