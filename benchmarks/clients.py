"""Compare every client with the Python worker: `python benchmarks/clients.py [--against PATH]`.

There are one publisher and, for each language, a worker that the language's conformance driver
runs, each with its own model; a contender measures the transport alone. They take turns. The
results are the time from publish to the worker's `applied`, and the processor time of the worker's
process, as ratios to the Python worker's in the same round (or to the Python worker of another
checkout, if one is given). Each version is checked for its transport: over the network it was
hashed, from shared memory it was not. The delays of event loops are measured afterwards, in
separate workers, because the timers that measure them take time, too.

All have keys if WEIGHTBUS_KEYS is a folder of `weightbus keygen DIR '*'`.
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
EVENT_LOOPS = ("node",)  # languages whose drivers report the delays of their event loops
PYTHON, BEFORE = "python", "python-before"  # the second is the worker of another checkout
LIMIT: Mapping[Transport, str] = {"network": "raw_tcp", "shared": "fill_copy"}
WIDTH = 120  # characters
JOIN_SECONDS, ASK_SECONDS = 60.0, 60.0
DRIVER_SECONDS = 1_800  # after which a driver ends, even if this process has died
COPIES = 5  # copies of each client's model: two at the publisher, three in the worker
IDLE_SECONDS, IDLE_SHARE_MAX = 1.0, 0.3  # the largest processor share of an idle worker


@dataclass
class Client:
    """One client in one comparison.

    Attributes:
        model: The id of its model.
        rounds: Seconds of every publish that counts, by round.
        cpu: Processor seconds of its process for each of them, by round.
        delays: The delays of its event loop in milliseconds, if the driver reports them.
        busy: Its processor share while it is idle.
    """

    model: str
    title: str
    start: Callable[[str, bool], Driver]  # given its name, and whether to report delays
    driver: Driver
    rounds: list[list[float]] = field(default_factory=list[list[float]])
    cpu: list[list[float]] = field(default_factory=list[list[float]])
    delays: list[float] = field(default_factory=list[float])
    busy: float = 0.0


@dataclass(frozen=True, slots=True)
class Entrant:
    """A participant: a title, and a function that starts its driver."""

    title: str
    command: list[str]


def before_of(checkout: Path) -> Entrant:
    """Return the Python client of another checkout, which must have its own environment.

    Raises:
        Fault: It has no environment, or the environment imports another package.
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
    here = checkout.resolve()  # in older checkouts the root is the package
    if Path(done.stdout.strip()).resolve().parent not in (here / "src" / "weightbus", here):
        raise Fault(f"{python} imports {done.stdout.strip()}, not what is in {checkout}")
    driver = checkout.resolve() / "tests" / "conformance" / "python_driver.py"
    return Entrant("Python, before", [str(python), str(driver)])


def entrants(
    languages: Sequence[Language], transport: Transport, before: Entrant | None
) -> dict[str, Entrant]:
    """Return the participants that support a transport, by model."""
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
    """All clients of one transport, and the transport alone, ready to take turns."""

    publisher: Publisher
    weights: Model
    clients: list[Client]
    transport: Transport
    plan: Plan
    limit: Process
    found: Result  # of the limit

    def publish(self, client: Client) -> float:
        """Publish to one client; return the seconds until its `applied`.

        Raises:
            Fault: It did not apply the version, or the version used another transport.
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
        """Publish a burst to one client; return the seconds, and the processor seconds, of each."""
        before = processor_seconds(client.driver.pid)
        burst = [self.publish(client) for _ in range(self.plan.burst)]
        return burst, (processor_seconds(client.driver.pid) - before) / self.plan.burst

    def play(self, say: Callable[[str], None]) -> None:
        """Let the clients take turns; each round starts with another client."""
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
        """Measure the delays of event loops, each in a separate worker."""
        for client in (each for each in self.clients if each.model in EVENT_LOOPS):
            client.driver.stop()
            client.driver = client.start(f"{client.model}-loop", True)
            client.driver.wait_event("joined")
            for number in range(-WARM_UP, self.plan.rounds):
                self.turn(client)
                if number < 0:
                    client.delays.clear()

    def look_while_idle(self) -> None:
        """Measure which workers compute while idle: they would distort all results."""
        before = [processor_seconds(client.driver.pid) for client in self.clients]
        time.sleep(IDLE_SECONDS)  # the measured second
        for client, seconds in zip(self.clients, before, strict=True):
            client.busy = (processor_seconds(client.driver.pid) - seconds) / IDLE_SECONDS


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process, in all of its threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def table_of(played: Round) -> Table:
    """Return the results as a table."""
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
    """Return the spread of the values of all rounds."""
    return Spread.of([value for burst in rounds for value in burst])


def shown(spread: Spread, scale: float = 1.0) -> str:
    """Return a spread as text."""
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
    """Return the languages whose drivers exist; print the others, and why they are missing."""
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
        played.look_while_idle()  # only now: a worker that just joined may touch memory
        for client in played.clients:
            client.driver.stop()
    return played


def report_on(played: Round, console: Console) -> None:
    """Print the results."""
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
