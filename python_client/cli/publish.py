"""`weightbus publish`: publishes the weights of a checkpoint to workers."""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...bus.errors import AddressError, ClosedError, PublishError, WorkersMissingError
from ...bus.net import endpoints
from ...bus.net.callbacks import EVENT_KINDS, WorkerEvent
from ...bus.publisher.status import WorkerStatus
from ...bus.receipt import Receipt
from ...bus.units import span
from ...codecs.metadata import FORMAT, checked, fitting
from ...codecs.precision import precision_of
from ...codecs.protocol_limits import METADATA_BYTES_MAX, METADATA_MAX
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint, stamp_of
from ..checkpoints.watch import Watch
from ..checks import check_name
from ..observing.access import Http
from ..observing.http_endpoints import HttpEndpoints
from ..publisher import Publisher
from ..settings import Encoding, Settings
from .outcome import DONE, NOT_ACHIEVED, Stopped, UsageError
from .screen import DIM, STATE_STYLES, Bars, Screen, counted, metadata_text, plain, size, table

T = TypeVar("T")

POLL_SECONDS = 0.1  # seconds between two checks of the workers' progress
BARS_MAX = 8  # the most workers with a progress bar each; more workers share one bar
GRACE_SECONDS = 10.0  # seconds after a publish's deadline until its thread counts as dead


@dataclass(frozen=True)
class PageOptions:
    """The options for the HTTP pages: addresses, token, and whether access needs no token."""

    dashboard: str | None = None
    metrics: str | None = None
    token: str | None = field(default=None, repr=False)
    insecure: bool = False

    def at(self, address: str | None) -> Http | None:
        """Return the address of a page with its rules of access; None for no address.

        Raises:
            UsageError: The address is invalid, or would give other hosts access without a token.
        """
        try:
            return None if address is None else Http(address, self.token, insecure=self.insecure)
        except (AddressError, ValueError) as error:
            raise UsageError(f"{error} (on the command line: --token, --insecure-http)") from None

    def opened(self, make: Callable[..., T], verb: str, bind: str) -> T:
        """Return the publisher or relay that `make` creates with these pages.

        Args:
            make: Creates the publisher or relay; called with the keywords `dashboard` and
                `metrics`.
            verb: The verb for the error text: `publish` or `relay`.
            bind: The address at which the publisher or relay listens.

        Raises:
            UsageError: The address of a page is invalid, or would give other hosts access.
            AddressError: An address is invalid or in use.
        """
        dashboard, metrics = self.at(self.dashboard), self.at(self.metrics)
        try:
            return make(dashboard=dashboard, metrics=metrics)
        except AddressError as error:
            raise AddressError(
                f"cannot {verb} at {bind}: {error} [--bind takes that port and the next one]"
            ) from None


@dataclass(frozen=True)
class PublishJob:
    """The options of the command `publish`; see its help text."""

    path: Path
    model: str
    bind: str
    expect: int
    watch: bool
    timeout: float
    state: Path | None = None
    grace: float | None = None
    dtypes: Sequence[str] = ()
    keys: Path | None = None
    insecure: bool = False
    pages: PageOptions = PageOptions()
    encoding: Encoding = "raw"
    metadata: Sequence[str] = ()

    def check(self) -> None:
        """Reject options that can never work.

        Raises:
            UsageError: An option is invalid; the message says what to write instead.
        """
        if not self.watch and not self.path.exists():
            raise UsageError(f"{self.path} does not exist; give a .safetensors file or a folder")
        if self.watch and not self.path.parent.is_dir():
            raise UsageError(f"{self.path}: there is no folder {self.path.parent} to watch")
        if not self.watch and self.expect < 1:
            raise UsageError("without --watch, no worker would get the weights: --expect 1 or more")
        try:
            check_name(self.model, "model")
            endpoints.check(self.bind)
            precision_of(self.dtype)
            checked(self.own_metadata)
        except (ValueError, AddressError) as error:
            raise UsageError(str(error)) from None

    @property
    def dtype(self) -> str | Mapping[str, str] | None:
        """The dtype to convert to, or a dtype for each pattern of names (`PATTERN=DTYPE`)."""
        if len(self.dtypes) == 1 and "=" not in self.dtypes[0]:
            return self.dtypes[0]
        pairs = (each.rpartition("=") for each in self.dtypes)
        return {pattern or "*": dtype for pattern, _, dtype in pairs} or None

    @property
    def own_metadata(self) -> dict[str, str]:
        """The user's metadata for each version.

        Raises:
            UsageError: An entry is not `NAME=TEXT`.
        """
        for each in self.metadata:
            if not each.partition("=")[0] or "=" not in each:
                raise UsageError(
                    f"--metadata {each}: give NAME=TEXT, such as --metadata step=12000"
                )
        return {name: text for name, _, text in (each.partition("=") for each in self.metadata)}

    def metadata_of(self, screen: Screen, checkpoint: Checkpoint) -> dict[str, str]:
        """Return a version's metadata: the user's entries, then the checkpoint's, up to the limit.

        A warning names the entries that do not fit.
        """
        own_metadata = self.own_metadata
        texts = {name: t for name, t in checkpoint.metadata.items() if name != FORMAT}
        found, rest = fitting({**own_metadata, **texts, **own_metadata}.items())
        if rest:
            screen.warn(
                f"{checkpoint.path}: of its metadata, {', '.join(rest[:10])}"
                + (f" and {len(rest) - 10} more" if len(rest) > 10 else "")
                + f" are not published: a version has at most {METADATA_MAX} entries and "
                f"{METADATA_BYTES_MAX} bytes of metadata"
            )
        return found


def publish(screen: Screen, order: PublishJob) -> int:
    """Publish once, or with `watch` at each change until stopped; return the exit code."""
    order.check()
    return _publish_changes(screen, order) if order.watch else _publish_once(screen, order)


def _publish_once(screen: Screen, order: PublishJob) -> int:
    # Publish the checkpoint once; return the exit code.
    deadline = time.monotonic() + order.timeout
    checkpoint = open_checkpoint(order.path)
    with _listen(order) as publisher:
        _introduce(screen, order, publisher)
        missing = _wait_for_workers(screen, order, publisher, deadline)
        if missing:
            screen.error(f"nothing was published: {missing}")
            _emit_nothing(screen, order, publisher, checkpoint, missing)
            return NOT_ACHIEVED
        left = max(POLL_SECONDS, deadline - time.monotonic())
        receipt, shortfall = _send(screen, order, publisher, checkpoint, left)
        if not shortfall and checkpoint.changed():
            shortfall = (
                f"{order.path} was written while it was published, so the workers may have parts "
                "of two checkpoints: publish it again (--watch prevents this)"
            )
        _show(screen, receipt, shortfall)
    return NOT_ACHIEVED if shortfall else DONE


def _publish_changes(screen: Screen, order: PublishJob) -> int:
    # Publish the checkpoint at each change, until stopped; return the exit code.
    published = 0
    try:
        with logged(screen), _listen(order) as publisher:
            _introduce(screen, order, publisher)
            publisher.on_worker(lambda event: show_event(screen, event))
            watch = Watch(order.path, screen.warn)
            while True:
                checkpoint = _next(screen, order, watch)
                if not published:
                    deadline = time.monotonic() + order.timeout
                    missing = _wait_for_workers(screen, order, publisher, deadline)
                    if missing:
                        screen.warn(f"{missing}. Workers that join later get the latest version")
                receipt, shortfall = _send(screen, order, publisher, checkpoint, order.timeout)
                published = receipt.version  # set before `_show`, since a signal may interrupt that
                _show(screen, receipt, shortfall)
    except Stopped as stopped:
        screen.say(f"stopped by {stopped.signal.name} after {counted(published, 'version')}", DIM)
        screen.emit("stopped", signal=stopped.signal.name, published=published)
        return DONE


def _listen(order: PublishJob) -> Publisher:
    # Return a new publisher, which listens at `bind`; raise UsageError for an invalid option.
    make = partial(
        Publisher, order.bind, state=order.state, keys=order.keys, insecure=order.insecure
    )
    return order.pages.opened(make, "publish", order.bind)


def _introduce(screen: Screen, order: PublishJob, publisher: Publisher) -> None:
    # Show the addresses of the publisher and of its pages.
    screen.say(f"{order.model} at {publisher.address}", "bold")
    show_pages(screen, publisher.shown)
    screen.emit(
        "listening",
        model=order.model,
        address=publisher.address,
        data_address=publisher.data_address,
        epoch=publisher.epoch,
        dashboard=publisher.shown.dashboard,
        metrics=publisher.shown.metrics,
    )


def show_pages(screen: Screen, shown: HttpEndpoints) -> None:
    """Show the addresses of the pages of a publisher or relay."""
    for what, address in {"dashboard": shown.dashboard, "metrics": shown.metrics}.items():
        if address:
            screen.say(f"{what} at {address}", DIM)


class _Log(logging.Handler):
    """Shows log records, except the events of workers, which `show_event` shows."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, str] = getattr(record, "weightbus", {})
        if fields.get("kind") not in EVENT_KINDS:
            self._screen.warn(self.format(record))


@contextlib.contextmanager
def logged(screen: Screen) -> Generator[None]:
    """Show the package's log records during the block."""
    log, handler = logging.getLogger("weightbus"), _Log(screen)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def show_event(screen: Screen, event: WorkerEvent) -> None:
    """Show an event of a worker, since receipts do not show events between two publishes."""
    text = f"{time.strftime('%H:%M:%S')}  {event.text}"
    if event.missed:
        text += f" ({counted(event.missed, 'earlier event')} not shown)"
    if event.kind in ("lost", "stuck", "refused", "failed"):
        screen.warn(text)
    else:
        screen.note(text)
    screen.emit("worker", event=event.kind, worker=event.worker, text=event.text)


def _next(screen: Screen, order: PublishJob, watch: Watch) -> Checkpoint:
    """Wait for the next complete checkpoint, read it with a progress bar, and return it."""
    while True:
        with screen.waiting(f"watching {order.path}"):
            watch.wait_for_change()
        with screen.bars() as bars:
            total = sum(file.size for file in stamp_of(order.path))
            loaded = watch.load(partial(bars.advance, "reading", total=total))
        if loaded is not None:
            return loaded


def _wait_for_workers(
    screen: Screen, order: PublishJob, publisher: Publisher, deadline: float
) -> str:
    """Wait for the expected number of workers; return an error message, or "" if enough joined.

    The wait ends at `deadline`, on the monotonic clock.
    """
    with screen.waiting("") as waiting:
        while True:
            joined = sum(
                worker.state != "lost" and order.model in worker.models
                for worker in publisher.workers().values()
            )
            waiting.say(f"waiting for workers: {joined} of {order.expect} joined")
            try:
                left = max(0.0, deadline - time.monotonic())
                publisher.wait_for_workers(order.expect, min(POLL_SECONDS, left), order.model)
            except WorkersMissingError:
                if time.monotonic() >= deadline:
                    workers = counted(order.expect, "worker")
                    within = f"within {order.timeout:g} s"
                    return (
                        f"{joined} of {workers} for {order.model!r} joined {within}; "
                        f"start them with: weightbus subscribe {publisher.address} "
                        f"--model {order.model} --out FILE"
                    )
            else:
                return ""


def _send(
    screen: Screen,
    order: PublishJob,
    publisher: Publisher,
    checkpoint: Checkpoint,
    timeout: float,
) -> tuple[Receipt, str]:
    """Publish with progress bars; return the receipt, and an error message or ""."""
    with screen.bars() as bars:
        before = publisher.workers()
        # Every transport verifies, so that users can compare the digests of receipts and files.
        future = publisher.publish_async(
            order.model,
            checkpoint.arrays(),
            timeout=timeout,
            metadata=order.metadata_of(screen, checkpoint),
            settings=Settings(
                verify=True, grace=order.grace, dtype=order.dtype, encoding=order.encoding
            ),
            # With --watch, the connected workers are enough, however few.
            expect=0 if order.watch else order.expect,
        )
        give_up = time.monotonic() + timeout + GRACE_SECONDS
        while not wait([future], POLL_SECONDS).done:
            _update_bars(bars, order.model, checkpoint.nbytes, before, publisher.workers())
            if time.monotonic() > give_up:
                raise ClosedError("the publisher's thread does not answer; is the host overloaded?")
    try:
        return future.result(), ""
    except PublishError as error:
        return error.receipt, str(error)


def _update_bars(
    bars: Bars,
    model: str,
    nbytes: int,
    before: Mapping[str, WorkerStatus],
    now: Mapping[str, WorkerStatus],
) -> None:
    # Set the progress bars to the bytes that each worker has received.
    done: dict[str, int] = {}
    for name, worker in now.items():
        if worker.state == "lost" or model not in worker.models:
            continue
        earlier = before.get(name)
        phase = worker.phase.get(model, "")
        if model in worker.progress:
            received, count = worker.progress[model]
            done[name] = nbytes * received // max(1, count)
        else:
            changed = earlier is None or worker.running.get(model) != earlier.running.get(model)
            done[name] = nbytes if phase or changed else 0
    if len(done) <= BARS_MAX:
        for name, received in done.items():
            bars.move(name, received, nbytes, now[name].phase.get(model, ""))
    else:
        finished = sum(received == nbytes for received in done.values())
        note = f"{finished} of {len(done)} workers have received the version"
        bars.move("all workers", sum(done.values()), nbytes * len(done), note)


def _show(screen: Screen, receipt: Receipt, shortfall: str) -> None:
    # Show a receipt as a table; `shortfall` is its error message, or "".
    rate = size(round(receipt.nbytes / max(receipt.seconds, 1e-9)))
    head = f"{time.strftime('%H:%M:%S')}  {receipt.model} version {receipt.version}"
    screen.say(f"{head}: {size(receipt.nbytes)} in {span(receipt.seconds)}, {rate}/s")
    if receipt.workers:
        rows = table("worker", "state", "after", "", right=("after",))
        for worker in sorted(receipt.workers.values(), key=lambda worker: worker.name):
            style = STATE_STYLES[worker.state]
            after = "" if worker.seconds is None else span(worker.seconds)
            patch = f"{size(worker.nbytes)} as {worker.encoding}" if worker.patched else ""
            note = plain(worker.detail or patch)
            rows.add_row(worker.name, f"[{style}]{worker.state}[/]", after, note)
        screen.show(rows)
    if receipt.metadata:
        screen.say(metadata_text(receipt.metadata), DIM)
    screen.say(f"digest {receipt.digest}" if receipt.digest else "no digest was needed", DIM)
    if shortfall:
        screen.error(shortfall)
    screen.emit("receipt", achieved=not shortfall, **_fields(receipt), text=shortfall)


def _emit_nothing(
    screen: Screen, order: PublishJob, publisher: Publisher, checkpoint: Checkpoint, why: str
) -> None:
    """Write the JSON receipt of a publish that did not begin: its `version` is null."""
    screen.emit(
        "receipt",
        achieved=False,
        model=order.model,
        epoch=publisher.epoch,
        version=None,
        nbytes=checkpoint.nbytes,
        seconds=order.timeout,
        digest="",
        metadata={},
        workers={},
        text=why,
    )


def _fields(receipt: Receipt) -> dict[str, object]:
    # Return a receipt as a dict, for JSON.
    return {
        "model": receipt.model,
        "epoch": receipt.epoch,
        "version": receipt.version,
        "nbytes": receipt.nbytes,
        "seconds": round(receipt.seconds, 6),
        "digest": receipt.digest,
        "metadata": dict(receipt.metadata),
        "workers": {
            worker.name: {
                "state": worker.state,
                "seconds": None if worker.seconds is None else round(worker.seconds, 6),
                "detail": worker.detail,
                "encoding": worker.encoding,
                "nbytes": worker.nbytes,
            }
            for worker in receipt.workers.values()
        },
    }
