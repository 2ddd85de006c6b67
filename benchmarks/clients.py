"""Measure every client beside the Python worker: `python benchmarks/clients.py`.

One publisher, and for each language a worker that its conformance driver runs, with a model of its
own. All are alive together and take turns, one at a time; what counts is the time from the call of
publish to that worker's `applied`, in ratio to the Python worker's in the same round. Every version
proves which road it took: what came over the network was hashed, what was read from shared memory
was not.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weightbus import Publisher, PublishError
from weightbus.benchmarks import memory, report
from weightbus.benchmarks.bus import ROADS, Road, road_of
from weightbus.benchmarks.comparison import PROCESS_BYTES, WARM_UP, Spread, over
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.model import Model, Shape
from weightbus.tests.conformance.driver import Driver, Fault, Options
from weightbus.tests.conformance.languages import Language, NotBuiltError, chosen

SIZE, ROUNDS = "256MiB/100", 9
BASE = "python"
WIDTH = 110  # characters
JOIN_SECONDS, PUBLISH_SECONDS = 60.0, 60.0
DRIVER_SECONDS = 1_800  # after which a driver ends, whatever becomes of us
COPIES = 5  # of the model for each client: two at the publisher, three in the worker
IDLE_SECONDS, IDLE_SHARE_MAX = 1.0, 0.3  # of a processor, for a worker to which nothing is sent


@dataclass
class Client:
    """One client in one comparison.

    Attributes:
        rounds: Seconds of every publish that counts.
        busy: The share of a processor that it takes while nothing is sent to it.
    """

    language: Language
    driver: Driver
    rounds: list[float] = field(default_factory=list[float])
    busy: float = 0.0

    @property
    def model(self) -> str:
        """The id of its model."""
        return self.language.key


def able_to(languages: Sequence[Language], road: Road) -> list[Language]:
    """Return the languages whose clients take a road."""
    return [x for x in languages if road == "network" or "shared-road" not in x.unsupported]


def started(languages: Sequence[Language], shape: Shape, road: Road, stack: ExitStack) -> "Round":
    """Start a publisher and all workers, and wait until all have joined."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    publisher = stack.enter_context(Publisher(shared_memory=road == "shared"))
    weights = Model(shape, zeros=False)
    spec = {n: {"dtype": "F32", "shape": [*a.shape]} for n, a in weights.arrays.items()}
    clients: list[Client] = []
    for language in languages:
        options = Options(
            models=(language.key,),
            in_place={language.key: spec},
            tensors=False,
            shared=road == "shared",
            seconds=DRIVER_SECONDS,
        )
        driver = Driver(language.command, publisher.address, language.key, options, folder)
        clients.append(Client(language, stack.enter_context(closing(driver))))
        publisher.prepare(language.key, weights.arrays)
    publisher.wait_for_workers(len(clients), JOIN_SECONDS)
    return Round(publisher, weights, clients, road)


@dataclass
class Round:
    """All clients of one road, ready to take turns."""

    publisher: Publisher
    weights: Model
    clients: list[Client]
    road: Road

    def publish(self, client: Client) -> float:
        """Publish to one client; return the seconds until it had applied the version and said so.

        Raises:
            Fault: It has not, or the version took another road.
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
        took: Road = "network" if event["digest"] else "shared"
        if took != self.road:
            raise Fault(f"{client.driver.name} took the road {took!r}, measured is {self.road!r}")
        return done.seconds

    def play(self, rounds: int, say: Callable[[str], None]) -> None:
        """Let the clients take turns; another one begins each time."""
        for number in range(-WARM_UP, rounds):
            at = number % len(self.clients)
            for client in [*self.clients[at:], *self.clients[:at]]:
                say(f"{self.road}, {client.language.title}: round {number + 1} of {rounds}")
                seconds = self.publish(client)
                if number >= 0:
                    client.rounds.append(seconds)

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
    shape = played.weights.shape
    title = f"{shape.label} in {shape.tensors} tensors to one worker, {played.road}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "ms (quartiles)", "x Python", "GB/s"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    base = next((c.rounds for c in played.clients if c.model == BASE), None)
    for client in played.clients:
        spread = Spread.of(client.rounds)
        table.add_row(
            client.language.title,
            shown(spread, 1e3),
            "" if base is None else shown(over([[s] for s in client.rounds], [[s] for s in base])),
            f"{shape.nbytes / spread.median / 1e9:.2f}",
        )
    return table


def shown(spread: Spread, scale: float = 1.0) -> str:
    """Return a spread in words."""
    low, median, high = (value * scale for value in (spread.low, spread.median, spread.high))
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--languages", help="some of them, such as go,rust; Python is always there")
    parser.add_argument("--size", type=Shape.parse, default=Shape.parse(SIZE), help=f"as {SIZE}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns that count")
    parser.add_argument("--roads", default=",".join(ROADS), help=f"some of {','.join(ROADS)}")
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


def measure(languages: Sequence[Language], road: Road, options: argparse.Namespace) -> Round:
    """Compare the clients on one road."""
    needed = len(languages) * (COPIES * options.size.nbytes + PROCESS_BYTES)
    if needed > memory.available():
        raise Fault(
            f"{len(languages)} clients need about {needed / 2**30:.0f} GiB of memory, "
            f"{memory.available() / 2**30:.0f} are free: choose fewer --languages, or a smaller "
            "--size"
        )
    console = Console(stderr=True)
    with ExitStack() as stack, console.status("") as status:
        played = started(languages, options.size, road, stack)
        played.play(options.rounds, status.update)
        played.look_while_idle()  # only now: who has just joined may still be touching its memory
        for client in played.clients:
            client.driver.stop()
    return played


def main(words: Sequence[str]) -> int:
    """Measure and report; return the exit status."""
    options = parse(words)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    keys = options.languages and f"{BASE},{options.languages}"
    wanted = list({language.key: language for language in chosen(keys)}.values())
    languages = built(wanted, console, build=not options.no_build)
    report.print_machine(describe(), console)
    for road in map(road_of, options.roads.split(",")):
        try:
            played = measure(able_to(languages, road), road, options)
        except Fault as fault:
            console.print(f"[red]{road}: {fault}[/red]", highlight=False)
            return 1
        console.print(table_of(played))
        for client in played.clients:
            if client.busy > IDLE_SHARE_MAX:
                console.print(
                    f"[yellow]{client.language.title} takes {client.busy:.0%} of a processor while "
                    "nothing is sent to it: it slows all others, and its own numbers are not its "
                    "client's. Its driver must not read with --no-tensors.[/yellow]",
                    highlight=False,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
