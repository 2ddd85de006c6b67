"""Count what a version crosses on its way through the code: `python benchmarks/crossings.py`.

The way is from `publish()` until a worker that calls `receive()` has applied it, over the network
and through shared memory, of a model of 4 KiB and of one of four chunks. Of each thread it tells:

    files      that it enters
    functions  that it enters: code objects, comprehensions and lambdas aside
    calls      of these: functions, methods, properties, what dataclasses generate, and each time
               that a generator goes on; of this package's code alone (`counts.py` has all calls)
    changes    of folder: calls and returns that leave one of python_client, bus and codecs for
               another. Forth and back between the same two, over and over, counts once: that is a
               loop, over chunks or fields.

Publisher and worker are in one process. A version is counted until all of its threads sleep. What
comes to that by chance only adds to it: a timer, a second turn of a loop where one does for two
messages. So the counts are the least of many versions, on a busy machine as well; of a model in
one chunk, many versions have just these. `crossings.json` keeps them (`--write`), and a test fails
if they rise.
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
PYTHON = ".".join(map(str, sys.version_info[:2]))  # others compile to other calls
SECONDS = 60.0
MODEL, CHUNKS, CHUNK_BYTES = "policy", 4, 2**20
SIZES = {"4 KiB": 2**12, "four chunks": CHUNKS * CHUNK_BYTES}
TRANSPORTS = ("network", "shared")
CASES = tuple(f"{size}, {transport}" for size in SIZES for transport in TRANSPORTS)
VERSIONS, LIMIT_SECONDS = 41, 45.0  # counted of each case, but for no longer
# So much more is not a rise. How chunks share wake-ups is chance: hardly two versions are alike.
SLACK = {case: 1.08 if case == "four chunks, network" else 1.01 for case in CASES}
WARM_SECONDS = 1.5  # more than a ping: only an answer to one proves that publishing reaches it
SETTLED = 0.002  # in which nobody calls anything

FOLDERS = ("weightbus.python_client.", "weightbus.bus.", "weightbus.codecs.")
MACHINE, SHELL = "weightbus.bus.worker.", "weightbus.bus.net."
NOT_FUNCTIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>", "<module>"}
COUNTS = ("files", "functions", "calls", "changes")
TOGETHER = "together"

Step = tuple[str, str]  # the folder, and the function in it
Counted = dict[str, dict[str, int]]  # by thread, then by what is counted


@dataclass
class Trail:
    """What one thread did for one version.

    Attributes:
        codes: How often it called each, in the order of the first call.
        walk: The folders that it went through.
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
        """It is in that module now."""
        folder = module.split(".")[1]
        if not self.walk or self.walk[-1][0] != folder:
            self.walk.append((folder, function))


Trails = dict[str, Trail]  # by thread


class Tracer:
    """Follows each thread through the package, as the profiler of all of them."""

    def __init__(self) -> None:
        self.on = False
        self.events = 0
        self.trails: Trails = {}
        self.entries: Counter[str] = Counter()  # of the worker's machine, with a payload

    def begin(self) -> None:
        """Forget what was before."""
        self.trails, self.entries, self.on = {}, Counter(), True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of the profiler."""
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
        """Wait until every other thread sleeps, and none has called anything for a moment.

        On a busy machine a thread that has something to do may not run for long: it does not sleep.

        Raises:
            TimeoutError: They go on and on.
        """
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            before = self.events
            time.sleep(SETTLED)  # in which a thread that waits for the interpreter has it
            if self.events == before and _others_sleep():
                return
        raise TimeoutError(f"the threads have not come to rest within {SECONDS:.0f} s")


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _nearest(frame: FrameType | None) -> FrameType | None:
    """Return where a thread is; what is not of the package belongs to who called it."""
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
    """Return whether a value is memory of a chunk, has it, or is a message with it."""
    if isinstance(value, (list, tuple)):
        return any(map(is_payload, cast("list[object]", value)))
    memory = value if isinstance(value, memoryview) else getattr(value, "view", None)
    return isinstance(memory, memoryview) and memory.nbytes == CHUNK_BYTES


def follow(case: str) -> Iterator[tuple[Trails, Counter[str]]]:
    """Publish versions; yield what each thread did for each, and what entered the machine."""
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
            tracer.settle()  # it waits
            tracer.begin()
            publisher.publish(MODEL, source, timeout=SECONDS)
            user.join(SECONDS)
            tracer.settle()
            tracer.on = False
            if not np.array_equal(source["w"], copy["w"]):
                raise RuntimeError("the worker holds other bytes than were published")
            if counted:
                yield tracer.trails, tracer.entries


def counts(trails: Iterable[Trail]) -> dict[str, int]:
    """Return what these came to together."""
    trails = list(trails)
    return {
        "files": len(set[str]().union(*(each.files for each in trails))),
        "functions": len(set[CodeType]().union(*(each.functions for each in trails))),
        "calls": sum(each.codes.total() for each in trails),
        "changes": sum(max(0, len(folded(each.walk)) - 1) for each in trails),
    }


def folded(walk: Sequence[Step]) -> list[Step]:
    """Return a walk in which forth and back between two folders, over and over, stands once."""
    kept: list[Step] = []
    for step in walk:
        kept.append(step)
        folders = [folder for folder, _ in kept[-4:]]
        if len(folders) == 4 and folders[:2] == folders[2:]:
            del kept[-2:]
    return kept


def least(found: Sequence[Counted]) -> Counted:
    """Return the least of each count."""
    return {
        name: {what: min(each[name][what] for each in found if name in each) for what in COUNTS}
        for name in dict.fromkeys(name for each in found for name in each)
    }


def risen(case: str, found: Counted, kept: dict[str, Counted]) -> list[str]:
    """Return what there is more of than is kept."""
    now, before = found[TOGETHER], kept[case][TOGETHER]
    return [what for what in COUNTS if now[what] > before[what] * SLACK[case]]


def trace(case: str, versions: int, kept: dict[str, Counted] | None = None) -> dict[str, Any]:
    """Follow versions; return the least that they came to, and the shortest in full.

    Args:
        case: Which versions.
        versions: How many, at most.
        kept: Stop as soon as nothing has risen above this.
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
    """Return the counts that are kept, and of which Python they are."""
    file = json.loads(KEPT.read_text())
    return file["python"], file["cases"]


def traced(
    environment: Mapping[str, str], case: str, versions: int = VERSIONS, *, until_kept: bool = False
) -> dict[str, Any]:
    """Trace in a process of its own, which imports the package that the environment names."""
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
    """Yield what a trace came to, in words."""
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
    """Trace this checkout, and another beside it; print both."""
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
