"""How far a sweep is, from its directory alone: without Ray, from any machine that sees it, at any time."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zoo.durations import duration
from zoo.plan import Population
from zoo.signs import Sign
from zoo.store import Store


@dataclass(frozen=True)
class RunningPopulation:
    """An attempt that has left a sign of life.

    age: seconds since its last one. alive: False once it has been silent for too long, or its process is gone.
    """

    population: str
    attempt: str
    runs: int
    epoch: int
    epochs: int
    host: str
    age: float
    alive: bool


@dataclass(frozen=True)
class SweepStatus:
    """The state of a sweep.

    sealed populations and runs count; diverged ones are among the sealed.
    quarantined: population id -> last line of its error.
    epochs_done, epochs_planned: runs x epochs, with what is running and what is saved in states.
    epochs_per_second: of all attempts that are alive together; None where none has finished an epoch.
    seconds_left: at that rate. bytes_sealed, bytes_planned: of checkpoints and metrics; planned: of weights.
    """

    sweep: str
    task: str
    populations: int
    populations_sealed: int
    runs: int
    runs_sealed: int
    runs_diverged: int
    running: tuple[RunningPopulation, ...]
    quarantined: dict[str, str]
    epochs_done: int
    epochs_planned: int
    epochs_per_second: float | None
    seconds_left: float | None
    bytes_sealed: int
    bytes_planned: int

    @property
    def done(self) -> bool:
        return self.populations_sealed == self.populations

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"done": self.done}

    def text(self) -> str:
        """Return a few lines for people."""
        share = self.epochs_done / self.epochs_planned
        lines = [
            f"{self.sweep}: {self.task}, {share:.1%} of {self.epochs_planned} runs x epochs",
            f"  populations  {self.populations_sealed} of {self.populations} sealed",
            f"  runs         {self.runs_sealed} of {self.runs} sealed, {self.runs_diverged} of them diverged",
            f"  bytes        {self.bytes_sealed / 1e6:.1f} MB sealed, {self.bytes_planned / 1e6:.1f} MB planned",
        ]
        if self.epochs_per_second:
            left = "" if self.seconds_left is None else f", {duration(self.seconds_left)} left"
            lines.append(f"  rate         {self.epochs_per_second:.2f} runs x epochs a second{left}")
        lines += [f"  running      {_describe(attempt)}" for attempt in self.running]
        lines += [f"  quarantined  {population}: {error}" for population, error in self.quarantined.items()]
        return "\n".join(lines)


def sweep_status(path: Path | str) -> SweepStatus:
    """Return the status of the sweep directory `path`.

    Raises:
        StoreError: it is no sweep directory, or a commit cannot be read.
    """
    store = Store(path)
    plans = store.require_plans()
    populations = {p.id: p for plan in plans for p in plan.populations}
    commits = [commit for commit in store.commits() if commit.population in populations]
    sealed = {commit.population for commit in commits}
    outcomes = [run for commit in commits for run in commit.runs.values()]
    running: list[RunningPopulation] = []
    rate = 0.0
    for id_ in store.begun():
        if id_ in populations and id_ not in sealed:
            for attempt, sign in store.signs(id_).items():
                entry = _running(populations[id_], attempt, sign)
                running.append(entry)
                rate += entry.runs * (sign.epochs_per_second() or 0.0) * entry.alive
    planned = sum(_epochs(p) for p in populations.values())
    furthest = {id_: store.saved_epoch(id_) for id_ in store.begun() if id_ in populations and id_ not in sealed}
    for entry in running:
        furthest[entry.population] = max(furthest.get(entry.population, 0), entry.epoch)
    done = sum(_epochs(populations[id_]) for id_ in sealed)
    done += sum(len(populations[id_].runs) * epoch for id_, epoch in furthest.items())
    return SweepStatus(
        sweep=str(store.root),
        task=plans[0].task,
        populations=len(populations),
        populations_sealed=len(sealed),
        runs=sum(len(plan.runs) for plan in plans),
        runs_sealed=len(outcomes),
        runs_diverged=sum(run.status == "diverged" for run in outcomes),
        running=tuple(running),
        quarantined={
            id_: error.strip().splitlines()[-1] for id_, error in store.quarantined().items() if id_ not in sealed
        },
        epochs_done=done,
        epochs_planned=planned,
        epochs_per_second=rate or None,
        seconds_left=(planned - done) / rate if rate else None,
        bytes_sealed=sum(record.size for commit in commits for record in commit.files.values()),
        bytes_planned=sum(plan.checkpoint_bytes() for plan in plans),
    )


def _running(population: Population, attempt: str, sign: Sign) -> RunningPopulation:
    return RunningPopulation(
        population=population.id,
        attempt=attempt,
        runs=len(population.runs),
        epoch=sign.epoch,
        epochs=population.runs[0].epochs,
        host=sign.host,
        age=sign.age(),
        alive=sign.is_alive(),
    )


def _epochs(population: Population) -> int:
    return len(population.runs) * population.runs[0].epochs


def _describe(attempt: RunningPopulation) -> str:
    silent = "" if attempt.alive else ", taken for dead"
    return (
        f"{attempt.population} on {attempt.host}: epoch {attempt.epoch} of {attempt.epochs}, {attempt.runs} runs, "
        f"last sign of life {duration(attempt.age)} ago{silent}"
    )
