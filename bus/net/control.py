"""Opens and polls a worker's sockets: the control connection, and the data connection.

The control connection is libzmq's; only this module and `trust/` (for keys) import zmq. The data
connection is our own, faster implementation of the same protocol (`sub.py`).

One thread owns the sockets; other threads may only call `wake`. Only `poll` blocks, for the time
given.
"""

import contextlib
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from ..errors import AddressError
from ..event_log import RateLimitedWarning
from ..headers import Buffer
from ..limits import UNASKED_BYTES_MAX
from ..protocol_limits import MESSAGE_BYTES_MAX
from ..trust import curve
from ..trust.curve_server import COMMAND_BYTES
from ..trust.keys import WorkerKeys
from . import endpoints
from .descriptors import check_left
from .incoming import Incoming
from .inheritance import close_in_children, close_libzmqs, descriptors_of_libzmq, keep_in_children
from .names import AGAIN_SECONDS, Lookup, is_name
from .sub import Subscription
from .threads import Waker, new_selector
from .zmtp import FRAME_HEAD_MAX, FRAMES_MAX, REPORT, Place

log = logging.getLogger("weightbus.worker")

LINGER_MS = 200  # time to send queued messages at close, such as a goodbye or a report
# TCP keepalive detects dead peers, so that their queues are freed. ZeroMQ's own pings are not used:
# libzmq (4.3.5) aborts the process if a ping is due on an unread connection that breaks.
# The first: seconds without data until a probe, and between two probes.
KEEPALIVE_SECONDS, KEEPALIVE_PROBES = 10, 2
UNSENT_MS = 30_000  # time within which the peer's kernel must acknowledge sent bytes
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
CONNECT_MS = 3_000  # time for one attempt to connect: the kernel sends two SYNs
HANG_UP_SECONDS = 1.0  # seconds until a reconnect, after a publisher exceeded a limit
DEALER_QUEUE = 32  # messages that a worker queues before TCP pushes back

# Plain integers: arithmetic with the enumerations of pyzmq is slow.
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
AT_ONCE = int(zmq.NOBLOCK)


class Activity(NamedTuple):
    """The result of `poll`: messages on the control or data connection, or room to send."""

    control: bool
    data: bool
    writable: bool = False


class WorkerSockets:
    """The sockets of one worker: a DEALER for control, and a `Subscription` for data.

    Args:
        addresses: The endpoints of control sockets, in order of preference; or the only one.
        place: Returns where to receive the payload of a published message; see `zmtp.Stream`.
        keys: The worker's keys and the publisher's public key: the same for all addresses, or one
            item per address. None: no keys are used.
        in_flight_max: Returns the most requested bytes that may be in flight to this worker.
        any_data_host: Whether published data may come from another host; see `endpoints.resolve`.

    Attributes:
        addresses: The endpoints of control sockets.
        address: The endpoint that the worker is connected to, or connects to.

    Raises:
        AddressError: An address is invalid, an address is given twice, or there is no address.
        OSError: Too few descriptors are left.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        place: Place,
        keys: WorkerKeys | Sequence[WorkerKeys] | None = None,
        in_flight_max: Callable[[], int] = lambda: 0,
        *,
        any_data_host: bool = False,
    ) -> None:
        self.addresses, self._any_data_host = endpoints.check_all(addresses), any_data_host
        self.address = self.addresses[0]
        self._keys = [keys] * len(self.addresses) if isinstance(keys, WorkerKeys) else keys
        self._events_fresh = False  # whether `_ready` is the current state of the control socket
        self._ready = 0
        check_left()
        with contextlib.ExitStack() as undo:
            with descriptors_of_libzmq(3) as self._libzmqs:
                self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                # Otherwise garbage collection of the context would block on its open socket.
                undo.callback(self._context.destroy, 0)
                self._control = self._dealer()
                self._changes = self._control.get_monitor_socket(curve.CHANGES)
            self._selector = undo.enter_context(new_selector())
            self._waker = undo.enter_context(contextlib.closing(Waker()))
            self.wake = self._waker.wake  # interrupts a `poll` in another thread
            self._selector.register(self._waker, selectors.EVENT_READ)
            descriptor = int(self._control.get(zmq.FD))
            self._selector.register(descriptor, selectors.EVENT_READ, self._control)
            undo.pop_all()
        self._monitor_events = curve.ConnectionEvents(self._changes, keyed=self._keys is not None)
        self._incoming, self._in_flight_max = Incoming(), in_flight_max
        self._frame_head = FRAME_HEAD_MAX + (COMMAND_BYTES if self._keys is not None else 0)
        self._dial_at = math.inf  # when to reconnect after an exceeded limit
        self._limit_warning = RateLimitedWarning(log, "hung up on the publisher: %s")
        self.data = Subscription(place, self.wake)
        self._watched: tuple[socket.socket, bool] | None = None
        try:
            self._dialled = ""  # the endpoint of the control socket
            self._lookups = [
                Lookup(each, self._waker.wake) if is_name(each) else None for each in self.addresses
            ]
            self._lookup = self._lookups[0]
            self._undialled = False  # whether libzmq rejects the present address
            self._pin(0)
            if self._lookup is None:
                self._dial(self.address)
        except BaseException as error:
            self.close()
            if isinstance(error, zmq.ZMQError):
                raise AddressError(f"cannot connect to {self.address}: {error.strerror}") from None
            raise
        close_in_children(self)

    def _pin(self, index: int) -> None:
        # Set the keys for the address with this index.
        if self._keys is not None:
            keys = self._keys[index]
            curve.pin(self._control, keys.public, keys.secret, keys.publisher)

    def _dealer(self) -> "zmq.Socket[bytes]":
        # Return a new DEALER socket with its options set.
        s = self._context.socket(zmq.DEALER)
        s.setsockopt(zmq.LINGER, LINGER_MS)
        s.setsockopt(zmq.TCP_KEEPALIVE, 1)
        s.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS)
        s.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS)
        s.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        s.setsockopt(zmq.TCP_MAXRT, UNSENT_MS)
        s.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        s.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        s.setsockopt(zmq.IMMEDIATE, 1)  # without a connection, messages are dropped, not queued
        s.setsockopt(zmq.RCVHWM, DEALER_QUEUE)
        s.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        s.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        return s

    def poll(self, seconds: float, *, writable: bool = False) -> Activity:
        """Wait for a message or `wake`; with `writable`, also for an open control connection."""
        now = time.monotonic()
        if now >= self._incoming.check_at:
            self._check_incoming(now)
        if now >= self._dial_at:
            self._dial_again()
        watched = self.data.process_events(now)
        if watched != self._watched:
            self._watch(watched)
        if self._lookup is not None and self._dial_at == math.inf:
            self._look_up(self._lookup, now)
            seconds = min(seconds, AGAIN_SECONDS)
        seconds = min(seconds, self._incoming.check_at - now)
        data, wanted = self.data.pending, READABLE | (WRITABLE if writable else 0)
        control = (self._ready if self._events_fresh else self._poll_events()) & wanted
        for key, _ in self._selector.select(0.0 if control or data else max(0.0, seconds)):
            if key.fileobj is self._waker:
                self._waker.drain()
            elif key.data is self._control:
                self._events_fresh = False
            else:
                data = data or (watched is not None and key.fileobj is watched[0])
        control = (self._ready if self._events_fresh else self._poll_events()) & wanted
        return Activity(
            control=bool(control & READABLE), data=data, writable=bool(control & WRITABLE)
        )

    def _poll_events(self) -> int:
        """Return the events of the control socket.

        The socket's descriptor signals only changes, and may not signal again after a send or
        receive. So the events are read again after each send or receive, before the next wait.
        """
        if not self._events_fresh:
            self._events_fresh, self._ready = True, int(self._control.get(zmq.EVENTS))
        return self._ready

    def _check_incoming(self, now: float) -> None:
        """Close the control connection if the publisher sends more than was requested."""
        nbytes, limit = self._incoming.check(now), self._in_flight_max() + UNASKED_BYTES_MAX
        if nbytes <= limit:
            return
        self._limit_warning.warn(
            f"{self.address} has sent {nbytes} bytes that belong to no complete message; after "
            f"this worker's requests, at most {limit} may be in flight. The worker connects again",
            now,
        )
        self._hang_up()
        self._dial_at = now + HANG_UP_SECONDS

    def _hang_up(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # there is no connection
            self._control.disconnect(self._dialled)
        self._incoming.follow(-1, "")

    def _look_up(self, lookup: Lookup, now: float) -> None:
        """Unless a connection is open: if the host's address has changed, connect to it."""
        if not self._poll_events() & WRITABLE and lookup.poll(now):
            self._dial(lookup.found)

    def _dial(self, endpoint: str) -> None:
        """Connect the control socket instead of any earlier connection."""
        self._events_fresh, self._dial_at = False, math.inf
        if self._dialled:
            self._hang_up()
        self._control.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._monitor_events.dial(endpoint)
        self._control.connect(endpoint)
        self._dialled = endpoint

    def _dial_again(self) -> None:
        """Connect to the present address; if its host is not resolved yet, `poll` does so later."""
        self._dial_at = math.inf
        endpoint = self.address if self._lookup is None else self._lookup.found
        if not endpoint:
            return
        try:
            self._dial(endpoint)
        except zmq.ZMQError:  # an invalid address other than the first, which `__init__` has tried
            self._undialled = True

    def lookup_error(self, now: float) -> str:
        """Return an error text if no address of the publisher can be resolved for long; else ""."""
        faults = [each.fault(now) if each is not None else "" for each in self._lookups]
        return "; ".join(faults) if all(faults) else ""

    def _watch(self, wanted: tuple[socket.socket, bool] | None) -> None:
        """Register the data connection, if any, with the selector."""
        if self._watched is not None and (wanted is None or wanted[0] is not self._watched[0]):
            self._selector.unregister(self._watched[0])
            self._watched = None
        if wanted is not None:
            connection, unsent = wanted
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
            change = self._selector.register if self._watched is None else self._selector.modify
            change(connection, events)
        self._watched = wanted

    def receive(self) -> Sequence[Buffer] | None:
        """Return the frames of the next control message; None if there is none."""
        if not self._poll_events() & READABLE:
            return None
        self._events_fresh = False
        frames: list[zmq.Frame] = []
        more = True
        while more:
            frame = self._control.recv(AT_ONCE, copy=False)
            more = frame.more
            if len(frames) <= FRAMES_MAX:  # with more frames, the message is malformed anyway
                frames.append(frame)
        self._incoming.in_messages += sum(map(len, frames)) + self._frame_head * len(frames)
        return [frame.buffer for frame in frames]

    def send(self, header: bytes, token: str = "") -> None:
        """Send a message, which may be lost; with a token, on the data connection if possible."""
        if token and self.data.send(REPORT + token.encode() + header):
            return
        self._events_fresh = False
        with contextlib.suppress(zmq.Again):
            self._control.send(header, AT_ONCE)

    def changed(self, patience: float) -> curve.Changes:
        """Return what has happened to the control connection since the last call.

        If handshakes keep ending without a status, that counts as a failure after `patience`
        seconds.
        """
        now = time.monotonic()
        before = self._monitor_events.descriptor, self._monitor_events.connections
        changed = self._monitor_events.read(now, patience)
        if (self._monitor_events.descriptor, self._monitor_events.connections) != before:
            self._incoming.follow(self._monitor_events.descriptor, self._dialled)
        unknown = self._lookup is not None and self._lookup.failed(now)
        if self._dial_at == math.inf and (self._undialled or unknown):
            return changed._replace(closed=True)
        return changed

    def connect_data(self, endpoint: str, ticket: str = "") -> None:
        """Receive published messages from this endpoint instead of any earlier endpoint.

        Raises:
            AddressError: The endpoint is invalid, or not on the publisher's host.
        """
        anywhere = self._any_data_host
        resolved = endpoints.resolve(endpoint, self.address, self._dialled, any_host=anywhere)
        self.data.connect(resolved, ticket)

    def source(self, address: str) -> tuple[str, WorkerKeys | None]:
        """Return the endpoint and the keys for a connection to a source of a version. (N2)

        Raises:
            AddressError: The address is invalid, or it is on another host and no keys are used.
        """
        keys = None if self._keys is None else self._keys[self.addresses.index(self.address)]
        anywhere = self._any_data_host or keys is not None
        try:
            return endpoints.resolve(address, self.address, self._dialled, any_host=anywhere), keys
        except AddressError:
            endpoints.check(address)
            raise AddressError(
                f"it is not on the host of the publisher ({self.address}), and there are no keys, "
                "so this worker fetches its chunks from the publisher. Use keys, or allow it: "
                "Settings(any_data_host=True)"
            ) from None

    def redial(self) -> None:
        """Reconnect both sockets; messages queued on the old connections are lost."""
        if self._dialled:
            self._dial(self._dialled)
        self.data.redial()

    def change_over(self, index: int, pause: float) -> None:
        """Connect to another of the addresses, after `pause` seconds, and end the data connection.

        Messages that are queued on the old control connection have `LINGER_MS` to be sent.
        """
        if self._dialled:
            self._hang_up()
        self._monitor_events.leave(self._dialled)
        self._dialled, self._undialled, self._events_fresh = "", False, False
        self.address, self._lookup = self.addresses[index], self._lookups[index]
        self._pin(index)
        self.data.connect("")
        if pause:
            self._dial_at = time.monotonic() + pause
        else:
            self._dial_again()

    def close_in_child(self) -> None:
        """Close the descriptors that a forked child has inherited; see `inheritance`."""
        self.data.close()
        self._selector.close()
        self._waker.close()
        close_libzmqs(self._libzmqs)

    def close(self) -> None:
        """Close all sockets. Queued messages have `LINGER_MS` to be sent."""
        self._control.disable_monitor()  # otherwise ZeroMQ waits for a reader of the monitor
        self.data.close()
        keep_in_children(self)
        self._selector.close()
        self._context.destroy()
        self._waker.close()
