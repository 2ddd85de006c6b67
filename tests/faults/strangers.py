"""What programs say that are no workers of ours, by accident or not: bytes, kind by kind.

A case is a few steps; each is said once the other side has answered the one before, or after a
moment. `plain()` is everything, `case` any number of cases: everything first, each kind in turns,
then mutations. A case follows from the seed and its number alone.

No case is a worker of a publisher without keys. A hello is said in ZMTP 1.0 and 2.0 alone, which no
worker speaks, and by web pages; those cases are never spliced with others. So if anybody joins, it
is a fault.
"""

import functools
import itertools
import json
import random
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from weightbus.bus.headers import encode
from weightbus.bus.limits import PAGES_MAX
from weightbus.bus.messages import Applied, Bye, Fetch, Hello, Observe, Ping, Progress
from weightbus.bus.net.zmtp import COMMAND, LONG, MORE

MECHANISMS = (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI")
SIGNATURE = b"\xff" + bytes(7) + b"\1\x7f"
SOCKETS = (b"DEALER", b"SUB", b"REQ", b"PAIR", b"XPUB", b"ROUTER", b"STREAM", b"x" * 255)
STEPS_KEPT = 4096  # of a step, bytes that are mutated: what comes later is as it was
REPEATS_MAX = 64
NAME = "from-a-web-page"


class Case(NamedTuple):
    """What one connection says.

    Attributes:
        kind: For people.
        steps: In this order.
        joins: Whether a hello is in it.
    """

    kind: str
    steps: tuple[bytes, ...]
    joins: bool = False


def hello() -> bytes:
    """Return a message with which a worker joins."""
    return encode(Hello(name=NAME, instance="00112233" * 4, models={"policy": None}))


def messages() -> list[bytes]:
    """Return messages of workers, all but a hello, and some that are none."""
    fetch = Fetch(model="policy", epoch=1, version=0, layout=True)
    applied = Applied(model="policy", epoch=1, version=1, digest="0" * 64)
    progress = Progress(model="policy", epoch=1, version=1, chunks=1)
    sound = [Ping(), fetch, applied, progress, Observe(pages=PAGES_MAX), Bye()]
    return [
        *map(encode, sound),
        b"",
        b"{}",
        b"x" * 60_000,
        b"[" * 30_000,
        b'{"wbp":1,"type":"hello"}',
    ]


# ZMTP.


def greeting(minor: int, mechanism: bytes, *, server: bool) -> bytes:
    """Return the greeting of ZMTP 3.0 or 3.1."""
    return SIGNATURE + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes([server]) + bytes(31)


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame of ZMTP 2.0 or later."""
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def frame_1(body: bytes, flags: int = 0) -> bytes:
    """Return a frame of ZMTP 1.0."""
    size = len(body) + 1
    head = bytes([size]) if size < 255 else b"\xff" + size.to_bytes(8, "big")
    return head + bytes([flags]) + body


def command(name: bytes, data: bytes = b"") -> bytes:
    """Return a command of ZMTP 3."""
    return frame(bytes([len(name)]) + name + data, COMMAND)


def property_(name: bytes, value: bytes) -> bytes:
    """Return one property of a READY."""
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def ready(kind: bytes = b"DEALER", *more: bytes) -> bytes:
    """Return the command that ends a handshake without keys."""
    return command(b"READY", property_(b"Socket-Type", kind) + b"".join(more))


NULL = greeting(0, b"NULL", server=False)


def _first_bytes() -> Iterator[Case]:
    rng = random.Random(1)
    for first in range(256):
        for length in (0, 1, 9, 64, 4095):
            yield Case("first byte", (bytes([first]) + rng.randbytes(length),))


def _greetings() -> Iterator[Case]:
    for minor, mechanism, server in itertools.product((0, 1), MECHANISMS, (False, True)):
        whole = greeting(minor, mechanism, server=server)
        for length in range(1, len(whole) + 1):
            yield Case(f"ZMTP 3 {mechanism.decode()}", (whole[:length],))
        for kind in SOCKETS:
            yield Case(f"ZMTP 3 {mechanism.decode()}", (whole, ready(kind)))
    for revision, number in itertools.product((1, 2, 3, 4, 9, 255), range(12)):
        whole = SIGNATURE + bytes([revision, number]) + frame(b"me")
        for length in range(1, len(whole) + 1):
            yield Case("ZMTP 2 greeting", (whole[:length],))
    for length in range(20):
        yield Case(
            "ZMTP 1 greeting", ((frame_1(b"") + frame_1(b"12345") + frame_1(b"x"))[:length],)
        )


def _old() -> Iterator[Case]:
    """Handshakes of ZMTP 1.0 and 2.0 (as JeroMQ 0.3.6 makes them), and messages."""
    identities = (b"", b"me", b"\0auto", b"i" * 254, b"i" * 1000)
    for identity, body in itertools.product(identities, [*messages(), hello()]):
        joins = body == hello()
        one = frame_1(identity), frame_1(body) * 2
        two = SIGNATURE + b"\1\5" + frame(identity), frame(body) * 2
        three = SIGNATURE + b"\1", b"\5", frame(identity), frame(body), frame(body)
        for steps in (one, two, three):
            kind = "ZMTP 1 message" if steps is one else "ZMTP 2 message"
            yield Case(kind, steps, joins)
            yield Case(kind, (b"".join(steps),), joins)
        yield Case("ZMTP 1 message", (frame_1(identity), frame_1(body, MORE) * 3), joins)
        yield Case("ZMTP 2 message", (*two[:1], frame(body, MORE) * 3), joins)


def _commands() -> Iterator[Case]:
    """Commands out of their order, and such as nobody says."""
    name = b"Identity"
    ping, pong = command(b"PING", b"\0\0ctx"), command(b"PONG", b"ctx")
    subscribe, error = command(b"SUBSCRIBE", b"policy/ctl"), command(b"ERROR", b"\3why")
    say = b"".join(map(frame, messages()[:6]))
    steps = {
        "READY twice": (ready(), ready()),
        "PING first": (ping, ready(), ping),
        "PONG first": (pong * 100, ready()),
        "ERROR": (error,),
        "ERROR after": (ready(), error, ping),
        "SUBSCRIBE on control": (ready(), subscribe, command(b"CANCEL", b"policy/ctl"), ping),
        "message first": (say, ready()),
        "long identity": (ready(b"DEALER", property_(name, b"i" * 60_000)), say),
        "same identity": (ready(b"DEALER", property_(name, b"i")), say),
        "zero identity": (ready(b"DEALER", property_(name, b"\0\0\0\0\1")), say),
        "twice a property": (ready(b"DEALER", *[property_(name, b"i")] * 2), say),
        "many properties": (ready(b"DEALER", *[property_(b"X-a", b"b")] * 5000), say),
        "property without end": (command(b"READY", b"\x0bSocket-Type\xff\xff\xff\xff"),),
        "no properties": (command(b"READY"), say),
        "empty command": (frame(b"", COMMAND), ready()),
        "name without end": (frame(b"\xffREADY", COMMAND),),
        "unknown": (command(b"JOIN", b"g"), command(b"LEAVE"), ready(), command(b"X" * 255)),
        "PING with all of a frame": (ready(), command(b"PING", b"\0\0" + b"c" * 60_000), say),
        "PING with nothing": (ready(), command(b"PING"), command(b"PING", b"\0"), say),
        "command with more": (ready(), frame(b"\4PING\0\0", COMMAND | MORE), say),
        "messages, PING, messages": (ready(), say + ping + say + ping),
        "topics": (ready(b"SUB"), frame(b"\1policy/ctl") + frame(b"\1" + b"t" * 60_000)),
        "tickets": (ready(b"SUB"), frame(b"\3" + b"0" * 32) + frame(b"\2" + b"0" * 32 + b"{}")),
        "SUBSCRIBE": (ready(b"SUB"), subscribe * 300),
        "odd words": (ready(b"SUB"), *(frame(bytes([i]) + b"word") for i in range(256))),
    }
    for kind, said in steps.items():
        for minor in (0, 1):
            start = greeting(minor, b"NULL", server=False)
            yield Case(kind, (start, *said))
            yield Case(kind, (start + b"".join(said),))


def _keyed() -> Iterator[Case]:
    """What begins a handshake of PLAIN, CURVE, or GSSAPI, and what is wrong for one."""
    rng = random.Random(2)
    first = b"\1\0" + bytes(72) + rng.randbytes(32) + b"\0" * 8 + rng.randbytes(80)
    initiate = command(b"INITIATE", rng.randbytes(300))
    curve = {
        "HELLO": (command(b"HELLO", first),),
        "HELLO twice": (command(b"HELLO", first), command(b"HELLO", first)),
        "HELLO of another version": (command(b"HELLO", b"\2" + first[1:]),),
        "short HELLO": (command(b"HELLO", first[:50]),),
        "long HELLO": (command(b"HELLO", first * 100),),
        "INITIATE first": (initiate, command(b"HELLO", first)),
        "INITIATE": (command(b"HELLO", first), initiate),
        "MESSAGE first": (command(b"MESSAGE", rng.randbytes(100)),),
        "WELCOME": (command(b"WELCOME", rng.randbytes(160)),),
        "READY": (ready(),),
        "ERROR": (command(b"ERROR", b"\3why"),),
        "message": (frame(b"{}"),),
    }
    plain = (command(b"HELLO", b"\5admin\6secret"), command(b"INITIATE", b"\x0bSocket-Type"))
    for server, minor in itertools.product((False, True), (0, 1)):
        for kind, said in curve.items():
            yield Case(f"CURVE {kind}", (greeting(minor, b"CURVE", server=server), *said))
        yield Case("PLAIN", (greeting(minor, b"PLAIN", server=server), *plain))
        yield Case("GSSAPI", (greeting(minor, b"GSSAPI", server=server), initiate))


def _frames() -> Iterator[Case]:
    """Frames with flags and sizes that no message has, and in numbers that nobody needs."""
    for flags in range(256):
        yield Case("flags", (NULL, ready(), bytes([flags, 3]) + b"abc" + frame(b"{}")))
    for size in (0, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1):
        for flags in (LONG, LONG | MORE, LONG | COMMAND):
            head = bytes([flags]) + size.to_bytes(8, "big")
            yield Case("size", (NULL, ready(), head + b"x" * 1000))
            yield Case("size, first", (NULL, head + b"x" * 1000))
            yield Case("size, ZMTP 2", (SIGNATURE + b"\1\5" + frame(b""), head + b"x" * 1000))
        yield Case("size, ZMTP 1", (b"\xff" + size.to_bytes(8, "big") + b"\0" + b"x" * 1000,))
    for one in (frame(b""), frame(b"", MORE), frame(b"x", MORE), frame(b"\4PING\0\0", COMMAND)):
        yield Case("10,000 frames", (NULL, ready(), one * 10_000))
        yield Case("10,000 frames, first", (NULL, one * 10_000))
    yield Case("10,000 frames, ZMTP 1", (frame_1(b""), frame_1(b"", MORE) * 10_000))
    yield Case("10,000 frames, ZMTP 2", (SIGNATURE + b"\1\5" + frame(b"") + frame(b"") * 10_000,))


# Others.


def _client_hello(name: str, protocols: list[str], oldest: ssl.TLSVersion) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = oldest
    if protocols:
        context.set_alpn_protocols(protocols)
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return out.read()
    raise AssertionError("a client that waits for no server")


def _tls() -> Iterator[Case]:
    for name in ("a", "trainer.example", "x" * 60 + ".example"):
        for protocols in ([], ["http/1.1"], ["h2", "http/1.1"], ["h2"]):
            for oldest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                yield Case("TLS", (_client_hello(name, protocols, oldest),))


def _request(method: str, path: str, fields: dict[str, str], version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {fields[name]}" for name in fields)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


BROWSER = {
    "Host": "127.0.0.1:5555",
    "Connection": "keep-alive",
    "User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) "
    "Chrome/142.0.0.0 Safari/537.36",
    "Accept": "*/*",
    "Origin": "https://page.example",
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "no-cors",
    "Referer": "https://page.example/",
    "Accept-Encoding": "gzip, deflate, br, zstd",
    "Accept-Language": "en-US,en;q=0.9",
}
PROMETHEUS = {
    "Host": "trainer:5555",
    "User-Agent": "Prometheus/3.7.3",
    "Accept": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.3,*/*;q=0.2",
    "Accept-Encoding": "gzip",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}


def _http() -> Iterator[Case]:
    probes: tuple[dict[str, str], ...] = (
        {"Host": "a"},
        {"Host": "a", "User-Agent": "curl/8.14.1", "Accept": "*/*"},
        {},
    )
    for fields in (BROWSER, PROMETHEUS, *probes):
        for method, path in itertools.product(
            ("GET", "HEAD", "OPTIONS", "CONNECT", "DELETE"), ("/", "/metrics", "/" + "x" * 2000)
        ):
            for version in ("1.0", "1.1"):
                yield Case(f"HTTP/{version}", (_request(method, path, fields, version),))
    for size, kind in itertools.product(
        (0, 1, 100, 255, 256, 5000, 60_000), ("text/plain", "application/json", "x/y")
    ):
        body = b"a" * size
        fields = {**BROWSER, "Content-Length": str(size), "Content-Type": kind}
        yield Case("HTTP POST", (_request("POST", "/", fields) + body,))
        yield Case("HTTP POST", (_request("POST", "/", fields), body))
    socket = {"Upgrade": "websocket", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    socket |= {"Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    yield Case("WebSocket", (_request("GET", "/", {**BROWSER, **socket}), b"\x81\x85abcdhello"))
    yield Case("HTTP PUT", (_request("PUT", "/", BROWSER) + hello(),), joins=True)


def _posts() -> Iterator[Case]:
    """Two POSTs of a web page: read as ZMTP 1.0, the frames in their bodies are a hello."""
    for path in ("/", *(f"/{'a' * n}" for n in range(1, 24))):
        post = _post_with(path, [frame_1(b"")] + [frame_1(hello())] * 3)
        yield Case("web page's POSTs", (post, post), joins=True)
        yield Case("web page's POSTs", (post + post,), joins=True)


def _post_with(path: str, frames: list[bytes]) -> bytes:
    """Return a POST whose head ends within a frame of ZMTP 1.0, which its body completes."""
    fields = {**BROWSER, "Content-Type": "text/plain;charset=UTF-8", "Content-Length": "1000"}
    head = _request("POST", path, fields)
    at = 0
    while at < len(head):
        if head[at] == 0xFF or head[at] == 0:
            raise AssertionError(f"a frame of {head[at]} cannot begin in a head: {head!r}")
        at += 1 + head[at]
    body = b"x" * (at - len(head)) + b"".join(frames)
    return head + body.ljust(1000, b"\1")


def _http_2() -> Iterator[Case]:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

    def of_2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return (
            struct.pack(">I", len(payload))[1:]
            + bytes([kind, flags])
            + struct.pack(">I", stream)
            + payload
        )

    settings = of_2(4, 0, 0, bytes.fromhex("000300000064000400400000000200000000"))
    window = of_2(8, 0, 0, bytes.fromhex("3fff0001"))
    grpc = (
        bytes.fromhex("8386449d62") + b"/grpc.health.v1.Health/Check" + b"\x5f\x10application/grpc"
    )
    headers = of_2(1, 4, 1, grpc)
    data = of_2(0, 1, 1, bytes(5))
    ping = of_2(6, 0, 0, bytes(8))
    for said in (
        (),
        (settings,),
        (settings, window),
        (settings, window, headers, data),
        (ping,) * 99,
    ):
        yield Case("gRPC" if headers in said else "HTTP/2", (preface + b"".join(said),))
        yield Case("gRPC" if headers in said else "HTTP/2", (preface, *said))


def _others() -> Iterator[Case]:
    startup = b"\0\3\0\0user\0postgres\0database\0postgres\0application_name\0psql\0\0"
    mongo = b"\1\0\0\0\0\0\0\0\xd4\7\0\0\0\0\0\0admin.$cmd\0\0\0\0\0\xff\xff\xff\xff"
    said: dict[str, list[bytes]] = {
        "SSH": [b"SSH-2.0-OpenSSH_10.0\r\n", b"\0\0\5\xdc\6\x14" + bytes(range(250)) * 6],
        "Redis": [b"*1\r\n$4\r\nPING\r\n", b"*2\r\n$4\r\nECHO\r\n$300\r\n" + b"a" * 300 + b"\r\n"],
        "Redis inline": [b"PING\r\n", b"INFO\r\n" * 100],
        "Postgres": [b"\0\0\0\x08\x04\xd2\x16\x2f", struct.pack(">I", len(startup) + 4) + startup],
        "SMTP": [b"EHLO mail.example\r\n", b"MAIL FROM:<a@b.example>\r\nRCPT TO:<c@d>\r\nDATA\r\n"],
        "NATS": [b'CONNECT {"verbose":false,"pedantic":false,"lang":"go"}\r\nPING\r\n'] * 9,
        "MongoDB": [struct.pack("<I", len(mongo) + 4) + mongo],
        "Kafka": [struct.pack(">Ihhih", 18, 18, 3, 1, 8) + b"producer"],
        "AMQP": [b"AMQP\0\0\x09\1"],
        "MQTT": [b"\x10\x10\0\4MQTT\4\2\0<\0\4test"],
        "MySQL": [b"\x20\0\0\1\x85\xa6\xff\1\0\0\0\1\x21" + bytes(23)],
        "LDAP": [bytes.fromhex("300c020101600702010304008000")],
        "RDP": [bytes.fromhex("030000130ee000000000000100080003000000")],
        "SOCKS": [b"\5\1\0", b"\5\1\0\1\x7f\0\0\1\x15\xb3"],
        "SIP": [b"OPTIONS sip:nm SIP/2.0\r\nVia: SIP/2.0/TCP nm;branch=foo\r\n\r\n"],
        "TCP store": [b"\0\0\0\1\0\0\0\0\0\0\0\x0bworker_0000"],
        "proxy": [b"PROXY TCP4 10.0.0.1 10.0.0.2 56324 5555\r\n", hello()[:30]],
        "proxy 2": [b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12)],
        "nothing": [b""],
        "JSON": [json.dumps({"jsonrpc": "2.0", "method": "x" * 300}).encode() + b"\n"],
        "zeros": [bytes(5000)],
        "ones": [b"\xff" * 5000],
    }
    for kind, steps in said.items():
        yield Case(kind, tuple(steps))
        yield Case(kind, (b"".join(steps),))


FAMILIES: tuple[Callable[[], Iterator[Case]], ...] = (
    _first_bytes,
    _greetings,
    _old,
    _commands,
    _keyed,
    _frames,
    _tls,
    _http,
    _posts,
    _http_2,
    _others,
)


@functools.cache
def plain(seed: int) -> tuple[Case, ...]:
    """Return every case that is not a mutation: one of each kind, then a second one of each, ..."""
    kinds: dict[str, list[Case]] = {}
    for family in FAMILIES:
        for each in family():
            kinds.setdefault(each.kind, []).append(each)
    rng = random.Random(seed)
    for cases in kinds.values():
        rng.shuffle(cases)
    turns = itertools.zip_longest(*kinds.values())
    return tuple(case for turn in turns for case in turn if case is not None)


def case(seed: int, number: int) -> Case:
    """Return a case: all plain ones come first."""
    known = plain(seed)
    if number < len(known):
        return known[number]
    return _mutated(known, random.Random(f"{seed}/{number}"))


def _mutated(known: tuple[Case, ...], rng: random.Random) -> Case:
    kind, steps, joins = rng.choice(known)
    other = rng.choice(known)
    said = list(steps)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(said))
        said[at] = _changed(said[at][:STEPS_KEPT], rng) + said[at][STEPS_KEPT:]
    if not (joins or other.joins) and rng.random() < 0.3:
        kind += f" and {other.kind}"
        said = said[: rng.randint(1, len(said))] + list(
            other.steps[rng.randrange(len(other.steps)) :]
        )
    return Case(kind, tuple(said), joins)


def _changed(step: bytes, rng: random.Random) -> bytes:
    """Flip a bit, cut a piece out, double a piece, or put one in."""
    changed = bytearray(step)
    at, end = sorted(rng.choices(range(len(step) + 1), k=2))
    match rng.randrange(4):
        case 0 if at < len(step):
            changed[at] ^= 1 << rng.randrange(8)
        case 1:
            del changed[at:end]
        case 2:
            changed[at:at] = step[at : min(end, at + STEPS_KEPT // 8)] * rng.randint(
                1, REPEATS_MAX // 8
            )
        case _:
            changed[at:at] = rng.randbytes(rng.randint(1, 64))
    return bytes(changed)
