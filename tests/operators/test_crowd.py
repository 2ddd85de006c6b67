"""A thousand workers on the page: what changes is seen within two seconds. (make operators)"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from weightbus import Publisher
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.operators.browser import Browser
from weightbus.tests.operators.served import SECONDS, arrays

PROCESSES, EACH = 4, 250
WORKERS = PROCESSES * EACH
VISIBLE_SECONDS = 2.0  # on a quiet machine, which this one need not be
BUSY = 5
CROWD = Path(__file__).with_name("crowd.py")


@pytest.fixture(name="crowd")
def _crowd(tmp_path: Path) -> Iterator[tuple[Publisher, list["subprocess.Popen[bytes]"]]]:
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(dashboard="127.0.0.1:0"))
        processes = list["subprocess.Popen[bytes]"]()
        for number in range(PROCESSES):
            folder = tmp_path / str(number)
            folder.mkdir()
            words = [sys.executable, str(CROWD), publisher.address, "m", str(folder), str(EACH)]
            process = subprocess.Popen(words, stdin=subprocess.PIPE)  # noqa: S603
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        publisher.wait_for_workers(WORKERS, 2 * SECONDS)
        yield publisher, processes


def seen(browser: Browser, words: str) -> float:
    """Return how many seconds it takes until the page shows some words."""
    begun = time.monotonic()
    wait_for(lambda: browser.shows(words), words, SECONDS)
    return time.monotonic() - begun


def until(what: str, condition: Callable[[], object]) -> None:
    wait_for(condition, what, SECONDS)


def test_a_change_among_a_thousand_workers_is_soon_visible(
    crowd: tuple[Publisher, list["subprocess.Popen[bytes]"]], tmp_path: Path
) -> None:
    (publisher, processes), took = crowd, dict[str, float]()
    profile = tmp_path / "browser"
    profile.mkdir()
    with Browser(profile, 1300, 800) as browser:
        browser.open(publisher.shown.dashboard)
        wait_for(lambda: browser.shows(f"{WORKERS} current"), "the page", SECONDS)
        for version in (1, 2, 3):
            published = publisher.publish_async("m", arrays(10), timeout=SECONDS)
            took[f"version {version} is there"] = seen(browser, f"m {version}")
            published.result(2 * SECONDS)
            took[f"all {WORKERS} run version {version}"] = seen(browser, f"{WORKERS} current")
        processes[0].kill()

        def lost() -> bool:
            return sum(w.state == "lost" for w in publisher.workers().values()) == EACH

        until("they are lost", lost)
        took[f"{EACH} are lost"] = seen(browser, f"{EACH} lost")
    print({what: round(seconds, 2) for what, seconds in took.items()})
    assert max(took.values()) <= BUSY * VISIBLE_SECONDS, took
