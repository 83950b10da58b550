"""What each command does with its options: calls the library, prints the result, returns the exit code.

Commands import what they need when they run, so that `zoo --help` is quick.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from generators.errors import InputError
from zoo.durations import duration

DONE, CHECK_FAILED, BAD_INPUT, QUARANTINED, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143


def _print(record: dict[str, Any], as_json: bool) -> None:
    """Print a flat record as JSON, or as a table of two columns."""
    if as_json:
        print(json.dumps(record))
        return
    width = max(len(name) for name in record)
    for name, value in record.items():
        print(f"{name:<{width}}  {value}")


def plan(options: argparse.Namespace) -> int:
    from zoo.config import load_config
    from zoo.plan import make_plan

    config = load_config(options.config, options.overrides)
    train_samples, test_samples = config.data.sizes()
    plan = make_plan(config, data_digest="0" * 16, train_samples=train_samples)
    steps = plan.run_steps(train_samples)
    record: dict[str, Any] = {
        "task": config.task,
        "runs": len(plan.runs),
        "populations": len(plan.populations),
        "runs_per_population": max(len(population.runs) for population in plan.populations),
        "epochs": config.epochs,
        "train_samples": train_samples,
        "test_samples": test_samples,
        "run_steps": steps,
        "labels": " ".join(plan.labels),
        "checkpoints": len(plan.runs) * len(plan.labels),
        "checkpoint_bytes": plan.checkpoint_bytes(),
    }
    if options.rate:
        record |= {"seconds": round(steps / options.rate), "time": duration(steps / options.rate)}
    _print(record, options.json)
    return DONE


def generate(options: argparse.Namespace) -> int:
    from zoo.config import load_config
    from zoo.sweep import SweepInterrupted, generate

    config = load_config(options.config, options.overrides)
    try:
        summary = generate(
            config,
            options.sweep_dir,
            data_dir=options.data_dir,
            workers=options.workers,
            address=options.address,
            extend=options.extend,
            progress=not options.quiet,
        )
    except SweepInterrupted as stop:
        print(f"zoo: {stop}", file=sys.stderr)
        return 128 + stop.signal
    record = asdict(summary)
    if not options.json:
        record["quarantined"] = len(summary.quarantined)
        record["seconds"] = round(summary.seconds, 1)
        if summary.run_steps:
            record["run_steps_per_second"] = round(summary.run_steps / summary.seconds, 1)
    _print(record, options.json)
    return QUARANTINED if summary.quarantined else DONE


def status(options: argparse.Namespace) -> int:
    from zoo.status import sweep_status

    while True:
        status = sweep_status(options.sweep_dir)
        print(json.dumps(status.to_dict()) if options.json else status.text(), flush=True)
        settled = status.populations_sealed + len(status.quarantined) == status.populations
        if not options.watch or (settled and not any(attempt.alive for attempt in status.running)):
            return DONE
        time.sleep(5)


def build(options: argparse.Namespace) -> int:
    from zoo.builder import build
    from zoo.splits import SPLITS

    with _executor(options) as executor:
        report = build(options.sweep_dirs, options.out, executor, progress=not options.quiet)
    for task, splits in report.checkpoints.items():
        print(f"{task}: {sum(splits.values())} checkpoints ({', '.join(f'{n} {s}' for s, n in splits.items())})")
        if empty := [split for split in SPLITS if split not in splits]:
            print(f"{task}: no run fell into {' or '.join(empty)}, so that is no split of it; a larger sweep has all")
    print(f"{report.diverged_runs} runs diverged, {report.unfinished_populations} populations are not finished yet")
    print(f"{report.folder}: {report.bytes / 1e6:.1f} MB; load it with load_dataset({str(report.folder)!r})")
    return DONE


@contextmanager
def _executor(options: argparse.Namespace) -> Iterator[Executor | None]:
    """Yield what --workers and --address ask for; None where neither is given."""
    if options.workers is None and options.address is None:
        yield None
        return
    from zoo.cluster import connect
    from zoo.executor import ClusterExecutor
    from zoo.shards import SHARDS_IN_FLIGHT

    # The work is for CPUs; where Ray deals out GPUs, all shards in flight share one.
    cluster = connect(options.workers, options.address, gpus_per_task=1 / SHARDS_IN_FLIGHT)
    try:
        yield ClusterExecutor(cluster)
    finally:
        cluster.close()


def verify(options: argparse.Namespace) -> int:
    if (options.path is None) == (options.repo is None):
        raise InputError("verify: expected a PATH or --repo USER/NAME")
    problems, name = _problems(options), options.repo or options.path
    for problem in problems:
        print(problem)
    print(f"{name}: {f'{len(problems)} problems' if problems else 'no problem found'}")
    return CHECK_FAILED if problems else DONE


def _problems(options: argparse.Namespace) -> list[str]:
    if options.repo is not None:
        from zoo.hub import verify_repository

        repo, _, revision = options.repo.partition("@")
        return verify_repository(repo, revision or None, deep=options.deep)
    from zoo.verification import verify

    return verify(options.path)


def select(options: argparse.Namespace) -> int:
    from zoo.dataset import open_zoo
    from zoo.filters import parse_filter
    from zoo.selection import select

    filters = [parse_filter(text) for text in options.filters]
    chosen = open_zoo(options.dataset).checkpoints(options.task, filters, options.split)
    paths = select(chosen, options.out)
    print(f"{options.out}: {len(paths)} checkpoints and checkpoints.csv")
    return DONE


def evaluate(options: argparse.Namespace) -> int:
    from zoo.evaluation import evaluate
    from zoo.filters import parse_filter
    from zoo.threads import available_cores

    report = evaluate(
        options.dataset,
        options.task,
        options.data_dir,
        options.limit,
        filters=[parse_filter(text) for text in options.filters],
        engine=options.engine,
        device=options.device,
        threads=available_cores(),
        tolerance=options.tolerance,
    )
    print(report.to_json() if options.json else report.text())
    return CHECK_FAILED if report.disagreeing or not report.comparisons else DONE


def rerun(options: argparse.Namespace) -> int:
    from zoo.evaluation import rerun

    report = rerun(options.dataset, options.run_id, options.data_dir, engine=options.engine, device=options.device)
    print(report.to_json() if options.json else report.text())
    same_engine = report.engine == report.recorded_engine
    return CHECK_FAILED if same_engine and not report.identical else DONE


def publish(options: argparse.Namespace) -> int:
    from zoo.hub import CHECKSUMS, publish
    from zoo.verify_dataset import verify_dataset

    report = publish(
        options.dataset,
        options.repo,
        private=options.private,
        tag=options.tag,
        dry_run=options.dry_run,
        verify=verify_dataset,
    )
    verb = "would be" if report.dry_run else "were"
    size = f"{report.added_bytes / 1e6:.1f} MB"
    print(f"{len(report.added)} files ({size}) {verb} added or changed, {len(report.deleted)} {verb} deleted")
    for name in report.unlisted:
        print(f"left out, as {CHECKSUMS} does not list it: {name}")
    print(f"{report.url} {report.commit or ''} {report.tag or ''}".strip())
    return DONE


def repair(options: argparse.Namespace) -> int:
    from zoo.repair import repair_sweep

    found = repair_sweep(options.sweep_dir, apply=options.apply, orphans=options.orphans)
    print(found.text())
    open_damage = bool(found.damaged or found.states) and not found.applied
    return CHECK_FAILED if open_damage or found.beyond else DONE


def import_release(options: argparse.Namespace) -> int:
    from zoo.release import import_release

    report = import_release(options.source, options.task, options.out, progress=not options.quiet)
    print(report.to_json() if options.json else report.text())
    return DONE if report.checkpoints else CHECK_FAILED


def bench(options: argparse.Namespace) -> int:
    from zoo.bench import measure, steps_with_evaluations
    from zoo.config import load_config
    from zoo.plan import make_plan

    if (options.gpus is None) != (options.gpu_rate is None):
        raise InputError("bench: --gpus and --gpu-rate go together; give both or neither")
    config = load_config(options.config, options.overrides)
    train_samples, test_samples = config.data.sizes()
    plan = make_plan(config, "0" * 16, train_samples)
    steps = steps_with_evaluations(plan.runs, train_samples, test_samples)
    report = measure(config.task, options.engine, options.runs, options.seconds, config.batch_size)
    record: dict[str, Any] = asdict(report) | {
        "matmul_share": round(report.share, 3),
        "run_steps": plan.run_steps(train_samples),
        "run_steps_with_evaluations": round(steps),
        "hours_here": round(report.hours(steps), 2),
    }
    if options.cores is not None:
        record |= {f"hours_on_{options.cores}_cores": round(report.hours(steps, options.cores), 2)}
    if options.gpus:
        record |= {f"hours_on_{options.gpus}_gpus": round(steps / (options.gpus * options.gpu_rate) / 3600, 2)}
    for name in ("run_steps_per_second", "gflops", "matmul_gflops"):
        record[name] = round(record[name], 1)
    _print(record, options.json)
    return DONE
