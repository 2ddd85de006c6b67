"""The sockets of a worker. No other module imports zmq but those of `trust/`, for keys.

The data connection is not libzmq's but our own (`sub.py`): it speaks the same protocol, and is
faster.

They belong to one thread, but for `wake`. Nothing blocks but `poll`, for the time given.
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
from ..limits import MESSAGE_BYTES_MAX, UNASKED_BYTES_MAX
from ..messages import Buffer
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
from .zmtp import FRAME_HEAD_MAX, FRAMES_MAX, WORD, Place

log = logging.getLogger("weightbus.worker")

LINGER_MS = 200  # what is on its way when a side closes (a goodbye, an acknowledgement) gets this
# TCP finds out which peers are gone, so that their queues are freed. Not ZeroMQ's own pings: libzmq
# (4.3.5) aborts the process if one is due on a connection that breaks while it is not read on.
KEEPALIVE_SECONDS, KEEPALIVE_PROBES = 10, 2  # of silence, then after each question without answer
UNSENT_MS = 30_000  # longer than a chunk of 1 MiB takes at 40 kB/s
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
CONNECT_MS = 3_000  # for one attempt, in which the kernel knocks twice: now and after 1 s
HANG_UP_SECONDS = 1.0  # before a publisher that was hung up on is dialled again
DEALER_QUEUE = 32  # messages a worker holds before TCP pushes back; bytes count, so it is small

# Plain numbers: arithmetic with the enumerations of pyzmq takes longer than what it is for.
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
AT_ONCE = int(zmq.NOBLOCK)

Found = list[tuple[selectors.SelectorKey, int]]


class Activity(NamedTuple):
    """What `poll` found."""

    control: bool
    data: bool
    writable: bool = False


class WorkerSockets:
    """A connected DEALER (control) and a `Subscription`, once the publisher says where.

    Args:
        address: The publisher's ROUTER.
        place: Where payloads of published messages go, see `zmtp.Stream`.
        keys: Its own, and the publisher's public one; None: there are none.
        awaits: Returns how many bytes may be on their way here, since they were asked for.
        any_data_host: Whether published data may come from another host, see `endpoints.resolve`.

    Raises:
        AddressError: The address makes no sense.
        OSError: Too few descriptors are left.
    """

    def __init__(
        self,
        address: str,
        place: Place,
        keys: WorkerKeys | None = None,
        awaits: Callable[[], int] = lambda: 0,
        *,
        any_data_host: bool = False,
    ) -> None:
        self.address, self._any_data_host = endpoints.check(address), any_data_host
        self._asked = False  # whether `_ready` is how things are at the control socket
        self._ready = 0
        check_left()
        with contextlib.ExitStack() as undo:
            with descriptors_of_libzmq(3) as self._libzmqs:
                self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                # Or whoever collects it would wait in it for ever for its socket to be closed.
                undo.callback(self._context.destroy, 0)
                self._control = self._dealer()
                self._changes = self._control.get_monitor_socket(curve.CHANGES)
            self._selector = undo.enter_context(new_selector())
            self._waker = undo.enter_context(contextlib.closing(Waker()))
            self.wake = self._waker.wake  # makes a `poll` in another thread return
            self._selector.register(self._waker, selectors.EVENT_READ)
            descriptor = int(self._control.get(zmq.FD))
            self._selector.register(descriptor, selectors.EVENT_READ, self._control)
            undo.pop_all()
        self._told = curve.Changes(self._changes, keyed=keys is not None)
        self._incoming, self._awaits = Incoming(), awaits
        self._frame_head = FRAME_HEAD_MAX + (COMMAND_BYTES if keys is not None else 0)
        self._dial_at = math.inf  # after the publisher was hung up on
        self._too_much = RateLimitedWarning(log, "hung up on the publisher: %s")
        self.data = Subscription(place, self.wake)
        self._watched: tuple[socket.socket, bool] | None = None
        try:
            if keys is not None:
                curve.pin(self._control, keys.public, keys.secret, keys.publisher)
            self._dialled = ""  # what the control socket connects to
            self._lookup = Lookup(address, self._waker.wake) if is_name(address) else None
            if self._lookup is None:
                self._dial(address)
        except BaseException as error:
            self.close()
            if isinstance(error, zmq.ZMQError):
                raise AddressError(f"cannot connect to {address}: {error.strerror}") from None
            raise
        close_in_children(self)

    def _dealer(self) -> "zmq.Socket[bytes]":
        s = self._context.socket(zmq.DEALER)
        s.setsockopt(zmq.LINGER, LINGER_MS)
        s.setsockopt(zmq.TCP_KEEPALIVE, 1)
        s.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS)
        s.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS)
        s.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        s.setsockopt(zmq.TCP_MAXRT, UNSENT_MS)
        s.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        s.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        s.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a connection: it would pile up
        s.setsockopt(zmq.RCVHWM, DEALER_QUEUE)
        s.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        s.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        return s

    def poll(self, seconds: float, *, writable: bool = False) -> Activity:
        """Wait for something to arrive or for `wake`; with `writable`, also for a peer."""
        now = time.monotonic()
        if now >= self._incoming.look_at:
            self._look(now)
        if now >= self._dial_at:
            self._dial(self._dialled)
        watched = self.data.process_events(now)
        if watched != self._watched:
            self._watch(watched)
        if self._lookup is not None:
            self._look_up(self._lookup, now)
            seconds = min(seconds, AGAIN_SECONDS)
        seconds = min(seconds, self._incoming.look_at - now)
        data, wanted = self.data.pending, READABLE | (WRITABLE if writable else 0)
        control = (self._ready if self._asked else self._ask()) & wanted
        for key, _ in self._selector.select(0.0 if control or data else max(0.0, seconds)):
            if key.fileobj is self._waker:
                self._waker.drain()
            elif key.data is self._control:
                self._asked = False
            else:
                data = data or (watched is not None and key.fileobj is watched[0])
        control = (self._ready if self._asked else self._ask()) & wanted
        return Activity(
            control=bool(control & READABLE), data=data, writable=bool(control & WRITABLE)
        )

    def _ask(self) -> int:
        """Return what can be done at the control socket.

        Its descriptor tells only that something has changed, and may not tell it again once the
        socket was used: so look after each use, before going to sleep.
        """
        if not self._asked:
            self._asked, self._ready = True, int(self._control.get(zmq.EVENTS))
        return self._ready

    def _look(self, now: float) -> None:
        """Hang up on a publisher that sends more than it was asked for."""
        unseen, most = self._incoming.look(now), self._awaits() + UNASKED_BYTES_MAX
        if unseen <= most:
            return
        self._too_much.warn(
            f"{unseen} bytes came from {self.address} that are in no message; this worker has "
            f"asked for so much that at most {most} may come at once. It dials again",
            now,
        )
        self._hang_up()
        self._dial_at = now + HANG_UP_SECONDS

    def _hang_up(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # there is none
            self._control.disconnect(self._dialled)
        self._incoming.follow(-1, "")

    def _look_up(self, lookup: Lookup, now: float) -> None:
        """Follow the host where it goes, as long as nothing is connected."""
        if not self._ask() & WRITABLE and lookup.process_events(now):
            self._dial(lookup.found)

    def _dial(self, endpoint: str) -> None:
        """Connect the control socket, in place of any connection before."""
        self._asked, self._dial_at = False, math.inf
        if self._dialled:
            self._hang_up()
        self._control.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._control.connect(endpoint)
        self._dialled = endpoint

    def unknown(self, now: float) -> str:
        """Say that there is no address of the publisher's host, if that has lasted; else empty."""
        return self._lookup.fault(now) if self._lookup is not None else ""

    def _watch(self, wanted: tuple[socket.socket, bool] | None) -> None:
        """Have the poller look at the data connection, if there is one."""
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
        """Return the frames of the next control message, if there is one."""
        if not self._ask() & READABLE:
            return None
        self._asked = False
        frames: list[zmq.Frame] = []
        more = True
        while more:
            frame = self._control.recv(AT_ONCE, copy=False)
            more = frame.more
            if len(frames) <= FRAMES_MAX:  # the rest can only make it malformed
                frames.append(frame)
        self._incoming.taken += sum(map(len, frames)) + self._frame_head * len(frames)
        return [frame.buffer for frame in frames]

    def send(self, header: bytes, token: str = "") -> None:
        """Send to the publisher, or upstream if that can be; lost while nobody is there."""
        if token and self.data.say(WORD + token.encode() + header):
            return
        self._asked = False
        with contextlib.suppress(zmq.Again):
            self._control.send(header, AT_ONCE)

    def changed(self, patience: float) -> tuple[bool, str]:
        """Return whether anything became of the control connection, and why it was refused."""
        before = self._told.descriptor, self._told.connections
        changed = self._told.read(time.monotonic(), patience)
        if (self._told.descriptor, self._told.connections) != before:
            self._incoming.follow(self._told.descriptor, self._dialled)
        return changed

    def connect_data(self, endpoint: str, ticket: str = "") -> None:
        """Take published messages from this endpoint, in place of any before.

        Raises:
            AddressError: It cannot be connected to, or is not on the publisher's host.
        """
        anywhere = self._any_data_host
        found = endpoints.resolve(endpoint, self.address, self._dialled, any_host=anywhere)
        self.data.connect(found, ticket)

    def redial(self) -> None:
        """Make both connections anew; what waits to be sent on the old ones is lost."""
        if self._dialled:
            self._dial(self._dialled)
        self.data.redial()

    def close_in_child(self) -> None:
        """Close what a forked child has inherited, see `inheritance`."""
        self.data.close()
        self._selector.close()
        self._waker.close()
        close_libzmqs(self._libzmqs)

    def close(self) -> None:
        """Close everything; what is on its way gets a moment."""
        self._control.disable_monitor()  # nobody reads it any more, for which ZeroMQ would wait
        self.data.close()
        keep_in_children(self)
        self._selector.close()
        self._context.destroy()
        self._waker.close()
