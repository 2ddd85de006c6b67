"""Floods the sockets of a publisher: `python -m weightbus.benchmarks.attacks NAME CONTROL DATA`.

It speaks ZMTP by hand, as fast as the other side takes it, over many connections; whoever hangs up
on it is dialled again. It ends when its standard input does.
"""

import contextlib
import functools
import itertools
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zmq

from weightbus.bus.limits import HEADER_BYTES_MAX, MODELS_MAX, PAGES_MAX
from weightbus.bus.messages import Hello, Message, Ping, encode
from weightbus.bus.net.endpoints import host_and_port
from weightbus.bus.net.zmtp import COMMAND, GREETING, MORE, message_parts
from weightbus.bus.observed import Observe, Verify
from weightbus.bus.trust.keys import PublisherKeys
from weightbus.python_client.keys import KEYS

LOWEST_PRIORITY = 19  # an attacker has a machine of its own: here it gets what others leave
BLOCK_BYTES = 2**16  # about what is made at once to be sent
READ_BYTES = 2**18
REDIAL_SECONDS = 0.1  # before a connection that was hung up on is dialled again, as ZeroMQ does
CURVE = GREETING.replace(b"NULL\0", b"CURVE")
HELLO = b"\x05HELLO\1\0" + bytes(72)  # of CURVE: RFC 26
HELLO_BYTES = 202  # with the head of its frame
NAMES = [f"{i:0128d}" for i in range(MODELS_MAX)]  # the longest there are


@dataclass(frozen=True, slots=True)
class Attack:
    """What is done to a publisher, over each of so many connections.

    Attributes:
        what: For people.
        channel: The socket that it is done to.
        connections: How many at once.
        blocks: What each connection sends, given its number; it goes on as long as this does.
        reads: Whether answers are read.
        descriptors: The publisher's limit of descriptors meanwhile; 0: as it is.
        keyed: It makes sense only where the publisher has keys: it speaks CURVE, and gets nowhere.
    """

    what: str
    channel: Literal["control", "data"]
    connections: int
    blocks: Callable[[int], Iterator[bytes]]
    reads: bool = True
    descriptors: int = 0
    keyed: bool = False


def _frame(body: bytes, flags: int = 0) -> bytes:
    small, last = message_parts([body])
    head = bytearray(small)
    head[0] |= flags
    return bytes(head) + bytes(last)


def _ready(kind: bytes) -> bytes:
    socket_type = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return GREETING + _frame(b"\x05READY" + socket_type, COMMAND)


def _message(message: Message) -> bytes:
    return _frame(encode(message))


def _many(one: Callable[[int], bytes], start: int) -> Iterator[bytes]:
    """Return block after block of frames, each with a number of its own."""
    numbers = itertools.count(start * 10**9)
    while True:
        block = bytearray()
        while len(block) < BLOCK_BYTES:
            block += one(next(numbers))
        yield bytes(block)


def _subscriptions(start: int) -> Iterator[bytes]:
    yield from _many(lambda n: _frame(b"\1m%d/ctl" % (n // 2)) + _frame(b"\0m%d/ctl" % n), start)


def _flapping(start: int) -> Iterator[bytes]:
    yield from _many(lambda _: _frame(b"\1policy/ctl") + _frame(b"\0policy/ctl"), start)


def _topics(start: int) -> Iterator[bytes]:
    for number in range(250):
        yield _frame(b"\1%d.%d" % (start, number) + b"t" * 60_000)
    yield from _nothing(start)


def _half_messages(_start: int) -> Iterator[bytes]:
    yield _frame(b"\1" + b"t" * 60_000, MORE) * 7
    yield from _nothing(_start)


def _hellos(start: int) -> Iterator[bytes]:
    yield from _many(lambda n: _message(_hello(f"stranger-{n}")), start)


def _same_hello(start: int) -> Iterator[bytes]:
    block = _message(_hello(f"known-{start}")) * 300
    yield from itertools.repeat(block)


def _large_hellos(start: int) -> Iterator[bytes]:
    def large(number: int) -> bytes:
        hello = _hello(f"large-{number}", NAMES, features=NAMES)
        padded = encode(hello)[:-1] + b',"x":"'
        return _frame(padded + b"x" * (HEADER_BYTES_MAX - len(padded) - 2) + b'"}')

    yield from _many(large, start)


def _one_hello(start: int) -> Iterator[bytes]:
    yield _message(_hello(f"once-{start}-{time.monotonic_ns()}", NAMES))


def _pings(start: int) -> Iterator[bytes]:
    yield _message(_hello(f"pinging-{start}"))
    yield from itertools.repeat(_message(Ping()) * 1000)


def _observes(_start: int) -> Iterator[bytes]:
    questions = _message(Observe(pages=PAGES_MAX)) + _message(Verify(worker="w", model="policy"))
    yield from itertools.repeat(questions * 500)


def _transport_pings(_start: int) -> Iterator[bytes]:
    yield from itertools.repeat(_frame(b"\x04PING\0\0" + b"a" * 16, COMMAND) * 1000)


def _malformed(_start: int) -> Iterator[bytes]:
    yield from itertools.repeat(_frame(b"{}") * 5000)


def _endless(_start: int) -> Iterator[bytes]:
    yield from itertools.repeat(_frame(b"x" * 30_000, MORE) * 4)


def _false_handshakes(_start: int) -> Iterator[bytes]:
    yield _frame(HELLO + os.urandom(120), COMMAND)
    yield from _nothing(_start)


def _handshakes(_start: int) -> Iterator[bytes]:
    yield _recorded_hello()
    yield from _nothing(_start)


@functools.cache
def _recorded_hello() -> bytes:
    """Return what somebody says first who knows the publisher's public key, and has one of its own.

    Whoever overhears that can say it again, as often as it likes.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, zmq.Context() as context:
        sender = context.socket(zmq.DEALER)
        sender.linger = 0
        sender.curve_publickey, sender.curve_secretkey = zmq.curve_keypair()
        folder = Path(os.environ[KEYS])
        sender.curve_serverkey = zmq.curve_public(PublisherKeys.read(folder).secret.encode())
        sender.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        overheard, _ = server.accept()
        with overheard, overheard.makefile("rb") as said:
            overheard.sendall(CURVE)
            said.read(len(CURVE))
            hello = said.read(HELLO_BYTES)
        sender.close()
    return hello


def _nothing(_start: int) -> Iterator[bytes]:
    while True:
        yield b""


def _hello(name: str, models: list[str] | None = None, features: list[str] | None = None) -> Hello:
    wanted: list[str] = models or ["policy"]
    return Hello(
        name=name,
        instance=os.urandom(16).hex(),
        models=dict.fromkeys(wanted),
        features=features or [],
    )


ATTACKS: dict[str, Attack] = {
    "subscriptions": Attack("other topics each time", "data", 20, _subscriptions),
    "flapping": Attack("one topic on and off", "data", 20, _flapping),
    "topics": Attack("250 topics of 60 kB each", "data", 20, _topics),
    "half": Attack("messages that never end", "data", 200, _half_messages),
    "data-pings": Attack("ZMTP's pings, answers unread", "data", 64, _transport_pings, reads=False),
    "hellos": Attack("another name each time", "control", 200, _hellos),
    "same-hello": Attack("one name, again and again", "control", 200, _same_hello),
    "large-hellos": Attack("64 KiB each", "control", 200, _large_hellos),
    "passing": Attack("one hello, and gone", "control", 50, _one_hello),
    "malformed": Attack("no message of ours", "control", 200, _malformed),
    "pings": Attack("pings, answers unread", "control", 64, _pings, reads=False),
    "observes": Attack("who runs what, answers unread", "control", 64, _observes, reads=False),
    "control-pings": Attack("ZMTP's pings", "control", 64, _transport_pings, reads=False),
    "idle": Attack("descriptors run out", "data", 200, _nothing, descriptors=128),
    "idle-control": Attack("descriptors run out", "control", 200, _nothing, descriptors=128),
    "multipart": Attack("one message that never ends", "control", 1, _endless),
    "multiparts": Attack("messages that never end", "control", 64, _endless),
    "false-handshakes": Attack("random for a box", "control", 200, _false_handshakes, keyed=True),
    "handshakes": Attack("begun, never ended", "control", 200, _handshakes, keyed=True),
}


class _Connection:
    """One of the attacker's connections."""

    def __init__(self, attack: Attack, address: tuple[str, int], number: int) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.connect_ex(address)
        self._attack = attack
        self._blocks = attack.blocks(number)
        ready = _ready(b"DEALER" if attack.channel == "control" else b"SUB")
        self._left = memoryview(CURVE if attack.keyed else ready)
        self._welcome = GREETING[:1] if attack.keyed else b"READY"
        self._greeted = False  # libzmq hangs up on what comes before its own READY
        self.sent = 0
        self.watched = 0

    def serve(self) -> int:
        """Send and read what can be; return what to wait for, 0 if the connection is over."""
        try:
            if self._attack.reads or not self._greeted:
                with contextlib.suppress(BlockingIOError):
                    got = self.socket.recv(READ_BYTES)
                    if not got:
                        return 0
                    self._greeted = self._greeted or self._welcome in got
            return self._send()
        except OSError:
            return 0

    def _send(self) -> int:
        if not self._left and not self._greeted:
            return selectors.EVENT_READ
        if not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = memoryview(block)
            if not block:
                return selectors.EVENT_READ
        with contextlib.suppress(BlockingIOError):
            count = self.socket.send(self._left)
            self.sent += count
            self._left = self._left[count:]
        return selectors.EVENT_WRITE | (selectors.EVENT_READ if self._attack.reads else 0)


class Flood:
    """An attack under way."""

    def __init__(self, attack: Attack, endpoint: str) -> None:
        self._attack, self._address = attack, host_and_port(endpoint)
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count(1)
        self._dial_at = [0.0] * attack.connections
        self._over = 0
        self.sent = self.dialled = 0

    def run(self) -> None:
        """Go on until the standard input ends."""
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            self._dial()
            for key, _ in self._selector.select(REDIAL_SECONDS):
                if key.data is None:
                    return
                self._serve(key.data)

    def _dial(self) -> None:
        now = time.monotonic()
        due = sum(at <= now for at in self._dial_at)
        self._dial_at = [at for at in self._dial_at if at > now]
        for _ in range(due):
            connection = _Connection(self._attack, self._address, next(self._numbers))
            self.dialled += 1
            self._selector.register(connection.socket, selectors.EVENT_WRITE, connection)
            connection.watched = selectors.EVENT_WRITE

    def _serve(self, connection: _Connection) -> None:
        events = connection.serve()
        if not events:
            self.sent += connection.sent
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._dial_at.append(time.monotonic() + REDIAL_SECONDS)
        elif events != connection.watched:
            connection.watched = events
            self._selector.modify(connection.socket, events, connection)

    def told(self) -> dict[str, int]:
        """Return what was done, as bytes and connections."""
        keys = self._selector.get_map().values()
        alive = sum(key.data.sent for key in keys if key.data is not None)
        return {"sent": self.sent + alive, "dialled": self.dialled}


def main(name: str, control: str, data: str) -> None:
    """Attack until the parent closes our standard input, then tell what was done."""
    os.nice(LOWEST_PRIORITY)
    attack = ATTACKS[name]
    flood = Flood(attack, control if attack.channel == "control" else data)
    flood.run()
    print(json.dumps(flood.told()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
