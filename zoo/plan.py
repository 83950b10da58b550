"""The frozen list of a sweep's runs and populations: what has to exist when the sweep is done.

A plan is settled once, from the configuration and the digest of the data, and kept in the sweep directory. Its JSON is
canonical: equal plans are equal bytes, and it ends with its own digest, so that a flipped bit anywhere is noticed.
"""

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from generators.architecture import parameter_count
from generators.errors import InputError
from generators.hyperparameters import Hyperparameters
from generators.population import HELD_OUT_SHARE, PER_RUN_FIELDS
from zoo.config import SweepConfig
from zoo.errors import PlanError

PLAN_FORMAT = 2
DIGEST_KEY = ',"sha256":"'
GPU_POPULATION = 200
CPU_POPULATION_STEPS = 7500
"""Run-steps in a CPU population's epoch, about a minute of one core: 16 runs on the full MNIST."""
CPU_POPULATION_RANGE = (8, 64)
BYTES_PER_WEIGHT = 4


@dataclass(frozen=True)
class Population:
    """Runs that train together. `id` is a digest of the run_ids."""

    id: str
    runs: tuple[Hyperparameters, ...]

    @classmethod
    def of(cls, runs: Iterable[Hyperparameters]) -> "Population":
        runs = tuple(runs)
        return cls(hashlib.sha256(",".join(run.run_id for run in runs).encode()).hexdigest()[:16], runs)


@dataclass(frozen=True)
class Plan:
    """All populations of a sweep.

    labels: epoch labels whose checkpoints are kept, for example ("0", "25", "50", "best").
    population_size: the most runs of a population.
    data: the settings that the data was loaded with (for the record; the data digest in the runs decides).
    origin: "generated", or "imported" for runs that were trained elsewhere.
    """

    populations: tuple[Population, ...]
    labels: tuple[str, ...]
    population_size: int
    data: dict[str, Any]
    origin: str = "generated"

    @property
    def runs(self) -> list[Hyperparameters]:
        return [run for population in self.populations for run in population.runs]

    @property
    def task(self) -> str:
        return self.populations[0].runs[0].task

    @property
    def data_digest(self) -> str:
        return self.populations[0].runs[0].data_digest

    @property
    def has_embedding(self) -> bool:
        """Whether its models share a frozen embedding, which the sweep keeps; imported ones come without theirs."""
        return self.task == "ag_news" and self.origin == "generated"

    def checkpoint_bytes(self) -> int:
        """Bytes of weights that the finished sweep holds, if no run diverges."""
        return len(self.runs) * len(self.labels) * parameter_count(self.task) * BYTES_PER_WEIGHT

    def run_steps(self, train_samples: int) -> int:
        """Training steps of all runs together, given the size of the training set."""
        return run_steps(self.runs, train_samples)

    def to_json(self) -> str:
        """Return the canonical JSON: what all runs share once, a row a run, and the digest of it all."""
        first = self.populations[0].runs[0].to_dict()
        varying = [name for name in first if any(getattr(run, name) != first[name] for run in self.runs)]
        content = {
            "format": PLAN_FORMAT,
            "origin": self.origin,
            "labels": list(self.labels),
            "population_size": self.population_size,
            "data": self.data,
            "common": {name: value for name, value in first.items() if name not in varying},
            "columns": [*varying, "run_id"],
            "populations": [
                {"id": p.id, "runs": [[*(getattr(run, name) for name in varying), run.run_id] for run in p.runs]}
                for p in self.populations
            ],
        }
        return _with_digest(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False))

    @classmethod
    def from_json(cls, text: str, where: str) -> "Plan":
        """Read a plan back and check its digest and every id; `where` names the file in errors."""
        try:
            content = json.loads(text)
            if content["format"] != PLAN_FORMAT:
                raise PlanError(
                    f"{where}: format: found {content['format']}, expected {PLAN_FORMAT}; "
                    f"use the version of this package that made the sweep"
                )
            if text != _with_digest(text[: text.rfind(DIGEST_KEY)] + "}"):
                raise PlanError(
                    f"{where}: not the content that was written (SHA-256 differs); restore the file from a copy"
                )
            *columns, _ = content["columns"]
            populations = []
            for entry in content["populations"]:
                rows = [(dict(zip(columns, row[:-1], strict=True)), row[-1]) for row in entry["runs"]]
                population = Population.of(Hyperparameters(**content["common"], **values) for values, _ in rows)
                if population.id != entry["id"] or [r.run_id for r in population.runs] != [name for _, name in rows]:
                    raise PlanError(
                        f"{where}: population {entry['id']}: ids do not follow from the runs; the file was changed"
                    )
                populations.append(population)
            labels, data = tuple(content["labels"]), content["data"]
            if not populations or not all(population.runs for population in populations):
                raise ValueError("no populations, or one without runs")
            if not (isinstance(data, dict) and all(isinstance(label, str) for label in labels)):
                raise ValueError("labels or data of another type")
            return cls(tuple(populations), labels, content["population_size"], data, content["origin"])
        except PlanError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise PlanError(f"{where}: not a readable plan ({error!r}); restore the file from a copy") from error


def _with_digest(text: str) -> str:
    """Return the JSON of an object with the digest of that text as its last key."""
    return f'{text[:-1]}{DIGEST_KEY}{hashlib.sha256(text.encode()).hexdigest()}"}}'


def run_steps(runs: Iterable[Hyperparameters], train_samples: int, first_epoch: int = 0) -> int:
    """Return the training steps of all `runs` together from an epoch on, given the size of the training set."""
    return sum((r.epochs - first_epoch) * (_samples_of(r, train_samples) // r.batch_size) for r in runs)


def make_plan(
    config: SweepConfig, data_digest: str, train_samples: int, on_gpu: bool = False, exclude: Iterable[str] = ()
) -> Plan:
    """Expand the grid to runs and the runs to populations.

    Args:
        data_digest: digest of the prepared data (TaskData.digest), part of every run_id.
        train_samples: size of the training set; an automatic population size on a CPU follows from it.
        exclude: run_ids that exist already (of a sweep that is extended).

    Raises:
        PlanError: nothing is left to train, or a train fraction leaves less than one batch.
    """
    done = set(exclude)
    runs = [run for run in expand_grid(config, data_digest) if run.run_id not in done]
    if not runs:
        raise PlanError(
            "grid: every run of the configuration is in the sweep already; there is nothing to extend it by"
        )
    size = config.population_size
    if isinstance(size, str):
        size = GPU_POPULATION if on_gpu else cpu_population_size(train_samples // config.batch_size)
    groups: dict[tuple, list[Hyperparameters]] = defaultdict(list)
    for run in runs:
        groups[tuple(v for name, v in run.to_dict().items() if name not in PER_RUN_FIELDS)].append(run)
    for group in groups.values():
        _require_a_batch(group[0], train_samples)
    populations = (Population.of(part) for group in groups.values() for part in _even_parts(group, size))
    return Plan(tuple(populations), config.labels, size, config.data.settings())


def _require_a_batch(run: Hyperparameters, train_samples: int) -> None:
    """Refuse a run whose part of the training data is less than one batch."""
    held_out = _held_out(run, train_samples)
    left = _samples_of(run, train_samples)
    if left < run.batch_size:
        of_which = f", of which {held_out} are held out" if held_out else ""
        raise PlanError(
            f"train_fraction: found {run.train_fraction}, which leaves {left} of {train_samples} training samples"
            f"{of_which}, expected at least one batch (batch_size {run.batch_size}); "
            f"lower batch_size, raise train_fraction or use more data"
        )


def _held_out(run: Hyperparameters, train_samples: int) -> int:
    return round(train_samples * HELD_OUT_SHARE) if run.best_by == "validation" else 0


def _samples_of(run: Hyperparameters, train_samples: int) -> int:
    """Return how many samples a run trains on, counted as the training does."""
    return round(run.train_fraction * (train_samples - _held_out(run, train_samples)))


def _even_parts(group: list[Hyperparameters], size: int) -> Iterator[list[Hyperparameters]]:
    """Cut a group into parts of at most `size`, as even as can be, so that no small rest is left over."""
    parts = math.ceil(len(group) / size)
    return (group[len(group) * i // parts : len(group) * (i + 1) // parts] for i in range(parts))


def cpu_population_size(steps_per_epoch: int) -> int:
    low, high = CPU_POPULATION_RANGE
    return min(max(CPU_POPULATION_STEPS // max(steps_per_epoch, 1), low), high)


def expand_grid(config: SweepConfig, data_digest: str) -> list[Hyperparameters]:
    """Return the distinct runs of all blocks, in the order of the lists (a run of two blocks counts once)."""
    runs: dict[Hyperparameters, None] = {}
    for index, block in enumerate(config.grid):
        lists = (block.optimizer, block.dropout, block.train_fraction, block.seed or (config.seed,))
        for optimizer, dropout, fraction, seed in itertools.product(*lists):
            for rate, std, l2 in itertools.product(block.learning_rate, block.init_std, block.l2):
                try:
                    run = Hyperparameters(
                        task=config.task,
                        optimizer=optimizer,
                        learning_rate=rate,
                        init_std=std,
                        l2=l2,
                        dropout=dropout,
                        train_fraction=fraction,
                        seed=seed,
                        epochs=config.epochs,
                        batch_size=config.batch_size,
                        warmup_epochs=config.warmup_epochs,
                        min_learning_rate=config.min_learning_rate,
                        best_by=config.best_by,
                        initialisation=config.initialisation,
                        data_digest=data_digest,
                    )
                except InputError as error:
                    raise PlanError(f"grid[{index}].{error}") from error
                runs[run] = None
    return list(runs)


def differences(planned: Plan, found: Plan) -> list[str]:
    """Name what differs between the plan of a configuration and the one that a sweep directory holds, a line each.

    The population size is left out: it changes no result, and is never a reason to refuse a configuration.
    """
    lines = []
    for name in ("labels", "origin"):
        if getattr(planned, name) != getattr(found, name):
            lines.append(f"{name}: found {getattr(found, name)}, configuration has {getattr(planned, name)}")
    if {run.run_id for run in planned.runs} == {run.run_id for run in found.runs}:
        return lines
    for name in found.runs[0].to_dict():
        here, there = _values(planned.runs, name), _values(found.runs, name)
        if here != there:
            lines.append(f"{name}: found {', '.join(map(str, there))}; configuration has {', '.join(map(str, here))}")
    return lines or ["grid: the same values are combined differently"]


def _values(runs: Sequence[Hyperparameters], name: str) -> list[Any]:
    return sorted({getattr(run, name) for run in runs})
