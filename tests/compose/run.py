"""Run the demo of docker-compose.yml in containers, break it, and hold its logs against each other.

    make compose-test

Takes the docker engine that is there (DOCKER_HOST, or the default one); without any, root on Debian
gets one that is started for this run and leaves nothing behind. Where there is none at all it says
so and skips, and fails where CI is set.
"""

import os
import signal
import sys
from time import monotonic

from rich.console import Console
from rich.table import Table

from weightbus.tests.compose.bases import make_bases
from weightbus.tests.compose.engine import NoEngineError, engine
from weightbus.tests.compose.fleet import RELAYS, RUST_TRAINER, Fleet, fleet
from weightbus.tests.compose.ledger import Ledger
from weightbus.tests.compose.story import BEHIND, TRAINER, RelaysStory, Story

CONSOLE = Console(width=100)


def main() -> int:
    """Tell the story of each trainer; return an exit status."""
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))  # unwinds
    started = monotonic()

    def say(text: str) -> None:
        CONSOLE.print(f"{monotonic() - started:6.1f} s  {text}", highlight=False)

    try:
        with engine() as found:
            if found.own:
                say("a docker engine of our own; making base images")
                make_bases(found)
            say("building the services")
            with fleet(found) as services:
                for trainer in (TRAINER, RUST_TRAINER):
                    _run(story := Story(trainer, services, say), services)
                services.stop([story.trainer, *story.workers])
                say("bringing up relays")
                services.bring(RELAYS)
                _run(RelaysStory(services, say), services)
    except NoEngineError as error:
        must = bool(os.environ.get("CI"))
        word = "FAILED" if must else "SKIPPED"
        print(f"{word}: the compose demo was not tested: {error}", file=sys.stderr)
        return int(must)
    say("done, and everything is removed")
    return 0


def _run(story: Story, services: Fleet) -> None:
    try:
        read = story.tell()
    except Exception:
        relays = BEHIND if isinstance(story, RelaysStory) else ()
        for name in (story.trainer, *relays, *story.workers):
            CONSOLE.rule(f"{name}: {services.state(name)}")
            print(services.words(name), flush=True)
        raise
    CONSOLE.print(_table(story, read))


def _table(story: Story, read: Ledger) -> Table:
    """Return one row for each worker: what it applied, and how it came back."""
    table = Table(title=f"The same bytes in every language, from {story.trainer}")
    table.add_column("worker")
    for number, epoch in enumerate(read.epochs(), 1):
        table.add_column(f"epoch {number}: versions\n({len(read.by_all(epoch))} at all workers)")
    for what in story.recovery:
        table.add_column(f"back after\n{what}", justify="right")
    for name in story.workers:
        cells = list[str]()
        for epoch in read.epochs():
            versions = sorted({v for e, v in read.applied[name] if e == epoch})
            cells.append(f"{len(versions)} of {versions[0]}..{versions[-1]}" if versions else "")
        times = [seconds.get(name) for seconds in story.recovery.values()]
        table.add_row(name, *cells, *("" if t is None else f"{t:.1f} s" for t in times))
    return table


if __name__ == "__main__":
    sys.exit(main())
