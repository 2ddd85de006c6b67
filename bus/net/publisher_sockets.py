"""Binds and polls a publisher's sockets: a ROUTER for control and a PUB for data, both our own.

One thread owns the sockets; other threads may only call `wake`. Only `poll` blocks, for the time
given.
"""

import contextlib
import selectors
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import AddressError
from ..headers import Buffer
from ..limits import COPIES_BYTES_MAX
from ..trust.curve_server import CurveServer
from ..trust.grants import Grants
from . import endpoints
from .descriptors import RejectedConnections, check_left
from .inheritance import close_in_children, keep_in_children
from .listening import register
from .outgoing import UnreadCopies
from .pub import PubSocket
from .router import Router
from .threads import Waker, new_selector

LINGER_SECONDS = 0.2  # seconds to send queued messages when a publisher closes
PUB_QUEUE = 1_000  # messages queued per subscriber; their payloads are not copied


class PollResult(NamedTuple):
    """The result of `poll`.

    Attributes:
        control: Whether `receive` may return a message.
        data: Whether subscribers have sent input.
        closed: Whether to call `take_closed`.
    """

    control: bool
    data: bool
    closed: bool = False


class PublisherSockets:
    """The bound control and data sockets of a publisher.

    Args:
        address: Where to bind the control socket.
        data: Where to bind the data socket; None: derived from the address.
        queue: The number of messages that may be queued per subscriber; further ones are dropped.
        secret: The publisher's secret key; empty: no keys are used.
        grants: The keys that may connect; None: no keys are used.

    Attributes:
        address, data_address: The endpoints of the two sockets, with the actual ports.
        data: The data socket.
        broadcast: Publishes to the subscribers: see `PubSocket.send`.
        leaving: Whether the sockets will be closed soon.
        wake: Interrupts a `poll` in another thread.

    Raises:
        AddressError: An address is invalid, or in use.
        KeysError: There are keys, but the cryptography library is missing.
        OSError: Too few descriptors are left.
    """

    def __init__(
        self,
        address: str,
        data: str | None,
        queue: int = PUB_QUEUE,
        secret: str = "",
        grants: Grants | None = None,
    ) -> None:
        endpoints.check(address)
        curve = None
        if grants is not None:
            curve = CurveServer(secret, lambda key: grants.of(key) is not None)
        check_left()
        rejected, copies = RejectedConnections(), UnreadCopies(COPIES_BYTES_MAX)
        self.leaving, self._rejected = False, rejected
        with contextlib.ExitStack() as undo:
            self._selector = undo.enter_context(new_selector())
            self._waker = undo.enter_context(contextlib.closing(Waker()))
            self.wake = self._waker.wake
            self._selector.register(self._waker, selectors.EVENT_READ)
            self._router = Router(self._selector, rejected, copies, curve)
            self.data = PubSocket(queue, self._selector, grants, rejected, copies)
            self.broadcast = self.data.send
            undo.callback(self._router.close, 0.0)
            undo.callback(self.data.close, 0.0)
            self.address = self._router.bind(address)
            self.data_address = self._bind_data(address, data)
            register(self.address, self)
            register(self.data_address, self)
            undo.pop_all()
        close_in_children(self)

    def _bind_data(self, address: str, data: str | None) -> str:
        if data is not None:
            return self.data.bind(endpoints.check(data), "data")
        beside = endpoints.check(endpoints.beside(self.address))
        if not endpoints.beside(address).endswith(":0"):
            return self.data.bind(beside, "data")
        try:
            return self.data.bind(beside, "data", patience=0.0)
        except AddressError:
            # The next port is in use. The kernel chose the control port, so any data port will do.
            return self.data.bind(endpoints.resolve("tcp://*:0", self.address), "data")

    @property
    def key(self) -> str:
        """The public key of the last message's sender; empty if no keys are used."""
        return self._router.key

    def poll(self, seconds: float) -> PollResult:
        """Wait for a message or for `wake`, and process the sockets that are ready."""
        data, router = self.data, self._router
        due = min(router.due, router.ending_at)
        at_once = data.with_input or router.ready or router.closed
        wait = 0.0 if at_once else max(0.0, min(seconds, due - time.monotonic()))
        found = self._selector.select(wait)
        now = time.monotonic()
        woken = False
        for key, _ in found:
            if key.fileobj is self._waker:
                woken = True
                self._waker.drain()
        if len(found) > woken:  # other sockets are ready, too
            data.process_events(found, now)
            router.process_events(found, now)
        if now >= router.due:
            router.tick(now)
        if now >= data.due:
            data.tick(now)
        closed = bool(router.closed) or now >= router.ending_at
        return PollResult(control=bool(router.ready), data=bool(data.with_input), closed=closed)

    def receive(self) -> tuple[bytes, Sequence[Buffer]] | None:
        """Return (routing id, frames) of the next control message; None if there is none."""
        return self._router.receive(time.monotonic())

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        """Send a message to one worker; return False if its connection is closed.

        If a worker does not read and its queue is full, the message is lost, as any message may be.
        """
        return self._router.send(identity, frames, time.monotonic())

    def hang_up(self) -> None:
        """Close the connection of the last message."""
        self._router.hang_up()

    def turned_away(self, now: float) -> str:
        """Return a warning if connections were rejected lately for lack of descriptors; else ""."""
        return self._rejected.text(now)

    def follow(self, pid: int) -> None:
        """Search for the process of the last message's sender, a worker that reported this pid."""
        self._router.follow(pid)

    def take_closed(self, now: float) -> list[tuple[bytes, str]]:
        """Return (routing id, text) for each closed connection; see `Router.take_closed`."""
        return self._router.take_closed(now)

    def close_in_child(self) -> None:
        """Close the descriptors that a forked child has inherited; see `inheritance`."""
        self.data.close_in_child()
        self._router.close_in_child()
        self._selector.close()
        self._waker.close()

    def close(self) -> None:
        """Close all sockets. Queued messages have `LINGER_SECONDS` to be sent."""
        keep_in_children(self)
        self.data.close(LINGER_SECONDS)
        self._router.close(LINGER_SECONDS)
        self._selector.close()
        self._waker.close()
