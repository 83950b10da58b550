"""The command line: `zoo COMMAND ...`. Results go to stdout, progress to stderr.

Exit codes: 0 done, 1 a check failed, 2 bad input (one line says which), 3 some populations are in quarantine,
130 and 143 interrupted (the same command goes on).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from generators import ENGINES
from generators.errors import InputError
from zoo import __version__, commands, commands_nfn
from zoo.arguments import population_runs, positive_integer, positive_number, whole_number, workers
from zoo.errors import DISK_FULL, one_line
from zoo.output import lasting_output
from zoo.signals import Terminated, sigterm_raises


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    with lasting_output():
        return _run(parser().parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    try:
        with sigterm_raises():
            return options.run(options)
    except InputError as error:
        print(f"zoo: error: {one_line(error)}", file=sys.stderr)
        return commands.BAD_INPUT
    except KeyboardInterrupt:
        print("zoo: interrupted", file=sys.stderr)
        return commands.INTERRUPTED
    except Terminated:
        print("zoo: terminated", file=sys.stderr)
        return commands.TERMINATED
    except BrokenPipeError:
        return commands.DONE  # whoever read our output has had enough
    except OSError as error:
        advice = "; make room and run the same command again" if error.errno in DISK_FULL else ""
        print(f"zoo: error: {error.filename or 'system'}: {error.strerror or error}{advice}", file=sys.stderr)
        return commands.BAD_INPUT


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Commands import what they need only when they run, so that help is quick."""
    top = argparse.ArgumentParser(
        prog="zoo", description="Generate, keep, publish and read zoos of small transformers."
    )
    top.add_argument("--version", action="version", version=f"zoo {__version__}")
    group = top.add_subparsers(metavar="COMMAND", required=True)

    plan = _command(group, "plan", commands.plan, "show what a configuration would train")
    _config_arguments(plan)
    plan.add_argument(
        "--rate", type=positive_number, metavar="R", help="run-steps per second, for a forecast of the time"
    )
    _json_argument(plan)

    generate = _command(group, "generate", commands.generate, "start a sweep, or go on with it")
    _config_arguments(generate)
    generate.add_argument(
        "--sweep-dir", required=True, metavar="DIR", help="folder of the sweep, or s3://bucket/folder"
    )
    _data_dir_argument(generate)
    generate.add_argument(
        "--workers",
        type=workers,
        metavar="N",
        help="populations at once; 0: in this process, no Ray; default: one a GPU, or one a core where there is no GPU",
    )
    generate.add_argument("--address", metavar="A", help="a running Ray cluster, or auto; default: this machine alone")
    generate.add_argument("--extend", action="store_true", help="add the runs that the sweep's plan does not have yet")
    generate.add_argument("--quiet", action="store_true", help="no progress bar")
    _json_argument(generate)

    status = _command(group, "status", commands.status, "show how far a sweep is, from its folder alone")
    status.add_argument("sweep_dir", metavar="SWEEP")
    status.add_argument("--watch", action="store_true", help="show it again every few seconds until it is done")
    _json_argument(status)

    build = _command(group, "build", commands.build, "write the dataset of one or more sweeps")
    build.add_argument("sweep_dirs", nargs="+", metavar="SWEEP")
    build.add_argument("--out", required=True, metavar="DIR", help="folder of the dataset")
    build.add_argument(
        "--workers",
        type=workers,
        metavar="N",
        help="write so many shards at once (four at most) in processes of Ray; default: in threads of this one",
    )
    build.add_argument("--address", metavar="A", help="a running Ray cluster that sees SWEEP and DIR, or auto")
    build.add_argument("--quiet", action="store_true", help="no progress bar")

    verify = _command(group, "verify", commands.verify, "check a sweep, a dataset or a published dataset")
    verify.add_argument("path", nargs="?", metavar="PATH", help="a sweep directory or a dataset folder")
    verify.add_argument("--repo", metavar="USER/NAME[@REVISION]", help="a published dataset, without its weights")
    verify.add_argument("--deep", action="store_true", help="with --repo: download and check everything")

    select = _command(group, "select", commands.select, "write chosen checkpoints as single files")
    select.add_argument("dataset", metavar="DATASET")
    _selection_arguments(select)
    select.add_argument("--split", choices=("train", "validation", "test"), help="only this split")
    select.add_argument("--out", required=True, metavar="DIR", help="a new folder, or an earlier selection's")

    evaluate = _command(group, "evaluate", commands.evaluate, "evaluate checkpoints again and compare with the record")
    evaluate.add_argument("dataset", metavar="DATASET", help="a dataset folder or a repository")
    _selection_arguments(evaluate)
    _data_dir_argument(evaluate)
    evaluate.add_argument(
        "--limit", type=positive_integer, metavar="N", help="only so many, spread over the range of accuracies"
    )
    evaluate.add_argument(
        "--tolerance", type=whole_number, default=2, metavar="N", help="test examples that may differ"
    )
    _engine_argument(evaluate, "auto")
    _device_argument(evaluate, "auto: a GPU where torch finds one")
    _json_argument(evaluate)

    rerun = _command(group, "rerun", commands.rerun, "train a published run again and compare its weights")
    rerun.add_argument("dataset", metavar="DATASET", help="a dataset folder or a repository")
    rerun.add_argument("run_id", metavar="RUN_ID")
    _data_dir_argument(rerun)
    _engine_argument(rerun, "recorded")
    _device_argument(rerun, "auto: the recorded one, where torch finds it")
    _json_argument(rerun)

    publish = _command(group, "publish", commands.publish, "put a dataset on the Hugging Face Hub")
    publish.add_argument("dataset", type=Path, metavar="DATASET")
    publish.add_argument("--repo", required=True, metavar="USER/NAME", help="the repository; made where there is none")
    publish.add_argument("--private", action="store_true", help="make a new repository private")
    publish.add_argument("--tag", metavar="TAG", help="tag the commit, for example v1.0.0")
    publish.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")

    repair = _command(group, "repair", commands.repair, "mend a damaged sweep directory; shows first what it would do")
    repair.add_argument("sweep_dir", metavar="SWEEP")
    repair.add_argument("--apply", action="store_true", help="do it")
    repair.add_argument("--orphans", action="store_true", help="with --apply: delete what dead attempts left, too")

    release = _command(
        group,
        "import-release",
        commands.import_release,
        "bring the paper's released checkpoints into a sweep directory",
    )
    release.add_argument("source", type=Path, metavar="ZIP_OR_FOLDER")
    release.add_argument("--task", required=True, choices=("mnist", "ag_news"))
    release.add_argument(
        "--out", required=True, metavar="SWEEP", help="a new sweep directory: a folder, or s3://bucket/folder"
    )
    release.add_argument("--quiet", action="store_true", help="no progress bar")
    _json_argument(release)

    bench = _command(
        group, "bench", commands.bench, "measure how fast this machine trains, and forecast a configuration"
    )
    _config_arguments(bench)
    _engine_argument(bench, "auto")
    bench.add_argument("--runs", type=population_runs, metavar="N", help="runs of the measured population")
    bench.add_argument(
        "--seconds", type=positive_number, default=5.0, metavar="S", help="how long to measure; default: 5"
    )
    bench.add_argument(
        "--cores", type=positive_integer, metavar="N", help="forecast for a machine of so many such cores"
    )
    bench.add_argument(
        "--gpus", type=positive_integer, metavar="N", help="forecast for so many GPUs of --gpu-rate each"
    )
    bench.add_argument("--gpu-rate", type=positive_number, metavar="R", help="run-steps per second of one GPU")
    _json_argument(bench)

    nfn = group.add_parser("nfn", help="neural functional networks: train, predict, benchmark")
    nfn_group = nfn.add_subparsers(metavar="COMMAND", required=True)
    commands_nfn.add_commands(partial(_command, nfn_group))
    return top


def _command(group: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
    command = group.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
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
        help="change a key of the configuration, such as epochs=10 or data.train_limit=6000; may be repeated",
    )


def _data_dir_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data-dir",
        type=Path,
        metavar="D",
        help="folder of the task's data files; MNIST needs one unless data.source is embedded, "
        "AG News comes from the Hub without one",
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


def _engine_argument(command: argparse.ArgumentParser, default: str) -> None:
    choices = sorted({*ENGINES, default})
    command.add_argument("--engine", choices=choices, default=default, help=f"what computes; default: {default}")


def _device_argument(command: argparse.ArgumentParser, auto: str) -> None:
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=auto)


def _json_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


if __name__ == "__main__":
    sys.exit(main())
