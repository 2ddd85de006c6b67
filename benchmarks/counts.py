"""Count the work of one publish on both sides: `python benchmarks/counts.py [--against PATH]`.

For each thread of the publisher's and of the first worker's process: processor time, wake-ups
(voluntary context switches), and calls of functions, Python's and C's. For each process: system
calls by name (if `strace` is installed), page faults, and blocks of memory that are not freed.
Counts depend on a machine's load much less than times do. Each way of counting slows the process
down, so each has its own processes.
"""

import argparse
import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from weightbus.benchmarks.against import imported_from
from weightbus.benchmarks.model import Shape
from weightbus.benchmarks.process import Answer, Answers, Process

MODEL, WARM_UP, SECONDS = "policy", 50, 120.0
TRANSPORTS = {"tcp": False, "shared": True}
CALLED = re.compile(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+)(?: +\d+)? +(\w+)$", re.MULTILINE)  # strace's

# The processes of both sides.


class Side:
    """Counts the work of a process and its threads since `mark`.

    Args:
        calls: Count calls of functions, which slows the process down.
    """

    def __init__(self, *, calls: bool) -> None:
        self._calls: Counter[tuple[int, str]] = Counter()
        self._before: dict[str, Any] = {}
        if calls:
            threading.setprofile(self._called)
            sys.setprofile(self._called)

    def _called(self, _frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            self._calls[threading.get_native_id(), event] += 1

    def mark(self) -> Answer:
        """Start counting."""
        self._calls.clear()
        self._before = _now()
        return {}

    def told(self) -> Answer:
        """Return the counts since `mark`."""
        calls, after, before = self._calls.copy(), _now(), self._before
        threads: Answer = {}
        for thread, (name, nanoseconds, switches) in after["threads"].items():
            _, ran, switched = before["threads"].get(thread, (name, 0, 0))
            found = threads.setdefault(name, dict.fromkeys(("ms", "wake-ups", "py", "c"), 0))
            found["ms"] += (nanoseconds - ran) / 1e6
            found["wake-ups"] += switches - switched
            found["py"] += calls[thread, "call"]
            found["c"] += calls[thread, "c_call"]
        process = {name: after[name] - before[name] for name in ("faults", "blocks")}
        return {"threads": threads, "process": process}


def _now() -> dict[str, Any]:
    import resource

    names = {each.native_id: each.name for each in threading.enumerate()}
    threads: dict[int, tuple[str, int, int]] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            status, number = (task / "status").read_text(), int(task.name)
            [switches] = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)
            ran = int((task / "schedstat").read_text().split()[0])
            name = names.get(number) or (task / "comm").read_text().strip()
            threads[number] = re.sub(r"-?\d+( \(.*\))?$", "", name), ran, int(switches)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return {"threads": threads, "faults": faults, "blocks": sys.getallocatedblocks()}


def publisher(arguments: argparse.Namespace) -> None:
    """Publish each time the parent asks."""
    import weightbus

    side = Side(calls=arguments.calls)
    tensors = _tensors(arguments.size)
    own = weightbus.Settings(shared_memory=TRANSPORTS[arguments.transport])
    few = weightbus.Settings(wait=arguments.wait)
    with weightbus.Publisher(settings=own) as source:

        def publish(count: int) -> Answer:
            for _ in range(count):
                for array in tensors.values():
                    array[:1] += 1
                source.publish(MODEL, tensors, timeout=SECONDS, settings=few)
            return {}

        def there() -> Answer:
            source.wait_for_workers(arguments.workers, SECONDS)
            return publish(WARM_UP)

        answers = Answers(
            {
                "there": there,
                "mark": side.mark,
                "publish": lambda: publish(arguments.publishes),
                "told": side.told,
            }
        )
        answers.say({"address": source.address})
        answers.serve()


def worker(arguments: argparse.Namespace) -> None:
    """Apply all versions."""
    import weightbus

    side = Side(calls=arguments.calls)
    few = weightbus.Settings(shared_memory=TRANSPORTS[arguments.transport])
    targets = {MODEL: _tensors(arguments.size)}
    with weightbus.Subscriber(arguments.address, targets, settings=few) as subscriber:
        if arguments.background:
            subscriber.start()
        else:
            threading.Thread(target=_receive, args=(subscriber,), name="user", daemon=True).start()
        answers = Answers({"mark": side.mark, "told": side.told})
        answers.say({})
        answers.serve()


def _receive(subscriber: Any) -> None:
    from weightbus import ClosedError

    with contextlib.suppress(ClosedError):
        while True:
            subscriber.receive(SECONDS)


def _tensors(shape: Shape) -> dict[str, Any]:
    import numpy as np

    return {f"p{i}": np.zeros(size, np.float32) for i, size in enumerate(shape.elements())}


# The parent process.


@contextlib.contextmanager
def _sides(
    arguments: argparse.Namespace, environment: dict[str, str], *flags: str
) -> Generator[tuple[Process, list[Process]]]:
    """Yield a publisher and its workers after some publishes."""
    common = [
        *("--size", arguments.size.text, "--transport", arguments.transport),
        *("--wait", arguments.wait),
        *("--workers", str(arguments.workers), "--publishes", str(arguments.publishes)),
        *(["--background"] if arguments.background else []),
        *flags,
    ]
    with contextlib.ExitStack() as stack:

        def begun(name: str, *words: str) -> tuple[Process, Answer]:
            process = Process(name, __file__, *words, *common, environment=environment)
            return stack.enter_context(process), process.answer(SECONDS)

        source, told = begun("publisher", "--side", "publisher")
        several = [
            begun(f"worker {i}", "--side", "worker", "--address", told["address"])[0]
            for i in range(arguments.workers)
        ]
        source.ask("there", SECONDS)
        yield source, several


def counted(
    arguments: argparse.Namespace, environment: dict[str, str], *flags: str
) -> dict[str, Answer]:
    """Return the counts of the publisher and of the first worker."""
    with _sides(arguments, environment, *flags) as (source, [first, *_]):
        asked = {"publisher": source, "worker": first}
        for side in asked.values():
            side.ask("mark", SECONDS)
        source.ask("publish", SECONDS)
        return {name: side.ask("told", SECONDS) for name, side in asked.items()}


def system_calls(
    arguments: argparse.Namespace, environment: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Return the numbers of system calls of the publisher and of the first worker, by name."""
    if shutil.which("strace") is None:
        return {}
    with _sides(arguments, environment) as (source, [first, *_]), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        traced = {"publisher": source, "worker": first}
        tracers = {
            name: stack.enter_context(_strace(side.pid, folder / name))
            for name, side in traced.items()
        }
        source.ask("publish", SECONDS)
        for tracer in tracers.values():
            tracer.send_signal(signal.SIGINT)
            tracer.wait(SECONDS)
        found = {name: CALLED.findall((folder / name).read_text()) for name in traced}
    return {
        name: {call: int(count) / arguments.publishes for count, call in calls if call != "total"}
        for name, calls in found.items()
    }


@contextlib.contextmanager
def _strace(pid: int, file: Path) -> Generator[subprocess.Popen[str]]:
    """Run a tracer in this block."""
    words = ["strace", "-f", "-c", "-o", str(file), "-p", str(pid)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as tracer:  # noqa: S603
        assert tracer.stderr is not None
        tracer.stderr.readline()  # it is attached, to a number of threads
        try:
            yield tracer
        finally:
            if tracer.poll() is None:
                tracer.terminate()


def lines(arguments: argparse.Namespace, environment: dict[str, str]) -> Iterator[str]:
    """Yield the counts of one publish as text."""
    plain = counted(arguments, environment)
    called = counted(arguments, environment, "--calls")
    system = system_calls(arguments, environment)
    for side, found in plain.items():
        threads = {
            name: {key: value / arguments.publishes for key, value in figures.items()}
            for name, figures in found["threads"].items()
        }
        for name, figures in called[side]["threads"].items():
            for key in ("py", "c"):
                threads.setdefault(name, Counter())[key] = figures[key] / arguments.publishes
        busy = {name: figures for name, figures in threads.items() if max(figures.values()) > 0.01}
        busy["together"] = dict(sum((Counter(f) for f in threads.values()), Counter()))
        yield f"  {side}:"
        for name, figures in busy.items():
            of = {key: figures.get(key, 0.0) for key in ("ms", "wake-ups", "py", "c")}
            yield (
                f"    {name:22} {of['ms']:6.3f} ms {of['wake-ups']:6.1f} wake-ups "
                f"{of['py']:7.1f} calls of Python {of['c']:7.1f} of C"
            )
        process = {k: v / arguments.publishes for k, v in found["process"].items()}
        yield f"    {process['faults']:.2f} page faults, {process['blocks']:.2f} blocks left over"
        calls = sorted(system.get(side, {}).items(), key=lambda item: -item[1])
        told = ", ".join(f"{count:.1f} {name}" for name, count in calls if count >= 0.05)
        total = sum(count for _, count in calls)
        yield f"    {total:.1f} system calls: {told}" if calls else "    (strace is not installed)"


def main(words: Sequence[str]) -> int:
    """Count for this checkout and for another one; print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, built")
    parser.add_argument("--transport", choices=list(TRANSPORTS), help="one of them alone")
    parser.add_argument("--size", type=Shape.parse, default=Shape.parse("256KiB/20"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--publishes", type=int, default=200)
    parser.add_argument("--wait", choices=("applied", "none"), default="applied")
    parser.add_argument("--background", action="store_true", help="start(), not receive()")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=("publisher", "worker"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.side is not None:
        {"publisher": publisher, "worker": worker}[arguments.side](arguments)
        return 0
    for transport in [arguments.transport] if arguments.transport else TRANSPORTS:
        arguments.transport = transport
        if arguments.against is not None:
            with imported_from(arguments.against) as environment:
                print(
                    f"{arguments.against}, {transport}:", *lines(arguments, environment), sep="\n"
                )
        print(f"here, {transport}:", *lines(arguments, {}), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
