"""The ZeroMQ sockets of either side. No other module of the package imports zmq.

Each object belongs to one thread, but for `wake`, which any thread may call. Nothing here blocks
but `poll`, and that for at most the time given.
"""

import contextlib
import errno
import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from . import endpoints
from .errors import AddressError
from .limits import HEADER_BYTES_MAX, MESSAGE_BYTES_MAX
from .messages import Buffer

LINGER_MS = 200  # what is on its way when a side closes (a goodbye, an acknowledgement) gets this
HEARTBEAT_MS = 5_000  # ZeroMQ's own pings, which free the queues of peers that are gone
HEARTBEAT_TIMEOUT_MS = 30_000  # longer than a chunk of 1 MiB takes at 40 kB/s
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
PUB_QUEUE = 64  # messages per subscriber before PUB drops; four windows of chunks
SUB_QUEUE = 32  # messages a worker holds before TCP pushes back; bytes count, so it is small
ROUTER_QUEUE = 1_000  # messages per worker; workers keep less than a window outstanding


@dataclass(frozen=True, slots=True)
class Activity:
    """What `poll` found."""

    control: bool
    data: bool
    writable: bool


class _Sockets:
    """What both sides have: a context, a control socket, a data socket, and a bell."""

    def __init__(self, control: int, data: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(control)
        self._data = self._context.socket(data)
        for s in (self._control, self._data):
            s.setsockopt(zmq.LINGER, LINGER_MS)
            s.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            s.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            s.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            s.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._bell, zmq.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(self._data, zmq.POLLIN)
        self._wants_write = False

    def poll(self, seconds: float, *, writable: bool = False) -> Activity:
        """Wait for something to arrive or for `wake`; with `writable`, also for a peer."""
        if writable != self._wants_write:
            self._wants_write = writable
            self._poller.modify(self._control, zmq.POLLIN | (zmq.POLLOUT if writable else 0))
        found = dict(self._poller.poll(math.ceil(max(0.0, seconds) * 1000)))
        if self._bell.fileno() in found or self._bell in found:
            self._silence()
        control = found.get(self._control, 0)
        return Activity(
            control=bool(control & zmq.POLLIN),
            data=self._data in found,
            writable=bool(control & zmq.POLLOUT),
        )

    def _silence(self) -> None:
        try:
            while self._bell.recv(4096):
                pass
        except BlockingIOError:
            pass

    def wake(self) -> None:
        """Make a `poll` in another thread return."""
        with contextlib.suppress(OSError):  # it was rung before, or nobody is left to wake
            self._rope.send(b"!")

    def close(self) -> None:
        """Close everything; what is on its way gets a moment."""
        self._control.close()
        self._data.close()
        self._context.term()
        self._bell.close()
        self._rope.close()

    def _receive(self, s: "zmq.Socket[bytes]") -> list[memoryview] | None:
        try:
            return [frame.buffer for frame in s.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None


class PublisherSockets(_Sockets):
    """A bound ROUTER (control) and a bound XPUB (data).

    Args:
        address: Where the ROUTER is bound.
        data: Where the XPUB is bound; None: beside it.
        queue: Messages held for a subscriber before more are dropped.

    Raises:
        AddressError: An address makes no sense, or is taken.
    """

    def __init__(self, address: str, data: str | None, queue: int = PUB_QUEUE) -> None:
        endpoints.check(address)
        super().__init__(zmq.ROUTER, zmq.XPUB)
        try:
            self._control.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a worker is gone
            self._control.setsockopt(zmq.MAXMSGSIZE, 2 * HEADER_BYTES_MAX)
            self._control.setsockopt(zmq.SNDHWM, ROUTER_QUEUE)
            self._data.setsockopt(
                zmq.XPUB_VERBOSE, 1
            )  # every subscription is a worker that listens
            self._data.setsockopt(zmq.MAXMSGSIZE, 2 * HEADER_BYTES_MAX)
            self._data.setsockopt(zmq.SNDHWM, queue)
            self.address = self._bind(self._control, address, "address")
            self.data_address = self._bind_data(address, data)
        except BaseException:
            self.close()
            raise

    def _bind_data(self, address: str, data: str | None) -> str:
        if data is not None:
            return self._bind(self._data, endpoints.check(data), "data")
        try:
            return self._bind(self._data, endpoints.beside(self.address), "data")
        except AddressError:  # the port beside is taken; if any port would do, so does any other
            return self._bind(self._data, endpoints.beside(address), "data")

    def _bind(self, s: "zmq.Socket[bytes]", endpoint: str, parameter: str) -> str:
        s.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            s.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressError(
                    f"{endpoint} is in use by another process; stop it, or pass another "
                    f"{parameter}= (port 0 takes any free one)"
                ) from None
            raise AddressError(f"cannot bind {parameter} {endpoint}: {error.strerror}") from None
        return s.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[bytes, Sequence[Buffer]] | None:
        """Return the identity and the frames of the next control message, if there is one."""
        frames = self._receive(self._control)
        return None if frames is None else (bytes(frames[0]), frames[1:])

    def receive_subscription(self) -> tuple[bool, bytes] | None:
        """Return the next subscription: whether somebody subscribed (or left), and the topic."""
        frames = self._receive(self._data)
        if frames is None:
            return None
        message = bytes(frames[0])
        return message[:1] == b"\1", message[1:]

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        """Send to one worker; return False if its connection is gone.

        A worker that does not read loses the message once its queue is full, as with any loss.
        """
        try:
            self._control.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise
        return True

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        """Publish to everybody who subscribed; whoever is not keeping up loses it."""
        with contextlib.suppress(zmq.Again):
            self._data.send_multipart(frames, zmq.NOBLOCK, copy=False)


class WorkerSockets(_Sockets):
    """A connected DEALER (control) and a SUB (data) that connects once the publisher says where.

    Raises:
        AddressError: The address makes no sense.
    """

    def __init__(self, address: str) -> None:
        self.address = endpoints.check(address)
        super().__init__(zmq.DEALER, zmq.SUB)
        self._data_address = ""
        self._topics: set[bytes] = set()
        try:
            self._control.setsockopt(zmq.IMMEDIATE, 1)  # say nothing to nobody: it would pile up
            self._control.setsockopt(zmq.RCVHWM, SUB_QUEUE)
            self._data.setsockopt(zmq.RCVHWM, SUB_QUEUE)
            for s in (self._control, self._data):
                s.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
            self._control.setsockopt(zmq.IPV6, int("[" in address))
            self._control.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(f"cannot connect to {address}: {error.strerror}") from None

    def receive(self) -> Sequence[Buffer] | None:
        """Return the frames of the next control message, if there is one."""
        return self._receive(self._control)

    def receive_published(self) -> Sequence[Buffer] | None:
        """Return the frames of the next published message, topic first, if there is one."""
        return self._receive(self._data)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send to the publisher; lost while nobody is there."""
        with contextlib.suppress(zmq.Again):
            self._control.send_multipart(frames, zmq.NOBLOCK)

    def connect_data(self, endpoint: str) -> None:
        """Take published messages from this endpoint, in place of any before.

        Raises:
            AddressError: It cannot be connected to.
        """
        endpoint = endpoints.resolve(endpoint, self.address)
        if endpoint == self._data_address:
            return
        if self._data_address:
            self._data.disconnect(self._data_address)
            self._data_address = ""
        self._data.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._data.connect(endpoint)
        except zmq.ZMQError as error:
            raise AddressError(f"cannot connect to data at {endpoint}: {error.strerror}") from None
        self._data_address = endpoint

    def subscribe(self, topic: bytes, on: bool) -> None:
        """Ask for a topic, or no longer; asking twice is asking once."""
        if on and topic not in self._topics:
            self._topics.add(topic)
            self._data.setsockopt(zmq.SUBSCRIBE, topic)
        elif not on and topic in self._topics:
            self._topics.discard(topic)
            self._data.setsockopt(zmq.UNSUBSCRIBE, topic)
