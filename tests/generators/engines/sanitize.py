"""Run the fused engine's own checks (sanitize.cpp) under sanitizers, for both tasks and every width of vectors.

    python tests/generators/engines/sanitize.py

Addresses and undefined behaviour for each width, data races once. Prints a line a check; the exit code is 1 if one
fails.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from generators.engines.fused.build import SOURCES, find_compiler, processor_flags

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-g1", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread")
TASKS = ("Images", "Texts<32>", "Texts<64>")
MEMORY, RACES = "-fsanitize=address,undefined", "-fsanitize=thread"
CHECKS = ((MEMORY, 4), (MEMORY, 8), (MEMORY, 16), (RACES, 16))


def check(task: str, sanitizer: str, lanes: int) -> bool:
    """Build and run one check; print what it says."""
    compiler = find_compiler()
    options = (sanitizer, "-fno-sanitize-recover=all", f"-DFUSED_TASK={task}", f"-DFUSED_LANES={lanes}", f"-I{SOURCES}")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "check"
        command = [*compiler, *processor_flags(compiler), *FLAGS, *options, str(HERE / "sanitize.cpp")]
        done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            done = subprocess.run([program], capture_output=True, text=True, check=False)
    print(f"{task} {sanitizer} {done.stdout}{done.stderr}".rstrip(), flush=True)
    return done.returncode == 0


def main() -> int:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = list(pool.map(lambda options: check(options[0], *options[1]), product(TASKS, CHECKS)))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
