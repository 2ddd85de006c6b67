"""`weightbus top` and `weightbus status` show what is, and tell it to scripts by their codes."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from weightbus import Publisher, PublishError, Settings, Subscriber
from weightbus.bus.token_bucket import Rate
from weightbus.bus.trust.keys import generate
from weightbus.python_client.cli.screen import Screen, plain, visible
from weightbus.python_client.cli.status import ROWS_SHOWN, show
from weightbus.python_client.cli.top import (
    SORTS,
    Choice,
    _picture,  # pyright: ignore[reportPrivateUsage]
)
from weightbus.python_client.observing.observer import Observer
from weightbus.python_client.observing.view import VERDICTS, Standing, Verdict
from weightbus.tests.cli.test_cli import result_of, run
from weightbus.tests.client.settling import arrays, joined
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than anything here takes


def standing(worker: str, verdict: Verdict, lag: int = 0, rate: float = 0.0) -> Standing:
    return Standing(
        "m", worker, verdict, 1, 1, 1, lag, None, "", rate, 0, "", "", "", "", 0, "", "", 0
    )


def test_everybody_up_to_date_is_zero(publisher: Publisher) -> None:
    with joined(publisher, w=arrays()):
        receipt = publisher.publish("m", arrays())
        done = run("status", publisher.address, "--expect", 1, "--json")
        found = result_of(done)
        assert (done.exit_code, found["achieved"], found["text"]) == (0, True, "")
        assert [w["version"] for w in found["workers"]] == [receipt.version]
        short = run("status", publisher.address, "--expect", 2, "--json")
        assert short.exit_code == 1
        assert result_of(short)["text"] == "1 of 2 workers are connected"


def test_who_is_still_applying_is_no_alarm_until_it_is_overdue() -> None:
    """A script that asks by chance between a publish and the last apply wants no alarm."""
    with (
        Publisher(settings=Settings(ping=0.1, lost_after=10 * SECONDS)) as publisher,  # nor stuck
        Subscriber(publisher.address, {"m": arrays()}, name="w"),  # which never applies
    ):
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", arrays(), settings=Settings(wait="none"))
        in_time = run("status", publisher.address, "--within", 3600, "--json")
        found = result_of(in_time)
        assert (in_time.exit_code, found["achieved"]) == (0, True), found
        assert [row["verdict"] for row in found["workers"]] == ["behind"], "the rows say it"
        assert "1 of them applying" in run("status", publisher.address, "--within", 3600).stdout
        now = run("status", publisher.address, "--within", 0, "--json")
        assert (now.exit_code, result_of(now)["text"]) == (1, "w is behind with m")
        publisher.publish(
            "m", arrays(), settings=Settings(wait="none")
        )  # which makes it no younger

        def overdue() -> bool:
            return run("status", publisher.address, "--within", 0.2).exit_code == 1

        wait_for(overdue, "it is overdue", SECONDS)


def test_nobody_there_is_two() -> None:
    with Publisher() as publisher:
        address = publisher.address
    done = run("status", address, "--timeout", 0.3, "--json")
    found = result_of(done)
    assert (done.exit_code, found["reachable"]) == (2, False)
    assert f"no publisher or relay answered at {address} within 0.3 s" in found["text"]
    assert run("top", address, "--once", "--timeout", 0.3).exit_code == 1
    assert run("status", "nowhere").exit_code == 2


def test_a_publisher_that_answers_is_ready_whatever_its_workers_do(publisher: Publisher) -> None:
    with joined(publisher, narrow=arrays(3)):
        with pytest.raises(PublishError):
            publisher.publish("m", arrays())
        assert run("status", publisher.address).exit_code == 1
        done = run("status", publisher.address, "--ready")
        assert (done.exit_code, done.stdout) == (0, f"{publisher.address} is ready\n")
        found = result_of(run("status", publisher.address, "--ready", "--json"))
        assert found == {"kind": "ready", "achieved": True, "reachable": True, "text": ""}
    wrong = run("status", publisher.address, "--ready", "--expect", 1)
    assert (wrong.exit_code, "leave out --expect" in wrong.stderr) == (2, True)


def test_where_nothing_answers_nothing_is_ready_in_time() -> None:
    with Publisher() as publisher:
        address = publisher.address
    begun = time.monotonic()
    done = run("status", address, "--ready", "--timeout", 0.3)
    assert time.monotonic() - begun < SECONDS
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"no publisher or relay answered at {address} within 0.3 s" in line
    assert not result_of(run("status", address, "--ready", "--timeout", 0.3, "--json"))["reachable"]


def test_one_that_refuses_this_observer_is_not_ready(tmp_path: Path) -> None:
    generate(tmp_path, {"w": "worker", "probe": "observer"})
    with Publisher(keys=tmp_path) as publisher:
        asks = ("status", publisher.address, "--ready", "--keys")
        assert run(*asks, tmp_path / "workers" / "probe.json").exit_code == 0
        done = run(*asks, tmp_path / "workers" / "w.json", "--json")
        found = result_of(done)
        assert (done.exit_code, found["achieved"]) == (1, False)
        assert "only an observer's key may watch here" in found["text"]


def test_a_roster_that_cannot_be_read_in_time_is_not_said_to_be_of_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weightbus.bus.publisher.observers.ROWS", Rate(0, 0))
    with Publisher() as publisher:
        publisher.publish("m", arrays(), settings=Settings(wait="none"))
        done = run("status", publisher.address, "--timeout", 0.5, "--json")
        found = result_of(done)
        assert (done.exit_code, found["achieved"], found["reachable"]) == (2, False, True)
        assert "could not be read within 0.5 s" in found["text"]
        once = run("top", publisher.address, "--once", "--timeout", 0.5)
        assert once.exit_code == 1
        assert "could not be read within 0.5 s" in once.stderr


def test_what_is_wrong_is_said_first_and_is_one(publisher: Publisher) -> None:
    """Before any row, in words and in units that fit."""
    with joined(publisher, narrow=arrays(3), good=arrays()):
        publisher.publish("m", arrays(), require=1)

        def failed() -> list[str]:
            lines = run("top", publisher.address, "--once").stdout.splitlines()
            return lines if "narrow failed" in lines[0] else []

        lines = wait_for(failed, "it has failed", SECONDS)
        assert lines[0] == "narrow failed m: layout-mismatch: w: shape [10] published, [3] here"
        assert lines[1].startswith("2 workers: 1 failed, 1 current")
        (row,) = [line for line in lines[2:] if line.startswith("good")]
        assert re.search(r"applied in [\d.]+ (µs|ms|s)", row)
        assert "0.0 s" not in "".join(lines)
        told = result_of(run("top", publisher.address, "--once", "--json"))["troubles"]
        assert [(t["verdict"], t["model"], t["state"]) for t in told] == [
            ("failed", "m", "problem")
        ]
        done = run("status", publisher.address)
        assert (done.exit_code, done.stdout.splitlines()[0]) == (1, "narrow failed m")
        assert "layout-mismatch: w: shape [10] published, [3] here" in done.stdout


def test_the_live_picture_says_first_what_is_wrong(publisher: Publisher) -> None:
    with joined(publisher, narrow=arrays(3)):
        with pytest.raises(PublishError):
            publisher.publish("m", arrays())
        with Observer(publisher.address) as observer:
            assert observer.look(SECONDS)
            out = io.StringIO()
            console = Console(file=out, width=60, height=20)
            console.print(_picture(observer, publisher.address, Choice(), 14))
    lines = out.getvalue().splitlines()
    (wrong,) = [n for n, line in enumerate(lines) if line.startswith("narrow failed m: ")]
    assert wrong <= 2, "below the summary"
    assert lines[wrong].endswith("…"), "and on one line, however narrow the terminal"


def test_of_many_rows_those_in_trouble_are_shown_and_the_rest_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = [standing("bad", "lost"), *(standing(f"w{n}", "current") for n in range(1000))]
    show(Screen(as_json=False), many)
    text = capsys.readouterr().out
    assert "bad" in text
    assert f"{len(many) - ROWS_SHOWN} more rows" in text
    assert len(text.splitlines()) < ROWS_SHOWN + 5


def test_an_unknown_order_is_refused(publisher: Publisher) -> None:
    done = run("top", publisher.address, "--once", "--sort", "beauty")
    assert done.exit_code == 2
    assert "trouble" in done.stderr


def test_the_worst_comes_first_and_keys_choose() -> None:
    some = [standing(v, v, lag=n, rate=9 - n) for n, v in enumerate(reversed(VERDICTS))]
    choice = Choice()
    assert [s.worker for s in choice.of(some)] == [*VERDICTS]
    seen = set[tuple[str, ...]]()
    for _ in SORTS:
        choice.press("s")
        seen.add(tuple(s.worker for s in choice.of(some)))
    assert choice.sort == "trouble"
    assert len(seen) >= 3
    for key in "/LOSx\x7f\r":
        choice.press(key)
    assert [s.worker for s in choice.of(some)] == ["lost"]
    assert not choice.typing
    choice.press("\x1b")
    assert len(choice.of(some)) == len(some)
    assert not choice.over
    choice.press("q")
    assert choice.over


def test_words_of_others_are_neither_markup_nor_orders_to_the_terminal() -> None:
    assert plain("[red]x[/]\x1b[2J").plain == r"[red]x[/]\x1b[2J"
    assert visible("a\x07\nb\x1b]0;t\x07") == "a\\x07\nb\\x1b]0;t\\x07"


class Terminal:
    """A command that has a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        words = [sys.executable, "-m", "weightbus", *arguments]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "30"}
        self.process = subprocess.Popen(  # noqa: S603
            words, stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        self.seen = ""

    def shows(self, text: str) -> bool:
        """Take what it has drawn since, and return whether this is in what it drew."""
        while select.select([self.master], [], [], 0)[0]:
            try:
                self.seen += os.read(self.master, 2**16).decode(errors="replace")
            except OSError:  # it has ended
                break
        return text in self.seen

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self.master, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        os.close(self.master)


def test_top_follows_in_a_terminal_until_a_key_ends_it(publisher: Publisher) -> None:
    target = {"w": np.zeros(10, np.float32)}
    with Subscriber(publisher.address, {"m": target}, name="worker-x") as subscriber:
        subscriber.start()
        publisher.wait_for_workers(1, SECONDS)
        terminal = Terminal("top", publisher.address)
        try:
            wait_for(lambda: terminal.shows("worker-x"), "the worker", SECONDS)
            publisher.publish("m", arrays())
            wait_for(lambda: terminal.shows("1 current"), "the version", SECONDS)
            terminal.press("s")
            wait_for(lambda: terminal.shows("sorted by worker"), "the order", SECONDS)
            terminal.press("q")
            assert terminal.process.wait(SECONDS) == 0
        finally:
            terminal.close()


def test_the_stream_for_programs_is_a_line_for_each_look(publisher: Publisher) -> None:
    words = [sys.executable, "-m", "weightbus", "top", publisher.address, "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:  # noqa: S603
        assert process.stdout is not None
        begun = time.monotonic()
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.terminate()
        assert process.wait(SECONDS) == 143
    assert [line["kind"] for line in lines] == ["top", "top"]
    assert time.monotonic() - begun > 0.5
