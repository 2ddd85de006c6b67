"""Exports the metrics of a publisher or relay to Prometheus.

One table describes all metrics; the documentation is generated from it. The number of labels is
limited: models and workers beyond a limit count only in sums.
"""

import math
import re
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...bus.errors import PublishError
from ...bus.net.callbacks import EVENT_KINDS, WorkerEvent
from ...bus.receipt import Receipt
from .relay_status import RelayStatus
from .view import VERDICTS, Standing, View

MODELS_LABELLED = 64  # the most models with their own series
WORKERS_LABELLED = 256  # the most workers with their own series, of which each has one per model
OTHER = "other"  # the label of all other models
# Matches the metadata to export: numbers. Other text would have to be a label, and each new text
# would make a new series.
NUMBER = re.compile(r"[+-]?[0-9]{1,32}(\.[0-9]{0,32})?([eE][+-]?[0-9]{1,4})?")
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Row(NamedTuple):
    """The description of a metric: its name, kind, labels and help text."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


STATES: Final = ("live", "stuck", "lost")
METRICS: Final = {
    row.name: row
    for row in (
        Row("weightbus_publishes_total", "counter", ("model", "outcome"),
            "Calls of publish that are over; outcome is achieved or missed."),
        Row("weightbus_published_bytes_total", "counter", ("model",),
            "Bytes of the versions of those calls, each counted once."),
        Row("weightbus_publish_seconds", "histogram", ("model",),
            "From the call of publish to its receipt."),
        Row("weightbus_worker_events_total", "counter", ("kind",),
            "What became of workers: joined, lost, back, stuck, left, refused, failed."),
        Row("weightbus_malformed_messages_total", "counter", (),
            "Messages dropped because they broke the protocol."),
        Row("weightbus_publisher_epoch", "gauge", (),
            "The publisher's incarnation; it changes when another takes its place."),
        Row("weightbus_workers", "gauge", ("state",),
            "Workers on the roster; state is live, stuck or lost."),
        Row("weightbus_model_version", "gauge", ("model",),
            "The latest version for all."),
        Row("weightbus_model_bytes", "gauge", ("model",),
            "Bytes of that version."),
        Row("weightbus_model_published_timestamp_seconds", "gauge", ("model",),
            "When that version was published, in seconds since 1970."),
        Row("weightbus_model_metadata", "gauge", ("model", "name"),
            "The metadata of that version, where it is a number: a step, a reward."),
        Row("weightbus_model_workers", "gauge", ("model", "state"),
            "Workers of a model; state is current, behind, stuck, failed or lost."),
        Row("weightbus_model_lag_versions", "gauge", ("model",),
            "By how many versions the last of the connected workers is behind."),
        Row("weightbus_model_lag_seconds", "gauge", ("model",),
            "Seconds since a version was published that some connected worker does not run yet."),
        Row("weightbus_worker_version", "gauge", ("model", "worker"),
            "The version that a worker runs; 0: none of this epoch."),
        Row("weightbus_worker_lag_versions", "gauge", ("model", "worker"),
            "Versions that a worker is behind."),
        Row("weightbus_relay_upstream_up", "gauge", (),
            "Of a relay: 1 while it has a session with the publisher above, else 0."),
        Row("weightbus_relay_upstream_epoch", "gauge", (),
            "Of a relay: the epoch of the publisher above, now or last; 0: there was none."),
        Row("weightbus_relay_received_bytes_total", "counter", ("model",),
            "Of a relay: bytes of versions and patches from the publisher above."),
        Row("weightbus_relay_versions", "gauge", ("model", "state"),
            "Of a relay: versions that it holds; state is whole or arriving."),
        Row("weightbus_relay_bytes", "gauge", ("model",),
            "Of a relay: bytes of these versions, and so of its memory for them."),
    )
}  # fmt: skip


class Metrics(Collector):
    """The metrics of one publisher or relay, in their own registry.

    Args:
        refresh: Returns an up-to-date view.
        malformed: Returns the number of received messages that broke the protocol.
        relay: Returns the status of the relay; None if it is no relay.
    """

    def __init__(
        self,
        refresh: Callable[[], View],
        malformed: Callable[[], int],
        relay: Callable[[], RelayStatus] | None = None,
    ) -> None:
        self.registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._refresh, self._malformed, self._relay = refresh, malformed, relay
        self._lock = threading.Lock()  # held to use the view, which is not thread-safe
        self._labels_lock = threading.Lock()
        self._labelled: set[str] = set()  # the models with labels of their own
        self._publishes = self._counter("weightbus_publishes_total")
        self._bytes = self._counter("weightbus_published_bytes_total")
        self._events = self._counter("weightbus_worker_events_total")
        row = METRICS["weightbus_publish_seconds"]
        self._seconds = prometheus_client.Histogram(
            row.name, row.help, row.labels, buckets=BUCKETS, registry=self.registry
        )
        for kind in EVENT_KINDS:
            self._events.labels(kind)
        self.registry.register(self)

    def _counter(self, name: str) -> prometheus_client.Counter:
        row = METRICS[name]
        return prometheus_client.Counter(name, row.help, row.labels, registry=self.registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        with self._lock:
            return prometheus_client.generate_latest(self.registry)

    def count(self, receipt: Receipt, error: PublishError | None) -> None:
        """Count a publish that ended."""
        model = self._label(receipt.model)
        self._publishes.labels(model, "missed" if error else "achieved").inc()
        self._bytes.labels(model).inc(receipt.nbytes)
        self._seconds.labels(model).observe(receipt.seconds)

    def event(self, event: WorkerEvent) -> None:
        """Count an event of a worker."""
        self._events.labels(event.kind).inc()

    def _label(self, model: str) -> str:
        with self._labels_lock:
            if len(self._labelled) < MODELS_LABELLED:
                self._labelled.add(model)
            return model if model in self._labelled else OTHER

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics of models and workers."""
        view, now = self._refresh(), time.monotonic()
        yield _counted("weightbus_malformed_messages_total", {(): self._malformed()})
        states = Tally(worker.state for worker in view.workers.values())
        yield _gauge("weightbus_publisher_epoch", {(): view.epoch})
        yield _gauge("weightbus_workers", {(state,): states[state] for state in STATES})
        yield from self._of_models(view, now)
        standings = view.standings(now)
        yield from _of_standings([s for s in standings if self._label(s.model) != OTHER])
        yield from _of_workers([s for s in standings if self._label(s.model) != OTHER], view.epoch)
        if self._relay is not None:
            yield from self._of_relay(self._relay())

    def _of_relay(self, relay: RelayStatus) -> Iterable[Metric]:
        # Yield the metrics that only a relay has.
        yield _gauge("weightbus_relay_upstream_up", {(): int(relay.joined)})
        yield _gauge("weightbus_relay_upstream_epoch", {(): relay.epoch})
        received, counts, sizes = Tally[str](), Tally[tuple[str, str]](), Tally[str]()
        for model, nbytes in relay.received.items():
            received[self._label(model)] += nbytes
            for each in relay.versions.get(model, ()):
                counts[self._label(model), "whole" if each.whole else "arriving"] += 1
                sizes[self._label(model)] += each.nbytes
        yield _counted(
            "weightbus_relay_received_bytes_total", {(m,): n for m, n in received.items()}
        )
        states = {(m, state): counts[m, state] for m in received for state in ("whole", "arriving")}
        yield _gauge("weightbus_relay_versions", states)
        yield _gauge("weightbus_relay_bytes", {(m,): sizes[m] for m in received})

    def _of_models(self, view: View, now: float) -> Iterable[Metric]:
        # Yield the metrics of the models.
        models = {n: m for n, m in view.models(now).items() if self._label(n) != OTHER}
        versions = {(name,): row.version for name, (row, _) in models.items()}
        yield _gauge("weightbus_model_version", versions)
        yield _gauge("weightbus_model_bytes", {(n,): row.nbytes for n, (row, _) in models.items()})
        yield _gauge(
            "weightbus_model_published_timestamp_seconds",
            {(n,): time.time() - age for n, (_, age) in models.items() if age is not None},
        )
        numbers = {
            (n, name): float(text)
            for n, (row, _) in models.items()
            for name, text in row.metadata.items()
            if NUMBER.fullmatch(text) and math.isfinite(float(text))  # not a hash such as 1e999
        }
        yield _gauge("weightbus_model_metadata", numbers)


def _of_standings(standings: list[Standing]) -> Iterable[Metric]:
    counts = Tally((s.model, str(s.verdict)) for s in standings)
    models = {s.model for s in standings}
    by_state = {(model, v): counts[model, v] for model in models for v in VERDICTS}
    yield _gauge("weightbus_model_workers", by_state)
    lags, ages = dict.fromkeys(models, 0), dict.fromkeys(models, 0.0)
    for s in standings:
        if s.verdict != "lost":
            lags[s.model] = max(lags[s.model], s.lag)
            ages[s.model] = max(ages[s.model], s.lag_s or 0.0)
    yield _gauge("weightbus_model_lag_versions", {(model,): n for model, n in lags.items()})
    yield _gauge("weightbus_model_lag_seconds", {(model,): n for model, n in ages.items()})


def _of_workers(standings: list[Standing], epoch: int) -> Iterable[Metric]:
    labelled = set(sorted({s.worker for s in standings})[:WORKERS_LABELLED])
    some = [s for s in standings if s.worker in labelled]
    versions = {(s.model, s.worker): s.version if s.epoch == epoch else 0 for s in some}
    yield _gauge("weightbus_worker_version", versions)
    yield _gauge("weightbus_worker_lag_versions", {(s.model, s.worker): s.lag for s in some})


def _gauge(name: str, values: Mapping[Any, float]) -> GaugeMetricFamily:
    row = METRICS[name]
    family = GaugeMetricFamily(name, row.help, labels=row.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _counted(name: str, values: Mapping[Any, float]) -> CounterMetricFamily:
    row = METRICS[name]
    family = CounterMetricFamily(name, row.help, labels=row.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
