"""All benchmarks, one after the other: `make bench`, or `make bench ARGS="--data FOLDER --only training nfn"`.

Needs a quiet machine and about half an hour. Real data is looked for like the tests do: ZOO_TEST_DATA, or
../shared/data beside the project.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("ZOO_TEST_DATA") or ROOT.parent / "shared" / "data")
    parser.add_argument("--data", type=Path, default=default, help="folder with mnist/ and ag_news/")
    parser.add_argument("--only", nargs="+", choices=("training", "engine", "nfn", "dataset", "sweep"))
    options = parser.parse_args()
    training = [
        ["bench_training.py", "--task", task, "--data-dir", str(options.data / task)] for task in ("mnist", "ag_news")
    ]
    commands = {
        "training": training,
        "engine": [["bench_engine.py"]],
        "nfn": [["bench_nfn.py"]],
        "dataset": [["bench_dataset.py"]],
        "sweep": [["bench_sweep.py"]],
    }
    failed = 0
    for name in options.only or commands:
        for script, *arguments in commands[name]:
            print(f"\n== {script} {' '.join(arguments)}", flush=True)
            failed += subprocess.run([sys.executable, HERE / script, *arguments], check=False).returncode != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
