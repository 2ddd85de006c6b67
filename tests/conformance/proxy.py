"""A proxy between workers and a publisher that takes ZMTP apart: rules work on whole messages.

    worker ── control port ──┐           ┌── ROUTER ┐
                             ├── rules ──┤          ├ publisher
    worker ── data port ─────┘           └── XPUB ──┘

Each connection of a worker has one of its own to the publisher, so that either side sees the
other's connection end. The publisher advertises the proxy's data port. The proxy stays while
publishers come and go.
"""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from weightbus.tests.conformance.driver import WAIT_SECONDS, Fault
from weightbus.tests.conformance.rules import Channel, Fate, Frames, Header, Passing, Rule, Spoil

MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
GREETING_BYTES = 64
HOST = "127.0.0.1"
LOOK_SECONDS = 0.05  # between two looks at what is still there when the proxy is closed
TURNS = 4  # of the loop, in which connections that were cut give their sockets back
CALL_SECONDS = 10.0  # for the proxy's own thread to do something
STREAM_BYTES = 2**22  # read ahead

T = TypeVar("T")


def framed(frames: Sequence[bytes]) -> bytes:
    """Return a message as bytes of ZMTP."""
    out = bytearray()
    for index, body in enumerate(frames):
        flags = MORE if index < len(frames) - 1 else 0
        if len(body) > 255:
            out += bytes([flags | LONG]) + len(body).to_bytes(8, "big")
        else:
            out += bytes([flags, len(body)])
        out += body
    return bytes(out)


def header_of(frames: Frames, channel: Channel, *, up: bool) -> Header:
    """Return the header of a message; nothing if it is a subscription or damaged."""
    at = 0 if channel == "control" else 1
    if len(frames) <= at or (up and channel == "data"):
        return {}
    with contextlib.suppress(ValueError):
        header: Any = json.loads(frames[at])
        if isinstance(header, dict):
            return header
    return {}


@dataclass(eq=False)
class Link:
    """A connection of a worker, and the one to the publisher behind it."""

    channel: Channel
    to_worker: asyncio.StreamWriter
    to_publisher: asyncio.StreamWriter
    worker: str = ""
    open: bool = False  # messages may be put in from here on
    kept: bytes = b""  # for the worker, until something comes that it is to arrive with
    spoils: list[Spoil] = field(default_factory=list[Spoil])  # bytes that are yet to pass

    def cut(self) -> None:
        """End both connections at once."""
        for writer in (self.to_worker, self.to_publisher):
            writer.transport.abort()

    def send(self, frames: Sequence[bytes], *, up: bool) -> None:
        """Put a message on its way, if the connection is still there."""
        self.write(framed(frames), up=up)

    def write(self, data: bytes, *, up: bool) -> None:
        """Put bytes on their way, if the connection is still there."""
        writer = self.to_publisher if up else self.to_worker
        if not up:
            data, self.kept = self.kept + data, b""
        for spoil in [spoil for spoil in self.spoils if spoil.up == up]:
            if spoil.at < len(data):
                data = spoil.pass_on(data)
                self.spoils.remove(spoil)
            else:
                spoil.at -= len(data)
        if not writer.is_closing():
            writer.write(data)

    async def trickle(self, frames: Sequence[bytes], pace: tuple[int, float], *, up: bool) -> None:
        """Put a message on its way piece by piece."""
        nbytes, seconds = pace
        data = framed(frames)
        for begin in range(0, len(data), nbytes):
            self.write(data[begin : begin + nbytes], up=up)
            await asyncio.sleep(seconds)


class Proxy:
    """The proxy, running in a thread of its own.

    Args:
        patience: Seconds for any message that must come.
        changed: Notified of each message, and of each connection that is asked for.

    Attributes:
        rules: Asked in order; the first that has a say decides. Replace the list at any time.
        reachable: The channels on which new connections are taken.
        spoils: What becomes of new connections: each takes the first of its channel.
        answers: What answers new control connections in the publisher's place, each once.
        connections: Connections that were asked for, with or without success.
    """

    def __init__(
        self, patience: float = WAIT_SECONDS, changed: threading.Condition | None = None
    ) -> None:
        self._patience = patience
        self.rules: list[Rule] = []
        self.reachable: set[Channel] = {"control", "data"}
        self.spoils: list[Spoil] = []
        self.answers: list[bytes] = []
        self._seen: list[Passing] = []
        self.connections = 0
        self._changed = changed or threading.Condition()
        self._targets: dict[Channel, tuple[str, int]] = {}
        self._links: set[Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers = [self._call(self._listen(channel)) for channel in ("control", "data")]
        control, data = (server.sockets[0].getsockname()[1] for server in self._servers)
        self.address = f"tcp://{HOST}:{control}"
        self.data_port: int = data

    # For any thread.

    def lead_to(self, control: str, data: str) -> None:
        """Lead new connections to this publisher."""
        self._targets = {"control": _host_and_port(control), "data": _host_and_port(data)}

    def cut(self, channel: Channel | None = None, worker: str | None = None) -> int:
        """Cut connections; return how many there were."""

        def chosen() -> int:
            links = [
                link
                for link in self._links
                if channel in (None, link.channel) and worker in (None, link.worker)
            ]
            for link in links:
                link.cut()
            return len(links)

        return self._soon(chosen)

    def spoil(self, worker: str, spoil: Spoil) -> int:
        """Have a byte spoilt of what is to pass on a worker's connection; return on how many."""

        def chosen() -> int:
            links = [
                link
                for link in self._links
                if link.channel == spoil.channel and link.worker == worker
            ]
            for link in links:
                link.spoils.append(spoil)
            return len(links)

        return self._soon(chosen)

    def inject(self, channel: Channel, frames: Sequence[bytes]) -> int:
        """Send a message to every worker; return to how many."""

        def everywhere() -> int:
            links = [link for link in self._links if link.channel == channel and link.open]
            for link in links:
                link.send(frames, up=False)
            return len(links)

        return self._soon(everywhere)

    def seen(self, kind: str, when: Callable[[Passing], bool] = lambda _: True) -> list[Passing]:
        """Return the messages of a type that have come to the proxy, whatever became of them."""
        with self._changed:
            return [p for p in self._seen if p.type == kind and when(p)]

    def wait_seen(
        self,
        kind: str,
        when: Callable[[Passing], bool] = lambda _: True,
        count: int = 1,
    ) -> None:
        """Wait until so many messages of a type have come to the proxy.

        Raises:
            Fault: They have not.
        """

        def enough() -> bool:
            return sum(p.type == kind and when(p) for p in self._seen) >= count

        with self._changed:
            if not self._changed.wait_for(enough, self._patience):
                raise Fault(
                    f"{count} messages of type {kind} did not pass within {self._patience:.0f} s"
                )

    def wait_connections(self, count: int) -> None:
        """Wait until so many connections were asked for.

        Raises:
            Fault: They were not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.connections >= count, self._patience):
                seconds = f"{self._patience:.0f} s"
                raise Fault(f"{self.connections} of {count} connections within {seconds}")

    def story(self) -> str:
        """Say what came, for a fault."""
        with self._changed:
            counts = Counter(f"{p.channel} {'up' if p.up else 'down'} {p.type}" for p in self._seen)
        return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))

    def wait_answered(self, ping: Callable[[Passing], bool]) -> None:
        """Wait until a ping has passed, and a pong to that worker after it.

        Raises:
            Fault: They have not.
        """

        def answered() -> bool:
            asked: set[str] = set()
            for passing in self._seen:
                if passing.type == "ping" and passing.up and ping(passing):
                    asked.add(passing.worker)
                if passing.type == "pong" and not passing.up and passing.worker in asked:
                    return True
            return False

        with self._changed:
            if not self._changed.wait_for(answered, self._patience):
                raise Fault(f"no such ping was answered within {self._patience:.0f} s")

    def forget(self) -> None:
        """Start counting anew."""
        with self._changed:
            self._seen.clear()

    def close(self) -> None:
        """Cut everything and end the thread."""

        async def end() -> None:
            self.reachable = set()  # a connection that is accepted from now on is closed
            # A server that closes while it accepts a connection does not close the connection
            # (CPython's `Server._attach` fails): so close when there is no other task.
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for link in self._links:
                    link.cut()
                await asyncio.wait(others, timeout=LOOK_SECONDS)
            for server in self._servers:
                server.close()
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    def _soon(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._loop.call_soon_threadsafe(lambda: future.set_result(work()))
        return future.result(CALL_SECONDS)

    # In the thread.

    async def _listen(self, channel: Channel) -> asyncio.Server:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._serve(channel, reader, writer)
            finally:
                writer.transport.abort()

        return await asyncio.start_server(accept, HOST, 0, limit=STREAM_BYTES)

    async def _serve(
        self, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        spoils = [spoil for spoil in self.spoils if spoil.channel == channel][:1]
        self.spoils = [spoil for spoil in self.spoils if spoil not in spoils]
        answer = self.answers.pop(0) if channel == "control" and self.answers else None
        with self._changed:
            self.connections += 1
            self._changed.notify_all()
        if channel not in self.reachable or channel not in self._targets:
            return
        if answer is not None:
            writer.write(answer)
            while await reader.read(STREAM_BYTES):  # until the worker gives up
                pass
            return
        try:
            host, port = self._targets[channel]
            back, forth = await asyncio.open_connection(host, port, limit=STREAM_BYTES)
        except OSError:
            return  # no publisher is there; the worker tries again
        link = Link(channel, writer, forth, spoils=spoils)
        self._links.add(link)
        pumps = [
            asyncio.ensure_future(self._pump(link, reader, up=True)),
            asyncio.ensure_future(self._pump(link, back, up=False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            for pump in pumps:
                pump.cancel()
            ends = await asyncio.gather(*pumps, return_exceptions=True)
            await _finish(link)
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, OSError | EOFError):
                raise end

    async def _pump(self, link: Link, reader: asyncio.StreamReader, *, up: bool) -> None:
        writer = link.to_publisher if up else link.to_worker
        left = GREETING_BYTES  # each side waits for a part of the other's: pass it on as it comes
        while left:
            part = await reader.read(left)
            if not part:
                return
            link.write(part, up=up)
            left -= len(part)
        frames: list[bytes] = []
        while True:
            head = await reader.readexactly(2)
            flags, size = head
            if flags & LONG:
                head += await reader.readexactly(7)
                size = int.from_bytes(head[1:], "big")
            body = await reader.readexactly(size)
            if flags & COMMAND:
                link.write(head + body, up=up)
                continue
            frames.append(body)
            if not flags & MORE:
                await self._pass(link, tuple(frames), up=up)
                frames.clear()
                await writer.drain()

    async def _pass(self, link: Link, frames: Frames, *, up: bool) -> None:
        header = header_of(frames, link.channel, up=up)
        if up and header.get("type") == "hello":
            link.worker = str(header.get("name"))
        link.open = True
        passing = Passing(link.channel, up, link.worker, frames, header)
        fates = (fate for rule in self.rules if (fate := rule(passing)) is not None)
        fate = next(fates, Fate(copies=((0.0, frames),)))
        self._note(passing)
        if fate.cut:
            link.cut()
        if fate.hold:
            await asyncio.sleep(fate.hold)
        for seconds, copy in fate.copies:
            if fate.pace:
                await link.trickle(copy, fate.pace, up=up)
            elif fate.together and not up:
                link.kept += framed(copy)
            elif seconds:
                self._loop.call_later(seconds, partial(link.send, copy, up=up))
            else:
                link.send(copy, up=up)

    def _note(self, passing: Passing) -> None:
        """Remember what came, without its bulk."""
        small = Passing(passing.channel, passing.up, passing.worker, (), passing.header)
        with self._changed:
            self._seen.append(small)
            self._changed.notify_all()


async def _finish(link: Link) -> None:
    """Let what is on its way arrive, then close: a goodbye is the last thing that a side says."""
    for writer in (link.to_worker, link.to_publisher):
        writer.close()
    for writer in (link.to_worker, link.to_publisher):
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), 1.0)
        writer.transport.abort()


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)
