import os
import subprocess
import sys


def test_cores_that_this_process_may_not_use_do_not_count() -> None:
    """As under Slurm, taskset and cpusets."""
    one = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{one}}}); from zoo.threads import available_cores as a; print(a())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
