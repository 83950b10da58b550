#!/usr/bin/env bash
# The main job on a small scale, offline: generate a zoo, build its dataset, load it, filter it, train predictors on it.
#   BIN=.venv/bin tests/demo.sh FOLDER
# Run again, it goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$(cd "$BIN" && pwd):$PATH"
demo=$1

run() {
    printf '\n$'
    printf ' %q' "$@"
    printf '\n'
    "$@"
}

mkdir -p "$demo"
run zoo plan quickstart
run zoo generate quickstart --sweep-dir "$demo/sweep"
run zoo status "$demo/sweep"
run zoo build "$demo/sweep" --out "$demo/small-transformer-zoo"
run zoo verify "$demo/small-transformer-zoo"
printf '\n$ python -c ...   # what load_dataset sees\n'
(cd "$demo" && HF_HUB_OFFLINE=1 python - <<'PYTHON'
from datasets import disable_progress_bars, load_dataset

disable_progress_bars()
zoo = load_dataset("small-transformer-zoo", "mnist", split="train").with_format("torch")
print(f"{len(zoo)} checkpoints to train on; W_Q of block 0: {tuple(zoo[0]['encoder.0.attention.queries.weight'].shape)}")
index = load_dataset("small-transformer-zoo", "index", split="train").to_pandas()
print(index.groupby(["epoch_label", "optimizer"])["test_accuracy"].describe()[["count", "min", "50%", "max"]].round(3))
PYTHON
)
run zoo select "$demo/small-transformer-zoo" --task mnist --filter 'test_accuracy>=0.5' --filter 'epoch_label==best' \
    --out "$demo/best"
run zoo evaluate "$demo/small-transformer-zoo" --limit 20
run zoo nfn benchmark "$demo/small-transformer-zoo" --task mnist --epoch-label 6 --seeds 2 \
    --thresholds 0 --components --no-sizes --predictors transformer-nfn mlp statnn hyperparameters \
    --out "$demo/predictors"
printf '\nTables: %s/predictors/benchmark.md\nPlots:  %s/predictors/scatter/*.png and %s/small-transformer-zoo/assets/*.png\n' \
    "$demo" "$demo" "$demo"
