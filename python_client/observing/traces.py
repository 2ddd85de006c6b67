"""Creates OpenTelemetry spans of publishes and applies, if the user's process has set up the SDK.

    weightbus.publish                 from the call to its receipt, a child of the caller's span
        weightbus.stage, .apply       for each worker, from the call to its acknowledgement
    weightbus.apply                   in the worker's process: the copy into its model

This module does not import OpenTelemetry: a process that has set up a provider has imported it.
The spans of both sides have model, epoch and version as attributes, by which a user finds spans
that belong together; no trace id is sent. A separate thread creates the spans, since the user's
exporters may hang or fail.
"""

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...bus.errors import PublishError
from ...bus.receipt import Receipt, WorkerReceipt
from .background_queue import BackgroundQueue, Job

if TYPE_CHECKING:
    from ..applying.applier import Update

log = logging.getLogger("weightbus.traces")

API, SDK = "opentelemetry.trace", "opentelemetry.sdk.trace"
NAME = "weightbus"
WORKERS_TRACED = 256  # the most workers of one publish that have a span
QUEUED_MAX = 256  # the most publishes and applies whose spans are queued; others have no spans
SETTLE_SECONDS = 1.0  # seconds to wait for queued spans when the process ends
SPANS = {"staged": "weightbus.stage", "applied": "weightbus.apply", "skipped": "weightbus.apply"}


def tracer() -> Any:
    """Return the tracer of OpenTelemetry; None if no provider is set up."""
    api, sdk = sys.modules.get(API), sys.modules.get(SDK)
    if api is None or sdk is None:
        return None
    provider = api.get_tracer_provider()
    if not isinstance(provider, sdk.TracerProvider):
        return None
    return provider.get_tracer(NAME, _version())


@cache
def _version() -> str:
    return version(NAME)


def on_publish(started: float) -> Callable[[Receipt, PublishError | None], None] | None:
    """Return a function that creates the spans of an ended publish; None if there is no tracer.

    Args:
        started: The monotonic time at which `publish` was called.
    """
    if SDK not in sys.modules:
        return None
    found = tracer()
    if found is None:
        return None
    context = sys.modules["opentelemetry.context"].get_current()
    return partial(_published, found, context, started)


def on_apply(update: "Update") -> None:
    """Create the span of a version that a worker has applied, if there is a tracer."""
    found = tracer() if SDK in sys.modules else None
    if found is not None:
        context = sys.modules["opentelemetry.context"].get_current()
        _queue_job(partial(_applied, found, context, update, time.time_ns()))


def settle() -> None:
    """Wait at most `SETTLE_SECONDS` until all queued spans are created."""
    if SDK in sys.modules:
        _queue(os.getpid()).settle(SETTLE_SECONDS)


@cache
def _queue(_process: int) -> BackgroundQueue:
    """Return the queue of this process; `_process` is its id.

    A forked child needs its own queue, since it does not have its parent's threads.
    """
    atexit.register(settle)  # runs before the provider's handler, which was registered earlier
    return BackgroundQueue("weightbus-traces", QUEUED_MAX)


def _queue_job(job: Job) -> None:
    if not _queue(os.getpid()).put(partial(_run_guarded, job)):
        _warn("the exporter is too slow for the spans, and some are dropped: use a faster one")


def _run_guarded(job: Job) -> None:
    try:
        job()
    except BaseException:
        _warn("a span could not be made; further failures are not logged", exc_info=True)


_warned = dict[str, object]()


def _warn(text: str, *, exc_info: bool = False) -> None:
    """Log a text, unless it was logged before. Thread-safe."""
    own = object()
    if _warned.setdefault(text, own) is own:
        log.warning(text, exc_info=exc_info)


def _applied(tracer: Any, context: Any, update: "Update", end: int) -> None:
    attributes = {**_attributes(update), "weightbus.bytes": update.nbytes}
    begin = end - round(1e9 * update.seconds)
    span = tracer.start_span("weightbus.apply", context, attributes=attributes, start_time=begin)
    span.end(end)


def _published(
    tracer: Any, context: Any, started: float, receipt: Receipt, error: PublishError | None
) -> None:
    begin = time.time_ns() - round(1e9 * (time.monotonic() - started))
    _queue_job(partial(_create_spans, tracer, context, begin, receipt, error))


def _create_spans(
    tracer: Any, context: Any, begin: int, receipt: Receipt, error: PublishError | None
) -> None:
    # Create the span of a publish, and the spans of its workers.
    attributes = {
        **_attributes(receipt),
        "weightbus.bytes": receipt.nbytes,
        "weightbus.workers": len(receipt.workers),
    }
    span = tracer.start_span("weightbus.publish", context, attributes=attributes, start_time=begin)
    api = sys.modules[API]
    inner = api.set_span_in_context(span, context)
    for worker in [*receipt.workers.values()][:WORKERS_TRACED]:
        _create_worker_span(tracer, inner, worker, receipt, begin)
    if error is not None:
        span.set_status(api.Status(api.StatusCode.ERROR, str(error)))
    span.end(begin + round(1e9 * receipt.seconds))


def _create_worker_span(
    tracer: Any, context: Any, worker: WorkerReceipt, receipt: Receipt, begin: int
) -> None:
    # Create the span of one worker.
    attributes = {
        **_attributes(receipt),
        "weightbus.worker": worker.name,
        "weightbus.state": worker.state,
    }
    name = SPANS.get(worker.state, "weightbus.apply")
    span = tracer.start_span(name, context, attributes=attributes, start_time=begin)
    if worker.state not in SPANS:
        api = sys.modules[API]
        span.set_status(api.Status(api.StatusCode.ERROR, worker.detail or worker.state))
    seconds = receipt.seconds if worker.seconds is None else worker.seconds
    span.end(begin + round(1e9 * seconds))


def _attributes(of: "Receipt | Update") -> dict[str, Any]:
    return {
        "weightbus.model": of.model,
        "weightbus.epoch": of.epoch,
        "weightbus.version": of.version,
    }
