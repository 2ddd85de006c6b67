"""Measure what patches save over links of some rates: `python benchmarks/links.py`.

Publisher and worker are processes in separate network namespaces, with a link between them that
`tc` shapes. This needs root; everything is removed at the end. The benchmark measures, in turns,
the time from `publish` until the version is applied: whole versions (raw), patches without classes
(flat) and with classes (class), and what `auto` chooses, whose worker joins anew on each link. Then
it measures how long readers wait, compared with a plain copy of the same size, and the memory, in
models. It prints rows as they are measured. A row that breaks its bound ends the program with
status 1. Run it on a quiet machine for ten minutes; `--quick` takes one minute and checks no
bounds.
"""

import argparse
import ctypes
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from weightbus import Publisher, Settings, Subscriber
from weightbus.benchmarks import memory
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.process import Answer, Answers, Process
from weightbus.benchmarks.report import print_machine
from weightbus.bus.publisher.roster import PatchCandidate
from weightbus.codecs.delta.worth import Way
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.python_client.publishing.models import Bases
from weightbus.python_client.settings import Encoding

NEAR, FAR = "wb0", "wb1"  # the network devices of the publisher and of the worker
HERE, THERE = "10.77.0.1", "10.77.0.2"
MODEL, WIDE = "policy", "wide"  # models with elements of 16 bits, and of 32 bits
TENSORS = 16
PATTERN = 2**22  # number of random elements, which the model repeats
ASK_SECONDS, PUBLISH_SECONDS, JOIN_SECONDS = 120.0, 300.0, 30.0
WAYS: dict[str, tuple[Encoding, bool | None]] = {  # and whether patches have classes
    "raw": ("raw", None),
    "flat": ("auto", False),
    "class": ("delta", None),
    "auto": ("auto", None),
}
PATCHED = ("flat", "class", "auto")
LINKS = {"loopback": 0, "1 Gb/s": 10**9, "100 Mb/s": 10**8, "10 Mb/s": 10**7}
ROUNDS = {"loopback": 10, "1 Gb/s": 6, "100 Mb/s": 2, "10 Mb/s": 2}  # even: there and back
DENSITIES = (0.001, 0.01, 0.1, 1.0)
SPEEDUP_AT = 0.01
SPEEDUP = {"1 Gb/s": (3, 7), "100 Mb/s": (25, 48), "10 Mb/s": (95, 155)}  # must, reach
GRID = ("loopback", "1 Gb/s", "100 Mb/s")
# JOINING: bounds of the ratio of sent bytes to the model's bytes.
SLOW, JOINING, JOINING_MIB = 5 * 10**6, (1.3, 1.1), 8
AUTO, AUTO_WIDE = (1.10, 1.03), (1.03, 1.01)
PAUSES = {"copying": None, "sole-writer": (0.5, 0.3), "resident": (0.1, 0.05)}
PAUSE_ROUNDS, MEMORY_ROUNDS = 9, 4
BASES = 2
Bytes = NDArray[np.uint8]
MEMORY = {"publisher": float(BASES), "worker": 1.0}
MEMORY_SLACK = 0.15  # in models: the patch itself, and its decoded parts
_CLONE_NEWNET = 0x40000000


def own_network() -> None:
    """Move this process, and processes that it starts later, into a new network namespace.

    Raises:
        OSError: This needs root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"no new network namespace (needs root): {os.strerror(code)}")
    run("ip", "link", "set", "lo", "up")


def run(*words: str) -> None:
    """Run a program of iproute2."""
    subprocess.run(words, check=True, timeout=10.0)  # noqa: S603 - our own words


def tensors(data: NDArray[np.uint8], *, wide: bool = False) -> dict[str, Any]:
    """Return tensors over the memory of some bytes."""
    import torch

    dtype = torch.float32 if wide else torch.bfloat16
    flat = torch.from_numpy(data.view(np.uint8)).view(dtype)
    return {f"w{index}": part for index, part in enumerate(flat.chunk(TENSORS))}


def versions(elements: int, density: float) -> tuple[Bytes, Bytes]:
    """Return two versions in bfloat16 with a share of changed elements, as after fine-tuning.

    An element changes by one unit with a probability that halves from one exponent to the next.
    """
    rng = np.random.default_rng(0)
    base = (rng.normal(0, 0.02, elements).astype(np.float32).view("<u4") >> 16).astype("<u2")
    likely = np.exp2(112.0 - ((base >> 7) & 255))
    low, high, rate = 0.0, 1e6, 0.0
    for _ in range(60):  # find the rate for this density by bisection
        rate = (low + high) / 2
        low, high = (rate, high) if np.minimum(rate * likely, 1).mean() < density else (low, rate)
    target = base ^ (rng.random(elements) < rate * likely).astype("<u2")
    return base.view(np.uint8), target.view(np.uint8)


@dataclass
class Rows:
    """Prints rows, and records broken bounds."""

    console: Console
    judged: bool
    missed: list[str] = field(default_factory=list[str])

    def say(self, name: str, text: str) -> None:
        """Print a row."""
        self.console.print(f"{name:38}{text}", highlight=False)

    def judge(self, name: str, value: float, bounds: tuple[float, float], *, least: bool) -> str:
        """Return a value with its bounds as text; record it if it breaks the first bound."""
        broken = value < bounds[0] if least else value > bounds[0]
        if broken:
            self.missed.append(name)
        sign, verdict = (">=" if least else "<="), "MISSED" if broken else "kept"
        return f"{value:.3g} (must {sign} {bounds[0]:g}, reach {bounds[1]:g}: {verdict})"


class Choosing(Bases):
    """The bases of patches; records which kind of patch was chosen last.

    Args:
        classes: The kind of all patches; None: `auto` chooses.
    """

    def __init__(self, classes: bool | None) -> None:
        super().__init__(MODEL, BASES)
        self._always, self.took = classes, "raw"

    def choose(
        self, layout: Layout, old: Bytes, new: Bytes, patch_candidates: Collection[PatchCandidate]
    ) -> Way | None:
        always = None if self._always is None else Way(self._always)
        found = always or super().choose(layout, old, new, patch_candidates)
        self.took = "raw" if found is None else "class" if found.classes else "flat"
        return found


class Trainer:
    """A publisher that publishes one way.

    Args:
        name: The name of the way.
        host: The address to bind to.
    """

    def __init__(self, name: str, host: str) -> None:
        self.encoding: Encoding
        self.encoding, classes = WAYS[name]
        self.name = name
        self.publisher = Publisher(
            f"tcp://{host}:0", settings=Settings(shared_memory=False, bases=BASES), insecure=True
        )
        self.bases = Choosing(classes)
        self.publisher._model(MODEL).bases = self.bases  # noqa: SLF001 # pyright: ignore

    def publish(self, weights: dict[str, Any], model: str = MODEL) -> float:
        """Publish; return the seconds until the version is applied."""
        self.bases.took, begun = "raw", time.perf_counter()
        receipt = self.publisher.publish(
            model,
            weights,
            settings=Settings(encoding=self.encoding),
            timeout=PUBLISH_SECONDS,
            expect=1,
        )
        seconds = time.perf_counter() - begun
        self.came = receipt.workers[self.name].encoding
        return seconds


class Weights:
    """A model, and versions of it in which some elements change."""

    def __init__(self, elements: int, densities: Sequence[float]) -> None:
        repeats = elements // PATTERN
        drawn = {density: versions(PATTERN, density) for density in densities}
        self.base = np.tile(drawn[densities[0]][0], repeats)
        self.changed = {d: np.tile(target, repeats) for d, (_, target) in drawn.items()}
        rng = np.random.default_rng(1)
        wide = [rng.standard_normal(elements // 2, np.float32).view(np.uint8) for _ in range(2)]
        self.wide = [tensors(each, wide=True) for each in wide]

    def pair(self, density: float) -> list[tuple[Bytes, dict[str, Any]]]:
        """Return two versions to publish in turns, which differ in a share of their elements."""
        return [(each, tensors(each)) for each in (self.changed[density], self.base)]


class Questions:
    """The questions that the worker's process answers.

    Args:
        told: `ways`, by name the publisher's address and the options of the subscriber; `elements`
            of the model; `address`, if it has a network of its own, where it is that.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._told, self._ways = told, dict[str, Any]()
        self._models: dict[str, dict[str, dict[str, Any]]] = {}
        self._scratch: list[NDArray[np.uint8]] = []  # two models, for plain copies

    def ready(self) -> Answer:
        """Answer that this process is ready."""
        return {}

    def link(self) -> Answer:
        """Configure this end of the link, which was moved here."""
        run("ip", "address", "add", f"{self._told['address']}/24", "dev", FAR)
        run("ip", "link", "set", FAR, "up")
        return {}

    def join(self) -> Answer:
        """Create a subscriber for each way."""
        for name in self._told["ways"]:
            self.rejoin(name)
        return {}

    def rejoin(self, name: str) -> Answer:
        """Replace a subscriber by a new one, which its publisher does not know."""
        ran: dict[str, int] = {}
        if name in self._ways:
            with self._ways.pop(name) as before:
                ran = {model: before.version(model) for model in self._models[name]}
        address, options, wide = self._told["ways"][name]
        zeros = np.zeros(2 * self._told["elements"], np.uint8)
        models = {
            model: {n: tensor.clone() for n, tensor in tensors(zeros, wide=model == WIDE).items()}
            for model in ((MODEL, WIDE) if wide else (MODEL,))
        }
        worker = Subscriber(
            address, models, name=name, settings=Settings(shared_memory=False, **options)
        )
        if not worker.wait_joined(JOIN_SECONDS):
            raise TimeoutError(f"{name}: {address} has not accepted this worker in time")
        self._ways[name], self._models[name] = worker.start(), models
        for model, version in ran.items():
            worker.wait_for_version(model, version, timeout=JOIN_SECONDS)
        return {}

    def digest(self, name: str) -> Answer:
        """Return the digest of the running version."""
        import torch

        value = 0
        for tensor in self._models[name][MODEL].values():
            value = crc32c(tensor.view(torch.uint8).numpy(), value)
        return {"crc": value}

    def pauses(self) -> Answer:
        """Return the time of the last apply of each way, and of a plain copy of the same size."""
        if not self._scratch:
            self._scratch = [np.ones(2 * self._told["elements"], np.uint8) for _ in range(2)]
        to, from_ = self._scratch
        begun = time.perf_counter()
        np.copyto(to, from_)
        memcpy = time.perf_counter() - begun
        return {n: w.update(MODEL).seconds for n, w in self._ways.items()} | {"memcpy": memcpy}

    def memory(self) -> Answer:
        """Return the peak memory since the last call."""
        peak = memory.peak()
        memory.reset_peak()
        return {"peak": peak}


def serve(text: str) -> None:
    """Run the worker's process: answer until the parent closes our standard input."""
    told = json.loads(text)
    if told["address"]:
        own_network()
    asked = Questions(told)
    each = {
        f"{what} {name}": functools.partial(getattr(asked, what), name)
        for what in ("rejoin", "digest")
        for name in told["ways"]
    }
    plain = {what: getattr(asked, what) for what in ("ready", "link", "join", "pauses", "memory")}
    Answers({**plain, **each}).serve()


class Link:
    """The link between publisher and worker, and their processes."""

    def __init__(self, elements: int) -> None:
        run("ip", "link", "add", NEAR, "type", "veth", "peer", "name", FAR)
        run("ip", "address", "add", f"{HERE}/24", "dev", NEAR)
        run("ip", "link", "set", NEAR, "up")
        self._shaped = False
        self.trainers = {name: Trainer(name, HERE) for name in WAYS}
        wide = ("raw", "auto")
        self.worker = worker(
            {n: (t.publisher.address, {}, n in wide) for n, t in self.trainers.items()},
            elements,
            THERE,
        )
        self.worker.ask("ready", ASK_SECONDS)  # the process is now in its network namespace
        run("ip", "link", "set", FAR, "netns", str(self.worker.pid))
        for question in ("link", "join"):
            self.worker.ask(question, ASK_SECONDS)

    def shape(self, rate: int) -> None:
        """Set the link's rate in bits per second; 0: unlimited."""
        if self._shaped:
            run("tc", "qdisc", "delete", "dev", NEAR, "root")
        self._shaped = bool(rate)
        if not rate:
            return
        burst, queue = max(5000, rate // 8000), max(30_000, rate // 160)  # 1 ms, 50 ms
        about = f"rate {rate}bit burst {burst} limit {queue}"
        run("tc", "qdisc", "add", "dev", NEAR, "root", "tbf", *about.split())

    def close(self) -> None:
        """End all processes."""
        self.worker.stop()
        for trainer in self.trainers.values():
            trainer.publisher.close()


def worker(ways: dict[str, Any], elements: int, address: str = "") -> Process:
    """Start the worker's process; with an address, in its own network namespace."""
    told = {"ways": ways, "elements": elements, "address": address}
    return Process("the worker", "links", "--worker", json.dumps(told))


def cell(link: Link, weights: Weights, density: float, rounds: int) -> dict[str, float]:
    """Return the median seconds of each way, measured in turns, and check the applied bytes."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    pair = weights.pair(density)
    for number in range(rounds):
        data, version = pair[number % 2]
        for name, trainer in [*link.trainers.items()][:: -1 if number // 2 % 2 else 1]:
            seconds[name].append(trainer.publish(version))
            wanted = "raw" if trainer.bases.took == "raw" and name != "class" else "delta-1"
            if trainer.came != wanted:
                raise RuntimeError(f"{name}: a version came as {trainer.came!r}, not {wanted!r}")
        if number >= rounds - 2:
            check(link, data)
    return {name: statistics.median(each) for name, each in seconds.items()}


def check(link: Link, data: Bytes) -> None:
    """Check that the worker runs these bytes in all ways."""
    wanted = crc32c(data)
    for name in WAYS:
        if link.worker.ask(f"digest {name}", ASK_SECONDS)["crc"] != wanted:
            raise RuntimeError(f"{name}: other bytes were applied than were published")


def over_links(
    link: Link, weights: Weights, links: Sequence[str], rounds: dict[str, int], rows: Rows
) -> None:
    """Measure each way on each link, the fastest link first."""
    for trainer in link.trainers.values():
        for _ in range(2):  # memory is allocated, and other one-time work is done
            for _, version in weights.pair(SPEEDUP_AT):
                trainer.publish(version)
    for where in links:
        link.shape(LINKS[where] if where in GRID else 0)  # a minute, without a bound for `auto`
        link.worker.ask("rejoin auto", ASK_SECONDS)  # it fetches, which shows the link's rate
        link.shape(LINKS[where])
        for _ in range(2):
            for _, version in weights.pair(SPEEDUP_AT):
                link.trainers["auto"].publish(version)
        densities = weights.changed if where in GRID else (SPEEDUP_AT,)
        for density in densities:
            found = cell(link, weights, density, rounds[where])
            show(where, density, found, link.trainers["auto"].bases.took, rows)
        if where in GRID:
            all_changed(link, weights, where, rounds[where], rows)


def joining(link: Link, weights: Weights, rows: Rows) -> None:
    """Measure the bytes sent to a worker that joins over a link with two seconds per chunk."""
    link.shape(0)
    link.trainers["raw"].publish(tensors(weights.base))
    link.shape(SLOW)
    before = sent()
    link.worker.ask("rejoin raw", ASK_SECONDS)
    name, share = f"{SLOW // 10**6} Mb/s, joining", (sent() - before) / weights.base.nbytes
    judged = rows.judge(name, share, JOINING, least=False)
    rows.say(name, f"bytes sent over those of the model: {judged}")


def sent() -> int:
    """Return the bytes sent to the worker, with all headers."""
    rows = Path("/proc/net/dev").read_text().splitlines()
    return next(int(row.split()[9]) for row in rows if row.strip().startswith(f"{NEAR}:"))


def show(where: str, density: float, found: dict[str, float], took: str, rows: Rows) -> None:
    """Print the results of one link and density, with their bounds."""
    name = f"{where}, {density:.1%} changed"
    times = ", ".join(f"{way} {1e3 * seconds:.1f}" for way, seconds in found.items())
    rows.say(name, f"ms: {times} (took {took})")
    gains = {way: found["raw"] / found[way] for way in PATCHED}
    if density == SPEEDUP_AT and where in SPEEDUP:
        best = max(gains["flat"], gains["class"])
        judged = rows.judge(f"{name}: speedup", best, SPEEDUP[where], least=True)
        each = ", ".join(f"{way} {gain:.1f}" for way, gain in gains.items())
        rows.say("", f"raw over patched: {each}; the better {judged}")
    if where in GRID:
        best = min(seconds for way, seconds in found.items() if way != "auto")
        judged = rows.judge(f"{name}: auto", found["auto"] / best, AUTO, least=False)
        rows.say("", f"auto over the best: {judged}")


def all_changed(link: Link, weights: Weights, where: str, rounds: int, rows: Rows) -> None:
    """Measure the cost of `auto` if all elements of a model of 32 bits change."""
    ratios: list[float] = []
    for number in range(-2, rounds):
        ways = ["raw", "auto"][:: -1 if number // 2 % 2 else 1]
        took = {way: link.trainers[way].publish(weights.wide[number % 2], WIDE) for way in ways}
        if number >= 0:
            ratios.append(took["auto"] / took["raw"])
    name = f"{where}, float32, all changed"
    ratio = statistics.median(ratios)
    rows.say(name, f"auto over raw: {rows.judge(name, ratio, AUTO_WIDE, least=False)}")


@contextmanager
def beside(elements: int) -> Generator[tuple[dict[str, Trainer], Process]]:
    """Run a worker on this host, which applies versions in all ways."""
    options = {"copying": {}, "sole-writer": {"sole_writer": True}, "resident": {"resident": True}}
    with ExitStack() as stack:
        trainers: dict[str, Trainer] = {}
        for name in options:
            trainers[name] = trainer = Trainer("class", "127.0.0.1")
            trainer.name = name
            stack.enter_context(closing(trainer.publisher))
        ways = {n: (t.publisher.address, options[n], False) for n, t in trainers.items()}
        asked = stack.enter_context(worker(ways, elements))
        asked.ask("join", ASK_SECONDS)
        yield trainers, asked


def pauses(weights: Weights, elements: int, rows: Rows) -> None:
    """Measure how long readers wait for a patched version, over a plain copy, and the memory."""
    pair = [version for _, version in weights.pair(SPEEDUP_AT)]
    with beside(elements) as (trainers, asked):
        remember(trainers["copying"], asked, pair, rows)
        for trainer in trainers.values():
            trainer.publish(tensors(weights.base))
        ratios: dict[str, list[float]] = {name: [] for name in trainers}
        for number in range(-4, PAUSE_ROUNDS):
            for trainer in trainers.values():
                trainer.publish(pair[number % 2])
            found = asked.ask("pauses", ASK_SECONDS)
            for name, each in ratios.items():
                if number >= 0:
                    each.append(found[name] / found["memcpy"])
        for name, each in ratios.items():
            value, bounds = statistics.median(each), PAUSES[name]
            judged = (
                f"{value:.3g}" if bounds is None else rows.judge(name, value, bounds, least=False)
            )
            rows.say(f"readers wait, {name}", f"over a memcpy: {judged}")


def remember(trainer: Trainer, asked: Process, pair: Sequence[dict[str, Any]], rows: Rows) -> None:
    """Measure the memory that patches need in addition to versions."""
    nbytes = sum(tensor.nbytes for tensor in pair[0].values())
    peaks: dict[str, list[int]] = {"publisher": [], "worker": []}
    encodings: tuple[Encoding, ...] = ("raw", "delta")
    for encoding in encodings:
        trainer.encoding = encoding
        for number in range(2 * MEMORY_ROUNDS):
            if number == MEMORY_ROUNDS:
                asked.ask("memory", ASK_SECONDS)
                memory.reset_peak()
            trainer.publish(pair[number % 2])
        peaks["worker"].append(asked.ask("memory", ASK_SECONDS)["peak"])
        peaks["publisher"].append(memory.peak())
    for who, (without, with_) in peaks.items():
        most = MEMORY[who]
        bounds = most + MEMORY_SLACK, most
        value = (with_ - without) / nbytes
        judged = rows.judge(f"{who}: memory", value, bounds, least=False)
        rows.say(f"memory, {who}", f"models beyond raw: {judged}")


def main(words: list[str]) -> int:
    """Measure everything; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of the model, a multiple of 8")
    parser.add_argument("--quick", action="store_true", help="a small model, and few rounds")
    parser.add_argument("--joining", action="store_true", help="what joining takes, and no more")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # for the child process
    told = parser.parse_args(words)
    if told.worker:
        serve(told.worker)
        return 0
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() or missing:
        print(f"needs root, and ip and tc of iproute2; missing: {', '.join(missing) or 'root'}")
        return 2
    own_network()
    console = Console(width=160)
    print_machine(describe(), console)
    rows = Rows(console, judged=not told.quick)
    mib, densities = (8, (0.01, 1.0)) if told.quick else (told.mib, DENSITIES)
    if told.joining:
        weights = Weights(JOINING_MIB * 2**19, densities[:1])
        with closing(Link(JOINING_MIB * 2**19)) as link:
            joining(link, weights, rows)
        return int(bool(rows.missed))
    links = [name for name in LINKS if not told.quick or name != "10 Mb/s"]
    rounds = dict.fromkeys(LINKS, 2) if told.quick else ROUNDS
    elements, begun = mib * 2**19, time.monotonic()
    weights = Weights(elements, densities)
    pauses(weights, elements, rows)
    with closing(Link(elements)) as link:
        over_links(link, weights, links, rounds, rows)
    seconds = time.monotonic() - begun
    console.print(
        f"{mib} MiB in bfloat16, {seconds:.0f} s; missed: {', '.join(rows.missed) or 'none'}"
    )
    return int(bool(rows.missed) and rows.judged)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
