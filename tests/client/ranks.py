"""Runs a script as the ranks of a torch.distributed group, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

SECONDS = 240.0


def run_ranks(script: str, size: int, folder: Path, *, dies: int | None = None) -> list[str]:
    """Run `script RANK SIZE FOLDER` for each rank, and return what each has printed.

    Args:
        script: The path of the script.
        size: The number of ranks.
        folder: A folder for the store, and for what ranks write to stderr.
        dies: The rank that ends itself with exit status 3.
    """
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # memory that is freed is seen to be
    }
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(size):
            command = [sys.executable, script, str(rank), str(size), str(folder)]
            with (folder / f"{rank}.err").open("w") as errors:
                ranks.append(
                    subprocess.Popen(  # noqa: S603 - our own code
                        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
                    )
                )
        said = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    words = [(folder / f"{rank}.err").read_text() for rank in range(size)]
    expected = [3 if rank == dies else 0 for rank in range(size)]
    assert [process.returncode for process in ranks] == expected, "\n".join(words)
    return said
