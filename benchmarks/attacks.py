"""Floods the sockets of a publisher: `python -m weightbus.benchmarks.attacks NAME THERE`.

Most attacks are by peers without access (`Strangers`): they write ZMTP directly, as fast as the
publisher reads, over many connections, and dial again when the publisher hangs up. In the other
attacks (`insiders.py`) the attacker has joined. An attack ends when its standard input ends.
"""

import contextlib
import functools
import itertools
import json
import os
import random
import resource
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import zmq

from weightbus.bus.headers import encode
from weightbus.bus.limits import PAGES_MAX
from weightbus.bus.messages import Hello, Observe, Ping, Verify
from weightbus.bus.net.endpoints import host_and_port
from weightbus.bus.net.zmtp import COMMAND, GREETING, MORE, message_parts
from weightbus.bus.protocol_limits import HEADER_BYTES_MAX, MODELS_MAX
from weightbus.bus.structs import Message
from weightbus.bus.trust.keys import PublisherKeys
from weightbus.python_client.keys import KEYS
from weightbus.tests.faults.strangers import plain

from . import insiders
from .flooded import Language, Setup
from .insiders import Insider, Steps

Channel = Literal["control", "data", "page"]
Blocks = Callable[[int], Iterator[bytes]]
MIB = 2**20
# The niceness of attacks that use all processor time that they get. A real attacker has its own
# machine; here it gets the time that others leave. An attack with a fixed rate needs little time.
LOWEST_PRIORITY = 19
BLOCK_BYTES = 2**16  # about how much an attack prepares at once
READ_BYTES = 2**18
REDIAL_SECONDS = 0.1  # pause before a closed connection is dialled again, as in ZeroMQ
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER
CURVE = GREETING.replace(b"NULL\0", b"CURVE")
HELLO = b"\x05HELLO\1\0" + bytes(72)  # of CURVE: RFC 26
HELLO_BYTES = 202  # with the head of its frame
PEAK_MIB, LATER_MIB = 64.0, 16.0
NAMES = [f"{i:0128d}" for i in range(MODELS_MAX)]  # the longest there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """An attack on a publisher, and the bounds that must hold during the attack.

    Attributes:
        what: A description.
        connections: The number of connections at once.
        keyed: The attack needs a publisher with keys.
        descriptors: The publisher's limit of descriptors during the attack; 0: unchanged.
        setup: How to start the publisher.
        peak_mib: How many MiB the publisher's memory may grow.
        later_mib: The same, some time after the attack.
        pong: The longest time in seconds for an answer to a ping; 0: no limit.
        joins: Whether workers join during the attack; each must have joined within a second.
        heard: Whether the log must have a line about each of them.
        only: The only language of publishers that the attack is for, if any.
    """

    what: str
    connections: int
    keyed: bool = False
    descriptors: int = 0
    setup: Setup = field(default_factory=Setup)
    peak_mib: float = PEAK_MIB
    later_mib: float = LATER_MIB
    pong: float = 0.0
    joins: bool = False
    heard: bool = False
    only: Language | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strangers(Attack):
    """An attack over connections of peers that have not joined.

    Attributes:
        channel: The attacked socket.
        blocks: Returns the blocks that a connection sends, given its number; then it closes.
        opening: Returns what it sends first; None: ZMTP's greeting and READY.
        welcome: What must be received before the blocks are sent: libzmq hangs up if they arrive
            before its own READY.
        reads: Whether answers are read.
        hosts: The number of source addresses.
        rate: The largest number of connections dialled per second; 0: no limit.
        abrupt: Whether a connection ends with a reset.
    """

    channel: Channel
    blocks: Blocks
    opening: Callable[[int], bytes] | None = None
    welcome: bytes = b"READY"
    reads: bool = True
    hosts: int = 1
    rate: float = 0.0
    abrupt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside(Attack):
    """An attack by a peer that may join."""

    act: Callable[[Insider], Steps]


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
    """Yield blocks of frames; each frame has a different number."""
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


def _curve_hello(_start: int) -> bytes:
    return CURVE + _recorded_hello()


@functools.cache
def _recorded_hello() -> bytes:
    """Return the first command of a peer that has keys and knows the publisher's public key.

    Anyone who records this command can send it again.
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


def _noise(start: int) -> Iterator[bytes]:
    """Return random bytes that contain ZMTP pings."""
    rng = random.Random(start)
    for _ in range(rng.randint(1, 40)):
        yield b"".join(_piece(rng) for _ in range(rng.randint(1, 40)))


def _piece(rng: random.Random) -> bytes:
    match rng.randrange(12):
        case 0 | 1 | 2 | 3:
            return _frame(b"\x04PING\0\0" + rng.randbytes(rng.randrange(17)), COMMAND)
        case 4 | 5 | 6:
            return _frame(rng.randbytes(rng.randrange(20)))
        case 7:
            return _message(Ping()) + _message(_hello(f"noise-{rng.randrange(50)}"))
        case 8:
            return _frame(rng.randbytes(rng.randrange(2000)), rng.choice((0, MORE)))
        case 9:
            return _frame(bytes([rng.randrange(4)]) + b"policy/ctl")
        case 10:
            return _frame(rng.choice((b"\x04PONG", b"\x05ERROR\0", b"\x05READY")), COMMAND)
        case _:
            return rng.randbytes(rng.randrange(12)) if rng.random() < 0.1 else b""


def _noisy_opening(start: int) -> bytes:
    """Return a greeting, some with keys; one in four has a random byte."""
    rng = random.Random(-start)
    said = bytearray(_ready(rng.choice((b"DEALER", b"DEALER", b"SUB", b"REQ"))))
    if rng.random() < 0.25:
        said[rng.randrange(len(said))] = rng.randrange(256)
    if rng.random() < 0.25:
        said[: len(GREETING)] = CURVE
        said[len(GREETING) :] = _frame(HELLO + rng.randbytes(120), COMMAND)
    return bytes(said)


def _silence(_start: int) -> bytes:
    return b""


def _curve(_start: int) -> bytes:
    return CURVE


def _cases(*kinds: str) -> tuple[tuple[bytes, ...], ...]:
    return tuple(case.steps for case in plain(0) if case.kind.startswith(kinds))


@functools.cache
def _web() -> tuple[tuple[bytes, ...], ...]:
    return _cases("HTTP/1", "HTTP POST", "web page", "WebSocket", "TLS", "HTTP/2", "gRPC")


@functools.cache
def _old() -> tuple[tuple[bytes, ...], ...]:
    return _cases("ZMTP 1", "ZMTP 2")


def _web_opening(start: int) -> bytes:
    return b"".join(_web()[start % len(_web())])


def _old_opening(start: int) -> bytes:
    return _old()[start % len(_old())][0]


def _old_rest(start: int) -> Iterator[bytes]:
    yield from itertools.cycle(_old()[start % len(_old())][1:] or (b"",))


def _again(opening: Callable[[int], bytes]) -> Callable[[int], Iterator[bytes]]:
    return lambda start: itertools.repeat(opening(start))


# Models so large that each copy is visible in the memory: two copies have 128 MiB.
LARGE: dict[str, Any] = {"peak_mib": 128.0, "later_mib": 128.0}
LARGE["setup"] = Setup(shape="64MiB/20", pause=0.1)
LARGEST = {**LARGE, "setup": Setup(shape="64MiB/20", pause=0.1, chunk_bytes=64 * MIB)}
FILES = 1500  # of a trainer that has many
NOISE: dict[str, Any] = {"opening": _noisy_opening, "hosts": 64, "abrupt": True}
OLD: dict[str, Any] = {"welcome": GREETING[:1], "hosts": 64}
KEYED: dict[str, Any] = {"opening": _curve, "welcome": GREETING[:1], "keyed": True}


def _on_data(what: str, connections: int, blocks: Blocks, **more: Any) -> Strangers:
    return Strangers(what=what, connections=connections, channel="data", blocks=blocks, **more)


def _on_control(what: str, connections: int, blocks: Blocks, **more: Any) -> Strangers:
    return Strangers(what=what, connections=connections, channel="control", blocks=blocks, **more)


def _unfinished(
    what: str, channel: Channel, opening: Callable[[int], bytes], **more: Any
) -> Strangers:
    """Return an attack of 400 connections a second from 60 addresses, which stay as they are."""
    return Strangers(
        what=what,
        connections=4000,
        channel=channel,
        blocks=_nothing,
        opening=opening,
        hosts=60,
        rate=400.0,
        descriptors=1024,
        joins=True,
        **more,
    )


def _inside(what: str, connections: int, act: Callable[[Insider], Steps], **more: Any) -> Inside:
    return Inside(what=what, connections=connections, act=act, **more)


ATTACKS: dict[str, Attack] = {
    "subscriptions": _on_data("other topics each time", 20, _subscriptions),
    "flapping": _on_data("one topic on and off", 20, _flapping),
    "topics": _on_data("250 topics of 60 kB each", 20, _topics),
    "half": _on_data("messages that never end", 200, _half_messages),
    "data-pings": _on_data("ZMTP's pings, answers unread", 64, _transport_pings, reads=False),
    "hellos": _on_control("another name each time", 200, _hellos),
    "same-hello": _on_control("one name, again and again", 200, _same_hello),
    "large-hellos": _on_control("64 KiB each", 200, _large_hellos),
    "passing": _on_control("one hello, and gone", 50, _one_hello),
    "malformed": _on_control("no message of ours", 200, _malformed),
    "pings": _on_control("pings, answers unread", 64, _pings, reads=False),
    "observes": _on_control("who runs what, answers unread", 64, _observes, reads=False),
    "control-pings": _on_control("ZMTP's pings", 64, _transport_pings, reads=False),
    "idle": _on_data("descriptors run out", 200, _nothing, descriptors=128),
    "idle-control": _on_control("descriptors run out", 200, _nothing, descriptors=128),
    "multipart": _on_control("one message that never ends", 1, _endless),
    "multiparts": _on_control("messages that never end", 64, _endless),
    "noise": _on_control("noise with ZMTP's pings", 64, _noise, **NOISE),
    "data-noise": _on_data("noise with ZMTP's pings", 64, _noise, **NOISE),
    "web": _on_control("HTTP, TLS, gRPC", 64, _again(_web_opening), opening=_web_opening, **OLD),
    "old": _on_control("ZMTP 1 and 2", 64, _old_rest, opening=_old_opening, **OLD),
    "unfinished": _unfinished("say nothing, from 60 hosts", "control", _silence),
    "unfinished-data": _unfinished("say nothing, from 60 hosts", "data", _silence),
    "unfinished-greeting": _unfinished("greet, from 60 hosts", "control", _curve),
    "page": Strangers(
        what="say nothing to the page",
        connections=300,
        channel="page",
        blocks=_nothing,
        opening=_silence,
        descriptors=256,
        joins=True,
        setup=Setup(page=True),
        only="python",
    ),
    "a-chunk-of-each": _inside(
        "one chunk of each version, unread", 1, insiders.a_chunk_of_each, **LARGE
    ),
    "chunks": _inside("128 chunks each, unread", 18, insiders.chunks_unread, **LARGE),
    "large-chunks": _inside(
        "pushed chunks of 64 MiB, unread", 40, insiders.subscribers_unread, **LARGEST
    ),
    "own-pid": _inside(
        "hello as the publisher's own process",
        32,
        insiders.own_pid,
        setup=Setup(files=FILES),
        pong=0.05,
    ),
    "wrong-digests": _inside("1000 a second", 1, insiders.wrong_digests, joins=True, heard=True),
    "epoch-below": _inside("a hello that contradicts itself", 1, insiders.epoch_below, joins=True),
    "epoch-ahead": _inside("a hello from the future", 1, insiders.epoch_ahead, joins=True),
    "false-handshakes": _on_control("random for a box", 200, _false_handshakes, **KEYED),
    "handshakes": _on_control("begun, never ended", 200, _handshakes, **KEYED),
    "unfinished-handshakes": _unfinished(
        "begun, never ended, from 60 hosts", "control", _curve_hello, keyed=True
    ),
}


class _Connection:
    """A connection of the attacker."""

    def __init__(self, attack: Strangers, address: tuple[str, int], number: int) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if attack.hosts > 1:
            self.socket.bind((f"127.8.0.{1 + number % attack.hosts}", 0))
        if attack.abrupt and number % 2:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.socket.connect_ex(address)
        self._attack = attack
        self._blocks = attack.blocks(number)
        ready = _ready(b"DEALER" if attack.channel == "control" else b"SUB")
        self._left = memoryview(ready if attack.opening is None else attack.opening(number))
        self._greeted = False
        self.sent = 0
        self.watched = 0

    def serve(self) -> int:
        """Send and read what is possible; return the events to wait for, or 0 at the end."""
        try:
            if self._attack.reads or not self._greeted:
                with contextlib.suppress(BlockingIOError):
                    got = self.socket.recv(READ_BYTES)
                    if not got:
                        return 0
                    self._greeted = self._greeted or self._attack.welcome in got
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
    """The open connections of an attack by strangers."""

    def __init__(self, attack: Strangers, endpoint: str) -> None:
        self._attack = attack
        page = urlsplit(endpoint)
        self._address = (
            (page.hostname or "", page.port or 0)
            if attack.channel == "page"
            else host_and_port(endpoint)
        )
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count(1)
        self._dial_at = [0.0] * attack.connections
        self._began = time.monotonic()
        self.sent = self.dialled = 0

    def run(self) -> None:
        """Attack until the standard input ends."""
        self._selector.register(0, selectors.EVENT_READ)
        while self.turn():
            pass

    def turn(self) -> bool:
        """Handle all ready connections, or wait for one; return whether to continue."""
        self._dial()
        for key, _ in self._selector.select(REDIAL_SECONDS):
            if key.data is None:
                return False
            self._serve(key.data)
        return True

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.socket.close()
        self._selector.close()

    def _dial(self) -> None:
        now = time.monotonic()
        due = sum(at <= now for at in self._dial_at)
        if self._attack.rate:
            due = min(due, int((now - self._began) * self._attack.rate) - self.dialled)
        if due <= 0:
            return
        self._dial_at.sort()
        del self._dial_at[:due]
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
        """Return the number of sent bytes and of connections."""
        keys = self._selector.get_map().values()
        alive = sum(key.data.sent for key in keys if key.data is not None)
        return {"sent": self.sent + alive, "dialled": self.dialled}


def come_in(attack: Inside, addresses: dict[str, Any]) -> dict[str, int]:
    """Attack until the standard input ends; return the sent bytes and the connections."""
    insider = Insider(addresses)
    for seconds in attack.act(insider):
        if select.select([0], [], [], seconds)[0]:
            break
    return {"sent": insider.sent, "dialled": insider.dialled}


def _waited() -> float:
    """Return for how many seconds this process was ready to run but had to wait."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def main(name: str, addresses_json: str, nice: str) -> None:
    """Report the start, attack until the parent closes our standard input, report the totals."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**16)), hard))
    attack, addresses = ATTACKS[name], json.loads(addresses_json)
    if isinstance(attack, Strangers) and not attack.rate:
        os.nice(int(nice))
        if attack.opening is not None:
            attack.opening(0)  # which takes a while the first time
    print(json.dumps({}), flush=True)
    began, waited = time.monotonic(), _waited()
    if isinstance(attack, Inside):
        told = come_in(attack, addresses)
    else:
        assert isinstance(attack, Strangers)
        flood = Flood(attack, addresses[attack.channel])
        flood.run()
        told = flood.told()
    share = (_waited() - waited) / (time.monotonic() - began)
    print(json.dumps({**told, "waited": share}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
