"""Writes zeros over the stamp of a segment while a worker copies from it; `overwriting.py` runs it.

A process of its own, so that nothing else makes it late: `spoiler.py PATH PID` says "waiting", and
"met" once it has written while the worker PID held the lock, before and after. It ends with its
standard input.
"""

import os
import select
import sys
import time

STAMP_AT, STAMP_BYTES = 24, 152
HEAD_START_SECONDS = 0.0005  # that a worker runs: it looks at the stamp, and begins to copy
PROCESS_CPU = 2  # Linux's CPUCLOCK_SCHED; with a process's number, that one's clock
LOOKS = 100  # at the lock, between two at standard input


def copies(pid: str, inode: int) -> bool:
    """Return whether a worker holds the lock of a segment; to try it would disturb it."""
    with open("/proc/locks") as locks:
        words = (line.split() for line in locks if " READ " in line)
        return any(word[4] == pid and word[5].endswith(f":{inode}") for word in words)


def has_run(pid: str) -> float:
    """Return for how many seconds a worker's threads have run, together and up to now."""
    return time.clock_gettime(~int(pid) << 3 | PROCESS_CPU)


def main(path: str, pid: str) -> None:
    """Lie in wait."""
    descriptor = os.open(path, os.O_RDWR)
    inode = os.fstat(descriptor).st_ino
    print("waiting", flush=True)
    while not any(copies(pid, inode) for _ in range(LOOKS)):
        if select.select([sys.stdin], [], [], 0)[0]:
            return
    began = has_run(pid)
    while has_run(pid) < began + HEAD_START_SECONDS:
        if not copies(pid, inode):
            return  # too late: the next version, then
    os.pwrite(descriptor, bytes(STAMP_BYTES), STAMP_AT)
    if copies(pid, inode):
        print("met", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
