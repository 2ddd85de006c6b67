"""The publisher's control socket: our own ROUTER socket, on TCP or a Unix socket.

libzmq processes bytes before a program sees messages: it serves peers of older protocols, answers
pings by itself, and collects the frames of a message without a limit. A peer can use some of these
to abort the process (libzmq 4.3.5). So the publisher speaks ZMTP 3 (ZeroMQ RFC 23) itself, as on
the data port: it sees each connection, counts its bytes, and can close it.

    greeting (64 bytes) ──> handshake ──> open: messages and commands
                            NULL: READY   CURVE: HELLO, INITIATE (`trust/curve_server.py`)

A connection is *unproven* until its first message is complete. The number of unproven connections
is limited. Beyond the limit, a new connection replaces the oldest unproven connection of the host
that has most of them. So unknown peers cannot crowd out workers, which prove themselves quickly.

Bytes are parsed when `receive` takes messages, one message of one connection at a time. A
connection is read again only after its messages are taken. The bytes that remain then are part of
one incomplete message. The size of incomplete messages is limited, per connection and in total.

One thread owns all of these objects; no method blocks.
"""

import contextlib
import ipaddress
import logging
import math
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ..event_log import RateLimitedWarning
from ..headers import Buffer
from ..limits import (
    CONNECT_RATE,
    HANDSHAKE_SECONDS,
    HOSTS_MAX,
    PARTIAL_BYTES_MAX,
    UNPROVEN_MAX,
)
from ..token_bucket import TokenBucket
from ..trust.curve_server import OVERLOADED, CurveError, CurveServer
from . import endpoints
from .descriptors import RejectedConnections, limit_of, nearly_exhausted
from .listening import WatchedListener, bound
from .outgoing import NOT_READ, UnreadCopies
from .peer import ControlConnection
from .processes import SocketSearch, peer_inode, peer_process
from .zmtp import ZmtpError

log = logging.getLogger("weightbus.publisher")

READ_BYTES = 2**14  # bytes read from one connection before its messages are taken
ACCEPTS = 32  # connections accepted in a row
TICK_SECONDS = 0.1  # seconds between two checks for what is overdue
SEARCH_FILES = 64  # files of a process that are examined in one step of a search: 0.2 ms
SEARCH_SECONDS = 0.02  # seconds until the next step
ENDING_SECONDS, AGAIN_SECONDS = 1.0, 0.01  # seconds to wait for a process's end; between two checks
# TCP keepalive detects dead peers, so that their connections are closed.
# The first: seconds without data until a probe, and between two probes.
KEEPALIVE_SECONDS, KEEPALIVE_PROBES = 10, 2
UNSENT_MS = 30_000  # time within which the peer's kernel must acknowledge sent bytes


class Router:
    """The bound control socket, and its connections.

    Args:
        selector: Where the sockets are registered; pass the events it finds to `process_events`.
        rejected: Counts connections that are rejected for lack of descriptors.
        copies: Counts the bytes that are copied for all connections of the publisher.
        curve: The publisher's keys; None: no keys are used.

    Attributes:
        due: The time at which `tick` must be called.
        ready: The connections with unparsed bytes, from which `receive` may return a message.
        closed: The closed connections that `take_closed` has not returned yet.
        ending_at: The time at which `take_closed` must be called, to check whether the processes of
            closed connections have ended.
        key: The public key of the last message's sender; empty if no keys are used.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        rejected: RejectedConnections,
        copies: UnreadCopies,
        curve: CurveServer | None = None,
    ) -> None:
        self._selector, self._rejected, self._copies, self._curve = (
            selector,
            rejected,
            copies,
            curve,
        )
        self._listener: WatchedListener | None = None
        self._over_tcp = True
        self._peers: dict[bytes, ControlConnection] = {}
        self._unproven: dict[ControlConnection, None] = {}  # the oldest first
        self._by_host: dict[str, int] = {}  # number of unproven connections, by host
        unlimited = math.isinf(limit_of())
        self._unproven_max = UNPROVEN_MAX if unlimited else min(UNPROVEN_MAX, limit_of() // 4)
        self.ready: deque[ControlConnection] = deque()
        # The bytes of incomplete messages, by connection, and in total.
        self._partial: dict[ControlConnection, int] = {}
        self._partial_bytes = 0
        # Connections whose next message waits until fewer bytes are copied for others.
        self._waiting: dict[ControlConnection, None] = {}
        self._hosts: dict[str, TokenBucket] = {}  # rate limits of new connections, by host
        self._searches: deque[ControlConnection] = deque()  # those with an unfinished search
        # Closed connections whose processes may end soon: (connection, when to stop checking).
        self._ending: list[tuple[ControlConnection, float]] = []
        self._last: ControlConnection | None = None  # the connection of the last message
        self._count = 0  # number of connections so far
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._hung_up = RateLimitedWarning(log, "hung up on a control connection: %s")
        self._tick_at = self._search_at = self.due = math.inf
        self.closed: list[ControlConnection] = []
        self.ending_at = math.inf
        self.key = ""

    def bind(self, endpoint: str) -> str:
        """Listen at an endpoint; return the endpoint with the actual port.

        Raises:
            AddressError: The endpoint is in use, or invalid.
        """
        listen = partial(WatchedListener, endpoint, self._selector, "a connection")
        self._listener = bound(listen, endpoint, "address")
        self._over_tcp = endpoints.ipc_path(self._listener.endpoint) is None
        self._tick_at = self.due = 0.0
        return self._listener.endpoint

    # Receiving.

    def process_events(
        self, found: Iterable[tuple[selectors.SelectorKey, int]], now: float
    ) -> None:
        """Accept, read and send on the sockets that the selector has found ready."""
        scratch = self._scratch
        for key, events in found:
            peer = key.data
            if not isinstance(peer, ControlConnection):
                if self._listener is not None and key.fileobj is self._listener.socket:
                    self._accept(self._listener, now)
                continue
            try:
                # Read only after earlier input was parsed: this limits the memory for input.
                if events & selectors.EVENT_READ and not peer.ready and peer.read(scratch, now):
                    self._note_partial(peer, 0)
                    peer.ready = True
                    self.ready.append(peer)
                if events & selectors.EVENT_WRITE:
                    self._write(peer, now)
            except OSError:
                self._close_when_drained(peer)

    def receive(self, now: float) -> tuple[bytes, Sequence[Buffer]] | None:
        """Return (routing id, frames) of the next message; None if there is none."""
        while self.ready:
            peer = self.ready.popleft()
            if peer.closed:
                continue
            try:
                message = peer.message(now)
            except (ZmtpError, CurveError) as error:
                self._reject(peer, error, now)
                continue
            if message is None:
                self._end_parsing(peer, now)
                continue
            if not peer.proven:
                self._mark_proven(peer)
            if peer.unparsed:
                self.ready.append(peer)
            else:
                self._end_parsing(peer, now)
            self._last, self.key = peer, peer.key
            return peer.identity, message
        return None

    def _end_parsing(self, peer: ControlConnection, now: float) -> None:
        """Send a connection's answers once no message is complete; close it if it has ended.

        If the incomplete messages of all connections are too large, the longest are rejected.
        """
        peer.ready = False
        if peer.broken:
            self._close(peer)
            return
        if peer.commands:  # answers to its commands
            try:
                self._write(peer, now)
            except OSError:
                self._close(peer)
                return
        self._note_partial(peer, peer.partial)
        while self._partial_bytes > PARTIAL_BYTES_MAX:
            longest = max(self._partial, key=self._partial.__getitem__)
            text = "the longest of too many unfinished messages"
            self._reject(longest, ZmtpError(text), now)

    def _reject(self, peer: ControlConnection, error: ZmtpError | CurveError, now: float) -> None:
        if isinstance(error, CurveError):
            peer.send_last(error.reply)
        self._hung_up.warn(f"{peer.host or 'a process of this host'}: {error}", now)
        self._close(peer)

    def _note_partial(self, peer: ControlConnection, nbytes: int) -> None:
        # Set the number of bytes of a connection's incomplete message.
        self._partial_bytes += nbytes - self._partial.pop(peer, 0)
        if nbytes:
            self._partial[peer] = nbytes

    def hang_up(self) -> None:
        """Close the connection of the last message."""
        if self._last is not None and not self._last.closed:
            self._close(self._last)

    # Sending.

    def send(self, identity: bytes, frames: Sequence[Buffer], now: float) -> bool:
        """Send a message to one worker; return False if its connection is closed.

        If a worker does not read and its queue is full, the message is lost, as any message may be.
        """
        peer = self._peers.get(identity)
        if peer is None or peer.broken:
            return False
        try:
            peer.outgoing.put(peer.encode_effect(frames), now)
        except OSError:
            self._close_when_drained(peer)
            return False
        self._watch(peer)
        return True

    def _write(self, peer: ControlConnection, now: float) -> None:
        peer.outgoing.write(now)
        self._watch(peer)

    def _watch(self, peer: ControlConnection) -> None:
        """Let the selector wait for input and, if bytes are unsent, for room to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing.unsent else 0)
        if peer.watched != events and not peer.broken:
            peer.watched = events
            self._selector.modify(peer, events, peer)
        if peer.outgoing.waits:
            self._waiting[peer] = None

    # Time.

    def tick(self, now: float) -> None:
        """Accept, look for readable connections, and close late ones, as due. Call at `due`."""
        if now >= self._search_at:
            self._search(now)
        if now >= self._tick_at:
            self._tick_at = now + TICK_SECONDS
            self._close_overdue(now)
        self.due = min(self._tick_at, self._search_at)

    def _close_overdue(self, now: float) -> None:
        # Accept again, close overdue connections, and free the memory of those without progress.
        if self._listener is not None and now >= self._listener.resume_at:
            self._listener.resume()
        for peer in list(self._unproven):
            if now - peer.since < HANDSHAKE_SECONDS:
                break
            if not peer.open:
                self._reject(peer, ZmtpError("no handshake in time"), now)
        for peer in list(self._peers.values()):
            peer.outgoing.hold(now)
        if self._waiting:
            self._copies.close_slow(now)
            self._retry_waiting(now)

    def _retry_waiting(self, now: float) -> None:
        """Try again to send messages that wait until fewer bytes are copied for others."""
        waiting, self._waiting = self._waiting, {}
        for peer in waiting:
            if not (peer.closed or peer.broken):
                try:
                    self._write(peer, now)
                except OSError:
                    self._close_when_drained(peer)

    # Connections.

    def _accept(self, listener: WatchedListener, now: float) -> None:
        # Accept connections, as far as limits and descriptors allow.
        for _ in range(ACCEPTS):
            accepted = listener.accept(now)
            if accepted is None:
                return
            connection, address = accepted
            host = _host_of(address)
            if not self._within_rate(host, now) or not self._make_room(connection, host, now):
                connection.close()
                continue
            self._add(connection, host, now)

    def _add(self, connection: socket.socket, host: str, now: float) -> None:
        # Add a new connection.
        connection.setblocking(False)
        if self._over_tcp:
            with contextlib.suppress(OSError):  # the peer has closed it, as the first read shows
                _tune(connection)
        self._count += 1
        identity = self._count.to_bytes(8, "big")
        args = identity, host, self._copies, self._drop
        peer = ControlConnection(connection, *args, self._curve, now)
        self._peers[identity] = peer
        self._unproven[peer] = None
        self._by_host[host] = self._by_host.get(host, 0) + 1
        peer.watched = selectors.EVENT_READ
        self._selector.register(peer, peer.watched, peer)
        try:
            self._write(peer, now)
        except OSError:
            self._close(peer)

    def _within_rate(self, host: str, now: float) -> bool:
        """Count a new connection of a host; return False if the host exceeds its rate limit."""
        if host not in self._hosts:
            if len(self._hosts) >= HOSTS_MAX:
                self._hosts = {h: each for h, each in self._hosts.items() if not each.is_full(now)}
            if len(self._hosts) >= HOSTS_MAX:  # forget all hosts: each may have a burst again
                self._hosts.clear()
            self._hosts[host] = TokenBucket(CONNECT_RATE, now)
        return self._hosts[host].take(1, now)

    def _make_room(self, connection: socket.socket, host: str, now: float) -> bool:
        """Return whether to keep a new connection; if necessary, close an unproven one for it."""
        exhausted = nearly_exhausted(connection.fileno())
        if exhausted:
            self._rejected.note(connection.fileno(), host, now)
        elif len(self._unproven) < self._unproven_max:
            return True
        if not self._unproven:
            return False
        busiest = max(self._by_host, key=self._by_host.__getitem__)
        oldest = next(peer for peer in self._unproven if peer.host == busiest)
        if self._curve is not None:
            oldest.send_last(OVERLOADED)
        self._close(oldest)
        return True

    def _mark_proven(self, peer: ControlConnection) -> None:
        """Mark a connection as proven, after its first message."""
        peer.proven = True
        self._forget_unproven(peer)
        if (bucket := self._hosts.get(peer.host)) is not None:
            bucket.give_back(1)

    def _forget_unproven(self, peer: ControlConnection) -> None:
        if peer in self._unproven:
            del self._unproven[peer]
            self._by_host[peer.host] -= 1
            if not self._by_host[peer.host]:
                del self._by_host[peer.host]

    def _close_when_drained(self, peer: ControlConnection) -> None:
        """Close a connection that its peer has ended, once its earlier messages are taken."""
        if not peer.ready:
            self._close(peer)
        elif not peer.broken:
            peer.broken = True
            self._selector.unregister(peer)

    def _drop(self, peer: ControlConnection) -> None:
        """Close a connection that does not read: too many bytes are copied for such connections."""
        if not peer.closed:
            self._reject(peer, ZmtpError(NOT_READ), time.monotonic())

    def _close(self, peer: ControlConnection) -> None:
        del self._peers[peer.identity]
        self._forget_unproven(peer)
        self._note_partial(peer, 0)
        self._waiting.pop(peer, None)
        if not peer.broken:
            self._selector.unregister(peer)
        peer.close()
        if peer.proven:
            self.closed.append(peer)

    def close(self, linger: float) -> None:
        """Close all connections; queued messages get `linger` seconds to be sent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        end = time.monotonic() + linger
        while any(p.outgoing.unsent and not p.broken for p in self._peers.values()):
            now = time.monotonic()
            if now >= end:
                break
            self.process_events(self._selector.select(end - now), now)
        for peer in list(self._peers.values()):
            self._close(peer)

    def close_in_child(self) -> None:
        """Close the descriptors that a forked child has inherited; the parent is not affected."""
        if self._listener is not None:
            self._listener.socket.close()
        for peer in self._peers.values():
            peer.close()

    # Processes of workers.

    def follow(self, pid: int) -> None:
        """Search for the process of the last message's sender, a worker that reported this pid."""
        peer = self._last
        if peer is None or peer.closed or peer.process is not None or pid == os.getpid():
            return
        if not self._over_tcp:
            peer.process = peer_process(peer.socket)
        elif peer.search is None or peer.search.pid != pid:
            if (inode := peer_inode(peer.socket)) is None:
                return
            first, peer.search = peer.search is None, SocketSearch(pid, inode)
            if first:
                self._step_search(peer, time.monotonic())  # now, before the process can end

    def _search(self, now: float) -> None:
        """Continue the search for the process of one worker on this host."""
        self._search_at = math.inf
        self._step_search(self._searches.popleft(), now)
        if self._searches:
            self._search_at = now + SEARCH_SECONDS

    def _step_search(self, peer: ControlConnection, now: float) -> None:
        search = peer.search
        if search is None or peer.closed:
            return
        if search.step(SEARCH_FILES):
            peer.process, peer.search = search.found, None
            return
        self._searches.append(peer)
        self._search_at = min(self._search_at, now + SEARCH_SECONDS)
        self.due = min(self.due, self._search_at)

    def take_closed(self, now: float) -> list[tuple[bytes, str]]:
        """Return (routing id, text) for each closed connection.

        The text says that the worker's process has ended, or is empty. A process may outlive its
        connection for a moment: after its end, the routing id is returned again, with the text.
        Call `receive` first, until it returns None: closed connections may have unparsed messages.
        """
        found: list[tuple[bytes, str]] = []
        peers = [(peer, now + ENDING_SECONDS, True) for peer in self.closed]
        peers += [(peer, until, False) for peer, until in self._ending]
        self.closed, self._ending = [], []
        for peer, until, newly_closed in peers:
            process = peer.process
            if process is not None and process.ended:
                found.append((peer.identity, f"its process, {process.pid}, has ended"))
                continue
            if newly_closed:
                found.append((peer.identity, ""))
            if process is not None and now < until:
                self._ending.append((peer, until))
        self.ending_at = now + AGAIN_SECONDS if self._ending else math.inf
        return found


def _host_of(address: tuple[Any, ...] | str) -> str:
    """Return the peer's host, for rate limits; empty over a Unix socket.

    For IPv6, return the /64 network: one host may use all addresses of its network.
    """
    if isinstance(address, str):
        return ""
    host = str(address[0])
    if ":" not in host:
        return host
    plain = ipaddress.IPv6Address(host.partition("%")[0])
    if plain.ipv4_mapped is not None:
        return str(plain.ipv4_mapped)
    return str(ipaddress.ip_network((plain, 64), strict=False))


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_MS)
