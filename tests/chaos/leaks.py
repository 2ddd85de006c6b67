"""What processes hold, and whether anything was left: descriptors, threads, segments, processes."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightbus.benchmarks.memory import private
from weightbus.bus.limits import BUFFERS_MAX, SNAPSHOTS_MAX
from weightbus.bus.memory.segment import VIEWS_MAX
from weightbus.tests.chaos.cast import Cast
from weightbus.tests.chaos.content import MODELS
from weightbus.tests.conformance.scenarios import IN_MEMORY

SEGMENT = "/memfd:weightbus"
# A descriptor of each, and another where it is mapped. A publisher has one more, by which workers
# find their host.
SEGMENTS_MAX = 2 * (max(SNAPSHOTS_MAX * len(MODELS), VIEWS_MAX) + 1)
# A relay receives into segments, while older versions are still in use below.
RELAY_SEGMENTS_MAX = 2 * ((SNAPSHOTS_MAX + BUFFERS_MAX) * len(MODELS) + 1)
THREADS_MORE = 6  # than before: some languages start threads as they like, and keep them
MEMORY_MORE = 48 * 2**20  # bytes: versions of both models on their way, over and over


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    descriptors: int
    segments: int
    threads: int
    memory: int
    kinds: Mapping[str, int] = field(default_factory=dict[str, int])  # descriptors of each kind


def held(pid: int) -> Held:
    """Look at a process."""
    targets = list[str]()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets.append(os.readlink(fd))
        except FileNotFoundError:  # closed meanwhile
            continue
    segments = sum(target.startswith(SEGMENT) for target in targets)
    threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    kinds = Counter(target.partition(":")[0] for target in targets)
    return Held(len(targets) - segments, segments, threads, private(pid), kinds)


def all_held(cast: Cast) -> dict[int, Held]:
    """Look at everybody who is there."""
    return {each.pid: held(each.pid) for each in cast.living}


def grown(cast: Cast, before: Mapping[int, Held]) -> Iterator[str]:
    """Yield who holds more than before, of those that have been there all the time."""
    for each in cast.living:
        now, then = held(each.pid), before.get(each.pid)
        most = RELAY_SEGMENTS_MAX if each.name.startswith("relay") else SEGMENTS_MAX
        if now.segments > most:
            yield f"{each.name} has {now.segments} segments open"
        if then is None:
            continue
        if now.descriptors > then.descriptors:
            more = {kind: n for kind, n in now.kinds.items() if n > then.kinds.get(kind, 0)}
            yield (
                f"{each.name} has {now.descriptors} descriptors open, {then.descriptors} before; "
                f"there are more of {more}"
            )
        if now.threads > then.threads + THREADS_MORE:
            yield f"{each.name} has {now.threads} threads, {then.threads} before"
        if now.memory > then.memory + MEMORY_MORE:
            yield f"{each.name} has {now.memory:,} bytes of memory, {then.memory:,} before"


def in_shared_memory() -> set[str]:
    """Return what lies in shared memory under our name, but for benchmarks' files."""
    names = {path.name for path in IN_MEMORY.iterdir()} if IN_MEMORY else set[str]()
    return {name for name in names if "weightbus" in name and "bench" not in name}


def children() -> set[int]:
    """Return the processes that this one has started, and that are still there."""
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found
