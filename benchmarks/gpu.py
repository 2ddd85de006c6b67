"""Measure publishing from a GPU and applying to a GPU: `python benchmarks/gpu.py [--quick]`.

Each row measures an operation and its limit in turns, and prints the median of their ratio and of
each time. A row passes if the ratio is within its bound. Without a GPU that torch can use, the
program says so and ends.
"""

import argparse
import contextlib
import io
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from weightbus import Publisher, Settings, Subscriber

MODEL, SECONDS = "policy", 120.0
BESIDE = 1.15, 1.05  # bounds of the ratio to one copy of pinned memory
STEPS = 3  # steps of training in one measurement
GIB = 2**30
HERE = Settings(device_copy=False)
SECOND = Settings(device_copy=True)
NETWORK = Settings(shared_memory=False)

Bounds = tuple[float, float] | None  # the largest allowed ratio, and the goal
Timed = Callable[[], float]  # does something once, and returns the seconds that it took


class Rows:
    """The rows of the result."""

    def __init__(self) -> None:
        self.missed = 0
        self.table = Table(title="medians; ratios are of each round", title_justify="left")
        for column in ("", "measured, ms", "limit, ms", "ratio", "must", "reach", ""):
            self.table.add_column(column, justify="left" if not column else "right")

    def add(
        self, name: str, ours: Timed, limit: Timed, bounds: Bounds = None, rounds: int = 7
    ) -> None:
        """Measure an operation and its limit in turns, and add a row."""
        for warm_up in (ours, limit):
            warm_up()
        pairs = [(ours(), limit()) for _ in range(rounds)]
        ratio = statistics.median(a / b for a, b in pairs)
        medians = [f"{1e3 * statistics.median(each):.2f}" for each in zip(*pairs, strict=True)]
        verdict = "" if bounds is None else "MISSED" if ratio > bounds[0] else "kept"
        self.missed += verdict == "MISSED"
        shown = ["", ""] if bounds is None else [f"{each:g}" for each in bounds]
        self.table.add_row(name, *medians, f"{ratio:.3f}", *shown, verdict)
        print(f"{name}: {' / '.join(medians)} ms, {ratio:.3f} {verdict}", flush=True)


def timed(call: Callable[[], object]) -> float:
    """Return how long a call takes, with all work that it starts on the device."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def weights_of(nbytes: int, tensors: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Return bf16 tensors of equal size, random."""
    size = nbytes // tensors // 2
    return {
        f"layers.{i}.weight": torch.randn(size, dtype=torch.bfloat16, device=device)
        for i in range(tensors)
    }


# The limits.


def crossing(nbytes: int, direction: str) -> Timed:
    """Return a function that copies pinned memory once."""
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    to, from_ = (here, on_device) if direction == "out" else (on_device, here)
    return lambda: timed(lambda: to.copy_(from_, non_blocking=True))


# Worker processes.


class Remote:
    """A process that executes one command after another."""

    def __init__(self, kind: Callable[..., Any], *about: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, about), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a command."""
        self._ours.send((name, arguments))

    def answer(self) -> Any:
        """Return the result of the last command."""
        if not self._ours.poll(SECONDS):
            raise TimeoutError("the other process does not answer")
        return self._ours.recv()

    def do(self, name: str, *arguments: Any) -> Any:
        """Send a command, and return its result."""
        self.tell(name, *arguments)
        return self.answer()

    def end(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._ours.send(None)
        self._process.join(20.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, kind: Callable[..., Any], about: tuple[Any, ...]) -> None:
    made = kind(*about)
    while (told := connection.recv()) is not None:
        name, arguments = told
        connection.send(getattr(made, name)(*arguments))
    if hasattr(made, "close"):
        made.close()


class Worker:
    """A worker with a model on the GPU or in host memory."""

    def __init__(self, address: str, nbytes: int, tensors: int, device: str = "cuda") -> None:
        self.target = weights_of(nbytes, tensors, device)
        self.first = [each.data_ptr() for each in self.target.values()]
        self.worker = Subscriber(address, {MODEL: self.target}, name="worker")
        self.updates: list[float] = []

    def apply(self) -> float:
        """Apply the next version; return the seconds that it took."""
        update = self.worker.receive(SECONDS)
        if update is None:
            raise TimeoutError("no version came")
        torch.cuda.synchronize()
        return update.seconds

    def many(self, count: int) -> tuple[bool, int]:
        """Apply up to a version; return whether tensors kept their addresses, and the memory."""
        version = 0
        while version < count:
            update = self.worker.receive(SECONDS)
            if update is None:
                raise TimeoutError("no version came")
            version = update.version
        same = self.first == [each.data_ptr() for each in self.target.values()]
        return same, _resident()

    def close(self) -> None:
        """Say goodbye."""
        self.worker.close()

    def within(self) -> float:
        """Copy the same number of bytes on the device."""
        flat = [each.view(torch.uint8) for each in self.target.values()]
        size = sum(each.numel() for each in flat)
        if not hasattr(self, "pair"):
            self.pair = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        return timed(lambda: self.pair[0].copy_(self.pair[1]))

    def sums(self) -> list[int]:
        """Return checksums of the bytes."""
        return [int(each.view(torch.int16).long().sum()) for each in self.target.values()]


class Follower:
    """A worker in host memory, which applies all versions in the background."""

    def __init__(self, address: str, shapes: dict[str, tuple[int, ...]]) -> None:
        target = {name: torch.zeros(s, dtype=torch.bfloat16) for name, s in shapes.items()}
        self.count = 0
        few = Settings(on_commit=self._count)
        self.worker = Subscriber(address, {MODEL: target}, settings=few).start()

    def _count(self, _update: object) -> None:
        self.count += 1

    def applied(self) -> int:
        """Return the number of applied versions."""
        return self.count

    def close(self) -> None:
        """Say goodbye."""
        self.worker.close()


def _resident() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) * 1024


@contextlib.contextmanager
def pair(
    nbytes: int, tensors: int, few: Settings, device: str = "cuda"
) -> Generator[tuple[Publisher, Remote, dict[str, torch.Tensor]]]:
    """Yield a publisher, a worker in another process, and weights for them."""
    weights = weights_of(nbytes, tensors)
    with Publisher(settings=few) as publisher:
        publisher.prepare(MODEL, weights)
        remote = Remote(Worker, publisher.address, nbytes, tensors, device)
        try:
            publisher.wait_for_workers(1, SECONDS)
            yield publisher, remote, weights
        finally:
            remote.end()


# The rows.


def snapshots(rows: Rows, nbytes: int) -> None:
    """Measure publishing from the device without workers."""
    weights, limit = weights_of(nbytes, 64), crossing(nbytes, "out")
    for few, name, bounds in ((HERE, "", BESIDE), (SECOND, " (second copy alone)", None)):
        with Publisher(settings=few) as publisher:
            publisher.prepare(MODEL, weights)
            publish = partial(publisher.publish, MODEL, weights, require=0, timeout=SECONDS)
            ours = partial(timed, publish)
            rows.add(f"snapshot of {nbytes / GIB:g} GiB{name}", ours, limit, bounds)
            rows.add(f"publish_async returns{name}", partial(_returns, publisher, weights), limit)


def _returns(publisher: Publisher, weights: Any) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    future = publisher.publish_async(MODEL, weights, require=0, timeout=SECONDS)
    seconds = time.perf_counter() - begun
    future.result()
    return seconds


def applies(rows: Rows, nbytes: int) -> None:
    """Measure applying on the device, over each transport."""
    limit, target = crossing(nbytes, "in"), weights_of(nbytes, 64)
    source = {name: each.cpu() for name, each in weights_of(nbytes, 64).items()}
    for few, name, rounds in ((Settings(), "shared memory", 7), (NETWORK, "staged", 3)):
        with (
            Publisher(settings=few) as publisher,
            Subscriber(publisher.address, {MODEL: target}) as worker,
        ):
            publisher.prepare(MODEL, source)
            publisher.wait_for_workers(1, SECONDS)
            ours = partial(_applies, publisher, worker, MODEL, source)
            for _ in range(2):  # for both of a worker's buffers
                ours()
            rows.add(f"apply of {nbytes / GIB:g} GiB, {name}", ours, limit, BESIDE, rounds)
        if not all(torch.equal(target[n].cpu(), each) for n, each in source.items()):
            raise AssertionError("other bytes have arrived")


def _applies(publisher: Publisher, worker: Subscriber, model: str, weights: Any) -> float:
    future = publisher.publish_async(model, weights, timeout=SECONDS)
    update = worker.receive(SECONDS)
    future.result()
    if update is None:
        raise TimeoutError("no version came")
    return update.seconds


def many_small(rows: Rows) -> None:
    """Compare 10,000 tensors of 100 kB with one of 1 GB."""
    models = {"many": weights_of(10**9, 10_000), "one": weights_of(10**9, 1)}
    name = "10,000 tensors of 100 kB over one of 1 GB"
    with Publisher() as publisher:
        for model, weights in models.items():
            publisher.prepare(model, weights)
        out = [
            partial(timed, partial(publisher.publish, model, each, require=0, timeout=SECONDS))
            for model, each in models.items()
        ]
        rows.add(f"snapshot, {name}", out[0], out[1], (1.3, 1.1))
    sources = {m: {n: t.cpu() for n, t in each.items()} for m, each in models.items()}
    with Publisher() as publisher, Subscriber(publisher.address, models) as worker:
        publisher.wait_for_workers(1, SECONDS)
        into = [partial(_applies, publisher, worker, *each) for each in sources.items()]
        for each in into:
            each()
        rows.add(f"apply, {name}", into[0], into[1], (1.3, 1.1))


def training(rows: Rows) -> None:
    """Compare steps of training that are published with steps that are not."""
    width, layers = 8192, 8
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
    ).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(2**15, width, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        for _ in range(3):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def steps(publisher: Publisher | None = None) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
            if publisher is not None:
                publisher.publish_async(MODEL, model, require=0, timeout=SECONDS)
        torch.cuda.current_stream().synchronize()  # training continues; copies may overlap
        return time.perf_counter() - begun

    print(f"a step of {layers * width * width * 2 / GIB:g} GiB: {steps() / STEPS:.3f} s")
    nobody, bounds = "nobody asks for it", (1.05, 1.02)
    must: Bounds
    for few, who, must in (
        (SECOND, nobody, bounds),
        (SECOND, "a worker in memory", bounds),
        (HERE, "a worker in memory", None),
    ):
        with Publisher(settings=few) as publisher:
            publisher.prepare(MODEL, model)
            remote = None
            if who != nobody:
                shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
                remote = Remote(Follower, publisher.address, shapes)
                publisher.wait_for_workers(1, SECONDS)
            way = "second copy" if few is SECOND else "without one"
            name = f"{STEPS} steps, each published, {way}, {who}"
            rows.add(name, partial(steps, publisher), steps, must, rounds=3)
            if remote is not None:
                print(f"the worker has applied {remote.do('applied')} versions", flush=True)
                remote.end()


def between(rows: Rows, nbytes: int) -> None:
    """Compare a publish from device memory to a worker's device memory with a device copy."""
    with pair(nbytes, 64, SECOND) as (publisher, remote, weights):

        def ours() -> float:
            remote.tell("apply")
            publisher.publish(MODEL, weights, timeout=SECONDS)
            return remote.answer()

        for _ in range(2):
            ours()
        rows.add(
            f"IPC transport, {nbytes / GIB:g} GiB",
            ours,
            lambda: remote.do("within"),
            (1.3, 1.1),
            15,
        )
        sums = [int(each.view(torch.int16).long().sum()) for each in weights.values()]
        if remote.do("sums") != sums:
            raise AssertionError("other bytes have arrived")


def constant(count: int) -> None:
    """Publish a small model many times over each transport; report memory that has grown."""
    for few, name in ((HERE, "by way of the host"), (SECOND, "IPC transport")):
        with pair(2**26, 200, few) as (publisher, remote, weights):
            found: list[tuple[int, int, int]] = []
            for first, last in ((1, count // 10), (count // 10 + 1, count)):
                remote.tell("many", last)
                for _ in range(first, last + 1):
                    publisher.publish(MODEL, weights, timeout=SECONDS)
                same, theirs = remote.answer()
                found.append((torch.cuda.mem_get_info()[0], theirs, _resident()))
            free, theirs, ours = (b - a for a, b in zip(*found, strict=True))
            print(
                f"{count} publishes, {name}: data_ptr {'constant' if same else 'MOVED'}; since the "
                f"{count // 10}th the device has {free / 2**20:+.1f} MiB free, the worker "
                f"{theirs / 2**20:+.1f} MiB of memory, the publisher {ours / 2**20:+.1f} MiB",
                flush=True,
            )
            if not same:
                raise AssertionError("a tensor has moved")


# Peers: from a model on the device to a model in another process.


class Peer:
    """The receiving side of each peer."""

    def __init__(self, nbytes: int, tensors: int, port: int, queue: Any) -> None:
        self.target, self.queue, self.port = weights_of(nbytes, tensors), queue, port

    def file(self, path: str) -> bool:
        """Load a saved checkpoint."""
        found = torch.load(path, map_location="cuda", weights_only=True)
        return self._put(found)

    def queued(self) -> bool:
        """Receive tensors through CUDA IPC."""
        return self._put(self.queue.get())

    def gloo(self) -> bool:
        """Receive a broadcast."""
        import torch.distributed as dist

        if not dist.is_initialized():
            _join(self.port, 1)
        for each in self.target.values():
            here = torch.empty(each.shape, dtype=each.dtype)
            dist.broadcast(here, 0)
            each.copy_(here)
        torch.cuda.synchronize()
        return True

    def _put(self, found: dict[str, torch.Tensor]) -> bool:
        for name, each in self.target.items():
            each.copy_(found[name])
        torch.cuda.synchronize()
        return True


def _join(port: int, rank: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def peers(rows: Rows, nbytes: int) -> None:
    """Compare the time of peers until another process has the weights with weightbus's time."""
    import torch.distributed as dist
    import torch.multiprocessing as torch_mp

    context = torch_mp.get_context("spawn")
    queue, tensors, port = context.Queue(), 64, _free_port()
    with pair(nbytes, tensors, SECOND) as (publisher, worker, weights):

        def ours() -> float:
            worker.tell("apply")
            seconds = timed(lambda: publisher.publish(MODEL, weights, timeout=SECONDS))
            worker.answer()
            return seconds

        remote = Remote(Peer, nbytes, tensors, port, queue)
        path = Path("/dev/shm/weightbus-peer.pt")  # noqa: S108

        def saved() -> None:
            torch.save(weights, path)
            remote.do("file", str(path))

        def queued() -> None:
            queue.put(weights)
            remote.do("queued")

        def gloo() -> None:
            remote.tell("gloo")
            if not dist.is_initialized():
                _join(port, 0)
            for each in weights.values():
                dist.broadcast(each.cpu(), 0)
            remote.answer()

        try:
            for name, call in (("torch.save, load", saved), ("CUDA IPC", queued), ("gloo", gloo)):

                def peer(call: Callable[[], None] = call) -> float:
                    return timed(call)

                with _reported(name):
                    rows.add(f"{nbytes / GIB:g} GiB by {name}, over ours", peer, ours, rounds=5)
        finally:
            path.unlink(missing_ok=True)
            remote.end()


@contextlib.contextmanager
def _reported(name: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        print(f"{name} left out: {error!r}", flush=True)


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    """Measure and print all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller models: to see that it runs")
    parser.add_argument("--only", nargs="*", help="only these rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} finds no GPU here")
        return
    size = GIB // 4 if options.quick else 4 * GIB
    rows = Rows()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    parts: dict[str, Callable[[], None]] = {
        "constant": lambda: constant(100 if options.quick else 1000),
        "snapshots": lambda: snapshots(rows, size),
        "applies": lambda: applies(rows, size),
        "small": lambda: many_small(rows),
        "between": lambda: between(rows, 2 * size),
        "training": lambda: training(rows),
        "peers": lambda: peers(rows, size // 4),
    }
    for name, part in parts.items():
        if not options.only or name in options.only:
            begun = time.perf_counter()
            part()
            torch.cuda.empty_cache()
            print(f"({name}: {time.perf_counter() - begun:.0f} s)", flush=True)
    text = io.StringIO()
    Console(file=text, width=120).print(rows.table)
    print(text.getvalue())
    sys.exit(bool(rows.missed))


if __name__ == "__main__":
    main()
