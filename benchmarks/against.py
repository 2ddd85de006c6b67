"""Compare this checkout with another one: both are contenders of one comparison, and take turns.

Each side has its own publisher process and workers, which import the package from the side's
checkout. The interpreter and the dependencies are the same.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .cases import plan
from .comparison import Spread, host, introduced, played
from .model import Shape
from .process import ProcessError

ROOT = Path(__file__).resolve().parent.parent
ASKS = "import weightbus as w; from weightbus.codecs import native as n; print(w.__file__)"
ASK_SECONDS = 60.0
LARGE, SMALL, MANY = "200MiB/100", "256KiB/20", "10000KiB/10000"
RECEIVED = ("weightbus_receive", "weightbus_shared")  # at `receive()`, over either transport
BACKGROUND = ("weightbus_background", "weightbus_shared_background")
# By row: the model, the contenders, and to how many workers.
ROWS: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {
    "tcp": (LARGE, RECEIVED[:1], (1, 2, 4)),
    "shared": (LARGE, RECEIVED[1:], (1, 2, 4)),
    "small": (SMALL, RECEIVED + BACKGROUND, (4,)),
    "many": (MANY, RECEIVED, (1,)),
}
BOUND = 1.03  # bound of the ratio's lower quartile: above it, this checkout is slower


@dataclass(frozen=True, slots=True)
class Held:
    """The ratio of this checkout's time to the other's, for one contender of a row."""

    row: str
    name: str
    workers: int
    ratio: Spread


@contextmanager
def imported_from(checkout: Path) -> Generator[dict[str, str]]:
    """Yield an environment in which Python imports `weightbus` from `checkout`.

    Raises:
        ProcessError: `checkout` is not a checkout, or its helper in C was built in another way.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = checkout.resolve() / "src"
        if not (path / "weightbus").is_dir():  # in older checkouts the root is the package
            path = Path(folder)
            (path / "weightbus").symlink_to(checkout.resolve())
        environment = {"PYTHONPATH": str(path)}
        file, helper = _asked(environment, checkout)
        if not Path(file).is_relative_to(path):
            raise ProcessError(f"{checkout} is not a checkout of weightbus: {file} is imported")
        mine = _asked({}, ROOT)[1]
        if helper != mine:
            raise ProcessError(
                f"{helper} in {checkout}, {mine} here: run `make .venv/installed` in both"
            )
        yield environment


def _asked(environment: dict[str, str], checkout: Path) -> list[str]:
    done = subprocess.run(  # noqa: S603 - our own package
        [sys.executable, "-c", f"{ASKS}; print(n.description())"],
        env={**os.environ, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=ASK_SECONDS,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ProcessError(f"{checkout} cannot be imported: {''.join(last)}")
    return done.stdout.splitlines()


def measure(
    environment: dict[str, str],
    rows: Sequence[str],
    workers: Sequence[int],
    rounds: int | None,
    say: Callable[[str], None],
    shape: Shape | None = None,
    pause: float = 0.0,
) -> Iterator[Held]:
    """Measure the rows and yield the results; `environment` is for the other side's processes.

    Raises:
        ProcessError: A side failed, or its workers had other bytes than were published.
    """
    for row in rows:
        model, names, counts = ROWS[row]
        for count in (n for n in counts if n in workers):
            planned = replace(plan(shape or Shape.parse(model), count, rounds), pause=pause)
            for name in names:
                with ExitStack() as stack:
                    hosts = {
                        "here": stack.enter_context(host(name, planned)),
                        "there": stack.enter_context(host(name, planned, environment)),
                    }
                    empty = {side: introduced(name, each) for side, each in hosts.items()}
                    found = played(planned, hosts, empty, say)
                yield Held(row, name, count, found["here"].over(found["there"]))
