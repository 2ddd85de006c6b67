"""A stand-in for Slurm's `srun`: starts the tasks as processes here, and passes SIGTERM on.

It knows what examples/slurm/job.sh uses; nodes are only indices.
"""

import os
import signal
import subprocess
import sys
from typing import Any


def main() -> int:
    """Run the tasks; return the highest exit code."""
    words = sys.argv[1:]
    options = dict[str, str]()
    while words[0].startswith("--"):
        name, _, value = words.pop(0).removeprefix("--").partition("=")
        options[name] = value
    assert options.keys() <= {"overlap", "nodes", "ntasks", "ntasks-per-node", "nodelist"}
    tasks = int(options["ntasks"])
    nodes = int(options.get("nodes", os.environ["SLURM_JOB_NUM_NODES"]))
    per_node = int(options.get("ntasks-per-node", tasks // nodes))
    started = list[subprocess.Popen[bytes]]()

    def pass_on(number: int, _frame: Any) -> None:
        for task in started:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    for index in range(tasks):
        ids = {"PROCID": index, "NODEID": index // per_node, "LOCALID": index % per_node}
        named = {f"SLURM_{key}": str(value) for key, value in ids.items()}
        started.append(subprocess.Popen(words, env=os.environ | named))  # noqa: S603 - the test's
    codes = [task.wait() for task in started]
    return max(code if code >= 0 else 128 - code for code in codes)


if __name__ == "__main__":
    sys.exit(main())
