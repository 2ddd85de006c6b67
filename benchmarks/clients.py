"""Measure every client beside the Python worker: `python benchmarks/clients.py [--against PATH]`.

One publisher, and for each language a worker that its conformance driver runs, with a model of its
own; beside them the cost of the transport alone. All are alive together and take turns, one at a
time. What counts is the time from the call of publish to that worker's `applied`, and the processor
time of the worker's process, in ratio to the Python worker's in the same round: that of another
checkout, if one is given. Every version proves which transport it took: what came over the network
was hashed, what was read from shared memory was not. How late event loops are is seen afterwards,
in workers of their own: the timers that tell it take time, too.

All have keys where WEIGHTBUS_KEYS names a folder of `weightbus keygen DIR '*'`.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weightbus import Publisher, PublishError, Settings
from weightbus.benchmarks import memory, report
from weightbus.benchmarks.bus import TRANSPORTS, Transport, transport_of
from weightbus.benchmarks.cases import plan
from weightbus.benchmarks.comparison import (
    PROCESS_BYTES,
    PUBLISH_SECONDS,
    WARM_UP,
    Plan,
    Result,
    Spread,
    host,
    introduced,
    over,
)
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.model import Model, Shape
from weightbus.benchmarks.process import Process, ProcessError
from weightbus.tests.conformance.driver import Driver, Fault, Options
from weightbus.tests.conformance.languages import Language, NotBuiltError, chosen

SIZES = "256MiB/100,256KiB/20"
EVENT_LOOPS = ("node",)  # whose drivers say how late it was
PYTHON, BEFORE = "python", "python-before"  # the second is of another checkout
LIMIT: Mapping[Transport, str] = {"network": "raw_tcp", "shared": "fill_copy"}
WIDTH = 120  # characters
JOIN_SECONDS, ASK_SECONDS = 60.0, 60.0
DRIVER_SECONDS = 1_800  # after which a driver ends, whatever becomes of us
COPIES = 5  # of the model for each client: two at the publisher, three in the worker
IDLE_SECONDS, IDLE_SHARE_MAX = 1.0, 0.3  # of a processor, for a worker to which nothing is sent


@dataclass
class Client:
    """One client in one comparison.

    Attributes:
        model: The id of its model.
        rounds: Seconds of every publish that counts, by round.
        cpu: Processor seconds of its process for each of them, by round.
        delays: Milliseconds for which its event loop was late, where a driver says that.
        busy: The share of a processor that it takes while nothing is sent to it.
    """

    model: str
    title: str
    start: Callable[[str, bool], Driver]  # by its name, and whether it says how late its loop was
    driver: Driver
    rounds: list[list[float]] = field(default_factory=list[list[float]])
    cpu: list[list[float]] = field(default_factory=list[list[float]])
    delays: list[float] = field(default_factory=list[float])
    busy: float = 0.0


@dataclass(frozen=True, slots=True)
class Entrant:
    """Who takes part: a title, and the driver to start."""

    title: str
    command: list[str]


def before_of(checkout: Path) -> Entrant:
    """Return the Python client of another checkout, which has an environment of its own.

    Raises:
        Fault: There is none, or it imports the package from elsewhere.
    """
    python = checkout.resolve() / ".venv" / "bin" / "python"
    asks = [str(python), "-c", "import weightbus; print(weightbus.__file__)"]
    try:
        done = subprocess.run(  # noqa: S603 - our own package
            asks, cwd="/", capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Fault(
            f"{checkout}: no weightbus there, run `make .venv/installed`: {error}"
        ) from None
    here = checkout.resolve()  # of an older one the root is the package
    if Path(done.stdout.strip()).resolve().parent not in (here / "src" / "weightbus", here):
        raise Fault(f"{python} imports {done.stdout.strip()}, not what is in {checkout}")
    driver = checkout.resolve() / "tests" / "conformance" / "python_driver.py"
    return Entrant("Python, before", [str(python), str(driver)])


def entrants(
    languages: Sequence[Language], transport: Transport, before: Entrant | None
) -> dict[str, Entrant]:
    """Return who can take a transport, by model."""
    able = [x for x in languages if transport == "network" or "shared-memory" not in x.unsupported]
    here = {x.key: Entrant(x.title, x.command) for x in able}
    return here if before is None else {BEFORE: before, **here}


def started(
    taking_part: Mapping[str, Entrant],
    planned: Plan,
    transport: Transport,
    stack: ExitStack,
) -> "Round":
    """Start a publisher and all workers, and wait until all have joined."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    publisher = stack.enter_context(
        Publisher(settings=Settings(shared_memory=transport == "shared"))
    )
    weights = Model(planned.shape, zeros=False)
    spec = {n: {"dtype": "F32", "shape": [*a.shape]} for n, a in weights.arrays.items()}
    clients: list[Client] = []
    for key, entrant in taking_part.items():
        options = Options(
            models=(key,),
            in_place={key: spec},
            tensors=False,
            shared=transport == "shared",
            seconds=DRIVER_SECONDS,
        )

        def start(
            name: str,
            loop_delay: bool,
            command: list[str] = entrant.command,
            options: Options = options,
        ) -> Driver:
            asked = replace(options, loop_delay=loop_delay)
            return stack.enter_context(
                closing(Driver(command, publisher.address, name, asked, folder))
            )

        clients.append(Client(key, entrant.title, start, start(key, False)))
        publisher.prepare(key, weights.arrays)
    limit = stack.enter_context(host(LIMIT[transport], planned))
    found = introduced(LIMIT[transport], limit)
    publisher.wait_for_workers(len(clients), JOIN_SECONDS)
    return Round(publisher, weights, clients, transport, planned, limit, found)


@dataclass
class Round:
    """All clients of one transport, and its cost alone, ready to take turns."""

    publisher: Publisher
    weights: Model
    clients: list[Client]
    transport: Transport
    plan: Plan
    limit: Process
    found: Result  # of the limit

    def publish(self, client: Client) -> float:
        """Publish to one client; return the seconds until it had applied the version and said so.

        Raises:
            Fault: It has not, or the version took another transport.
        """
        self.weights.advance()
        try:
            receipt = self.publisher.publish(
                client.model, self.weights.arrays, timeout=PUBLISH_SECONDS
            )
        except PublishError as error:
            raise Fault(f"{error}; {client.driver.story()}") from None
        done = receipt.workers[client.driver.name]
        if done.state != "applied" or done.seconds is None:
            raise Fault(f"not applied: {receipt}")
        number = {"epoch": receipt.epoch, "version": receipt.version}
        event = client.driver.wait_event("applied", model=client.model, **number)
        took: Transport = "network" if event["digest"] else "shared"
        if took != self.transport:
            raise Fault(
                f"{client.driver.name} took the transport {took!r}, measured is {self.transport!r}"
            )
        if "delay_ms" in event:
            client.delays.append(event["delay_ms"])
        return done.seconds

    def turn(self, client: Client) -> tuple[list[float], float]:
        """Publish a burst to one client; return its seconds, and what each took of a processor."""
        before = processor_seconds(client.driver.pid)
        burst = [self.publish(client) for _ in range(self.plan.burst)]
        return burst, (processor_seconds(client.driver.pid) - before) / self.plan.burst

    def play(self, say: Callable[[str], None]) -> None:
        """Let the clients take turns; another one begins each time."""
        for number in range(-WARM_UP, self.plan.rounds):
            at = number % len(self.clients)
            for client in [*self.clients[at:], *self.clients[:at]]:
                say(f"{self.transport}, {client.title}: round {number + 1} of {self.plan.rounds}")
                seconds, cpu = self.turn(client)
                if number >= 0:
                    client.rounds.append(seconds)
                    client.cpu.append([cpu])
            answer = self.limit.ask(f"publish {self.plan.burst}", PUBLISH_SECONDS)
            if number >= 0:
                self.found.rounds.append(answer["seconds"])

    def look_at_event_loops(self) -> None:
        """See how late they are, in a worker of its own each."""
        for client in (each for each in self.clients if each.model in EVENT_LOOPS):
            client.driver.stop()
            client.driver = client.start(f"{client.model}-loop", True)
            client.driver.wait_event("joined")
            for number in range(-WARM_UP, self.plan.rounds):
                self.turn(client)
                if number < 0:
                    client.delays.clear()

    def look_while_idle(self) -> None:
        """See which workers compute while they have nothing to do: that colors all numbers."""
        before = [processor_seconds(client.driver.pid) for client in self.clients]
        time.sleep(IDLE_SECONDS)  # it is this second that is looked at
        for client, seconds in zip(self.clients, before, strict=True):
            client.busy = (processor_seconds(client.driver.pid) - seconds) / IDLE_SECONDS


def processor_seconds(pid: int) -> float:
    """Return the time that a process has computed, in all of its threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def table_of(played: Round) -> Table:
    """Return the table for a person."""
    shape, found = played.plan.shape, played.found
    base = next((c for key in (BEFORE, PYTHON) for c in played.clients if c.model == key), None)
    title = f"{shape.label} in {shape.tensors} tensors to one worker, {played.transport}"
    title += f", {played.plan.rounds} rounds of {played.plan.burst}"
    table = Table(title=title, title_justify="left")
    than = "" if base is None else base.title
    for heading in ("", "ms (quartiles)", f"x {than}", f"x {found.title}", "cpu ms", f"x {than}"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row(found.title, shown(found.seconds, 1e3))
    for client in played.clients:
        table.add_row(
            client.title,
            shown(spread(client.rounds), 1e3),
            "" if base is None else shown(over(client.rounds, base.rounds)),
            shown(over(client.rounds, found.rounds)),
            f"{spread(client.cpu).median * 1e3:.2f}",
            "" if base is None else shown(over(client.cpu, base.cpu)),
        )
    return table


def spread(rounds: Sequence[Sequence[float]]) -> Spread:
    """Return the spread of what all rounds had."""
    return Spread.of([value for burst in rounds for value in burst])


def shown(spread: Spread, scale: float = 1.0) -> str:
    """Return a spread in words."""
    low, median, high = (value * scale for value in (spread.low, spread.median, spread.high))
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--languages", help="some of them, such as go,rust; Python is always there")
    parser.add_argument("--against", type=Path, help="another checkout, built: its Python is 1.00")
    parser.add_argument("--sizes", default=SIZES, help=f"of the model, as {SIZES}")
    parser.add_argument("--rounds", type=int, help="turns that count; fewer for larger models")
    parser.add_argument(
        "--transports", default=",".join(TRANSPORTS), help=f"some of {','.join(TRANSPORTS)}"
    )
    parser.add_argument("--no-build", action="store_true", help="take the drivers that are there")
    return parser.parse_args(words)


def built(languages: Sequence[Language], console: Console, *, build: bool) -> list[Language]:
    """Return the languages whose drivers are there, and say which are not, and why."""
    able: list[Language] = []
    for language in languages:
        try:
            lacking = language.missing() if build else ""
            if build and not lacking:
                language.build()
        except NotBuiltError as error:
            lacking = str(error)
        if lacking or not Path(language.command[-1]).is_file():
            console.print(f"left out: {language.title}: {lacking or 'not built'}", highlight=False)
        else:
            able.append(language)
    return able


def measure(taking_part: Mapping[str, Entrant], planned: Plan, transport: Transport) -> Round:
    """Compare the clients on one transport."""
    needed = (len(taking_part) + 1) * (COPIES * planned.shape.nbytes + PROCESS_BYTES)
    if needed > memory.available():
        raise Fault(
            f"{len(taking_part)} clients need about {needed / 2**30:.0f} GiB of memory, "
            f"{memory.available() / 2**30:.0f} are free: choose fewer --languages, or smaller "
            "--sizes"
        )
    console = Console(stderr=True)
    with ExitStack() as stack, console.status("") as status:
        played = started(taking_part, planned, transport, stack)
        played.play(status.update)
        played.look_at_event_loops()
        played.look_while_idle()  # only now: who has just joined may still be touching its memory
        for client in played.clients:
            client.driver.stop()
    return played


def report_on(played: Round, console: Console) -> None:
    """Print what was found."""
    console.print(table_of(played))
    for client in played.clients:
        if client.delays:
            console.print(
                f"{client.title}: its event loop was late by {statistics.median(client.delays):.1f}"
                f" ms in the median, and by {max(client.delays):.1f} at most",
                highlight=False,
            )
        if client.busy > IDLE_SHARE_MAX:
            console.print(
                f"[yellow]{client.title} takes {client.busy:.0%} of a processor while "
                "nothing is sent to it: it slows all others, and its own numbers are not its "
                "client's. Its driver must not read with --no-tensors.[/yellow]",
                highlight=False,
            )


def main(words: Sequence[str]) -> int:
    """Measure and report; return the exit status."""
    options = parse(words)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    keys = options.languages and f"{PYTHON},{options.languages}"
    wanted = list({language.key: language for language in chosen(keys)}.values())
    languages = built(wanted, console, build=not options.no_build)
    report.print_machine(describe(), console)
    try:
        before = options.against and before_of(options.against)
        for shape in map(Shape.parse, options.sizes.split(",")):
            for transport in map(transport_of, options.transports.split(",")):
                taking_part = entrants(languages, transport, before)
                report_on(measure(taking_part, plan(shape, 1, options.rounds), transport), console)
    except (Fault, ProcessError) as fault:
        console.print(f"[red]{fault}[/red]", highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
