"""Fetches chunks of versions from their sources, for a worker or for the publisher itself. (N1)

A source is another server of some chunks of a version. One thread per source connects with the
sockets of a worker. Its session, one of a worker that only pulls (level 1), ends with the job. The
thread writes chunks into the version's memory, and reports which chunks have arrived.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from ...codecs.sealing import Opening
from ..errors import ProtocolError
from ..headers import Buffer, encode, from_publisher
from ..limits import Timing
from ..messages import (
    PARTS,
    AnyChunk,
    Bye,
    Chunk,
    Fetch,
    Hello,
    Piece,
    Ping,
    Pong,
    PublisherMessage,
    Refuse,
    Rekey,
    SealedChunk,
    Welcome,
)
from ..protocol_limits import WINDOW_CHUNKS
from ..staged import SourceFetch
from ..trust.keys import WorkerKeys
from ..worker.events import SourceFetched
from ..worker.keyring import Keyring
from ..worker.transfer import DAMAGED_MAX, put_chunk
from .control import WorkerSockets

CHECK_SECONDS = 0.1  # seconds between two checks whether the version is still wanted
CLOSE_SECONDS = 5.0  # seconds that `close` waits for the threads, which normally end much sooner

Locate = Callable[[str], tuple[str, WorkerKeys | None]]


class SourceFetcher:
    """Fetches chunks from sources.

    Args:
        locate: Returns, for the address of a source, the endpoint and the keys for the connection.
            Raises AddressError if no connection is allowed. (N2)
        report: Called with chunks that have arrived, and at the end of a job, in any thread.
        timing: The timeouts and intervals.
    """

    def __init__(
        self, locate: Locate, report: Callable[[SourceFetched], None], timing: Timing
    ) -> None:
        self._locate, self._report, self._timing = locate, report, timing
        self._threads = list[threading.Thread]()
        self._closed = False

    def fetch(self, job: SourceFetch, hello: Hello) -> None:
        """Begin to fetch, in one thread per source; `hello` is the first message to each source.

        If the process cannot start a thread, the job ends with that fault for its source, and for
        later ones.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        running = _RunningJob(job, self._report, len(job.sources))
        for count, (address, indexes) in enumerate(job.sources):
            arguments = running, address, indexes, hello
            thread = threading.Thread(
                target=self._fetch, args=arguments, name="weightbus-source", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                for _ in job.sources[count:]:
                    running.end(str(error))
                return
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads, and wait for them at most `CLOSE_SECONDS`."""
        self._closed = True
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _fetch(
        self, running: "_RunningJob", address: str, indexes: Sequence[int], hello: Hello
    ) -> None:
        """Fetch chunks from one source, in its thread."""
        fault = ""
        try:
            endpoint, keys = self._locate(address)
            session = _SourceSession(running, indexes, hello, self._timing, keyed=keys is not None)
            in_flight = session.in_flight_max
            with closing(WorkerSockets(endpoint, _no_lease, keys, in_flight)) as sockets:
                fault = session.run(sockets, lambda: self._closed)
        except Exception as error:  # the missing chunks are then fetched from the publisher
            fault = str(error) or repr(error)
        running.end(f"chunks of the source at {address} are lacking: {fault}" if fault else "")


def _no_lease(_header: Sequence[Buffer], _size: int) -> None:
    """Return no memory for a published message, since none arrives."""


class _RunningJob:
    """One job, which several threads share.

    Args:
        job: The job.
        report: Called with the chunks that have arrived, and at the end.
        count: The number of sources.
    """

    def __init__(
        self, job: SourceFetch, report: Callable[[SourceFetched], None], count: int
    ) -> None:
        self.job, self._report, self._pending = job, report, count
        self._faults = list[str]()
        self._lock = threading.Lock()

    def report(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Report (index, CRC-32C) of chunks that have arrived."""
        self._report(SourceFetched(self.job, chunks))

    def end(self, fault: str) -> None:
        """Record that a source is done, or has failed with a fault; the last ends the job."""
        with self._lock:
            self._pending -= 1
            self._faults += [fault] if fault else []
            last = not self._pending
        if last:
            self._report(SourceFetched(self.job, (), over=True, faults=self._faults))


class _SourceSession:
    """The session with one source, which sends some chunks of a version.

    Args:
        running: The job.
        indexes: The indexes of the chunks to fetch from this source.
        hello: The first message to the source.
        timing: The timeouts and intervals.
        keyed: Whether the source uses keys, and thus encrypts the chunks.
    """

    def __init__(
        self,
        running: _RunningJob,
        indexes: Sequence[int],
        hello: Hello,
        timing: Timing,
        *,
        keyed: bool,
    ) -> None:
        self._running, self._job, self._timing = running, running.job, timing
        self._missing = [*reversed(indexes)]  # a stack of chunks that are not requested yet
        self._requested = set[int]()
        self._moved_at = 0.0  # when a chunk arrived, or was requested while none was in flight
        self._hello, self._keyring = encode(hello), Keyring() if keyed else None
        self._inside = self._sends_parts = False
        self._damaged = 0  # number of damaged chunks
        self._new = list[tuple[int, int]]()  # chunks that have arrived and are not reported yet

    def in_flight_max(self) -> int:
        """Return the most requested bytes that may be in flight."""
        return WINDOW_CHUNKS * self._job.plan.chunk_bytes

    def run(self, sockets: WorkerSockets, stopped: Callable[[], bool]) -> str:
        """Fetch the chunks; return an error text, or "" if all arrived or the job was stopped."""
        heard_at, hello_at, pinged_at = time.monotonic(), 0.0, time.monotonic()
        while self._missing or self._requested:
            if stopped() or not self._job.live:
                break
            now = time.monotonic()
            if now - heard_at >= self._timing.lost_after:
                return f"it has sent nothing for {self._timing.lost_after:g} s"
            if self._requested and now - self._moved_at >= self._timing.lost_after:  # N3
                return f"it has sent no chunk for {self._timing.lost_after:g} s"
            may_send = not self._inside and now - hello_at >= self._timing.hello_retry
            activity = sockets.poll(CHECK_SECONDS, writable=may_send)
            now = time.monotonic()
            if activity.writable and may_send:
                sockets.send(self._hello)
                hello_at = now
            while (frames := sockets.receive()) is not None:
                heard_at = now
                try:
                    message, payloads = from_publisher(frames)
                except ProtocolError as error:
                    return str(error)
                if fault := self._process(message, payloads, sockets):
                    return fault
            if self._new:
                self._running.report(self._new)
                self._new = []
            if self._inside:
                self._request(sockets)
                if now - pinged_at >= self._timing.ping:
                    sockets.send(encode(Ping()))
                    pinged_at = now
            changes = sockets.changed(self._timing.lost_after)
            if changes.refused or changes.closed:
                return changes.refused or "its connection is closed, or cannot be opened"
        sockets.send(encode(Bye()))
        return ""

    def _process(
        self, message: PublisherMessage, payloads: Sequence[Buffer], sockets: WorkerSockets
    ) -> str:
        """Process a message; return an error text that ends the session, or an empty text."""
        match message:
            case Welcome():
                if message.epoch != self._job.announce.epoch:
                    return f"it is of epoch {message.epoch}"
                self._inside, self._sends_parts = True, PARTS in message.features  # T5
                if self._keyring is not None:
                    self._keyring.begin(message.keys)
            case Rekey():
                if self._keyring is not None:
                    self._keyring.add(message.keys, time.monotonic() + self._timing.lost_after)
            case Ping():
                sockets.send(encode(Pong(token=message.token)))
            case Refuse():
                return f"it refuses ({message.code}): {message.text}"
            case Chunk() | SealedChunk() | Piece():
                return self._chunk(message, payloads[0])
            case _:  # other messages do not matter, since this session applies no versions
                pass
        return ""

    def _chunk(self, chunk: AnyChunk, data: Buffer) -> str:
        """Write a requested chunk into the version's memory, if the chunk is intact.

        Return an error text that ends the session, if too many chunks are damaged.
        """
        job, index = self._job, chunk.index
        announce = job.announce
        same = (chunk.model, chunk.epoch, chunk.version) == (
            *(announce.model, announce.epoch, announce.version),
        )
        same = same and (isinstance(chunk, Piece) or chunk.patch is None)
        if not same or index not in self._requested:
            return ""
        self._requested.discard(index)
        proof: int | Opening | Piece | None = None
        # From a source with keys, plain chunks are not accepted.
        if isinstance(chunk, Piece):
            proof = chunk if self._keyring is None else None
        elif isinstance(chunk, Chunk):
            proof = chunk.crc if self._keyring is None else None
        elif self._keyring is not None:
            proof = self._keyring.opening(announce, chunk, len(data))
        cut = None if job.cut is None else (job.cut, index)
        crc = put_chunk(job.buffer, job.plan.span(index), proof, data, cut)
        if crc is not None:
            self._moved_at = time.monotonic()
            self._new.append((index, crc))
            return ""
        self._damaged += 1
        self._missing.append(index)
        return "its chunks are damaged" if self._damaged > DAMAGED_MAX else ""

    def _request(self, sockets: WorkerSockets) -> None:
        """Request more chunks, as far as the window allows."""  # W11
        if len(self._requested) > WINDOW_CHUNKS // 2:
            return
        if not self._requested:
            self._moved_at = time.monotonic()
        intervals = list[tuple[int, int]]()
        while self._missing and len(self._requested) < WINDOW_CHUNKS:
            index = self._missing.pop()
            self._requested.add(index)
            extends = bool(intervals) and sum(intervals[-1]) == index
            first, count = intervals.pop() if extends else (index, 0)
            intervals.append((first, count + 1))
        announce = self._job.announce
        cut = self._job.cut if self._sends_parts else None
        for each in intervals:
            for first, count, ranges in [(*each, [])] if cut is None else cut.requests(*each):
                fetch = Fetch(
                    model=announce.model,
                    epoch=announce.epoch,
                    version=announce.version,
                    first=first,
                    count=count,
                    ranges=ranges,
                )
                sockets.send(encode(fetch))
