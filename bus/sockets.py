"""The sockets of either side. No other module of the package imports zmq.

The data connection is not libzmq's but our own, on either side (`distribution.py`,
`subscription.py`): it speaks the same protocol, and is faster.

Each object belongs to one thread, but for `wake`, which any thread may call. Nothing here blocks
but `poll`, and that for at most the time given.
"""

import contextlib
import errno
import math
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import zmq

from . import endpoints
from .distribution import Distribution
from .errors import AddressError
from .limits import HEADER_BYTES_MAX, MESSAGE_BYTES_MAX
from .messages import Buffer
from .subscription import Subscription
from .zmtp import Place

LINGER_MS = 200  # what is on its way when a side closes (a goodbye, an acknowledgement) gets this
HEARTBEAT_MS = 5_000  # ZeroMQ's own pings, which free the queues of peers that are gone
HEARTBEAT_TIMEOUT_MS = 30_000  # longer than a chunk of 1 MiB takes at 40 kB/s
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
PUB_QUEUE = (
    1_000  # messages per subscriber before more are dropped; they lie in the version's memory
)
DEALER_QUEUE = 32  # messages a worker holds before TCP pushes back; bytes count, so it is small
ROUTER_QUEUE = 1_000  # messages per worker; workers keep less than a window outstanding


@dataclass(frozen=True, slots=True)
class Activity:
    """What `poll` found."""

    control: bool
    data: bool
    writable: bool = False


class _Sockets:
    """What both sides have: a context, a control socket, and a bell."""

    def __init__(self, control: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._socket(control)
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._bell, zmq.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        s = self._context.socket(kind)
        s.setsockopt(zmq.LINGER, LINGER_MS)
        s.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        s.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        s.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        s.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        return s

    def _poll(self, seconds: float) -> dict[object, int]:
        """Wait for something to arrive or for `wake`; return what was found at which socket."""
        found: dict[object, int] = dict(self._poller.poll(math.ceil(max(0.0, seconds) * 1000)))
        if self._bell.fileno() in found:
            self._silence()
        return found

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
        self._context.destroy()
        self._bell.close()
        self._rope.close()


class PublisherSockets(_Sockets):
    """A bound ROUTER (control) and a bound `Distribution` (data).

    Args:
        address: Where the ROUTER is bound.
        data: Where the data socket is bound; None: beside it.
        queue: Messages held for a subscriber before more are dropped.

    Raises:
        AddressError: An address makes no sense, or is taken.
    """

    def __init__(self, address: str, data: str | None, queue: int = PUB_QUEUE) -> None:
        endpoints.check(address)
        super().__init__(zmq.ROUTER)
        self._data = Distribution(queue)
        self._poller.register(self._data.fileno(), zmq.POLLIN)
        try:
            self._control.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a worker is gone
            self._control.setsockopt(zmq.MAXMSGSIZE, 2 * HEADER_BYTES_MAX)
            self._control.setsockopt(zmq.SNDHWM, ROUTER_QUEUE)
            self.address = self._bind(address)
            self.data_address = self._bind_data(address, data)
        except BaseException:
            self.close()
            raise

    def _bind_data(self, address: str, data: str | None) -> str:
        if data is not None:
            return self._data.bind(endpoints.check(data), "data")
        try:
            return self._data.bind(endpoints.beside(self.address), "data")
        except AddressError:
            if not endpoints.beside(address).endswith(":0"):
                raise
            # The port beside is taken, but any would have done for control, so any does for data.
            return self._data.bind(endpoints.resolve("tcp://*:0", self.address), "data")

    def _bind(self, endpoint: str) -> str:
        self._control.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._control.bind(endpoint)
        except zmq.ZMQError as error:
            reason = str(error.strerror)
            raise endpoints.unbindable(endpoint, "address", error.errno, reason) from None
        return self._control.getsockopt_string(zmq.LAST_ENDPOINT)

    def poll(self, seconds: float) -> Activity:
        """Wait for something to arrive, or for `wake`."""
        found = self._poll(seconds)
        now = time.monotonic()
        if self._data.fileno() in found:
            self._data.attend(now)
        self._data.tick(now)
        return Activity(control=self._control in found, data=self._data.pending)

    def receive(self) -> tuple[bytes, Sequence[Buffer]] | None:
        """Return the identity and the frames of the next control message, if there is one."""
        frames = _receive(self._control)
        return None if frames is None else (frames[0], frames[1:])

    def receive_subscription(self) -> tuple[bool, bytes] | None:
        """Return the next subscription: whether somebody subscribed (or left), and the topic."""
        return self._data.receive_subscription()

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
        self._data.send(frames, time.monotonic())

    def withdraw(self, topics: Collection[bytes]) -> None:
        """Forget what is not on its way yet of some topics."""
        self._data.withdraw(topics)

    def close(self) -> None:
        """Close everything; what is on its way gets a moment."""
        self._data.close(LINGER_MS / 1000)
        super().close()


class WorkerSockets(_Sockets):
    """A connected DEALER (control) and a `Subscription`, once the publisher says where.

    Args:
        address: The publisher's ROUTER.
        place: Where payloads of published messages go, see `zmtp.Stream`.

    Raises:
        AddressError: The address makes no sense.
    """

    def __init__(self, address: str, place: Place) -> None:
        self.address = endpoints.check(address)
        super().__init__(zmq.DEALER)
        self._data = Subscription(place, self.wake)
        self._watched: tuple[int, bool] | None = None
        self._wants_write = False
        try:
            self._control.setsockopt(zmq.IMMEDIATE, 1)  # say nothing to nobody: it would pile up
            self._control.setsockopt(zmq.RCVHWM, DEALER_QUEUE)
            self._control.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
            self._control.setsockopt(zmq.IPV6, int("[" in address))
            self._control.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(f"cannot connect to {address}: {error.strerror}") from None

    def poll(self, seconds: float, *, writable: bool = False) -> Activity:
        """Wait for something to arrive or for `wake`; with `writable`, also for a peer."""
        if writable != self._wants_write:
            self._wants_write = writable
            self._poller.modify(self._control, zmq.POLLIN | (zmq.POLLOUT if writable else 0))
        self._watch(self._data.attend(time.monotonic()))
        pending = self._data.pending
        found = self._poll(0.0 if pending else seconds)
        control = found.get(self._control, 0)
        return Activity(
            control=bool(control & zmq.POLLIN),
            data=pending or (self._watched is not None and self._watched[0] in found),
            writable=bool(control & zmq.POLLOUT),
        )

    def _watch(self, wanted: tuple[int, bool] | None) -> None:
        """Have the poller look at the data connection, if there is one."""
        if wanted == self._watched:
            return
        if self._watched is not None and (wanted is None or wanted[0] != self._watched[0]):
            self._poller.unregister(self._watched[0])
        if wanted is not None:
            descriptor, unsent = wanted
            self._poller.register(descriptor, zmq.POLLIN | (zmq.POLLOUT if unsent else 0))
        self._watched = wanted

    def receive(self) -> Sequence[Buffer] | None:
        """Return the frames of the next control message, if there is one."""
        try:
            frames = self._control.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return [frame.buffer for frame in frames]

    def receive_published(self) -> Sequence[Buffer] | None:
        """Return the frames of the next published message, topic first, if there is one."""
        return self._data.receive(time.monotonic())

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send to the publisher; lost while nobody is there."""
        with contextlib.suppress(zmq.Again):
            self._control.send_multipart(frames, zmq.NOBLOCK)

    def connect_data(self, endpoint: str) -> None:
        """Take published messages from this endpoint, in place of any before.

        Raises:
            AddressError: It cannot be connected to.
        """
        self._data.connect(endpoints.resolve(endpoint, self.address))

    def subscribe(self, topic: bytes, on: bool) -> None:
        """Ask for a topic, or no longer; asking twice is asking once."""
        self._data.subscribe(topic, on=on)

    def close(self) -> None:
        """Close everything; what is on its way gets a moment."""
        self._data.close()
        super().close()


def _receive(s: "zmq.Socket[bytes]") -> list[bytes] | None:
    """Return the next message of a socket that gets none but small ones."""
    try:
        return s.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
