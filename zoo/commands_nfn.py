"""`zoo nfn train | predict | benchmark`: the options of each, and what it does with them."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zoo.arguments import positive_integer
from zoo.commands import CHECK_FAILED, DONE

RECIPES = ("paper", "quick")


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the three commands; `add(name, run, summary)` makes the parser of one."""
    train_parser = add("train", train, "train a predictor of test accuracy on the weights of a zoo")
    _training_arguments(train_parser)
    train_parser.add_argument("--predictor", default="transformer-nfn", metavar="P", help="default: transformer-nfn")
    train_parser.add_argument("--components", nargs="+", metavar="C", help="embedding, encoder, classifier")
    train_parser.add_argument("--seed", type=int, default=0, metavar="S", help="of parameters and batches; default: 0")
    train_parser.add_argument("--threshold", type=float, default=0.0, metavar="A", help="smallest test accuracy")
    train_parser.add_argument("--out", metavar="DIR", help="keep the predictor and its plot here")

    predict_parser = add("predict", predict, "rank checkpoints by the accuracy that a trained predictor reads in them")
    predict_parser.add_argument("predictor", type=Path, metavar="PREDICTOR", help="folder of `zoo nfn train --out`")
    predict_parser.add_argument("checkpoints", nargs="*", type=Path, metavar="FILE", help="safetensors files")
    predict_parser.add_argument("--dataset", metavar="DATASET", help="rank the checkpoints of a dataset instead")
    predict_parser.add_argument("--epoch-label", metavar="L", help="of the dataset; default: as in training")
    predict_parser.add_argument(
        "--top", type=positive_integer, default=20, metavar="N", help="print so many; default: 20"
    )
    _common_arguments(predict_parser)

    benchmark_parser = add("benchmark", benchmark, "train all predictors on several seeds and write the paper's tables")
    _training_arguments(benchmark_parser)
    benchmark_parser.add_argument("--out", required=True, metavar="DIR", help="folder of cells and tables")
    benchmark_parser.add_argument(
        "--predictors",
        nargs="+",
        metavar="P",
        help="default: all; one whose library is not installed fails by name, and the others are trained",
    )
    benchmark_parser.add_argument(
        "--thresholds",
        nargs="+",
        type=float,
        default=[0.0, 0.2, 0.4, 0.6, 0.8],
        metavar="A",
        help="columns of the table: smallest test accuracies; default: 0 0.2 0.4 0.6 0.8",
    )
    benchmark_parser.add_argument(
        "--components",
        nargs="*",
        metavar="C[,C...]",
        help="subsets of the weights, such as encoder embedding,encoder; default: all subsets; nothing: no such table",
    )
    benchmark_parser.add_argument("--no-sizes", action="store_true", help="no table of channels and layers")
    benchmark_parser.add_argument(
        "--seeds", type=positive_integer, default=5, metavar="N", help="trainings a row; default: 5"
    )
    benchmark_parser.add_argument(
        "--workers", type=int, metavar="N", help="trainings at once on Ray; default: 0, in this process"
    )
    benchmark_parser.add_argument(
        "--address", metavar="A", help="a running Ray cluster; without --workers, all of it takes part"
    )


def _training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="a dataset folder or a repository")
    parser.add_argument("--task", required=True, metavar="T", help="whose checkpoints: mnist or ag_news")
    parser.add_argument(
        "--epoch-label", required=True, metavar="L", help="which checkpoint of each run, for example 50"
    )
    parser.add_argument("--resplit", action="store_true", help="split anew for each seed, as the paper does")
    parser.add_argument("--recipe", choices=RECIPES, default="paper", help="of networks; default: paper")
    parser.add_argument("--epochs", type=positive_integer, metavar="N", help="of networks, in place of the recipe's")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    _common_arguments(parser)


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--filter", dest="filters", action="append", default=[], metavar="F", help="of the dataset, such as l2<=1e-6"
    )
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _recipe(options: argparse.Namespace) -> Any:
    from dataclasses import replace

    from zoo.nfn.fit import PAPER, QUICK

    recipe = QUICK if options.recipe == "quick" else PAPER
    if options.epochs is None:
        return recipe
    return replace(recipe, epochs=options.epochs, warmup_epochs=min(recipe.warmup_epochs, options.epochs))


def train(options: argparse.Namespace) -> int:
    from zoo.files import write
    from zoo.nfn.report import scatter_plot
    from zoo.nfn.train import train
    from zoo.storage import local_path

    out = None if options.out is None else local_path(options.out, "--out")
    result = train(
        options.dataset,
        task=options.task,
        epoch_label=options.epoch_label,
        predictor=options.predictor,
        components=options.components,
        seed=options.seed,
        threshold=options.threshold,
        filters=options.filters,
        resplit=options.resplit,
        recipe=_recipe(options),
        device=options.device,
        out=out,
        progress=not options.quiet,
    )
    if out is not None:
        write(out / "predicted.png", scatter_plot(options.predictor, result))
    if options.json:
        print(json.dumps(asdict(result)))
        return DONE
    counts = ", ".join(f"{count} {part}" for part, count in result.checkpoints.items())
    print(f"{options.predictor}: {result.parameters:,} parameters, {counts} checkpoints, {result.seconds:.1f} s")
    print(f"Kendall's tau: validation {result.validation_tau:.3f}, test {result.test_tau:.3f}")
    if out is not None:
        print(f"{out}: the predictor, and predicted.png")
    return DONE


def predict(options: argparse.Namespace) -> int:
    from zoo.nfn.predict import predict

    ranking = predict(
        options.predictor,
        checkpoints=options.checkpoints,
        dataset=options.dataset,
        epoch_label=options.epoch_label,
        filters=options.filters,
        device=options.device,
    )
    if options.json:
        print(json.dumps(asdict(ranking)))
        return DONE
    for row in ranking.predictions[: options.top]:
        known = "" if row.accuracy is None else f"  recorded {row.accuracy:.4f}  {row.split}"
        print(f"{row.predicted:.4f}  {row.name}{known}")
    if len(ranking.predictions) > options.top:
        print(f"... and {len(ranking.predictions) - options.top} more; --top shows them")
    if ranking.tau is not None:
        test = "" if ranking.test_tau is None else f"{ranking.test_tau:.3f} of the {ranking.test_checkpoints} in test, "
        included = ", training part included" if any(row.split == "train" for row in ranking.predictions) else ""
        print(f"Kendall's tau: {test}{ranking.tau:.3f} of all {len(ranking.predictions)}{included}")
        if ranking.resplit:
            print("trained with --resplit: checkpoints of every split, test too, may have trained the predictor")
    return DONE


def benchmark(options: argparse.Namespace) -> int:
    from zoo.nfn.benchmark import SIZES, benchmark
    from zoo.storage import local_path

    out = local_path(options.out, "--out")
    subsets = None if options.components is None else [names.split(",") for names in options.components]
    result = benchmark(
        options.dataset,
        task=options.task,
        epoch_label=options.epoch_label,
        out=out,
        predictors=options.predictors,
        thresholds=options.thresholds,
        components=subsets,
        sizes=() if options.no_sizes else SIZES,
        seeds=options.seeds,
        filters=options.filters,
        resplit=options.resplit,
        recipe=_recipe(options),
        device=options.device,
        workers=0 if options.workers is None and options.address is None else options.workers,
        address=options.address,
        progress=not options.quiet,
    )
    if options.json:
        print((out / "benchmark.json").read_text(), end="")
    else:
        print((out / "benchmark.md").read_text(), end="")
        print(f"\n{out}: {', '.join(Path(name).name for name in result.files['plots'])} and the tables")
    return CHECK_FAILED if result.failed else DONE
