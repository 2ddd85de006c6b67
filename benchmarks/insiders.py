"""Attacks by a peer that may join: without keys any peer, with keys an allowed worker.

Each attack is a generator: it acts, and yields how many seconds to wait before the next action.
"""

import itertools
import os
import select
import socket
import time
from collections.abc import Generator
from typing import Any

from weightbus.bus.headers import token_of
from weightbus.bus.messages import TICKET, Applied, Fetch, Ping, Pong, Running
from weightbus.bus.net.endpoints import host_and_port
from weightbus.bus.net.zmtp import GREETING, message_parts
from weightbus.bus.protocol_limits import EPOCH_CLOCK_MAX, FETCH_CHUNKS_MAX
from weightbus.codecs.protocol_limits import INTEGER_MAX

from .bus import MODEL
from .dealer import UNREAD_BYTES, Dealer

READY_SUB = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
LOOK_SECONDS = 0.05  # between two requests of the newest version
HOLD_SECONDS = 4.0  # for which requested chunks stay unread before the next request
AGE_MS = 10**9  # claimed age of the publisher of the running weights: older than any publisher here
FAR = EPOCH_CLOCK_MAX - 2 * AGE_MS
DIGESTS_SECOND, DIGESTS_PAUSE = 1000, 0.01
DIGESTS_LOOK = 50  # turns between two requests of the newest version
HELLOS_SECOND = 8

Steps = Generator[float]


class Insider:
    """The attacker, which counts the bytes that it sends.

    Args:
        addresses: The addresses of the publisher's sockets, and its `pid`.
    """

    def __init__(self, addresses: dict[str, Any]) -> None:
        self.control: str = addresses["control"]
        self.data: str = addresses["data"]
        self.pid: int = addresses["pid"]
        self._dealers: list[Dealer] = []
        self.dialled = 0

    @property
    def sent(self) -> int:
        """The bytes of all sent messages."""
        return sum(each.sent for each in self._dealers)

    def dealer(self, name: str, *, reads: bool = True) -> Dealer:
        """Return another control connection."""
        self.dialled += 1
        made = Dealer(self.control, name, reads=reads)
        self._dealers.append(made)
        return made

    def close(self) -> None:
        """Close all connections."""
        for each in self._dealers:
            each.close()


class Scout:
    """A worker that knows which version is the newest."""

    def __init__(self, insider: Insider) -> None:
        self.dealer = insider.dealer("scout")
        self.epoch = self.dealer.join(MODEL).epoch
        self.version = 0

    def look(self) -> bool:
        """Request the newest version; return whether it has changed."""
        self.dealer.say(Ping())
        before = self.version
        while (heard := self.dealer.hear()) is not None:
            if isinstance(heard, Pong) and heard.epoch:
                self.epoch, self.version = heard.epoch, heard.models.get(MODEL, 0)
        return self.version != before

    def fetch(self, dealer: Dealer, count: int) -> None:
        """Make another connection request the first chunks of the newest version."""
        dealer.say(Fetch(model=MODEL, epoch=self.epoch, version=self.version, count=count))


def _reader(insider: Insider, name: str) -> Dealer:
    made = insider.dealer(name, reads=False)
    made.join(MODEL)
    return made


def a_chunk_of_each(insider: Insider) -> Steps:
    """Request one chunk of each version, and read none."""
    scout, reader = Scout(insider), _reader(insider, "reader")
    while True:
        if scout.look():
            scout.fetch(reader, 1)
        yield LOOK_SECONDS


def chunks_unread(insider: Insider, connections: int = 18) -> Steps:
    """Request 128 chunks of each version on each connection, and read none."""
    scout = Scout(insider)
    for turn in itertools.count():
        readers = [_reader(insider, f"reader-{turn}-{number}") for number in range(connections)]
        for reader in readers:
            while not scout.look():
                yield LOOK_SECONDS
            scout.fetch(reader, FETCH_CHUNKS_MAX)
            scout.fetch(reader, FETCH_CHUNKS_MAX)
        yield HOLD_SECONDS
        for reader in readers:
            reader.close()


def subscribers_unread(insider: Insider, connections: int = 40) -> Steps:
    """Subscribe to pushed chunks on each connection, and read none; dial again if closed."""
    workers = [insider.dealer(f"subscriber-{number}") for number in range(connections)]
    held: dict[Dealer, socket.socket] = {}
    closed = select.poll()
    try:
        while True:
            over = {number for number, _ in closed.poll(0)}
            for worker in workers:
                if worker in held and held[worker].fileno() not in over:
                    continue
                if worker in held:
                    closed.unregister(held[worker])
                    held.pop(worker).close()
                if (made := _subscriber(worker, insider)) is not None:
                    held[worker] = made
                    closed.register(made, select.POLLRDHUP)
                yield 0.0
            yield LOOK_SECONDS
    finally:
        for made in held.values():
            made.close()


def _subscriber(worker: Dealer, insider: Insider) -> socket.socket | None:
    ticket = token_of(worker.join(MODEL), TICKET)
    made = socket.socket()
    insider.dialled += 1
    made.settimeout(1.0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
    said = [b"\x03" + ticket.encode()] if ticket else []
    said += [b"\x01%s/%s" % (MODEL.encode(), each) for each in (b"ctl", b"dat")]
    try:
        made.connect(host_and_port(insider.data))
        made.sendall(GREETING + READY_SUB)
        heard = b""
        while b"READY" not in heard:
            more = made.recv(256)
            if not more:
                raise ConnectionError("the publisher has closed the connection")
            heard += more
        made.sendall(b"".join(bytes(part) for each in said for part in message_parts([each])))
    except OSError:
        made.close()
        return None
    return made


def own_pid(insider: Insider, connections: int = 32) -> Steps:
    """Send hellos at the allowed rate on each connection, with the publisher's own pid."""
    dealers = [insider.dealer(f"pid-{number}") for number in range(connections)]
    while True:
        for dealer in dealers:
            dealer.say(dealer.hello(MODEL, pid=insider.pid))
            while dealer.hear() is not None:
                pass
        yield 1 / HELLOS_SECOND


def wrong_digests(insider: Insider) -> Steps:
    """Report a thousand times a second that the newest version is applied, with a wrong digest."""
    scout, began, said = Scout(insider), time.monotonic(), 0
    for turn in itertools.count():
        if turn % DIGESTS_LOOK == 0:
            scout.look()
        due = int((time.monotonic() - began) * DIGESTS_SECOND)
        for _ in range(min(due - said, DIGESTS_SECOND)):
            digest, version = os.urandom(32).hex(), scout.version
            scout.dealer.say(
                Applied(model=MODEL, epoch=scout.epoch, version=version, digest=digest)
            )
        said = due
        yield DIGESTS_PAUSE


def epoch_below(insider: Insider) -> Steps:
    """Send a hello with a version that was never published, from a much earlier epoch."""
    scout = Scout(insider)
    for number in itertools.count():
        scout.look()
        liar = insider.dealer(f"liar-{number}")
        runs = Running(epoch=scout.epoch, version=INTEGER_MAX, digest="")
        yield from _insist(liar, runs, 0)


def epoch_ahead(insider: Insider) -> Steps:
    """Send a hello with a version of an epoch in the far future."""
    for number in itertools.count():
        liar = insider.dealer(f"liar-{number}")
        yield from _insist(liar, Running(epoch=FAR, version=1, digest="0" * 64), FAR)


def _insist(liar: Dealer, runs: Running, epoch: int) -> Steps:
    for _ in range(HELLOS_SECOND):
        liar.say(liar.hello(MODEL, runs, epoch=epoch, age_ms=AGE_MS))
        yield 1 / HELLOS_SECOND
    liar.close()
