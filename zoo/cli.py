"""The command line: `zoo COMMAND ...`. Results go to stdout, progress to stderr.

Exit codes: 0 done, 1 a check failed, 2 bad input (one line says which), 3 some populations are in quarantine,
130 and 143 interrupted (the same command goes on).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from generators.errors import InputError

DONE, CHECK_FAILED, BAD_INPUT, QUARANTINED, INTERRUPTED = 0, 1, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except InputError as error:
        print(f"zoo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("zoo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has had enough
        return DONE


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Commands import what they need only when they run, so that help is quick."""
    top = argparse.ArgumentParser(
        prog="zoo", description="Generate, keep, publish and read zoos of small transformers."
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    plan = _command(commands, "plan", _plan, "show what a configuration would train")
    _config_arguments(plan)
    plan.add_argument("--rate", type=float, metavar="R", help="run-steps per second, for a forecast of the time")
    _json_argument(plan)

    generate = _command(commands, "generate", _generate, "start a sweep, or go on with it")
    _config_arguments(generate)
    generate.add_argument("--sweep-dir", required=True, metavar="DIR", help="folder of the sweep")
    generate.add_argument("--data-dir", type=Path, metavar="D", help="folder of the task's data files")
    generate.add_argument("--workers", type=int, metavar="N", help="populations at once; 0: in this process, no Ray")
    generate.add_argument("--address", metavar="A", help="a running Ray cluster, or auto; default: this machine alone")
    generate.add_argument("--extend", action="store_true", help="add the runs that a finished sweep does not have")
    generate.add_argument("--quiet", action="store_true", help="no progress bar")
    _json_argument(generate)

    status = _command(commands, "status", _status, "show how far a sweep is, from its folder alone")
    status.add_argument("sweep_dir", metavar="SWEEP")
    status.add_argument("--watch", action="store_true", help="show it again every few seconds until it is done")
    _json_argument(status)

    build = _command(commands, "build", _build, "write the dataset of one or more sweeps")
    build.add_argument("sweep_dirs", nargs="+", type=Path, metavar="SWEEP")
    build.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the dataset")
    build.add_argument("--quiet", action="store_true", help="no progress bar")

    verify = _command(commands, "verify", _verify, "check a sweep, a dataset or a published dataset")
    verify.add_argument("path", nargs="?", type=Path, metavar="PATH", help="a sweep directory or a dataset folder")
    verify.add_argument("--repo", metavar="USER/NAME[@REVISION]", help="a published dataset, without its weights")
    verify.add_argument("--deep", action="store_true", help="with --repo: download and check everything")

    select = _command(commands, "select", _select, "write chosen checkpoints as single files")
    select.add_argument("dataset", metavar="DATASET")
    _selection_arguments(select)
    select.add_argument("--split", choices=("train", "validation", "test"), help="only this split")
    select.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")

    publish = _command(commands, "publish", _publish, "put a dataset on the Hugging Face Hub")
    publish.add_argument("dataset", type=Path, metavar="DATASET")
    publish.add_argument("--repo", required=True, metavar="USER/NAME")
    publish.add_argument("--private", action="store_true", help="make a new repository private")
    publish.add_argument("--tag", metavar="TAG", help="tag the commit, for example v1.0.0")
    publish.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")

    bench = _command(commands, "bench", _bench, "measure how fast this machine trains, and forecast a configuration")
    _config_arguments(bench)
    bench.add_argument("--engine", choices=("auto", "torch", "fused"), default="auto")
    bench.add_argument("--runs", type=int, metavar="N", help="runs of the measured population")
    bench.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long to measure")
    bench.add_argument("--cores", type=int, metavar="N", help="forecast for a machine of so many such cores")
    bench.add_argument("--gpus", type=int, metavar="N", help="forecast for so many GPUs of --gpu-rate each")
    bench.add_argument("--gpu-rate", type=float, metavar="R", help="run-steps per second of one GPU")
    _json_argument(bench)
    return top


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    command.set_defaults(run=run)
    return command


def _config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a preset such as mnist")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="change a key of the configuration",
    )


def _selection_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--task", metavar="T", help="needed where the dataset has several")
    command.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="CONDITION",
        dest="filters",
        help='for example "test_accuracy>=0.9"; several must all hold',
    )


def _json_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _print(record: dict[str, Any], as_json: bool) -> None:
    """Print a flat record as JSON, or as a table of two columns."""
    if as_json:
        print(json.dumps(record))
        return
    width = max(len(name) for name in record)
    for name, value in record.items():
        print(f"{name:<{width}}  {value}")


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def _plan(options: argparse.Namespace) -> int:
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
        record |= {"seconds": round(steps / options.rate), "time": _duration(steps / options.rate)}
    _print(record, options.json)
    return DONE


def _generate(options: argparse.Namespace) -> int:
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


def _status(options: argparse.Namespace) -> int:
    from zoo.status import sweep_status

    while True:
        status = sweep_status(options.sweep_dir)
        print(json.dumps(status.to_dict()) if options.json else status.text(), flush=True)
        if not options.watch or status.done:
            return DONE
        time.sleep(5)


def _build(options: argparse.Namespace) -> int:
    from zoo.builder import build

    report = build(options.sweep_dirs, options.out, progress=not options.quiet)
    for task, splits in report.checkpoints.items():
        print(f"{task}: {sum(splits.values())} checkpoints ({', '.join(f'{n} {s}' for s, n in splits.items())})")
    print(f"{report.diverged_runs} runs diverged, {report.unfinished_populations} populations are not finished yet")
    print(f"{report.folder}: {report.bytes / 1e6:.1f} MB; load it with load_dataset({str(report.folder)!r})")
    return DONE


def _verify(options: argparse.Namespace) -> int:
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
    if (options.path / "plans").is_dir() and not (options.path / "SHA256SUMS").is_file():
        from zoo.verify import verify_sweep

        return verify_sweep(options.path)
    from zoo.verify_dataset import verify_dataset

    return verify_dataset(options.path)


def _select(options: argparse.Namespace) -> int:
    from zoo.dataset import open_zoo
    from zoo.filters import parse_filter
    from zoo.select import select

    filters = [parse_filter(text) for text in options.filters]
    chosen = open_zoo(options.dataset).checkpoints(options.task, filters, options.split)
    paths = select(chosen, options.out)
    print(f"{options.out}: {len(paths)} checkpoints and checkpoints.csv")
    return DONE


def _publish(options: argparse.Namespace) -> int:
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


def _bench(options: argparse.Namespace) -> int:
    from zoo.bench import BATCH, EVALUATION_COST, measure
    from zoo.config import load_config
    from zoo.plan import make_plan

    if (options.gpus is None) != (options.gpu_rate is None):
        raise InputError("bench: --gpus and --gpu-rate go together; give both or neither")
    config = load_config(options.config, options.overrides)
    train_samples, test_samples = config.data.sizes()
    plan = make_plan(config, "0" * 16, train_samples)
    evaluations = len(plan.runs) * (config.epochs + 1) * test_samples / BATCH * EVALUATION_COST
    steps = plan.run_steps(train_samples) * config.batch_size / BATCH + evaluations
    report = measure(config.task, options.engine, options.runs, options.seconds)
    rate = report.run_steps_per_second
    record: dict[str, Any] = asdict(report) | {"matmul_share": round(report.share, 3), "run_steps_to_do": round(steps)}
    record |= {"hours_here": round(steps / rate / 3600, 2)}
    if options.cores:
        record |= {f"hours_on_{options.cores}_cores": round(steps / rate / 3600 * report.threads / options.cores, 2)}
    if options.gpus:
        record |= {f"hours_on_{options.gpus}_gpus": round(steps / (options.gpus * options.gpu_rate) / 3600, 2)}
    for name in ("run_steps_per_second", "gflops", "matmul_gflops"):
        record[name] = round(record[name], 1)
    _print(record, options.json)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
