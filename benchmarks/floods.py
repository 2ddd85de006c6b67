"""Flood a publisher in every way we know and say what it costs: `python benchmarks/floods.py`.

Before each flood the bus is calm for a while; then come the flood, and a time in which it is over.
Memory is held against what it was before, and the honest workers' publishes against all calm times
of the run. Choose floods with `--only hellos,topics`. A broken bound ends with status 1.
With `--keys` the publisher and its workers have keys, and whoever floods has none. `--publisher
rust` floods the core's publisher, whose driver is built before: `make -C rust_client driver`.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weightbus.benchmarks.attacks import ATTACKS
from weightbus.benchmarks.fleet import START_SECONDS
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.memory import PrivatePeak, private
from weightbus.benchmarks.process import Process
from weightbus.benchmarks.report import print_machine
from weightbus.bus.trust.keys import generate
from weightbus.python_client.keys import KEYS

MIB = 2**20
PEAK_MIB = 64.0  # over what it was before
LATER_MIB = 16.0  # over that, when the flood has been over for `LATER_SECONDS`
LATER_SECONDS = 10.0
TIMES_BASE = 3.0  # the honest workers' 99th percentile over that of calm times
SHAPE, WORKERS = "2MiB/20", 2
ANSWER_SECONDS = 30.0
WIDTH = 120


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a flood did.

    Attributes:
        calm, flooded: Seconds of each publish, before and meanwhile.
        peak, later: Bytes over base: the most, and at the end.
        cpu: Cores that the publisher's process took.
        sent, dialled: Bytes and connections of the attacker.
    """

    name: str
    calm: list[float]
    flooded: list[float]
    peak: int
    later: int
    cpu: float
    sent: int
    dialled: int


class Target:
    """The flooded publisher's process, from outside."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.addresses = process.answer(START_SECONDS)
        self._pid: int = self.addresses["pid"]

    def after(self, seconds: float) -> list[float]:
        """Let so much time pass; return how long publishes took meanwhile."""
        self._process.ask("seconds", ANSWER_SECONDS)
        time.sleep(seconds)
        found: list[float] = self._process.ask("seconds", ANSWER_SECONDS)["seconds"]
        return found

    def flood(self, name: str, calm_seconds: float, seconds: float) -> Outcome:
        """Measure one attack."""
        attack, pid = ATTACKS[name], self._pid
        calm = self.after(calm_seconds)
        base = private(pid)
        with PrivatePeak(pid) as peak:
            usual = _limit_descriptors(pid, attack.descriptors)
            addresses = (self.addresses["control"], self.addresses["data"])
            with Process(name, "attacks", name, *addresses) as attacker:
                cpu, began = _cpu_seconds(pid), time.monotonic()
                flooded = self.after(seconds)
                cpu = (_cpu_seconds(pid) - cpu) / (time.monotonic() - began)
                told = attacker.end(ANSWER_SECONDS)
            _limit_descriptors(pid, usual)
            time.sleep(LATER_SECONDS)
        later = private(pid) - base
        self._process.ask("check", ANSWER_SECONDS)
        return Outcome(name, calm, flooded, peak.nbytes - base, later, cpu, **told)


def _limit_descriptors(pid: int, soft: int) -> int:
    """Set another process's limit of descriptors, unless it is 0; return what it was."""
    before, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    if soft:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    return before


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _percentile(seconds: list[float], percent: int) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def misses(outcome: Outcome, base: list[float]) -> list[str]:
    """Return which bounds were broken, in words."""
    found: list[str] = []
    if outcome.peak > PEAK_MIB * MIB:
        found.append(f"peak above {PEAK_MIB:.0f} MiB")
    if outcome.later > LATER_MIB * MIB:
        found.append(f"more than {LATER_MIB:.0f} MiB stay")
    if len(outcome.flooded) < 2:
        found.append("nothing was published")
    elif _percentile(outcome.flooded, 99) > TIMES_BASE * _percentile(base, 99):
        found.append(f"p99 above {TIMES_BASE:.0f} times calm")
    return found


def table_of(outcomes: list[Outcome], base: list[float], publisher: str) -> Table:
    """Return the table for a person."""
    title = f"floods of a publisher in {publisher}, {SHAPE}, {WORKERS} honest workers"
    table = Table(title=title, title_justify="left")
    table.add_column("flood")
    table.add_column("")
    for heading in ("peak MiB", "10 s later", "p50 ms", "p99 ms", "p99/calm", "cores", "MB sent"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    calm = _percentile(base, 50), _percentile(base, 99)
    table.add_row("calm", "", "", "", *(f"{1e3 * each:.1f}" for each in calm), "1.0", "", "", "")
    for o in outcomes:
        attack, seconds = ATTACKS[o.name], o.flooded
        p50, p99 = (_percentile(seconds, p) if len(seconds) > 1 else float("nan") for p in (50, 99))
        missed = misses(o, base)
        table.add_row(
            o.name,
            f"{attack.what} ({attack.connections}; {o.dialled} dialled)",
            f"{o.peak / MIB:+.1f}",
            f"{o.later / MIB:+.1f}",
            f"{1e3 * p50:.1f}",
            f"{1e3 * p99:.1f}",
            f"{p99 / calm[1]:.1f}",
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
    parser.add_argument("--calm", type=float, default=4.0, help="seconds before each")
    found = parser.parse_args(words)
    alone = [name for name in found.only if ATTACKS[name].keyed]
    if alone and not found.keys:
        parser.error(f"{', '.join(alone)}: give --keys, these are floods of publishers with keys")
    return found


def _floods(text: str) -> list[str]:
    unknown = set(text.split(",")) - set(ATTACKS)
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no floods {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}"
        )
    return text.split(",")


def main(words: list[str]) -> int:
    """Measure and report; return 1 if a bound is broken."""
    arguments = parse(words)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    print_machine(describe(), console)
    outcomes: list[Outcome] = []
    chosen = arguments.only or [n for n, a in ATTACKS.items() if arguments.keys or not a.keyed]
    with ExitStack() as stack:
        if arguments.keys:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            generate(Path(folder), {"*": "worker"})
            os.environ[KEYS] = folder  # for the processes that this one starts
        status = stack.enter_context(console.status(""))
        told = (SHAPE, str(WORKERS), arguments.publisher)
        process = stack.enter_context(Process("publisher", "flooded", *told))
        target = Target(process)
        target.after(arguments.calm)  # the first versions touch fresh memory
        for name in chosen:
            status.update(f"{name}: {ATTACKS[name].what}")
            outcomes.append(target.flood(name, arguments.calm, arguments.seconds))
    base = [seconds for outcome in outcomes for seconds in outcome.calm]
    how = f"{arguments.publisher.title()} {'with' if arguments.keys else 'without'} keys"
    console.print(table_of(outcomes, base, how))
    return 1 if any(misses(o, base) for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
