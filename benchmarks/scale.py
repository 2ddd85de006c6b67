"""Measure trees of relays over shaped links: `python benchmarks/scale.py`, or `make scale`.

A host sends at most 200 Mb/s, and receives without a limit. With root, each host is a network
namespace with a link to a switch. Without root, it is an address of the loopback device, with a
proxy that limits what its publisher or relay sends (`--links proxies`). Everything is removed at
the end. A row is a ratio of two trees, printed with the optimum by arithmetic: a publisher that
sends N copies over one link needs N times as long as for one, and a chunk through K relays is late
by K chunks. The measured time is from `publish` to its receipt, which has every worker. A row that
misses its bound ends the program with status 1. It takes five minutes; the links limit the speed,
but a busy machine is slower.

Other measurements of scale: `benchmarks/relay.py` measures time and memory over loopback, and
`tests/simulation/scale.py` counts the messages of 10,000 workers.
"""

import argparse
import ctypes
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from math import inf, isinf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from weightbus import ClosedError, Publisher, Relay, Settings, Subscriber
from weightbus.benchmarks.fleet import ANSWER_SECONDS, START_SECONDS
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.process import Answer, Answers, Process
from weightbus.benchmarks.report import print_machine
from weightbus.benchmarks.throttled import Link

MODEL, PORT = "policy", 5555
HUB, HOST, BRIDGE, LINK = "wbshub", "wbs", "wbsbr", "wbsv"  # namespaces and devices
NETWORK = "10.79.0"
RATE = "rate 200mbit burst 128kb limit 1mb"
BYTES_PER_SECOND, BURST = 25e6, 2**17  # the same
# Without namespaces: the networks of the servers, and of the proxies before them.
LOOPBACK, PROXIES = "127.79.0", "127.80.0"
CHUNK, MIB = 2**20, 2**20
PUBLISH_SECONDS = 120.0
NEWNET = 0x40000000  # CLONE_NEWNET of setns(2)
SMALL = 2**14  # number of elements of the model for the publisher's processor time
CROWD = 100  # number of workers of each relay for that
FOREVER = 86_400.0


class Bound(NamedTuple):
    """A row: its bounds, and whether more is better."""

    what: str
    optimum: float
    must: float
    reach: float
    more: bool

    def kept(self, value: float) -> bool:
        """Return whether a measured value keeps the bound."""
        return value >= self.must if self.more else value <= self.must


Rows = dict[str, tuple[Bound, Callable[[], float]]]  # by name, what is measured

NEAR = Bound("8 workers on the hosts of 2 relays, over flat: times faster", 4, 3, 3.7, True)
FAR = Bound("8 workers on hosts behind 2 relays, over flat: times faster", 2, 1.7, 1.95, True)
CHAIN = Bound("a chain of 4 relays over one of 1: times as long", 1.05, 1.12, 1.06, False)
BYTES = Bound("bytes to a relay's host with 8 workers, over the version's", 1, 1.02, 1.005, False)
KILLED = Bound("a relay is killed: seconds until its workers have the version", 0, 2, 0.5, False)
ORIGIN = Bound(
    f"the publisher's processor time, 2 relays with {CROWD} workers each over 2 workers",
    *(1, 1.25, 1.08),
    more=False,
)
ORIGIN_SMALL = Bound(
    "the same with 64 KiB: no bound, for it is the price of naming each worker",
    *(1, inf, inf),
    more=False,
)


# The processes.


def enter(host: int) -> None:
    """Move this process into the namespace of a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{HOST}{host}", "rb") as namespace:
        if libc.setns(namespace.fileno(), NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to host {host}")


def received() -> int:
    """Return the bytes that this host has received over its link."""
    (line,) = [x for x in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in x]
    return int(line.split(":")[1].split()[0])


Questions = dict[str, Callable[[], Answer]]


def publisher(questions: Questions, about: dict[str, Any], undo: ExitStack) -> None:
    """Run a publisher, which publishes when it is asked."""
    settings = Settings(chunk_bytes=CHUNK, data=address_of(about, data=True))
    made = Publisher(address_of(about), insecure=True, settings=settings)
    opened = undo.enter_context(made)
    weights = {"w": np.zeros(about["size"], np.float32)}

    def publish() -> Answer:
        weights["w"] += 1
        cpu, begun = time.process_time(), time.monotonic()
        receipt = opened.publish(MODEL, weights, expect=about["expect"], timeout=PUBLISH_SECONDS)
        cpu = time.process_time() - cpu
        seconds = time.monotonic() - begun
        return {"seconds": seconds, "cpu": cpu, "applied": len(receipt.in_state("applied"))}

    def live() -> Answer:
        found = [w for w in opened.workers().values() if w.state == "live" and not w.relay]
        return {"count": len(found)}

    questions.update(publish=publish, live=live)


def relay(questions: Questions, about: dict[str, Any], undo: ExitStack) -> None:
    """Run a relay."""
    settings = Settings(data=address_of(about, data=True))
    at = about["above"], address_of(about), [MODEL]
    made = Relay(*at, name=f"relay-{about['host']}", insecure=True, settings=settings)
    opened = undo.enter_context(made)
    questions["joined"] = lambda: {"joined": opened.wait_joined(START_SECONDS)}
    questions["received"] = lambda: {"bytes": received()}


def link(questions: Questions, about: dict[str, Any], undo: ExitStack) -> None:
    """Run a proxy that limits what the publisher or relay of a host sends."""
    host = about["host"]
    ends = f"{LOOPBACK}.{host}", f"{PROXIES}.{host}"
    made = Link(*ends, ports_of(host), BYTES_PER_SECOND, BURST)
    opened = undo.enter_context(made)
    questions["sent"] = lambda: {"bytes": opened.sent}


def ports_of(host: int) -> tuple[int, int]:
    """Return the ports of a host; each host has different ones, for the loopback device."""
    return PORT + 2 * host, PORT + 2 * host + 1


def address_of(about: dict[str, Any], *, data: bool = False) -> str:
    """Return the control or data address of a publisher or relay on its host."""
    network = NETWORK if about["namespaces"] else LOOPBACK
    return f"tcp://{network}.{about['host']}:{ports_of(about['host'])[data]}"


def workers(questions: Questions, about: dict[str, Any], undo: ExitStack) -> None:
    """Apply versions, with one or more workers."""
    made = list[Subscriber]()
    settings = Settings(shared_memory=about["near"])  # namespaces share /dev/shm
    # Many workers share one model's memory, to save memory; all write the same values.
    target = {MODEL: {"w": np.zeros(about["size"], np.float32)}}
    for name in about["names"]:
        worker = Subscriber(about["above"], target, name=name, settings=settings)
        made.append(undo.enter_context(worker))

        def receive(worker: Subscriber = worker) -> None:
            with suppress(ClosedError):
                while worker.receive(FOREVER):
                    pass

        threading.Thread(target=receive, daemon=True).start()
    questions["joined"] = lambda: {"joined": all(w.wait_joined(START_SECONDS) for w in made)}


ROLES = {"publisher": publisher, "relay": relay, "link": link, "workers": workers}


def serve(text: str) -> None:
    """Run one of the processes until the parent closes our standard input."""
    about, questions = json.loads(text), Questions()
    if about["namespaces"]:
        enter(about["host"])
    with ExitStack() as undo:
        ROLES[about["role"]](questions, about, undo)
        Answers(questions).serve()


# The hosts, and trees on them.


def run(*words: str) -> None:
    """Run a command, and raise if it fails."""
    subprocess.run(words, check=True, capture_output=True, text=True)  # noqa: S603 - our own


@contextmanager
def hosts(count: int, *, both_ways: bool = False) -> Generator[None]:
    """Make hosts 1 to `count`, and remove them at the end.

    If `both_ways`, links also limit what hosts receive.
    """
    with ExitStack() as undo:
        for name in (HUB, *(f"{HOST}{i}" for i in range(1, count + 1))):
            run("ip", "netns", "add", name)
            undo.callback(run, "ip", "netns", "delete", name)
        hub = ("ip", "-n", HUB, "link")
        run(*hub, "add", BRIDGE, "type", "bridge")
        run(*hub, "set", BRIDGE, "up")
        for i in range(1, count + 1):
            name, link = f"{HOST}{i}", f"{LINK}{i}"
            run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", link, "netns", HUB)
            run(*hub, "set", link, "master", BRIDGE, "up")
            run("ip", "-n", name, "address", "add", f"{NETWORK}.{i}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", name, "link", "set", device, "up")
            shape = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *RATE.split())
            run("ip", "netns", "exec", name, *shape)
            if both_ways:  # what the switch sends to the host
                inward = ("dev", link, "root", "tbf", *RATE.split())
                run("ip", "netns", "exec", HUB, "tc", "qdisc", "add", *inward)
        yield


def why_no_namespaces() -> str:
    """Return why network namespaces are not possible on this machine; empty if they are."""
    for words in (("ip", "-V"), ("tc", "-V"), ("unshare", "--net", "true")):
        try:
            run(*words)
        except OSError as error:
            return f"{words[0]}: {error.strerror}"
        except subprocess.CalledProcessError as error:
            return str(error.stderr).strip() or f"{words[0]} has failed"
    return ""


class Tree:
    """A publisher on host 1, with relays and workers on other hosts.

    Args:
        relays: By host, the host of the publisher or relay above.
        workers: (host, hosts of the publisher or relays in order of preference, number of workers).
        size: Numbers of float32 of the model.
        undo: Ends the processes.
        namespaces: Whether hosts are network namespaces; else they have proxies.
    """

    def __init__(
        self,
        relays: dict[int, int],
        workers: Sequence[tuple[int, Sequence[int], int]],
        size: int,
        undo: ExitStack,
        *,
        namespaces: bool,
    ) -> None:
        self._undo, self._size, self._namespaces = undo, size, namespaces
        self.count = sum(count for _, _, count in workers)
        senders = () if namespaces else (1, *relays)
        self._links = {host: self._start("link", host) for host in senders}
        self.publisher = self._start("publisher", 1, expect=self.count)
        above = {host: [self._at(up)] for host, up in relays.items()}
        self.relays = {h: self._start("relay", h, above=above[h]) for h in relays}
        started = list[Process]()
        for number, (host, ups, count) in enumerate(workers):
            names = [f"w{number}-{i}" for i in range(count)]
            near = [*ups] == [host]
            places = [self._at(up, near=near) for up in ups]
            started.append(self._start("workers", host, above=places, names=names, near=near))
        for process in (*self.relays.values(), *started):
            if not process.ask("joined", START_SECONDS)["joined"]:
                raise TimeoutError(f"{process.name} has not joined")
        deadline = time.monotonic() + START_SECONDS
        while self.publisher.ask("live", ANSWER_SECONDS)["count"] < self.count:
            if time.monotonic() > deadline:
                raise TimeoutError("not all workers are on the publisher's roster")
            time.sleep(0.05)

    def _at(self, host: int, *, near: bool = False) -> str:
        """Return the address of a host's publisher or relay; `near`: for workers on that host."""
        network = NETWORK if self._namespaces else LOOPBACK if near else PROXIES
        return f"tcp://{network}.{host}:{ports_of(host)[0]}"

    def _start(self, role: str, host: int, **more: Any) -> Process:
        fixed = {"role": role, "host": host, "size": self._size, "namespaces": self._namespaces}
        about = json.dumps({**fixed, **more})
        return self._undo.enter_context(Process(f"{role} on host {host}", "scale", about))

    def received(self, host: int) -> int:
        """Return the bytes sent to a relay's host; with proxies, all bytes from the publisher."""
        if self._namespaces:
            return int(self.relays[host].ask("received", ANSWER_SECONDS)["bytes"])
        return int(self._links[1].ask("sent", ANSWER_SECONDS)["bytes"])

    def publish(self) -> Answer:
        """Publish another version, and return its seconds and processor time."""
        answer = self.publisher.ask("publish", PUBLISH_SECONDS + ANSWER_SECONDS)
        if answer["applied"] != self.count:
            raise RuntimeError(f"{answer['applied']} of {self.count} workers applied the version")
        return answer


class Measured:
    """Measures trees, and caches the results."""

    def __init__(self, mib: int, rounds: int, *, namespaces: bool) -> None:
        self._size, self._rounds = mib * MIB // 4, rounds
        self._nbytes, self._namespaces = mib * MIB, namespaces

    def _seconds(
        self, relays: dict[int, int], workers: Sequence[tuple[int, Sequence[int], int]]
    ) -> float:
        """Return the least seconds of a publish; the first publish does not count."""
        with ExitStack() as undo:
            tree = Tree(relays, workers, self._size, undo, namespaces=self._namespaces)
            tree.publish()
            return min(tree.publish()["seconds"] for _ in range(self._rounds))

    @functools.cached_property
    def flat(self) -> float:
        """Seconds for 8 workers on hosts of their own, each connected to the publisher."""
        return self._seconds({}, [(2 + i, [1], 1) for i in range(8)])

    def near(self) -> float:
        """Return how many times faster 8 workers on the hosts of 2 relays are."""
        return self.flat / self._seconds({2: 1, 3: 1}, [(2, [2], 4), (3, [3], 4)])

    def far(self) -> float:
        """Return how many times faster 8 workers on hosts behind 2 relays are."""
        behind = [(4 + i, [2 + i % 2], 1) for i in range(8)]
        return self.flat / self._seconds({2: 1, 3: 1}, behind)

    def chain(self) -> float:
        """Return the ratio of a chain of four relays to one relay."""
        one = self._seconds({2: 1}, [(3, [2], 1)])
        return self._seconds({2: 1, 3: 2, 4: 3, 5: 4}, [(6, [5], 1)]) / one

    def bytes(self) -> float:
        """Return the bytes on the link to a relay's host with 8 workers, in versions."""
        with ExitStack() as undo:
            tree = Tree({2: 1}, [(2, [2], 8)], self._size, undo, namespaces=self._namespaces)
            tree.publish()
            before = tree.received(2)
            for _ in range(self._rounds):
                tree.publish()
            return float(tree.received(2) - before) / self._rounds / self._nbytes

    def killed(self) -> float:
        """Return the ratio to the optimum of a publish whose relay is killed half-way.

        The other relay's link then carries both remaining halves: as much as one more publish.
        """
        with ExitStack() as undo:
            ends = [(4, [2, 3], 1), (5, [3, 2], 1)]
            tree = Tree({2: 1, 3: 1}, ends, self._size, undo, namespaces=self._namespaces)
            tree.publish()
            undisturbed = tree.publish()["seconds"]
            tree.publisher.tell("publish")
            time.sleep(undisturbed / 2)
            os.kill(tree.relays[2].pid, 9)
            answer = tree.publisher.answer(PUBLISH_SECONDS)
            if answer["applied"] != tree.count:
                raise RuntimeError(f"{answer['applied']} of {tree.count} workers have it")
            return max(0.0, float(answer["seconds"]) - 1.5 * undisturbed)

    def origin(self) -> float:
        """Return the publisher's processor time with relays over that with direct workers."""
        return self._origin(self._size, 2 * self._rounds)

    def origin_small(self) -> float:
        """Return the same for a model so small that the reports are most of the work."""
        return self._origin(SMALL, 10 * self._rounds)

    def _origin(self, size: int, rounds: int) -> float:
        def cpu(relays: dict[int, int], workers: Sequence[tuple[int, Sequence[int], int]]) -> float:
            with ExitStack() as undo:
                tree = Tree(relays, workers, size, undo, namespaces=self._namespaces)
                tree.publish()
                return sum(tree.publish()["cpu"] for _ in range(rounds)) / rounds

        direct = cpu({}, [(2, [1], 1), (3, [1], 1)])
        return cpu({2: 1, 3: 1}, [(2, [2], CROWD), (3, [3], CROWD)]) / direct


def report(rows: Rows, only: str | None) -> None:
    """Measure, print a row for each bound, and end with status 1 if one is missed.

    Args:
        rows: By name.
        only: The names of the rows to measure, separated by commas; None: all.
    """
    console, missed = Console(), False
    print_machine(describe(), console)
    table = Table("row", "optimum", "measured", "must", "reach", "")
    for name in only.split(",") if only else rows:
        bound, measure = rows[name]
        value = measure()
        kept = bound.kept(value)
        missed |= not kept
        known = (bound.optimum, value, bound.must, bound.reach)
        numbers = ("" if isinf(x) else f"{x:.3g}" for x in known)
        table.add_row(bound.what, *numbers, "kept" if kept else "MISSED")
        console.print(f"{name}: {value:.3f}", highlight=False)
    console.print(table)
    sys.exit(1 if missed else 0)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description="Measure trees of relays over shaped links.")
    parser.add_argument("--mib", type=int, default=64, help="size of the model (default: 64)")
    parser.add_argument("--rounds", type=int, default=2, help="versions of each tree")
    parser.add_argument("--only", help="names of rows, with commas: near, far, chain, ...")
    ways = "namespaces", "proxies"
    parser.add_argument(
        "--links", choices=ways, help="what limits them (default: namespaces, if permitted)"
    )
    asked = parser.parse_args()
    why = why_no_namespaces() if asked.links is None else ""
    namespaces = asked.links == "namespaces" or (asked.links is None and not why)
    print(f"links: {ways[0] if namespaces else ways[1]}" + (f", since {why}" if why else ""))
    measured = Measured(asked.mib, asked.rounds, namespaces=namespaces)
    rows: Rows = {
        "near": (NEAR, measured.near),
        "far": (FAR, measured.far),
        "chain": (CHAIN, measured.chain),
        "bytes": (BYTES, measured.bytes),
        "killed": (KILLED, measured.killed),
        "origin": (ORIGIN, measured.origin),
        "origin-small": (ORIGIN_SMALL, measured.origin_small),
    }
    with hosts(11) if namespaces else nullcontext():
        report(rows, asked.only)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        serve(sys.argv[1])
    else:
        main()
