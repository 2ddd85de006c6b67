"""Trace one publish and count changes of room: `python benchmarks/crossings.py [--against PATH]`.

The rooms are python_client, bus and codecs. A change is a call or a return that leaves one for
another, on the way of one version from `publish()` until it is applied at a worker that calls
`receive()`, in every thread that it goes through. Forth and back between the same two rooms, over
and over, counts once: that is a loop, over chunks or fields. Also printed is how often a chunk's
payload is handed from the worker's shell to its machine.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

SECONDS = 60.0
MODEL, CHUNKS, CHUNK_BYTES, WARM_UP = "policy", 4, 2**20, 3
ROOMS = ("python_client/", "bus/", "codecs/")
MACHINE = ("bus/worker/", "bus/worker.py", "bus/slot.py", "bus/transfer.py")  # today's; and before
SHELL = ("bus/net/", "bus/worker_loop.py", "bus/sockets.py", "bus/zmtp.py", "bus/subscription.py")

Step = tuple[str, str]  # the room, and the function in it


class Tracer:
    """Notes each call of a function of the package, and each return, thread by thread.

    Args:
        package: The folder of the package.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self.on = False
        self.walks: dict[str, list[Step]] = {}
        self.entries: Counter[str] = Counter()  # of the worker's machine, with a payload
        self.files: dict[str, dict[str, None]] = {}  # by thread, in the order of the first call

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of the profiler."""
        if not self.on:
            return
        thread = threading.current_thread().name
        if event.startswith("c_"):
            module = getattr(argument, "__module__", None) or ""
            if module.startswith("weightbus."):
                room, name = module.split(".")[1], argument.__name__
                self._note(thread, (room, name) if event == "c_call" else self._at(frame))
            return
        at = self._at(frame if event == "call" else frame.f_back)
        self._note(thread, at)
        if event == "call" and self._file(frame):
            self.files.setdefault(thread, {})[self._file(frame)] = None
            here, there = self._file(frame), self._caller(frame)
            handed = here.startswith(MACHINE) and there.startswith(SHELL)
            if handed and any(map(is_payload, frame.f_locals.values())):
                self.entries[f"{here}: {frame.f_code.co_qualname}"] += 1

    def _note(self, thread: str, step: Step | None) -> None:
        walk = self.walks.setdefault(thread, [])
        if step is not None and (not walk or walk[-1][0] != step[0]):
            walk.append(step)

    def _at(self, frame: FrameType | None) -> Step | None:
        """Return where a thread is; what is not of the package belongs to who called it."""
        while frame is not None:
            if file := self._file(frame):
                return file.partition("/")[0], frame.f_code.co_qualname
            frame = frame.f_back
        return None

    def _caller(self, frame: FrameType) -> str:
        """Return the file that called, whatever lies between that is not of the package."""
        before = frame.f_back
        while before is not None and not self._file(before):
            before = before.f_back
        return self._file(before) if before is not None else ""

    def _file(self, frame: FrameType) -> str:
        name = frame.f_code.co_filename.removeprefix(self._package)
        return name if name.startswith(ROOMS) else ""


def is_payload(value: object) -> bool:
    """Return whether a value is memory of a chunk, has it, or is a message with it."""
    if isinstance(value, (list, tuple)):
        return any(map(is_payload, cast("list[object]", value)))
    memory = value if isinstance(value, memoryview) else getattr(value, "view", None)
    return isinstance(memory, memoryview) and memory.nbytes == CHUNK_BYTES


def trace(road: str) -> dict[str, Any]:
    """Publish until memory is warm, then once more; return what the last one did."""
    import numpy as np

    import weightbus

    tracer = Tracer(Path(weightbus.__file__).parent)
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    few = weightbus.Settings(shared_memory=road == "shared")
    source, copy = ({"w": np.zeros(CHUNKS * CHUNK_BYTES // 4, np.float32)} for _ in range(2))
    with (
        weightbus.Publisher("tcp://127.0.0.1:0", settings=few) as publisher,
        weightbus.Subscriber(publisher.address, {MODEL: copy}, settings=few) as subscriber,
    ):

        def receive() -> None:
            for _ in range(WARM_UP + 1):
                subscriber.receive(SECONDS)

        user = threading.Thread(target=receive, name="worker's user", daemon=True)
        user.start()
        publisher.wait_for_workers(1, SECONDS)
        for number in range(WARM_UP + 1):
            source["w"] += 1
            tracer.on = number == WARM_UP
            publisher.publish(MODEL, source, timeout=SECONDS)
        user.join(SECONDS)
        tracer.on = False
    sys.setprofile(None)
    if not np.array_equal(source["w"], copy["w"]):
        raise RuntimeError("the worker holds other bytes than were published")
    files = {thread: [*names] for thread, names in tracer.files.items()}
    return {"walks": tracer.walks, "entries": tracer.entries, "files": files}


def folded(walk: Sequence[Step]) -> list[Step]:
    """Return a walk in which forth and back between two rooms, over and over, stands once."""
    kept: list[Step] = []
    for step in walk:
        kept.append(step)
        rooms = [room for room, _ in kept[-4:]]
        if len(rooms) == 4 and rooms[:2] == rooms[2:]:
            del kept[-2:]
    return kept


def changes(found: dict[str, Any]) -> int:
    """Return how often the walk of a version changes its room."""
    return sum(len(folded(walk)) - 1 for walk in found["walks"].values() if walk)


def traced(environment: dict[str, str], road: str) -> dict[str, Any]:
    """Trace in a process of its own, which imports the package that the environment names."""
    done = subprocess.run(  # noqa: S603 - this very script
        [sys.executable, __file__, "--trace", road],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        timeout=2 * SECONDS,
        check=True,
    )
    return json.loads(done.stdout)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield what a trace came to, in words."""
    threads = {name: walk for name, walk in found["walks"].items() if walk}
    walks = {name: folded([(r, f) for r, f in walk]) for name, walk in threads.items()}
    for name, walk in walks.items():
        yield f"  {name}: {' > '.join(f'{room} ({function})' for room, function in walk)}"
    every = sum(len(walk) - 1 for walk in threads.values())
    yield f"  {changes(found)} changes of room; {every} with every repetition"
    for name, times in found["entries"].items():
        yield f"  {times} times with a payload of {CHUNKS} in {name}"


def main(words: Sequence[str]) -> int:
    """Trace this checkout, and another beside it; print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, built")
    parser.add_argument("--road", choices=("network", "shared"), default="network")
    parser.add_argument("--trace", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.trace:
        print(json.dumps(trace(arguments.trace)))
        return 0
    from weightbus.benchmarks.against import imported_from

    if arguments.against is not None:
        with imported_from(arguments.against) as environment:
            print(f"{arguments.against}:", *lines(traced(environment, arguments.road)), sep="\n")
    print("here:", *lines(traced({}, arguments.road)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
