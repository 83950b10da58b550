#!/bin/sh
# Loads datasets of this project with datasets 5.x and 4.x, which needs an environment of its own (.venv-compat).
set -eu
VENV=${VENV:-.venv}
COMPAT_VENV=${COMPAT_VENV:-.venv-compat}
[ -x "$VENV/bin/python" ] || make "$VENV/.dev"
if [ ! -x "$COMPAT_VENV/bin/python" ]; then
	"$VENV/bin/python" -m venv "$COMPAT_VENV"
	"$COMPAT_VENV/bin/python" -m pip install --quiet "datasets>=4.8,<5" "torch>=2.9"
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for seed in 0 1; do # the second dataset replaces the first, whose rows lie in the caches by then
	"$VENV/bin/python" tests/compat.py build "$folder/small-transformer-zoo" "$seed"
	for python in "$VENV/bin/python" "$COMPAT_VENV/bin/python"; do
		HF_HUB_OFFLINE=1 HF_HOME="$folder/home" "$python" tests/compat.py check "$folder/small-transformer-zoo"
	done
done
