"""A control connection over which a flood or a probe can send any message."""

import os
import time

import zmq

from weightbus.bus.headers import encode, from_publisher
from weightbus.bus.messages import Hello, Running, Welcome
from weightbus.bus.structs import Message
from weightbus.bus.trust import curve
from weightbus.python_client.keys import worker_keys

JOIN_SECONDS = 10.0
RETRY_SECONDS = 0.25  # seconds between two hellos, as in workers
UNREAD_BYTES = 4096  # bytes of the kernel's buffer of a connection that is not read


class Dealer:
    """One connection, with the keys that the environment names, if any.

    Args:
        address: The publisher's control address.
        name: The worker name with which it joins.
        reads: Whether it reads messages after it has joined.

    Attributes:
        sent: The bytes of all sent messages.
    """

    def __init__(self, address: str, name: str, *, reads: bool = True) -> None:
        self.name, self.sent, self._instance = name, 0, os.urandom(16).hex()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        if not reads:
            self._socket.setsockopt(zmq.RCVHWM, 1)
            self._socket.setsockopt(zmq.RCVBUF, UNREAD_BYTES)
        if (keys := worker_keys(None, name)) is not None:
            curve.pin(self._socket, keys.public, keys.secret, keys.publisher)
        self._socket.connect(address)

    def say(self, message: Message) -> None:
        """Send a message; it is dropped without a connection, or if the peer does not read."""
        body = encode(message)
        try:
            self._socket.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return
        self.sent += len(body)

    def hear(self, seconds: float = 0.0) -> Message | None:
        """Return the next message, or None if none arrives in time."""
        if not self._socket.poll(max(0, round(1000 * seconds))):
            return None
        return from_publisher(self._socket.recv_multipart())[0]

    def hello(
        self,
        model: str,
        running: Running | None = None,
        *,
        age_ms: int = 0,
        pid: int = 0,
        epoch: int = 0,
    ) -> Hello:
        """Return the hello."""
        return Hello(
            name=self.name,
            instance=self._instance,
            models={model: running},
            epoch=epoch,
            age_ms=age_ms,
            pid=pid,
        )

    def join(self, model: str, seconds: float = JOIN_SECONDS) -> Welcome:
        """Send hellos until a welcome arrives.

        Raises:
            TimeoutError: No welcome arrived.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.say(self.hello(model))
            again = time.monotonic() + RETRY_SECONDS
            while (left := again - time.monotonic()) > 0:
                heard = self.hear(left)
                if isinstance(heard, Welcome):
                    return heard
        raise TimeoutError(f"{self.name} has no welcome after {seconds:.0f} s")

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(0)
