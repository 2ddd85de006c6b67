"""Logs have one line for each thing that happens, no more than can be read, and say whose fault."""

import logging

import numpy as np
import pytest

from weightbus import Publisher, PublishError, RefusedError, Settings, Subscriber
from weightbus.bus.effects import Notice
from weightbus.bus.errors import FRAMES_SHOWN, summary_of
from weightbus.bus.event_log import KIND_RATE, EventLog
from weightbus.tests.cli.starting import python
from weightbus.tests.client.settling import arrays
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than anything here takes
log = logging.getLogger("weightbus.test")


def break_something(_update: object) -> None:
    raise KeyError("the caches of the user")


@pytest.mark.parametrize("started", [True, False])
def test_a_version_that_does_not_fit_is_in_the_workers_log_once(
    caplog: pytest.LogCaptureFixture, *, started: bool
) -> None:
    def told() -> list[str]:
        own = [r for r in caplog.records if r.name != "weightbus.publisher"]
        return [r.name for r in own if "layout-mismatch" in r.getMessage()]

    with Publisher() as publisher, Subscriber(publisher.address, {"m": arrays()}) as subscriber:
        publisher.wait_for_workers(1, SECONDS)
        if started:
            subscriber.start()
            publisher.publish("m", arrays(), timeout=SECONDS)  # so that somebody applies there
        with pytest.raises(PublishError, match="layout-mismatch"):
            publisher.publish("m", {"w": np.zeros(3, np.float32)}, timeout=SECONDS)
        wait_for(told, "it is told", SECONDS)
    assert told() == ["weightbus.subscriber" if started else "weightbus.worker"]


def test_an_error_in_user_code_reaches_both_sides_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        Publisher() as publisher,
        Subscriber(
            publisher.address,
            {"m": arrays()},
            name="w",
            settings=Settings(before_apply=break_something),
        ) as subscriber,
    ):
        subscriber.start()
        publisher.wait_for_workers(1, SECONDS)
        with pytest.raises(PublishError) as failed:
            publisher.publish("m", arrays())
        subscriber.close()
    detail = failed.value.receipt.workers["w"].detail
    assert "KeyError: 'the caches of the user' (at test_logs.py:" in detail
    assert "in break_something)" in detail
    (record,) = [r for r in caplog.records if r.name == "weightbus.subscriber"]
    assert "in break_something\n" in caplog.text
    assert record.exc_info is not None


def deep(depth: int) -> None:
    if depth:
        deep(depth - 1)
    raise ValueError("far down")


def test_of_a_traceback_the_innermost_frames_are_told() -> None:
    with pytest.raises(ValueError, match="far down") as found:
        deep(2 * FRAMES_SHOWN)
    text = summary_of(found.value)
    assert text.count("test_logs.py") == FRAMES_SHOWN
    assert "\n" not in text
    assert summary_of(OSError(28, "full")) == "OSError: [Errno 28] full"


def test_a_record_says_what_it_is_about_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weightbus"):
        EventLog(log).write(
            Notice("failed", "worker w failed:\n\x1b[2Jforged", "w", warning=True), 0
        )
    (record,) = caplog.records
    assert record.getMessage() == r"worker w failed:\n\x1b[2Jforged"
    assert record.levelno == logging.WARNING
    assert record.__dict__["weightbus"] == {"kind": "failed", "worker": "w"}


def test_a_flood_is_told_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog(log)
    with caplog.at_level(logging.INFO, "weightbus"):
        for number in range(100_000):
            events.write(Notice("joined", f"worker {number} joined", str(number)), number / 1000)
    assert len(caplog.records) <= KIND_RATE.burst + 100 * KIND_RATE.per_second + 100 / 10 + 1
    assert any("times more since" in record.getMessage() for record in caplog.records)


def test_a_record_below_the_level_takes_no_token(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog(log)
    with caplog.at_level(logging.WARNING, "weightbus"):
        for _ in range(10 * int(KIND_RATE.burst)):
            events.write(Notice("joined", "worker w joined", "w"), 0)
        events.write(Notice("nobody", "a warning", warning=True), 0)
    assert [record.getMessage() for record in caplog.records] == ["a warning"]


def records(caplog: pytest.LogCaptureFixture, name: str, kind: str) -> list[logging.LogRecord]:
    """Return the records of one logger that are about one kind of thing."""
    mine = [r for r in caplog.records if r.name == name]
    return [r for r in mine if r.__dict__.get("weightbus", {}).get("kind") == kind]


def test_both_sides_say_who_joined_and_who_is_refused_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.INFO, "weightbus"),
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": arrays()}, name="w") as first,
    ):
        assert first.wait_joined(SECONDS)
        # By another name of the host: as from another process, whose workers are none of ours.
        elsewhere = publisher.address.replace("127.0.0.1", "localhost")
        with Subscriber(elsewhere, {"m": arrays()}, name="w") as second:
            for _ in range(3):
                with pytest.raises(RefusedError):
                    second.receive(SECONDS)
    for name in ("weightbus.publisher", "weightbus.worker"):
        (joined,) = records(caplog, name, "joined")
        assert joined.levelno == logging.INFO
        (refused,) = records(caplog, name, "refused")
        assert refused.levelno == logging.WARNING
        assert "name-taken" in refused.getMessage()
    assert f"worker w of {publisher.address}: joined, epoch {publisher.epoch}" in caplog.text


SILENT = "logging.getLogger('weightbus').addHandler(logging.NullHandler())"


@pytest.mark.parametrize(("setup", "lines"), [("pass", 1), (SILENT, 0)])
def test_who_has_set_up_nothing_is_told_warnings_and_may_say_not_to_be(
    setup: str, lines: int
) -> None:
    code = (
        "import logging, weightbus.bus.event_log as c\n"
        "from weightbus.bus.effects import Notice\n"
        f"{setup}\n"
        "events = c.EventLog(logging.getLogger('weightbus.publisher'))\n"
        "events.write(Notice('joined', 'worker w joined', 'w'), 0)\n"
        "events.write(Notice('lost', 'worker w is lost', 'w', warning=True), 0)\n"
    )
    done = python("-c", code, timeout=SECONDS)
    assert (done.stdout, len(done.stderr.splitlines())) == ("", lines)
