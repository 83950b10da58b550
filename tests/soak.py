"""Sweeps under random faults, many times over: `make soak`, or `python tests/soak.py --faults 200 --seed 0`.

Each round is one sweep. Faults strike its drivers, workers and files until it is done; then everything is checked:
commits equal the plan, keys are unique, digests are valid, and the rows are those of an undisturbed sweep, bit for bit.
"""

import argparse
import errno
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # ahead of tests/, which has folders of the same names
os.environ["PYTHONPATH"] = ":".join(sys.path[:2])
os.environ.setdefault("OMP_NUM_THREADS", "1")

from crash_points import at_steps, fail_at, kill_at
from faulty_workers import FAULTS, faulty_train, order
from sweep_tools import assert_undisturbed, block, drive, kill, rows, start, tiny, write_digits

from zoo import driver as driver_module
from zoo.errors import StoreError
from zoo.plan import make_plan
from zoo.signs import Sign
from zoo.store import Store
from zoo.sweep import generate

CONFIG = tiny(epochs=6, save_epochs=[0, 3, "best"], population_size=2, grid=[block(optimizer=["adam", "sgd"])])
STEPS = 400
"""About as many steps as the write protocol takes in one undisturbed sweep."""
RAY_ROUND = 12
"""Every so many rounds run on Ray, where workers fail on order."""


class Soak:
    """Counts the faults that have struck, by kind."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.data = write_digits(folder / "digits")
        generate(CONFIG, folder / "undisturbed", self.data, workers=0, progress=False)
        self.expected = rows(folder / "undisturbed")

    def round(self, number: int) -> None:
        """Bring one sweep to its end through faults, and check it."""
        sweep = self.folder / f"round-{number}" / "sweep"
        sweep.parent.mkdir()
        if number % RAY_ROUND == RAY_ROUND - 1:
            self._on_ray(sweep)
        else:
            while not _is_done(sweep):
                self.random.choice(
                    [self._kill, self._kill, self._die_at_step, self._fail_flush, self._zombie, self._signal]
                )(sweep)
                self._damage_a_state(sweep)
        # What was set aside by an injected error is tried again, as a person would.
        generate(CONFIG, sweep, self.data, workers=0, progress=False)
        assert_undisturbed(sweep, self.expected)

    def _drive_until(self, sweep: Path, seconds: float) -> Any:
        process = start(drive, CONFIG, sweep, self.data)
        process.join(seconds)
        return process

    def _kill(self, sweep: Path) -> None:
        """kill -9 of one to three drivers that work at the same time."""
        others = [start(drive, CONFIG, sweep, self.data) for _ in range(self.random.randrange(3))]
        for process in [*others, self._drive_until(sweep, self.random.uniform(0.05, 0.8))]:
            if process.exitcode is None:
                kill(process)
                self.struck["kill -9 of a driver"] += 1
            process.join()

    def _die_at_step(self, sweep: Path) -> None:
        process = start(drive_with_fault, sweep, self.data, "kill", self.random.randrange(STEPS))
        process.join()
        self.struck["kill -9 at a step of the protocol, file torn"] += process.exitcode == -signal.SIGKILL

    def _fail_flush(self, sweep: Path) -> None:
        kind = self.random.choice(["EIO", "ENOSPC"])
        process = start(drive_with_fault, sweep, self.data, kind, self.random.randrange(STEPS))
        process.join()
        self.struck[f"flush fails with {kind}"] += process.exitcode == STRUCK

    def _zombie(self, sweep: Path) -> None:
        """A driver is frozen in the middle, another one works on, the first wakes up again."""
        zombie = self._drive_until(sweep, self.random.uniform(0.1, 0.6))
        if zombie.exitcode is None:
            kill(zombie, signal.SIGSTOP)
            other = start(drive_without_waiting, sweep, self.data)
            other.join(self.random.uniform(0.2, 1.5))
            kill(zombie, signal.SIGCONT)
            self.struck["zombie"] += 1
            other.join()
        zombie.join()

    def _signal(self, sweep: Path) -> None:
        process = self._drive_until(sweep, self.random.uniform(0.2, 0.8))
        if process.exitcode is None:
            kill(process, self.random.choice([signal.SIGTERM, signal.SIGINT]))
            self.struck["SIGTERM or SIGINT"] += 1
        process.join()

    def _damage_a_state(self, sweep: Path) -> None:
        found = sorted(sweep.glob("populations/*/state/[0-9]*"))
        if found and self.random.random() < 0.3:
            path = self.random.choice(found)
            os.truncate(path, self.random.randrange(path.stat().st_size))
            self.struck["torn state"] += 1

    def _on_ray(self, sweep: Path) -> None:
        """Workers fail on order, and one is killed by its process id."""
        kinds = [kind for kind in FAULTS if kind not in ("disk full", "error")] + ["garbage"]
        data = CONFIG.data.load(self.data)
        populations = [p.id for p in make_plan(CONFIG, data.digest(), len(data.train)).populations]
        ordered = 0
        for population in populations:
            for number in range(2):
                order(sweep, self.random.choice(kinds), population, self.random.randrange(1, 7), number)
                ordered += 1
        driver_module._train = faulty_train
        driver_module.SIGN_SECONDS = 0.5
        config = tiny(
            epochs=6, save_epochs=[0, 3, "best"], grid=[block(optimizer=["adam", "sgd"])], sweep={"hang_seconds": 4}
        )
        generate(config, sweep, self.data, workers=2, progress=False)
        self.struck["worker fails on Ray"] += ordered - len(list((sweep.parent / "faults").iterdir()))


STRUCK = 7


def drive_with_fault(sweep: Path, data: Path, kind: str, step: int) -> None:
    """Target of a process: dies at a step, or finds a flush failing and exits with STRUCK."""
    if kind == "kill":
        with at_steps(sweep, kill_at(step)):
            return drive(CONFIG, sweep, data)
    seen: list[int] = []
    fail = fail_at(step, getattr(errno, kind), for_ever=kind == "ENOSPC")

    def note(*arguments: Any) -> None:
        try:
            fail(*arguments)
        except OSError:
            seen.append(1)
            raise

    try:
        with at_steps(sweep, note):
            drive(CONFIG, sweep, data)
    except StoreError as error:
        assert str(sweep) in str(error), error
    sys.exit(STRUCK if seen else 0)


def drive_without_waiting(sweep: Path, data: Path) -> None:
    """Target of a process that takes over populations of others although they show life."""
    Sign.patience = lambda self: 0.0  # type: ignore[method-assign]
    drive(CONFIG, sweep, data)


def _is_done(sweep: Path) -> bool:
    store = Store(sweep)
    return bool(store.plans()) and not store.todo()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many faults at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started, number = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="zoo-soak-") as folder:
        soak = Soak(Path(folder), options.seed)
        while soak.struck.total() < options.faults:
            soak.round(number)
            number += 1
            print(f"{number} sweeps, {soak.struck.total()} faults, {time.monotonic() - started:.0f} s", file=sys.stderr)
    for kind, count in soak.struck.most_common():
        print(f"{count:5d}  {kind}")
    print(f"{soak.struck.total()} faults in {number} sweeps: no row lost, doubled or changed")


if __name__ == "__main__":
    main()
