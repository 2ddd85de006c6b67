"""Flood a publisher in all known ways and measure the effect: `python benchmarks/floods.py`.

Each flood has three parts: a calm time, the flood, and a time after it. The memory is compared with
its peak in the calm time, and the honest workers' publishes with all calm times of the run. A
worker pings all the time; in some floods, other workers join one after another. Choose floods with
`--only hellos,topics`. If a bound is broken, the status is 1. With `--keys` the publisher and its
workers have keys; the attackers have none, except in floods by an allowed worker. `--publisher
rust` floods the publisher in Rust, whose driver must be built: `make -C rust_client driver`. A
publisher that ends is replaced for the next flood; `--only noise --seconds 600` measures after how
long noise ends it. On a busy host use `--nice 0`, so that the attackers get processor time.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from weightbus.benchmarks.attacks import ATTACKS, LOWEST_PRIORITY, MIB
from weightbus.benchmarks.fleet import START_SECONDS
from weightbus.benchmarks.flooded import Setup
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.memory import PrivatePeak, private
from weightbus.benchmarks.probes import Pongs, joins
from weightbus.benchmarks.process import Process, ProcessError
from weightbus.benchmarks.report import print_machine
from weightbus.benchmarks.victim import ANSWER_SECONDS, EndedError, Victim, keys_for_all

LATER_SECONDS = 10.0  # seconds after a flood until memory is measured again
TIMES_BASE = 3.0  # bound of the honest workers' 99th percentile over the calm times'
JOINS, JOIN_SECONDS = 10, 1.0
LOOK_SECONDS = 1.0  # seconds between two checks whether the publisher lives
WAITED_MAX = 0.8  # largest share of the time in which the attacker waits for a processor
LEAP_MS = 86_400_000  # how far an epoch may be ahead of this host's clock: a day
WIDTH = 150


@dataclass(slots=True)
class Outcome:
    """The results of a flood.

    Attributes:
        setup: The attacked publisher.
        began: When the flood started.
        calm, flooded: The seconds of each publish before and during the flood.
        peak, later: Bytes above the base: the peak, and at the end.
        cpu: The number of cores that the publisher's process used.
        sent, dialled: Bytes and connections of the attacker.
        waited: The share of the time in which the attacker waited for a processor.
        pong: The longest time for an answer to a ping, in seconds.
        joined: For each worker that tried to join, whether it succeeded.
        wrong: Texts about other faults.
    """

    name: str
    setup: Setup
    began: float = 0.0
    calm: list[float] = field(default_factory=list[float])
    flooded: list[float] = field(default_factory=list[float])
    peak: int = 0
    later: int = 0
    cpu: float = 0.0
    sent: int = 0
    dialled: int = 0
    waited: float = 0.0
    pong: float = 0.0
    joined: list[bool] = field(default_factory=list[bool])
    wrong: list[str] = field(default_factory=list[str])


def flood(victim: Victim, name: str, calm_seconds: float, seconds: float, nice: int) -> Outcome:
    """Measure one attack."""
    attack, pid = ATTACKS[name], victim.pid
    outcome = Outcome(name, victim.setup)
    outcome.began = time.monotonic()
    try:
        with PrivatePeak(pid) as before:
            outcome.calm = _pass(victim, calm_seconds, outcome)
        victim.log()
        with PrivatePeak(pid) as peak, _limited(pid, attack.descriptors):
            _attack(victim, outcome, seconds, nice)
            time.sleep(LATER_SECONDS)
        outcome.peak, outcome.later = peak.nbytes - before.nbytes, private(pid) - before.nbytes
        epoch = victim.check()["epoch"]
        if not victim.epoch <= epoch <= 1000 * time.time() + LEAP_MS:
            outcome.wrong.append(f"the epoch has moved from {victim.epoch} to {epoch}")
        if attack.heard:
            outcome.wrong += _unheard(victim.log(), len(outcome.joined))
    except EndedError as error:
        outcome.wrong.append(f"ended after {time.monotonic() - outcome.began:.0f} s: {error}")
    return outcome


def _attack(victim: Victim, outcome: Outcome, seconds: float, nice: int) -> None:
    attack, pid = ATTACKS[outcome.name], victim.pid
    addresses = json.dumps(victim.addresses)
    with (
        Pongs(victim.addresses["control"]) as pongs,
        Process(outcome.name, "attacks", outcome.name, addresses, str(nice)) as attacker,
    ):
        attacker.answer(START_SECONDS)
        cpu = _cpu_seconds(pid)
        began = outcome.began = time.monotonic()
        try:
            for number in range(JOINS if attack.joins else 0):
                outcome.flooded += _pass(victim, seconds / JOINS, outcome)
                came = joins(victim.addresses["control"], _late(number), JOIN_SECONDS)
                outcome.joined.append(came)
            left = seconds - (time.monotonic() - began)
            outcome.flooded += _pass(victim, left, outcome)
            outcome.cpu = (_cpu_seconds(pid) - cpu) / (time.monotonic() - began)
        finally:
            outcome.pong = pongs.longest
            with contextlib.suppress(ProcessError):
                told = attacker.end(ANSWER_SECONDS)
                outcome.sent, outcome.dialled = told["sent"], told["dialled"]
                outcome.waited = told["waited"]


def _pass(victim: Victim, seconds: float, outcome: Outcome) -> list[float]:
    """Wait for some seconds; return the times of publishes during the wait."""
    found: list[float] = []
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_SECONDS))
        publishes = victim.publishes()
        found += publishes.seconds
        if publishes.failed and not any(text.startswith("a publish") for text in outcome.wrong):
            outcome.wrong.append(f"a publish failed: {publishes.failed}")
    return found


def _late(number: int) -> str:
    return f"late-{number}"


def _unheard(lines: list[str], count: int) -> list[str]:
    names = [_late(number) for number in range(count)]
    missing = [n for n in names if not any(f"worker {n} joined" in line for line in lines)]
    return [f"no word of {', '.join(missing)} in a log of {len(lines)} lines"] if missing else []


@contextlib.contextmanager
def _limited(pid: int, soft: int) -> Generator[None]:
    """Limit the descriptors of another process in this block; 0: no limit."""
    before, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    if soft:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (before, hard))


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _percentile(seconds: list[float], percent: int) -> float:
    if len(seconds) < 2:
        return math.nan
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def broken(outcome: Outcome) -> list[str]:
    """Return texts about broken bounds that do not depend on other floods."""
    attack = ATTACKS[outcome.name]
    found = list(outcome.wrong)
    if outcome.waited > WAITED_MAX:
        found.append(f"no flood: it waited for a processor {outcome.waited:.0%} of the time")
    if outcome.peak > attack.peak_mib * MIB:
        found.append(f"peak above {attack.peak_mib:.0f} MiB")
    if outcome.later > attack.later_mib * MIB:
        found.append(f"more than {attack.later_mib:.0f} MiB stay")
    if attack.pong and outcome.pong > attack.pong:
        found.append(f"a pong takes more than {1000 * attack.pong:.0f} ms")
    if not all(outcome.joined):
        found.append(f"{sum(outcome.joined)} of {len(outcome.joined)} joined in {JOIN_SECONDS:g} s")
    return found


def misses(outcome: Outcome, base: list[float]) -> list[str]:
    """Return texts about all broken bounds."""
    found = broken(outcome)
    if len(outcome.flooded) < 2:
        found += [] if outcome.wrong else ["nothing was published"]
    elif _percentile(outcome.flooded, 99) > TIMES_BASE * _percentile(base, 99):
        found.append(f"p99 above {TIMES_BASE:.0f} times calm")
    return found


def table_of(outcomes: list[Outcome], base: list[float]) -> Table:
    """Return the table of the floods of one setup."""
    setup = outcomes[0].setup
    table = Table(title=f"{setup.shape}, {setup.workers} honest workers", title_justify="left")
    table.add_column("flood")
    table.add_column("")
    for heading in ("peak MiB", "10 s later", "p50 ms", "p99 ms", "p99/calm"):
        table.add_column(heading, justify="right")
    for heading in ("longest pong ms", "joins", "cores", "MB sent"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    calm = _percentile(base, 50), _percentile(base, 99)
    table.add_row("calm", "", "", "", *(f"{1e3 * each:.1f}" for each in calm), "1.0")
    for o in outcomes:
        attack, seconds = ATTACKS[o.name], o.flooded
        p50, p99 = _percentile(seconds, 50), _percentile(seconds, 99)
        missed = misses(o, base)
        table.add_row(
            o.name,
            f"{attack.what} ({attack.connections}; {o.dialled} dialled)",
            f"{o.peak / MIB:+.1f}",
            f"{o.later / MIB:+.1f}",
            f"{1e3 * p50:.1f}",
            f"{1e3 * p99:.1f}",
            f"{p99 / calm[1]:.1f}",
            f"{1e3 * o.pong:.1f}",
            f"{sum(o.joined)}/{len(o.joined)}" if o.joined else "",
            f"{o.cpu:.2f}",
            f"{o.sent / 1e6:.1f}",
            f"[red]{'; '.join(missed)}[/red]" if missed else "[green]held[/green]",
        )
    return table


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=_floods, default=[], help="else all")
    parser.add_argument("--keys", action="store_true", help="have keys, against who has none")
    parser.add_argument("--publisher", choices=("python", "rust"), default="python")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each flood")
    text = "of the attackers that take all that they get"
    parser.add_argument("--nice", type=int, default=LOWEST_PRIORITY, help=text)
    parser.add_argument("--calm", type=float, default=4.0, help="seconds before each")
    found = parser.parse_args(words)
    alone = [name for name in found.only if ATTACKS[name].keyed]
    if alone and not found.keys:
        parser.error(f"{', '.join(alone)}: give --keys, these are floods of publishers with keys")
    others = [n for n in found.only if ATTACKS[n].only not in (None, found.publisher)]
    if others:
        parser.error(f"{', '.join(others)}: not of a publisher in {found.publisher}")
    return found


def _floods(text: str) -> list[str]:
    unknown = set(text.split(",")) - set(ATTACKS)
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no floods {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}"
        )
    return text.split(",")


def measure(names: list[str], given: argparse.Namespace) -> list[Outcome]:
    """Measure floods one after another, of the same publisher as long as it lives."""
    console = Console(stderr=True)
    outcomes: list[Outcome] = []
    names = sorted(names, key=lambda name: list(_setups()).index(ATTACKS[name].setup))
    with console.status("") as status, ExitStack() as stack:
        victim: Victim | None = None
        for name in names:
            status.update(f"{name}: {ATTACKS[name].what}")
            setup = replace(ATTACKS[name].setup, language=given.publisher)
            if victim is None or victim.setup != setup:
                stack.close()
                victim = stack.enter_context(Victim(setup))
                _settle(victim, given.calm)
            outcomes.append(flood(victim, name, given.calm, given.seconds, given.nice))
            if broken(outcomes[-1]):
                victim = None
    return outcomes


def _settle(victim: Victim, seconds: float) -> None:
    """Wait until the first versions, which touch new memory, have been published."""
    with contextlib.suppress(EndedError):
        _pass(victim, seconds, Outcome("", victim.setup))


def _setups() -> dict[Setup, None]:
    return dict.fromkeys(attack.setup for attack in ATTACKS.values())


def main(words: list[str]) -> int:
    """Measure and report; return 1 if a bound is broken."""
    given = parse(words)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    print_machine(describe(), console)
    chosen = given.only or [
        name
        for name, attack in ATTACKS.items()
        if (given.keys or not attack.keyed) and attack.only in (None, given.publisher)
    ]
    with keys_for_all() if given.keys else contextlib.nullcontext():
        outcomes = measure(chosen, given)
    how = "with" if given.keys else "without"
    console.print(f"floods of a publisher in {given.publisher.title()} {how} keys")
    missed = False
    for setup in dict.fromkeys(o.setup for o in outcomes):
        those = [o for o in outcomes if o.setup == setup]
        base = [seconds for o in those for seconds in o.calm]
        console.print(table_of(those, base))
        missed = missed or any(misses(o, base) for o in those)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
