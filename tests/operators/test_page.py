"""The page in a real browser: make operators (Debian's chromium)."""

from contextlib import closing
from pathlib import Path

import pytest

from weightbus import Publisher
from weightbus.bus.messages import Hello, Running, encode
from weightbus.bus.net.control import WorkerSockets
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.operators.browser import Browser
from weightbus.tests.operators.served import SECONDS, arrays

EVIL = "<img src=x onerror=\"document.title='owned'\">"


def evil_worker(publisher: Publisher) -> WorkerSockets:
    """Return the connection of a worker whose words are markup."""
    sockets = WorkerSockets(publisher.address, lambda _frames, _size: None)
    models: dict[str, Running | None] = {"m": None}
    hello = Hello(name="evil", instance="0" * 32, models=models, host=EVIL, client=EVIL)

    def joined() -> bool:
        sockets.poll(0.1, writable=True)
        sockets.send(encode(hello))
        return "evil" in publisher.workers()

    wait_for(joined, "the evil one joins", SECONDS)
    return sockets


@pytest.mark.parametrize(("width", "height"), [(1300, 800), (390, 844)])
def test_the_page_shows_what_is_and_runs_no_words_of_workers(
    publisher: Publisher, width: int, height: int, tmp_path: Path
) -> None:
    with closing(evil_worker(publisher)), Browser(tmp_path, width, height) as browser:
        browser.open(publisher.shown.dashboard)
        wait_for(lambda: browser.shows("narrow"), "the page", SECONDS)
        for version in (1, 2, 3):
            publisher.publish("m", arrays(10), require=1)
            wait_for(lambda v=version: browser.shows(f"m {v}"), "it is live", SECONDS)  # type: ignore[misc]
        wait_for(lambda: browser.shows("layout-mismatch: w: shape [10]"), "why", SECONDS)
        assert browser.shows(EVIL)
        assert browser.value("document.title") == "weightbus"
        assert browser.value("document.images.length") == 0
        assert browser.value("document.documentElement.scrollWidth") <= width
        browser.value("document.getElementById('filter').value = 'good'")
        browser.value("document.getElementById('filter').dispatchEvent(new Event('input'))")
        assert browser.value("document.querySelectorAll('#workers tr').length") == 1
        publisher.close()
        wait_for(lambda: browser.shows("does not answer"), "the end is shown", SECONDS)


FEED = """
for (let version = 1; version <= 300; version++) {
  const workers = [];
  for (let n = 0; n < 600; n++) workers.push({
    worker: `w${n}`, model: "m", verdict: n ? "current" : "behind", epoch: 1, newest: version,
    version: n ? version : 7, lag: n ? 0 : version - 7, lag_s: null, phase: "", rate: 0, took_s: 1,
    silent_s: 0, error: "", language: "", client: "", host: "", road: "pulled", encoding: "raw" });
  const models = [{ name: "m", version, nbytes: 1, encoding: "raw", age_s: 0 }];
  state = { epoch: 1, models, workers, events: [] }; at = version; remember();
}
draw();
"""


def test_many_workers_are_drawn_for_long_and_only_what_is_drawn_is_kept(
    publisher: Publisher, tmp_path: Path
) -> None:
    with Browser(tmp_path, 1300, 800) as browser:
        browser.open(publisher.shown.dashboard)
        wait_for(lambda: browser.shows("narrow"), "the page", SECONDS)
        browser.value("source.close()")
        browser.value(FEED)
        assert browser.shows("m 300")
        assert browser.value("document.querySelectorAll('polyline').length") == 41
        assert browser.value("history.get('m').length") == 240
        assert browser.value("Math.max(...history.get('m').map(p => p.runs.size))") == 40
        drawn = "[...document.querySelectorAll('polyline')].map(l => l.getAttribute('points'))"
        lows, *_, latest = [
            [float(point.partition(",")[2]) for point in line.split()]
            for line in browser.value(drawn)
        ]
        assert set(lows) == {95.0}, "the one that is behind is at the bottom"
        assert latest[-1] == 5.0
