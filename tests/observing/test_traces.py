"""Spans of OpenTelemetry, of publishes and applies, where somebody takes them."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weightbus import Publisher, PublishError, Settings, Subscriber
from weightbus.python_client.observing import traces
from weightbus.tests.cli.starting import python
from weightbus.tests.client.settling import arrays, joined
from weightbus.tests.compose.waiting import wait_for

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

SECONDS = 30.0


@pytest.fixture(name="spans")
def _spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Set a provider, for one test: a process can do that but once."""
    provider, kept = sdk.TracerProvider(), memory.InMemorySpanExporter()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield kept
    traces.settle()
    provider.shutdown()


class Processor(sdk.SpanProcessor):  # type: ignore[misc, name-defined]
    """A user's, which does this whenever a span ends."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do, self.threads = do, set[str]()

    def on_end(self, span: object) -> None:
        del span
        self.threads.add(threading.current_thread().name)
        self.do()


@pytest.fixture(name="process")
def _process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], Any]]:
    """Set a provider whose spans are processed by something of the user's."""
    provider = sdk.TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(traces, "SETTLE_SECONDS", 0.01)

    def make(do: Callable[[], object]) -> Processor:
        processor = Processor(do)
        provider.add_span_processor(processor)
        return processor

    traces._warned.clear()  # noqa: SLF001 # pyright: ignore
    traces._queue.cache_clear()  # noqa: SLF001 # pyright: ignore
    yield make
    traces._queue.cache_clear()  # noqa: SLF001 # pyright: ignore


def test_without_a_provider_nothing_is_made() -> None:
    assert traces.tracer() is None
    assert traces.on_publish(0.0) is None


def test_nothing_of_it_is_imported_by_us() -> None:
    code = (
        "import sys, numpy, weightbus\n"
        "at_once = weightbus.Settings(wait='none')\n"
        "with weightbus.Publisher(settings=at_once) as p: p.publish('m', {'w': numpy.zeros(3)})\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    assert python("-c", code, timeout=SECONDS).stdout.strip() == "[]"


def test_a_publish_and_each_worker_have_spans_in_the_trace_of_the_caller(spans: Any) -> None:
    with Publisher() as publisher, joined(publisher, good=arrays(), narrow=arrays(3)):
        mine = trace.get_tracer_provider().get_tracer("mine")
        with mine.start_as_current_span("step"), pytest.raises(PublishError):
            publisher.publish("m", arrays())
        names = ["weightbus.apply"] * 3 + ["weightbus.publish"]

        def told() -> Any:
            found = [s for s in spans.get_finished_spans() if s.name != "step"]
            return found if sorted(s.name for s in found) == names else None

        found = wait_for(told, "the spans", SECONDS)
    step = next(s for s in spans.get_finished_spans() if s.name == "step")
    publish = next(s for s in found if s.name == "weightbus.publish")
    assert publish.parent.span_id == step.context.span_id
    assert dict(publish.attributes) == {
        "weightbus.model": "m",
        "weightbus.epoch": publisher.epoch,
        "weightbus.version": 1,
        "weightbus.bytes": 40,
        "weightbus.workers": 2,
    }
    assert not publish.status.is_ok
    inside = [s for s in found if s.parent and s.parent.span_id == publish.context.span_id]
    states = {s.attributes["weightbus.worker"]: s.attributes["weightbus.state"] for s in inside}
    assert states == {"good": "applied", "narrow": "failed"}
    assert all(publish.start_time == s.start_time <= s.end_time <= publish.end_time for s in inside)
    (copy,) = [s for s in found if s.name == "weightbus.apply" and s not in inside]
    assert copy.parent is None
    assert copy.attributes["weightbus.version"] == 1


def test_an_exporter_that_hangs_holds_up_nobody(
    process: Callable[..., Processor], caplog: pytest.LogCaptureFixture
) -> None:
    """Readers, receipts, pings and further versions go on; of spans too many are dropped."""
    release = threading.Event()
    processor = process(lambda: release.wait(SECONDS))
    timing = Settings(ping=0.05, lost_after=0.2)
    with (
        Publisher(settings=timing) as publisher,
        Subscriber(publisher.address, {"m": arrays()}, name="w", settings=timing) as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        for version in (1, 2):
            publish = publisher.publish_async("m", arrays())
            update = worker.receive(SECONDS)
            assert update is not None
            assert update.version == version
            assert publish.result(SECONDS).workers["w"].state == "applied"
            with worker.reading(0.0):
                pass
            for _ in range(traces.QUEUED_MAX + 1):
                traces.on_apply(update)
    release.set()
    traces._queue(os.getpid()).settle(SECONDS)  # noqa: SLF001 # pyright: ignore
    assert processor.threads == {"weightbus-traces"}
    assert caplog.text.count("some are dropped") == 1


def test_a_processor_that_fails_is_told_once_and_fails_nothing(
    process: Callable[..., Processor], caplog: pytest.LogCaptureFixture
) -> None:
    processor = process(lambda: 1 / 0)
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": arrays()}, name="w") as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        for _ in range(2):
            publish = publisher.publish_async("m", arrays())
            assert worker.receive(SECONDS) is not None
            publish.result(SECONDS)
    assert traces._queue(os.getpid()).settle(SECONDS)  # noqa: SLF001 # pyright: ignore
    assert processor.threads == {"weightbus-traces"}
    (told,) = [r for r in caplog.records if r.name == "weightbus.traces"]
    assert told.levelno == logging.WARNING
    assert "ZeroDivisionError" in caplog.text
