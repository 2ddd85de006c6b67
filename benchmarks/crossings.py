"""Count the files and functions on a version's way through the code: `... crossings.py`.

The way is from `publish()` until a worker that calls `receive()` has applied the version, over the
network and through shared memory, for a model of 4 KiB and a model of four chunks. The counts of
each thread are:

    files      that the thread enters
    functions  that it enters: code objects except comprehensions and lambdas
    calls      of functions, methods, properties and generated methods, and each continuation of a
               generator; only in this package's code (`counts.py` has all calls)
    changes    of folder: calls and returns from one of python_client, bus and codecs to another.
               Repeated changes between the same two folders count once: they are a loop over chunks
               or fields.

Publisher and worker are in one process. The count of a version ends when all threads sleep. Chance
only adds to the counts: a timer, or a second turn of a loop that could handle two messages in one
turn. So the result is the minimum over many versions, also on a busy machine. `crossings.json` has
the counts (`--write`), and a test fails if they rise.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

KEPT = Path(__file__).with_name("crossings.json")
PYTHON = ".".join(map(str, sys.version_info[:2]))  # other Python versions compile to other calls
SECONDS = 60.0
MODEL, CHUNKS, CHUNK_BYTES = "policy", 4, 2**20
SIZES = {"4 KiB": 2**12, "four chunks": CHUNKS * CHUNK_BYTES}
TRANSPORTS = ("network", "shared")
CASES = tuple(f"{size}, {transport}" for size in SIZES for transport in TRANSPORTS)
VERSIONS, LIMIT_SECONDS = 41, 45.0  # versions of each case to count, and the time limit in seconds
# Tolerance of the counts: which chunks share a wake-up is chance, so that versions differ.
SLACK = {case: 1.08 if case == "four chunks, network" else 1.01 for case in CASES}
WARM_SECONDS = 1.5  # longer than the interval of pings: a pong proves that pushes arrive
SETTLED = 0.002  # seconds without any call

FOLDERS = ("weightbus.python_client.", "weightbus.bus.", "weightbus.codecs.")
MACHINE, SHELL = "weightbus.bus.worker.", "weightbus.bus.net."
NOT_FUNCTIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>", "<module>"}
COUNTS = ("files", "functions", "calls", "changes")
TOGETHER = "together"

Step = tuple[str, str]  # the folder, and the function in it
Counted = dict[str, dict[str, int]]  # by thread, then by what is counted


@dataclass
class Trail:
    """The calls of one thread for one version.

    Attributes:
        codes: The number of calls of each code object, in the order of first calls.
        walk: The folders that it entered, in order.
    """

    codes: Counter[CodeType] = field(default_factory=Counter[CodeType])
    walk: list[Step] = field(default_factory=list[Step])

    @property
    def files(self) -> set[str]:
        """The files of the package that it entered."""
        return {each.co_filename for each in self.codes if each.co_filename[0] != "<"}

    @property
    def functions(self) -> set[CodeType]:
        """The functions of the package that it entered."""
        return {each for each in self.codes if each.co_name not in NOT_FUNCTIONS}

    def note(self, module: str, function: str) -> None:
        """Record that the thread is now in a module."""
        folder = module.split(".")[1]
        if not self.walk or self.walk[-1][0] != folder:
            self.walk.append((folder, function))


Trails = dict[str, Trail]  # by thread


class Tracer:
    """A profiler that records the calls of each thread in the package."""

    def __init__(self) -> None:
        self.on = False
        self.events = 0
        self.trails: Trails = {}
        self.entries: Counter[str] = Counter()  # methods of the worker's machine that get a payload

    def begin(self) -> None:
        """Discard all earlier records."""
        self.trails, self.entries, self.on = {}, Counter(), True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Handle an event of the profiler."""
        c = event.startswith("c_")
        module = (getattr(argument, "__module__", None) or "") if c else _module(frame)
        if not module.startswith(FOLDERS):
            return
        self.events += 1
        if not self.on:
            return
        trail = self.trails.setdefault(threading.current_thread().name, Trail())
        if event == "call":
            trail.codes[frame.f_code] += 1
            if module.startswith(MACHINE):
                self._entered(frame)
        if event == "c_call":
            trail.note(module, argument.__name__)
        elif inside := _nearest(frame.f_back if event == "return" else frame):
            trail.note(_module(inside), inside.f_code.co_qualname)

    def _entered(self, frame: FrameType) -> None:
        caller = _nearest(frame.f_back)
        handed = caller is not None and _module(caller).startswith(SHELL)
        if handed and any(map(is_payload, frame.f_locals.values())):
            self.entries[f"{_module(frame)}: {frame.f_code.co_qualname}"] += 1

    def settle(self) -> None:
        """Wait until all other threads sleep, and none has made a call for a moment.

        On a busy machine, a thread with work may not run for a while, although it does not sleep.

        Raises:
            TimeoutError: The threads do not stop.
        """
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            before = self.events
            time.sleep(SETTLED)  # enough for a thread that waits for the interpreter to get it
            if self.events == before and _others_sleep():
                return
        raise TimeoutError(f"the threads still run after {SECONDS:.0f} s")


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _nearest(frame: FrameType | None) -> FrameType | None:
    """Return the module of a frame; code outside the package belongs to its caller."""
    while frame is not None and not _module(frame).startswith(FOLDERS):
        frame = frame.f_back
    return frame


def _others_sleep() -> bool:
    mine = str(threading.get_native_id())
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if task.name != mine and state != "S":
                return False
    return True


def is_payload(value: object) -> bool:
    """Return whether a value is, or contains, the memory of a chunk."""
    if isinstance(value, (list, tuple)):
        return any(map(is_payload, cast("list[object]", value)))
    memory = value if isinstance(value, memoryview) else getattr(value, "view", None)
    return isinstance(memory, memoryview) and memory.nbytes == CHUNK_BYTES


def follow(case: str) -> Iterator[tuple[Trails, Counter[str]]]:
    """Publish versions; for each, yield the calls of each thread, and the machine's inputs."""
    import numpy as np

    import weightbus

    size, transport = case.split(", ")
    tracer = Tracer()
    settings = weightbus.Settings(shared_memory=transport == "shared")
    source, copy = ({"w": np.zeros(SIZES[size] // 4, np.float32)} for _ in range(2))
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    with (
        weightbus.Publisher("tcp://127.0.0.1:0", settings=settings) as publisher,
        weightbus.Subscriber(publisher.address, {MODEL: copy}, settings=settings) as subscriber,
    ):
        publisher.wait_for_workers(1, SECONDS)
        warm = time.monotonic() + WARM_SECONDS
        while True:
            source["w"] += 1
            counted = time.monotonic() > warm
            user = threading.Thread(
                target=subscriber.receive, args=(SECONDS,), name="worker's user", daemon=True
            )
            user.start()
            tracer.settle()  # the thread waits
            tracer.begin()
            publisher.publish(MODEL, source, timeout=SECONDS)
            user.join(SECONDS)
            tracer.settle()
            tracer.on = False
            if not np.array_equal(source["w"], copy["w"]):
                raise RuntimeError("the worker has other bytes than were published")
            if counted:
                yield tracer.trails, tracer.entries


def counts(trails: Iterable[Trail]) -> dict[str, int]:
    """Return the sum of the counts."""
    trails = list(trails)
    return {
        "files": len(set[str]().union(*(each.files for each in trails))),
        "functions": len(set[CodeType]().union(*(each.functions for each in trails))),
        "calls": sum(each.codes.total() for each in trails),
        "changes": sum(max(0, len(folded(each.walk)) - 1) for each in trails),
    }


def folded(walk: Sequence[Step]) -> list[Step]:
    """Return a walk in which repeated changes between the same two folders are removed."""
    kept: list[Step] = []
    for step in walk:
        kept.append(step)
        folders = [folder for folder, _ in kept[-4:]]
        if len(folders) == 4 and folders[:2] == folders[2:]:
            del kept[-2:]
    return kept


def least(found: Sequence[Counted]) -> Counted:
    """Return the minimum of each count."""
    return {
        name: {what: min(each[name][what] for each in found if name in each) for what in COUNTS}
        for name in dict.fromkeys(name for each in found for name in each)
    }


def risen(case: str, found: Counted, kept: dict[str, Counted]) -> list[str]:
    """Return the counts that are above the stored ones."""
    now, before = found[TOGETHER], kept[case][TOGETHER]
    return [what for what in COUNTS if now[what] > before[what] * SLACK[case]]


def trace(case: str, versions: int, kept: dict[str, Counted] | None = None) -> dict[str, Any]:
    """Trace versions; return the minimum counts, and the records of the shortest version.

    Args:
        case: The transport and the model.
        versions: The largest number of versions.
        kept: Stop as soon as no count is above these.
    """
    import weightbus

    root = f"{Path(weightbus.__file__).parent}/"
    counted: list[Counted] = []
    paths: dict[str, set[str]] = {}
    shortest, entered = Trails(), Counter[str]()
    deadline = time.monotonic() + LIMIT_SECONDS
    for trails, entries in follow(case):
        each = {name: counts([trail]) for name, trail in trails.items()}
        each[TOGETHER] = counts(trails.values())
        if not counted or each[TOGETHER]["calls"] < least(counted)[TOGETHER]["calls"]:
            shortest, entered = trails, entries
        counted.append(each)
        for name, trail in trails.items():
            paths.setdefault(name, set()).update(trail.files)
        done = kept is not None and not risen(case, least(counted), kept)
        if done or len(counted) >= versions or time.monotonic() > deadline:
            break
    sys.setprofile(None)
    threading.setprofile(None)
    return {
        "counts": {name: least(counted)[name] for name in [*shortest, TOGETHER]},
        "calls": sorted(each[TOGETHER]["calls"] for each in counted),
        "entries": entered,
        "files": {name: [each.removeprefix(root) for each in paths[name]] for name in paths},
        "walks": {name: folded(trail.walk) for name, trail in shortest.items()},
        "codes": {
            name: [
                (times, code.co_filename.removeprefix(root), code.co_firstlineno, code.co_qualname)
                for code, times in trail.codes.items()
            ]
            for name, trail in shortest.items()
        },
    }


def read() -> tuple[str, dict[str, Counted]]:
    """Return the stored counts, and the version of Python to which they belong."""
    file = json.loads(KEPT.read_text())
    return file["python"], file["cases"]


def traced(
    environment: Mapping[str, str], case: str, versions: int = VERSIONS, *, until_kept: bool = False
) -> dict[str, Any]:
    """Trace in a new process, whose environment determines the imported package."""
    words = ["--trace", case, "--versions", str(versions)] + ["--until-kept"] * until_kept
    done = subprocess.run(  # noqa: S603 - this very script
        [sys.executable, __file__, *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        timeout=4 * SECONDS,
        check=True,
    )
    return json.loads(done.stdout)


def lines(case: str, found: dict[str, Any], *, every: bool) -> Iterator[str]:
    """Yield the results of a trace as text."""
    yield f"{case:24}" + "".join(f"{what:>10}" for what in COUNTS)
    for name, counted in found["counts"].items():
        yield f"  {name:22}" + "".join(f"{counted[what]:10}" for what in COUNTS)
    calls = found["calls"]
    yield f"  calls together: least {calls[0]}, median {calls[len(calls) // 2]}, most {calls[-1]}"
    for name, times in found["entries"].items():
        yield f"  {times} times with a payload in {name}"
    for name, codes in found["codes"].items() if every else ():
        walk = " > ".join(f"{folder} ({function})" for folder, function in found["walks"][name])
        yield f"  {name}: {walk}"
        for times, file, line, function in codes:
            yield f"  {times:5}  {file}:{line}  {function}"


def main(words: Sequence[str]) -> int:
    """Trace this checkout and another one; print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, built")
    parser.add_argument("--case", choices=CASES, action="append", help="can be repeated; else all")
    parser.add_argument("--versions", type=int, default=VERSIONS, help="that are counted")
    parser.add_argument(
        "--list", action="store_true", help="every function of the shortest version"
    )
    parser.add_argument("--write", action="store_true", help=f"keep the counts in {KEPT.name}")
    parser.add_argument("--trace", help=argparse.SUPPRESS)
    parser.add_argument("--until-kept", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args(words)
    if told.trace:
        kept = read()[1] if told.until_kept else None
        print(json.dumps(trace(told.trace, told.versions, kept)))
        return 0
    from weightbus.benchmarks.against import imported_from

    cases = CASES if told.write else told.case or CASES
    counted: dict[str, Counted] = {}
    for case in cases:
        if told.against is not None:
            with imported_from(told.against) as environment:
                found = traced(environment, case, told.versions)
            print(f"{told.against}:", *lines(case, found, every=told.list), sep="\n")
            print("here:")
        found = traced({}, case, told.versions)
        print(*lines(case, found, every=told.list), sep="\n", flush=True)
        counted[case] = found["counts"]
    if told.write:
        KEPT.write_text(json.dumps({"python": PYTHON, "cases": counted}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
