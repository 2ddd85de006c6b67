"""The cases of `publisher_sequences.json`: what a publisher sends after one event and another.

Each case has one publisher of epoch 7 and the model `m`, of one tensor `w` of bytes.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any

from weightbus.tests.vectors import parts
from weightbus.tests.vectors.layout_cases import info
from weightbus.tests.vectors.levels import highest
from weightbus.tests.vectors.parts import Json, digest, padded, spans

EPOCH, CHUNK_BYTES, NBYTES = 7, 16, 40
DAY_MS = 86_400_000
START_MS = 20 * 366 * DAY_MS  # of the publisher, by its wall clock
AGE_MS = 10_000  # of the publisher, when the first event comes
LEAP_MS = 366 * DAY_MS  # `EPOCH_LEAP_MAX_MS`
WINDOW = 64  # `PUSH_CHUNKS`
FIRST, SECOND = "0" * 32, "1" * 32  # instances of one worker
WRONG = "f" * 64
DELTA = "delta-1"

crc32c = cache(parts.crc32c)


@dataclass(frozen=True)
class Data:
    """The bytes of a version."""

    version: int
    nbytes: int = NBYTES
    chunk_bytes: int = CHUNK_BYTES
    epoch: int = EPOCH
    model: str = "m"

    @property
    def content(self) -> bytes:
        """What the generator and each player compute from number and size."""
        return bytes((self.version * 16 + index) % 256 for index in range(self.nbytes))

    @property
    def layout(self) -> bytes:
        """The layout, with its length."""
        return padded({"w": info("U8", [self.nbytes], 0, self.nbytes)})

    @property
    def count(self) -> int:
        """The number of chunks."""
        return len(spans(self.nbytes, self.chunk_bytes))

    @property
    def digest(self) -> str:
        """The digest of layout and chunks."""
        crcs = [crc32c(self.content[a:b]) for a, b in spans(self.nbytes, self.chunk_bytes)]
        return digest(hashlib.sha256(self.layout).hexdigest(), self.chunk_bytes, crcs)

    @property
    def named(self) -> Json:
        """The fields of messages that name the version."""
        return {"model": self.model, "epoch": self.epoch, "version": self.version}

    # What a publisher sends.

    def announce(self, to: str = "m/ctl", layout: bool = False, **fields: Any) -> Json:
        """An announcement, with or without the layout."""
        size: Json = {"nbytes": self.nbytes, "chunk_bytes": self.chunk_bytes, "encoding": "raw"}
        name = {"layout": hashlib.sha256(self.layout).hexdigest()}
        known = {**self.named, **name, "layout_bytes": len(self.layout), **size}
        modes: Json = {"commit": "auto", "acknowledge": "applied", "whole": None}
        payload = {"payload": len(self.layout) if layout else 0}
        return {"to": to, "type": "announce", **known, **modes, **payload, **fields}

    def chunks(self, to: str = "m/dat", first: int = 0, count: int | None = None) -> Json:
        """Chunks in a row, which count as one message."""
        count = self.count - first if count is None else count
        begin, end = first * self.chunk_bytes, (first + count) * self.chunk_bytes
        part = self.content[begin:end]
        some = {"first": first, "count": count, "crc": crc32c(part), "payload": len(part)}
        return {"to": to, "type": "chunk", **self.named, "patch": None, **some}

    def end(self, to: str = "m/ctl", **fields: Any) -> Json:
        """The end of all chunks."""
        return {"to": to, "type": "end", **self.named, "digest": self.digest, **fields}

    def commit(self, to: str) -> Json:
        """A commit."""
        return {"to": to, "type": "commit", **self.named, "digest": self.digest}

    def abort(self, to: str) -> Json:
        """An abort."""
        return {"to": to, "type": "abort", **self.named}

    # What a worker sends.

    def fetch(self, first: int = 0, count: int = 0, **fields: Any) -> Json:
        """A request."""
        return {"type": "fetch", **self.named, "first": first, "count": count, **fields}

    def staged(self, **fields: Any) -> Json:
        """A report that the version is staged."""
        return {"type": "staged", **self.named, "digest": self.digest, **fields}

    def applied(self, **fields: Any) -> Json:
        """A report that the version runs."""
        return {"type": "applied", **self.named, "digest": self.digest, **fields}

    def failed(self, **fields: Any) -> Json:
        """A report that the version does not run."""
        return {"type": "failed", **self.named, "code": "apply", "text": "no", **fields}

    def progress(self, chunks: int, **fields: Any) -> Json:
        """A report of chunks."""
        return {
            "type": "progress",
            **self.named,
            "chunks": chunks,
            "phase": "receiving",
            **fields,
        }

    def runs(self, **fields: Any) -> Json:
        """The entry of `models` in a `hello`."""
        return {"epoch": self.epoch, "version": self.version, "digest": self.digest, **fields}


ONE, TWO, THREE, FOUR = map(Data, (1, 2, 3, 4))


def hello(name: str = "w", instance: str = FIRST, **fields: Any) -> Json:
    """What a worker of the model `m` sends first."""
    return {"type": "hello", "name": name, "instance": instance, "models": {"m": None}, **fields}


def ping(token: int = 1, **fields: Any) -> Json:
    """A ping of a worker."""
    return {"type": "ping", "token": token, **fields}


def to(who: str, kind: str, **fields: Any) -> Json:
    """A message of the publisher to a connection or on a topic."""
    return {"to": who, "type": kind, **fields}


def refuse(who: str, code: str, **fields: Any) -> Json:
    """A refusal."""
    return to(who, "refuse", code=code, **fields)


def welcome(who: str, models: dict[str, int] | None = None, **fields: Any) -> Json:
    """A welcome."""
    known = {"epoch": EPOCH, "ping_ms": 1000, "lost_ms": 5000, "models": models or {}}
    return to(who, "welcome", **{**known, **fields})


def pong(who: str, token: int = 1, **models: int) -> Json:
    """The answer to a ping."""
    return to(who, "pong", token=token, epoch=EPOCH, models=models)


def asked(who: str) -> Json:
    """The ping by which the publisher asks an instance for a sign of life."""
    return to(who, "ping")


def gone(who: str, data: Data, **fields: Any) -> Json:
    """The refusal of a fetch."""
    return refuse(who, "gone", **{**data.named, **fields})


def done(
    achieved: bool = True,
    *,
    through: dict[str, list[str]] | None = None,
    patched: dict[str, int] | None = None,
    **workers: str,
) -> Json:
    """How a call ends: the state of each target, and more of those behind relays.

    `through` has the relays before them, and `patched` the bytes of the patches that they got.
    """
    known: Json = {"achieved": achieved, "workers": workers}
    known |= {"through": through} if through else {}
    return known | ({"patched": patched} if patched else {})


@dataclass
class Case:
    """One sequence under construction. The messages that must come out are the arguments."""

    name: str
    rules: str  # of the protocol, that it is about
    options: Json = field(default_factory=dict[str, Any])
    steps: list[Json] = field(default_factory=list[Json])

    def step(self, event: Json, sends: tuple[Json, ...] | None, expect: Json) -> "Case":
        """An event, and what must come of it."""
        if sends is not None:
            expect = {"sends": list(sends), **expect}
        self.steps.append({**event, "expect": expect})
        return self

    def says(self, who: str, message: Json, *sends: Json, **expect: Any) -> "Case":
        """A message arrives on a connection."""
        more: Json = {key: expect.pop(key) for key in ("key", "times", "payloads") if key in expect}
        message = {"wbp": 1, **message}
        return self.step({"from": who, "message": message, **more}, sends, expect)

    def writes(self, who: str, text: str, *sends: Json, **expect: Any) -> "Case":
        """Bytes arrive that are no message."""
        more: Json = {key: expect.pop(key) for key in ("key", "times") if key in expect}
        return self.step({"from": who, "text": text, **more}, sends, expect)

    def joins(self, who: str = "w", *, subscribed: bool = True, **fields: Any) -> "Case":
        """A worker joins on the connection of its name, and pings; the answers are free."""
        self.step({"from": who, "message": {"wbp": 1, **hello(who, **fields)}}, None, FREE)
        answer = {"wbp": 1, **ping(subscribed=subscribed)}
        return self.step({"from": who, "message": answer}, None, FREE)

    def reports(self, token: str, message: Json, *sends: Json, **expect: Any) -> "Case":
        """A message arrives on a data connection, after a token."""
        return self.step({"token": token, "message": {"wbp": 1, **message}}, sends, expect)

    def publish(self, data: Data, *sends: Json, **rest: Any) -> "Case":
        """The user publishes a version."""
        known = ("sends", "ends", "tells", "status", "fails")
        expect = {key: rest.pop(key) for key in known if key in rest}
        if rest.pop("free", False):
            expect |= FREE
        size: Json = {"nbytes": data.nbytes, "chunk_bytes": data.chunk_bytes, "seed": data.version}
        call = {"model": data.model, **size, **rest}
        return self.step({"publish": call}, None if "sends" in expect else sends, expect)

    def published(self, data: Data, **rest: Any) -> "Case":
        """The user publishes a version, of which all that comes out is free."""
        return self.publish(data, free=True, **rest)

    def closed(self, who: str, *sends: Json, **expect: Any) -> "Case":
        """A connection is closed."""
        return self.step({"closed": who}, sends, expect)

    def wait(self, ms: int, *sends: Json, **expect: Any) -> "Case":
        """Time passes."""
        return self.step({"wait_ms": ms}, sends, expect)

    def does(self, event: Json, *sends: Json, **expect: Any) -> "Case":
        """Another event."""
        return self.step(event, sends, expect)


FREE: Json = {"sends": None, "ends": None}


def sequence_cases() -> Iterator[Json]:
    """Yield all sequences."""
    parts = (
        *(_joining(), _names(), _epochs(), _sessions(), _announcing(), _pushing(), _fetching()),
        *(
            _keeping(),
            _deciding(),
            _announcing_again(),
            _reporting(),
            _stuck(),
            _receipts(),
            _lost(),
            _patches(),
            _extras(),
            _limits(),
        ),
        *(_observing(), _verifying(), _keys()),
    )
    for case in chain.from_iterable(parts):
        rules = case.rules.split()
        head = {"name": case.name, "level": highest(rules), "rules": rules}
        yield {**head, **case.options, "steps": case.steps}


def _joining() -> Iterator[Case]:
    case = Case("a worker joins", "P1 P3 P17")
    case.says("w", hello(), welcome("w", age_ms=AGE_MS, data="tcp://*:9"), tells=["joined w"])
    case.wait(2000).says("w", ping(5), pong("w", 5))
    case.says("w", ping(6), pong("w", 6), status={"w": {"state": "live", "running": {}}})
    yield case.says("v", hello("v"), welcome("v", age_ms=AGE_MS + 2000))
    case = Case("the user chose the epoch", "P1 P3", {"chosen": True})
    case.says("w", hello(), welcome("w", age_ms=0))
    yield case.says("v", hello("v", epoch=8, age_ms=10**9), refuse("v", "stale-epoch"))
    case = Case("a message before hello", "P4")
    for message in (ping(), ONE.fetch(), ONE.progress(1), ONE.staged(), ONE.applied()):
        case.says("w", message, refuse("w", "unknown-worker"))
    case.says("w", ONE.failed(), refuse("w", "unknown-worker")).says("w", {"type": "bye"})
    yield case.says("w", {"type": "pong"}, refuse("w", "unknown-worker"), status={"w": None})
    case = Case("messages that break the protocol", "P4 P5")
    for who in ("x", "w"):
        case.says(who, {**ping(), "wbp": 2}, refuse(who, "protocol-version"))
        case.writes(who, "{", refuse(who, "malformed"))
        case.says(who, {"type": "fetch", "model": "m"}, refuse(who, "malformed"))
        case.says(who, {"type": "other"}, refuse(who, "malformed"))
        case.says(who, ping(), refuse(who, "malformed"), payloads=1)
        if who == "x":
            case.joins("w")
    yield case.says("w", ping(), pong("w"))
    case = Case("a hello that contradicts itself", "P3")
    case.says("w", hello(models={"m": Data(1, epoch=6).runs()}, epoch=5), refuse("w", "malformed"))
    case.says("w", hello(models={"m": ONE.runs()}, epoch=6), refuse("w", "malformed"))
    case.says("w", hello(models={"m": ONE.runs()}, epoch=7), refuse("w", "stale-epoch"))
    case.published(ONE).says("w", hello(models={"m": TWO.runs()}, epoch=7), STALE, status=NO_W)
    for message in (
        hello(models={"n": ONE.runs(digest="")}, epoch=7, age_ms=10**9),
        hello(models={"m": TWO.runs()}, epoch=50, age_ms=10**9),
    ):
        case.says("w", message, STALE, status=NO_W)
    case.says(
        "w", hello(models={"m": Data(1, epoch=50).runs()}, epoch=49), refuse("w", "malformed")
    )
    case.says("w", hello(models={"m": Data(9, epoch=6).runs()}, epoch=6), welcome("w", {"m": 1}))
    case.says("v", hello("v", models={"m": ONE.runs()}, epoch=7), welcome("v", {"m": 1}))
    at = {"w": running(6, 9), "v": running(7, 1)}
    yield case.does({"stop": True}, status=at)
    case = Case("digests of a hello", "P12")
    case.published(ONE).says("w", hello(models={"m": ONE.runs()}, epoch=7), welcome("w", {"m": 1}))
    for other in (WRONG, ""):
        more = hello(models={"m": ONE.runs(digest=other)}, epoch=7)
        case.says("w", more, welcome("w", {"m": 1}), status={"w": running(0, 0)}, tells=[])
    yield case
    case = Case("a hello names the version of an open call", "P12 P15")
    case.joins().published(ONE)
    more = hello(models={"m": ONE.runs()}, epoch=7)
    yield case.says("w", more, welcome("w", {"m": 1}), ends=[done(w="applied")])
    case = Case("the roster is full", "P3")
    many = {f"m{n}": None for n in range(64)}
    case.says("%", hello("w%", models=many), times=624, **FREE)
    case.says("x", hello("x", models={f"m{n}": None for n in range(63)}), welcome("x"))
    case.says("y", hello("y", models={"a": None, "b": None}), refuse("y", "limit"))
    case.says("x", hello("x", models=many), welcome("x"))
    case.says("y", hello("y"), refuse("y", "limit"))
    more = {**many, "m": None}
    case.says("x", hello("x", models=more), refuse("x", "malformed"))
    yield case.says("0", {"type": "bye"}).says("y", hello("y"), welcome("y"))


STALE, NO_W = refuse("w", "stale-epoch"), {"w": None}


def running(epoch: int, version: int, **fields: Any) -> Json:
    """The status of a worker that runs a version."""
    return {"running": {"m": [epoch, version]} if version else {}, **fields}


def _names() -> Iterator[Case]:
    other = hello(instance=SECOND)
    case = Case("a worker connects again", "P3 P4")
    case.joins().says("2", hello(), welcome("2"), tells=[])
    case.says("w", ping(), refuse("w", "unknown-worker")).says("2", ping(), pong("2"))
    yield case.says("w", {"type": "bye"}).says("2", ping(), pong("2"))
    case = Case("a second instance while the first answers", "P3")
    case.joins().says("2", other, asked("w")).says("2", other, asked("w"))
    case.wait(100).says("w", {"type": "pong"}, status={"w": {"state": "live"}})
    yield case.says("2", other, refuse("2", "name-taken"), tells=["refused w"])
    case = Case("an answer counts for as long as a session", "P3")
    case.joins().says("2", other, asked("w")).wait(100).says("w", ping(), pong("w"))
    case.says("2", other, refuse("2", "name-taken")).wait(4000).says("w", ping(), pong("w"))
    case.says("2", other, refuse("2", "name-taken")).wait(1000)
    case.says("2", other, asked("w")).wait(100).says("w", ping(), pong("w"))
    yield case.says("2", other, refuse("2", "name-taken"))
    case = Case("a second instance after the first is silent", "P3 P18")
    case.joins().wait(100).says("2", other, asked("w")).wait(4800)
    case.says("2", other, asked("w")).wait(200, tells=["lost w"])
    case.says("2", other, welcome("2"), tells=["joined w"])
    yield case.says("w", ping(), refuse("w", "unknown-worker"))
    case = Case("the connection of an instance that was asked is closed", "P3 P18")
    case.joins().says("2", other, asked("w")).closed("w", tells=["lost w"])
    yield case.says("2", other, welcome("2")).says("w", ping(), refuse("w", "unknown-worker"))
    case = Case("a second instance while the first is away", "P3 P18")
    case.joins().closed("w", status={"w": {"state": "live"}})
    yield case.says("2", other, welcome("2"), tells=["lost w", "joined w"])
    case = Case("a welcome ends what was asked", "P3")
    case.joins().says("2", other, asked("w")).says("3", hello(), welcome("3"))
    yield case.closed("3", status={"w": {"state": "live"}})
    case = Case("a connection takes another name", "P3 P18")
    case.joins().published(ONE)
    ends = [done(w="left")]
    case.says("w", hello("v"), welcome("w", {"m": 1}), tells=["left w", "joined v"], ends=ends)
    yield case.says("w", ping(), pong("w", m=1), status=NO_W)


def _epochs() -> Iterator[Case]:
    later = hello("v", epoch=900, age_ms=90_000)
    new = 900 + 90_000 - 10_010
    case = Case("a later epoch", "P1 P3 P12 P14")
    case.joins().published(ONE).says("w", ONE.progress(1))
    case.says("x", hello("x", epoch=900, age_ms=5_000), refuse("x", "stale-epoch"))
    case.says("x", hello("x", epoch=900, age_ms=10_010), refuse("x", "stale-epoch"))
    case.says("v", later, to("w", "pong", epoch=new), welcome("v", {"m": 1}, epoch=new))
    moved = Data(1, epoch=new)
    case.says("w", ONE.applied(), status={"w": running(7, 1, state="live")})
    case.says("w", ONE.fetch(0, 1), gone("w", ONE), moved.announce("w"), moved.end("w"))
    case.says("w", moved.fetch(0, 2), moved.chunks("w", 0, 2))
    case.says("w", moved.applied(), status={"w": running(new, 1)}, ends=[done(w="applied")])
    case.says("v", moved.applied(digest=""), status={"v": running(new, 1)})
    two = Data(2, epoch=new)
    yield case.publish(two, two.announce(), two.announce("w"), two.announce("v"))
    case = Case("an undecided version and a later epoch", "P3 P10")
    case.joins().published(ONE).published(TWO, commit="together", wait="staged")
    abort, ends = TWO.abort("w"), [done(False, w="behind")]
    answers = abort, to("w", "pong", epoch=new), welcome("v", {"m": 1}, epoch=new)
    case.says("v", later, *answers, ends=ends)
    two, latest = Data(2, epoch=new), Data(1, epoch=new)
    yield case.says("w", two.fetch(), gone("w", two), latest.announce("w"), latest.end("w"))
    case = Case("pauses between later epochs", "P3")
    epoch, pause, age = EPOCH, 0, AGE_MS
    for _ in range(5):
        later = hello("v", epoch=epoch + 1, age_ms=10**6)
        for n in range(pause):
            case.says("v", later, *([refuse("v", "stale-epoch")] if n else []))
            case.wait(5000, tells=None)
            age += 5000
        epoch += 1 + 10**6 - -(-1001 * age // 1000)
        case.says("v", later, sends=None, ends=None).says(
            "x", hello("x"), welcome("x", epoch=epoch)
        )
        case.says("x", {"type": "bye"})
        pause = 2 * pause or 1
    yield case.does({"stop": True})
    case = Case("a later epoch is bounded by the clock", "P3")
    last = START_MS + LEAP_MS
    case.says("v", hello("v", epoch=last, age_ms=2**50), refuse("v", "stale-epoch"))
    case.says("v", hello("v", epoch=last + 1, age_ms=2**50), refuse("v", "stale-epoch"))
    case.says("v", hello("v", epoch=last - 1, age_ms=2**50), welcome("v", epoch=last))
    yield case
    case = Case("a later epoch is never after 2248", "P3", {"start_ms": 2**44})
    case.says("v", hello("v", epoch=2**43, age_ms=2**50), refuse("v", "stale-epoch"))
    yield case.says("v", hello("v", epoch=600, age_ms=2**50), welcome("v", epoch=2**43))


def _sessions() -> Iterator[Case]:
    case = Case("a pong names the newest versions", "P8 P10 P16 P17")
    more = {"m": None, "n": None}
    case.joins(models=more).published(ONE).says("w", ping(), pong("w", m=1))
    n = Data(1, model="n")
    case.published(n, workers=["w"]).says("w", ping(2), pong("w", 2, m=1, n=1))
    case.joins("v", models=more).says("v", ping(), pong("v", m=1))
    case.published(TWO, workers=["w"]).says("w", ping(), pong("w", m=2, n=1))
    case.says("v", ping(), pong("v", m=1))
    case.published(THREE, commit="together", wait="staged").says("w", ping(), pong("w", m=2, n=1))
    case.does({"subscribes": "m/ctl"}, to("m/ctl", "beacon", model="m", epoch=7, version=1))
    case.does({"subscribes": "n/ctl"}, to("n/ctl", "beacon", model="n", epoch=7, version=0))
    case.does({"subscribes": "o/ctl"}, to("o/ctl", "beacon", model="o", epoch=7, version=0))
    case.does({"subscribes": "m/dat"}).does({"subscribes": "other"})
    yield case.wait(1100, sends=None, beacons=["m 7 1"])
    case = Case("beacons", "P10 P16")
    case.wait(2000, beacons=[]).published(ONE).wait(1100, sends=None, beacons=["m 7 1"])
    case.published(TWO).wait(1100, sends=None, beacons=["m 7 2"])
    case.joins().published(THREE, commit="together", wait="staged")
    case.wait(1100, sends=None, beacons=["m 7 2"]).says("w", THREE.staged(), sends=None, ends=None)
    yield case.wait(1100, sends=None, beacons=["m 7 3"])
    case = Case("a worker says bye", "P4 P18")
    case.joins().joins("v").published(ONE).says("w", {"type": "bye"}, tells=["left w"], status=NO_W)
    case.says("w", ping(), refuse("w", "unknown-worker"))
    case.says("v", ONE.applied(), ends=[done(w="left", v="applied")])
    yield case.published(TWO, workers=["w"]).published(THREE, workers=["x"], fails=True)
    case = Case("the last worker says bye", "P15 P18")
    case.joins().published(ONE).says("w", {"type": "bye"}, ends=[done(w="left")])
    yield case
    case = Case("a worker that left joins again", "P18")
    case.joins().joins("v").published(ONE).says("w", {"type": "bye"})
    case.says("w", hello(), welcome("w", {"m": 1})).says("v", ONE.applied())
    yield case.says("w", ONE.applied(), ends=[done(w="applied", v="applied")])
    case = Case("a publisher is stopped", "P10 P20")
    case.joins().joins("v").published(ONE).says("w", ONE.applied())
    case.published(TWO, commit="together", wait="staged")
    case.says("w", TWO.staged())
    ends = [done(False, w="applied", v="behind"), done(False, w="staged", v="behind")]
    yield case.does({"stop": True}, TWO.abort("w"), TWO.abort("v"), ends=ends)
    case = Case("a misspelt model", "P25")
    case.joins(models={"polcy": None}).published(Data(1, model="policy"))
    case.joins("v", models={"polcy": None, "policy": None}).joins("x", models={"other": None})
    case.wait(2000, sends=None).says("w", ping(), sends=None)
    case.wait(2000, refuse("w", "no-model", model="polcy"))
    yield case.says("w", ping(), sends=None).wait(4000, sends=None)


def _announcing() -> Iterator[Case]:
    case = Case("a version for all", "P6 P7")
    case.joins().joins("v", subscribed=False).joins("x", models={"n": None})
    case.publish(ONE, ONE.announce(layout=True), ONE.announce("v"), ONE.chunks(), ONE.end())
    case.publish(TWO, TWO.announce(), TWO.announce("v"), TWO.chunks(), TWO.end())
    three = Data(3, 50)
    case.publish(
        three, three.announce(layout=True), three.announce("v"), three.chunks(), three.end()
    )
    case.says("w", hello(), welcome("w", {"m": 3}))
    four = Data(4, 50)
    case.publish(four, four.announce(), four.announce("v"), four.announce("w"))
    case.says("v", ping(subscribed=True), pong("v", m=4))
    five = Data(5, 50)
    yield case.publish(five, five.announce(), five.announce("w"), five.chunks(), five.end())
    case = Case("a version for named workers", "P6 P7 P8")
    case.joins().joins("v", subscribed=False).joins("x")
    case.publish(ONE, ONE.announce("w"), ONE.announce("v"), workers=["w", "v"])
    case.says("w", ONE.applied()).says("v", ONE.applied(), ends=[done(w="applied", v="applied")])
    zero = Data(0)
    case.says("x", zero.fetch(), gone("x", zero))
    case.says("x", ONE.fetch(2, 1), ONE.chunks("x", 2, 1))
    case.publish(TWO, TWO.announce(layout=True), TWO.announce("v"), TWO.chunks(), TWO.end())
    yield case.says("w", zero.fetch(), TWO.announce("w"), TWO.end("w"))
    case = Case("what a call waits for", "P6 P15")
    case.joins(subscribed=False).joins("v", subscribed=False)
    mode: Json = {"acknowledge": "staged"}
    case.publish(
        ONE, ONE.announce(layout=True, **mode), ONE.announce("w", **mode), AT_V, wait="staged"
    )
    case.says("w", ONE.staged(), ONE.commit("w"))
    case.says("v", ONE.staged(), ONE.commit("v"), ends=[done(w="staged", v="staged")])
    ends = [done(w="behind", v="behind")]
    case.publish(TWO, TWO.announce(), TWO.announce("w"), TWO.announce("v"), wait="none", ends=ends)
    case.publish(THREE, THREE.announce(), THREE.announce("w"), THREE.announce("v"), require=1)
    case.says("w", THREE.staged(), THREE.commit("w"))
    yield case.says("w", THREE.applied(), ends=[done(w="applied", v="behind")])
    case = Case("a version for nobody", "P6 P15")
    case.publish(ONE, ONE.announce(layout=True), ends=[done()])
    yield case.says("w", hello(), welcome("w", {"m": 1}))


AT_V = ONE.announce("v", acknowledge="staged")


def _pushing() -> Iterator[Case]:
    first, second, large = Data(1, 16), Data(2, 16), Data(1, 100 * CHUNK_BYTES)
    case = Case("a version of one chunk", "P7")
    case.joins().publish(first, first.announce(layout=True), first.chunks(), first.end())
    crc = crc32c(second.content)
    whole = {"crc": crc, "digest": second.digest}
    case.publish(second, second.announce(whole=whole, payload=16))
    case.says("w", second.applied(), ends=[done(w="skipped"), done(w="applied")])
    yield case.says("w", second.fetch(0, 1), second.chunks("w"))
    case = Case("versions that are too large for their announcement", "P7")
    sizes = (2**18, 2**18 + 1)
    case.joins()
    for n, nbytes in enumerate(sizes):
        one, two = (Data(2 * n + v, nbytes, 2**19) for v in (1, 2))
        case.publish(one, one.announce(layout=True), one.chunks(), one.end())
        crc = crc32c(two.content)
        if n:
            case.publish(two, two.announce(), two.chunks(), two.end())
        else:
            whole = {"crc": crc, "digest": two.digest}
            case.publish(two, two.announce(whole=whole, payload=nbytes))
    yield case
    case = Case("a version without bytes", "P7").joins()
    for version in (1, 2):
        empty = Data(version, 0)
        case.publish(empty, empty.announce(layout=version == 1), empty.end())
    yield case
    case = Case("a push follows the fastest worker", "P7 P14")
    case.joins().joins("v").publish(large, large.announce(layout=True), large.chunks(count=WINDOW))
    case.says("w", large.progress(10), large.chunks(first=WINDOW, count=10))
    case.says("v", large.progress(8)).says("v", large.progress(11), large.chunks(first=74, count=1))
    case.says("w", {**large.progress(50), "version": 2})
    case.says("w", large.progress(30, phase="applying"), large.chunks(first=75, count=19))
    yield case.says("w", large.progress(60), large.chunks(first=94), large.end())
    case = Case("a push ends early", "P7")
    case.joins().publish(large, large.announce(layout=True), large.chunks(count=WINDOW))
    case.wait(200).says("w", large.progress(1), large.chunks(first=WINDOW, count=1)).wait(200)
    case.wait(200, large.end()).says("w", large.progress(9))
    yield case.says("w", large.fetch(99, 1), large.chunks("w", 99, 1))
    case = Case("a newer version ends a push", "P7")
    case.joins().publish(large, large.announce(layout=True), large.chunks(count=WINDOW))
    two = Data(2, large.nbytes)
    case.publish(two, two.announce(), two.chunks(count=WINDOW)).says("w", large.progress(40))
    yield case.says("w", two.progress(36), two.chunks(first=WINDOW), two.end())
    case = Case("an abort ends a push", "P7 P10")
    case.joins().publish(
        large, *_together(large), large.chunks(count=WINDOW), commit="together", wait="staged"
    )
    case.says("w", large.failed(), large.abort("w"), ends=[done(False, w="failed")])
    yield case.says("w", large.progress(40)).wait(600, sends=[])
    case = Case("a version for named workers does not end a push", "P7")
    case.joins().publish(large, large.announce(layout=True), large.chunks(count=WINDOW))
    two = Data(2, large.nbytes)
    case.publish(two, two.announce("w"), workers=["w"])
    yield case.says("w", large.progress(36), large.chunks(first=WINDOW), large.end())


def _together(data: Data, *names: str, layout: bool = True) -> list[Json]:
    modes: Json = {"commit": "together", "acknowledge": "staged"}
    return [data.announce(layout=layout, **modes), *(data.announce(n, **modes) for n in names)]


def _fetching() -> Iterator[Case]:
    zero = Data(0)
    case = Case("what a fetch gets", "P8")
    case.joins(subscribed=False).says("w", ONE.fetch(0, 1), gone("w", ONE)).published(ONE)
    case.says("w", ONE.fetch(), ONE.announce("w"), ONE.end("w"))
    case.says("w", ONE.fetch(layout=True), ONE.announce("w", layout=True), ONE.end("w"))
    case.says("w", ONE.fetch(0, 3), ONE.chunks("w")).says(
        "w", ONE.fetch(1, 1), ONE.chunks("w", 1, 1)
    )
    case.says("w", zero.fetch(), ONE.announce("w"), ONE.end("w"))
    case.says("w", zero.fetch(layout=True), ONE.announce("w", layout=True), ONE.end("w"))
    for version, first, count in ((0, 0, 1), (1, 0, 4), (1, 3, 1), (1, 2, 2), (1, 2**19, 1)):
        data = Data(version)
        case.says("w", data.fetch(first, count), refuse("w", "range", **data.named))
    latest = ONE.announce("w"), ONE.end("w")
    case.says("w", TWO.fetch(0, 1), gone("w", TWO), *latest)
    old = Data(1, epoch=6)
    case.says("w", old.fetch(0, 1), gone("w", old), *latest)
    other = Data(1, model="n")
    case.says("w", other.fetch(), gone("w", other))
    later = Data(1, epoch=8)
    yield case.says("w", later.fetch(), gone("w", later), *latest)
    case = Case("the newest version for a worker", "P8")
    case.joins().joins("v").published(ONE).published(TWO, workers=["w"])
    case.says("w", zero.fetch(), TWO.announce("w"), TWO.end("w"))
    case.says("v", zero.fetch(), ONE.announce("v"), ONE.end("v"))
    case.says("v", TWO.fetch(0, 1), TWO.chunks("v", 0, 1))
    case.published(THREE, commit="together", wait="staged")
    modes: Json = {"commit": "together", "acknowledge": "staged"}
    case.says("w", zero.fetch(), TWO.announce("w"), TWO.end("w"))
    case.says("w", THREE.fetch(), THREE.announce("w", **modes), THREE.end("w"))
    case.says("w", THREE.staged()).says("v", THREE.staged(), sends=None, ends=None)
    yield case.says("w", THREE.fetch(), THREE.announce("w"), THREE.end("w"))


def _keeping() -> Iterator[Case]:
    latest = TWO.announce("w"), TWO.end("w")
    case = Case("a version is kept for a worker that receives it", "P9")
    case.joins(subscribed=False).joins("v", subscribed=False).published(ONE)
    case.says("w", ONE.fetch(0, 1), ONE.chunks("w", 0, 1)).says("v", ONE.applied())
    case.published(TWO).says("w", ONE.fetch(1, 2), ONE.chunks("w", 1, 2))
    case.says("w", ONE.applied(), **FREE).says("w", ONE.fetch(0, 1), gone("w", ONE), *latest)
    yield case.says("w", TWO.fetch(0, 1), TWO.chunks("w", 0, 1))
    ways = {
        "stages": [ONE.staged()],
        "applies": [ONE.applied()],
        "fails": [ONE.failed()],
        "fetches a later one of": [TWO.fetch(0, 1)],
        "reports a later one of": [TWO.progress(1)],
        "requests the newest of": [Data(0).fetch()],
        "leaves without": [{"type": "bye"}, hello()],
    }
    for words, messages in ways.items():
        case = Case(f"a worker {words} a version that is kept", "P9")
        case.joins(subscribed=False).published(ONE).says("w", ONE.progress(1)).published(TWO)
        case.says("w", ONE.fetch(0, 1), ONE.chunks("w", 0, 1))
        for message in messages:
            case.says("w", message, **FREE)
        yield case.says("w", ONE.fetch(0, 1), gone("w", ONE), *latest)
    case = Case("a lost worker receives no version", "P9 P18")
    case.joins(subscribed=False).published(ONE, timeout_ms=1000).says("w", ONE.progress(1))
    case.published(TWO, timeout_ms=1000).wait(5500, **FREE).says("w", ping(), pong("w", m=2))
    yield case.says("w", ONE.fetch(0, 1), gone("w", ONE), *latest)
    for words, begun in (("never", False), ("once", True)):
        case = Case(f"a silent worker that {words} fetched a version", "P9").joins(subscribed=False)
        case.published(ONE)
        if begun:
            case.says("w", ONE.fetch(0, 1), ONE.chunks("w", 0, 1))
        case.wait(400, **FREE).published(TWO)
        answer = [ONE.chunks("w", 1, 1)] if begun else [gone("w", ONE), *latest]
        yield case.says("w", ONE.fetch(1, 1), *answer)
    case = Case("a worker that receives a version moves on to the newest", "P9")
    case.joins(subscribed=False).published(ONE).says("w", ONE.fetch(0, 1), ONE.chunks("w", 0, 1))
    case.published(TWO).published(THREE).says("w", ONE.fetch(1, 1), ONE.chunks("w", 1, 1))
    yield case.says("w", Data(0).fetch(), THREE.announce("w"), THREE.end("w"))
    case = Case("a version for a worker is kept until a newer one", "P9")
    case.joins(subscribed=False).joins("v", subscribed=False)
    case.published(ONE).published(TWO, workers=["w"]).says("w", TWO.applied(), **FREE)
    case.says("v", TWO.fetch(0, 1), TWO.chunks("v", 0, 1)).says("v", ONE.applied(), **FREE)
    case.published(THREE).says("v", TWO.applied(), **FREE)
    latest = THREE.announce("v"), THREE.end("v")
    yield case.says("v", TWO.fetch(0, 1), gone("v", TWO), *latest)


def _deciding() -> Iterator[Case]:
    together: Json = {"commit": "together", "wait": "staged"}
    both = _together(ONE, "w", "v")

    def begun(name: str, rules: str = "P10", **fields: Any) -> Case:
        case = Case(name, rules).joins(subscribed=False).joins("v", subscribed=False)
        return case.publish(ONE, *both, **{**together, **fields})

    case = begun("all have staged a version", "P10 P11")
    case.says("w", ONE.staged(), ends=[]).says("w", ONE.staged())
    commits = ONE.commit("w"), ONE.commit("v")
    ends = [done(w="staged", v="staged")]
    case.says("v", ONE.staged(), *commits, ONE.commit("v"), ends=ends)
    yield case.says("w", ONE.staged(), ONE.commit("w")).says("w", ping(), pong("w", m=1))
    case = begun("enough have staged a version", "P10 P11", require=1)
    case.says(
        "w", ONE.staged(), ONE.commit("w"), ONE.commit("w"), ends=[done(w="staged", v="behind")]
    )
    yield case.says("v", ONE.staged(), ONE.commit("v"))
    case = begun("a worker fails an undecided version", "P10 P13")
    case.says("w", ONE.staged()).says("v", {"type": "bye"}, ONE.commit("w"), **LEFT)
    yield case.says("w", ONE.applied())
    case = begun("too few can stage a version", "P10 P11 P13", require=2)
    case.says("w", ONE.staged())
    ends = [done(False, w="staged", v="failed")]
    case.says("v", ONE.failed(), ONE.abort("w"), ONE.abort("v"), ends=ends)
    case.says("w", ONE.staged(), ONE.abort("w")).says("w", ONE.fetch(), gone("w", ONE))
    yield case.says("w", ping(), pong("w")).published(TWO).says("w", ping(), pong("w", m=2))
    case = begun("a failed worker stages before the decision", "P10 P13", require=1)
    case.says("w", ONE.failed()).says(
        "w", ONE.staged(), ONE.commit("w"), ONE.commit("w"), **STAGED_W
    )
    yield case
    case = begun("a deadline before the decision", "P10", timeout_ms=1000)
    case.says("w", ONE.staged()).wait(900)
    ends = [done(False, w="staged", v="behind")]
    yield case.wait(200, ONE.abort("w"), ONE.abort("v"), ends=ends)
    case = begun("a newer version before the decision", "P10")
    case.says("w", ONE.staged())
    sends = ONE.abort("w"), ONE.abort("v"), TWO.announce("w")
    case.publish(TWO, *sends, workers=["w"], ends=[done(False, w="staged", v="behind")])
    yield case.says("v", ONE.staged(), ONE.abort("v"))
    case = begun("a worker is lost before the decision", "P10 P18", grace_ms=0)
    case.says("w", ONE.staged()).wait(4000).says("w", ping(), pong("w"))
    ends = [done(False, w="staged", v="lost")]
    yield case.wait(1100, ONE.abort("w"), ends=ends)
    case = begun("a lost worker returns before the decision", "P10 P18", grace_ms=3000)
    case.says("w", ONE.staged()).wait(4000).says("w", ping(), pong("w")).wait(1100)
    announced = ONE.announce("v", commit="together", acknowledge="staged")
    case.says("v", ping(), announced, ONE.end("v"), pong("v"), tells=["back v"])
    yield case.says("v", ONE.staged(), *commits, ONE.commit("v"), ends=None)
    case = Case("a worker joins before the decision", "P10 P18").joins(subscribed=False)
    case.publish(ONE, *_together(ONE, "w"), **together, expect=2)
    case.says("w", ONE.staged())
    case.says("v", hello("v"), welcome("v"), announced, ONE.end("v"))
    yield case.says("v", ONE.staged(), *commits, ONE.commit("v"), ends=None)
    case = Case("an applied version counts as staged", "P10 P12").joins(subscribed=False)
    case.publish(ONE, *_together(ONE, "w"), **together)
    yield case.says("w", ONE.applied(), ends=[done(w="applied")])
    case = Case("a version for named workers together", "P6 P8 P10").joins().joins("v")
    case.publish(ONE, *_together(ONE, "w")[1:], workers=["w"], **together)
    case.says("v", ping(), pong("v"))
    case.says("w", ONE.staged(), ONE.commit("w"), ONE.commit("w"), ends=[done(w="staged")])
    yield case.says("v", ping(), pong("v")).says("w", ping(), pong("w", m=1))
    case = Case("a decision for workers that apply", "P10 P12").joins().joins("v")
    case.publish(ONE, *_together(ONE), ONE.chunks(), ONE.end(), commit="together")
    case.says("w", ONE.staged()).says("v", ONE.staged(), *commits, ONE.commit("v"))
    yield case.says("w", ONE.applied()).says(
        "v", ONE.applied(), ends=[done(w="applied", v="applied")]
    )


def _announcing_again() -> Iterator[Case]:
    together: Json = {"commit": "together", "wait": "staged"}
    again = ONE.announce("v", commit="together", acknowledge="staged"), ONE.end("v")
    case = Case("an undecided version is announced again", "P10 P17")
    case.joins(subscribed=False).joins("v", subscribed=False)
    case.publish(ONE, *_together(ONE, "w", "v"), **together, require=1)
    case.says("w", ONE.progress(0)).wait(900, sends=None)
    case.says("v", ping(), pong("v")).wait(200, sends=None)
    case.says("w", ping(), pong("w")).says("v", ping(), pong("v"), *again)
    case.wait(900, sends=None).says("v", ping(), pong("v")).wait(200, sends=None)
    case.says("v", ping(), pong("v"), *again).says("v", ONE.failed()).wait(1100, sends=None)
    case.says("v", ping(), pong("v"))
    yield case.says("w", ONE.staged(), ONE.commit("w"), ONE.commit("w"), ends=None)
    case = Case("an undecided version for another worker is not announced again", "P6 P10 P17")
    case.joins(subscribed=False).joins("v", subscribed=False)
    case.publish(ONE, *_together(ONE, "w")[1:], workers=["w"], **together)
    yield case.wait(1100, sends=None).says("v", ping(), pong("v"))


LEFT = {"ends": [done(w="staged", v="left")]}
STAGED_W = {"ends": [done(w="staged", v="behind")]}


def _reporting() -> Iterator[Case]:
    case = Case("digests of reports", "P11 P12 P15")
    case.joins().published(ONE).says("w", ONE.staged(digest=WRONG), tells=["wrong-digest w"])
    case.says("w", ONE.staged(digest=WRONG), tells=[]).says(
        "w", ONE.applied(digest=WRONG), tells=[]
    )
    case.says("w", ONE.applied(digest=""), status={"w": running(0, 0)})
    case.says("w", TWO.applied(), tells=["wrong-digest w"], status={"w": running(0, 0)})
    case.says(
        "w", Data(1, epoch=8).applied(), tells=["wrong-digest w"], status={"w": running(0, 0)}
    )
    case.says("w", Data(1, epoch=8).staged()).says("w", Data(1, model="n").staged())
    case.says("w", TWO.staged(), TWO.abort("w"))
    case.says("w", ONE.applied(), ends=[done(w="applied")], status={"w": running(7, 1)})
    yield case.says("w", Data(1, model="n").applied(), tells=[], status={"w": running(7, 1)})
    case = Case("a report without a digest, of a version that is gone", "P8 P9 P12")
    case.joins().joins("v").published(ONE).published(TWO)
    case.says("w", TWO.progress(1)).says("v", TWO.progress(1))
    case.says("v", ONE.fetch(0, 1), gone("v", ONE), TWO.announce("v"), TWO.end("v"))
    case.says("v", ONE.applied(digest=WRONG), tells=["wrong-digest v"])
    case.says("w", ONE.applied(digest=""), tells=[], status={"w": running(7, 1)})
    case.says("w", TWO.applied(digest=""), tells=["wrong-digest w"], status={"w": running(7, 1)})
    case.says("v", ONE.applied(digest=""), ends=[done(w="applied", v="applied")])
    yield case.says("v", THREE.applied(digest=""), tells=["wrong-digest v"])
    case = Case("a version of an earlier epoch runs", "P12")
    case.joins().says("w", Data(9, epoch=6).applied(digest=WRONG), status={"w": running(6, 9)})
    case.says("w", Data(8, epoch=6).applied(), status={"w": running(6, 9)}, tells=[])
    case.published(ONE).says("w", ONE.applied(), status={"w": running(7, 1)}, ends=None)
    yield case.says("w", Data(10, epoch=6).applied(), status={"w": running(7, 1)}, tells=[])
    case = Case("a newer version runs", "P12 P15 P19")
    case.joins().joins("v").published(ONE).published(TWO)
    case.says("w", TWO.applied(), status={"w": running(7, 2)})
    case.says("w", ONE.applied(), status={"w": running(7, 2)}, tells=[])
    case.says("v", ONE.applied(), ends=[done(w="skipped", v="applied")])
    yield case.says("v", TWO.applied(), ends=[done(w="applied", v="applied")])
    case = Case("a report that comes again", "P19").joins().published(ONE)
    case.says("w", ONE.staged(), ONE.commit("w")).says("w", ONE.applied(), ends=[done(w="applied")])
    case.says("w", ONE.applied(), tells=[]).says("w", ONE.progress(2))
    case.says("w", ONE.failed(), tells=[], status={"w": running(7, 1)})
    yield case.wait(4500, sends=None).says("w", ping(), sends=None).wait(2000, tells=[])
    case = Case("a version fails", "P13 P15")
    case.joins().joins("v").published(ONE, require=2)
    case.says("w", ONE.failed(), ends=[done(False, w="failed", v="behind")], tells=["failed w"])
    yield case.says("w", ONE.applied(), status={"w": running(7, 1)})
    case = Case("a version fails and is applied then", "P13")
    case.joins().joins("v").published(ONE, require=1).says("w", ONE.failed(), ends=[])
    case.says("w", ONE.failed(), tells=[])
    yield case.says("w", ONE.applied(), ends=[done(w="applied", v="behind")])
    case = Case("a failed version leaves no version", "P13")
    case.joins().published(ONE).says("w", ONE.applied(), ends=None).published(TWO)
    case.says("w", TWO.failed(), ends=[done(False, w="failed")], status={"w": running(7, 1)})
    case.says("w", TWO.failed(intact=False), status={"w": running(0, 0)})
    yield case.says("w", ONE.applied(), status={"w": running(7, 1)})


def _stuck() -> Iterator[Case]:
    case = Case("a worker is stuck", "P14")
    case.joins(subscribed=False).published(ONE).says("w", ONE.progress(1)).wait(4000, **FREE)
    case.says("w", ONE.progress(1)).wait(900, **FREE)
    case.wait(200, tells=["stuck w"], status={"w": {"state": "stuck"}}).says(
        "w", ping(), sends=None
    )
    case.wait(1000, tells=[]).says("w", ONE.progress(2), tells=None)
    case.wait(200, tells=["back w"], status={"w": {"state": "live"}})
    yield case.wait(4000, **FREE).says("w", ping(), sends=None).wait(1000, tells=["stuck w"])
    for words, message in (
        ("applies", ONE.applied()),
        ("applies a newer version than", TWO.applied()),
        ("fails", ONE.failed()),
        ("is welcomed with", hello()),
    ):
        case = Case(f"a worker {words} what it was at", "P14").joins(subscribed=False)
        case.published(ONE).published(TWO).says("w", ONE.progress(1)).says("w", message, **FREE)
        case.wait(4000, **FREE).says("w", ping(), sends=None)
        yield case.wait(1500, tells=[], status={"w": {"state": "live"}})
    for words, message in (("stages", ONE.staged()), ("fetches", ONE.fetch(0, 1))):
        case = Case(f"a worker {words} and no more", "P14").joins(subscribed=False)
        case.published(ONE).says("w", message, **FREE).wait(4000, **FREE).says(
            "w", ping(), sends=None
        )
        yield case.wait(1500, tells=["stuck w"], status={"w": {"state": "stuck"}})
    case = Case("a call ends at its deadline", "P15").joins().joins("v")
    case.published(ONE, timeout_ms=1000).says("w", ONE.applied()).wait(900)
    yield case.wait(200, ends=[done(False, w="applied", v="behind")], sends=None)
    case = Case("many calls are open", "P15").joins()
    for number in range(1, 257):
        case.published(Data(number, 16, 16), timeout_ms=100_000)
    last = Data(257, 16, 16)
    yield case.publish(last, sends=None, ends=[done(False, w="behind")])


RECEIPTS = {  # what a worker does with a version, and the state in the receipt
    "applied": "applied",
    "applied failed": "applied",
    "applied lost": "applied",
    "newer": "skipped",
    "newer bye": "skipped",
    "failed": "failed",
    "failed applied": "applied",
    "failed bye": "left",
    "failed lost": "failed",
    "failed newer": "skipped",
    "failed staged": "staged",
    "staged": "staged",
    "staged applied": "applied",
    "staged bye": "left",
    "staged failed": "failed",
    "staged lost": "lost",
    "staged newer": "skipped",
    "lost": "lost",
    "lost applied": "applied",
    "lost bye": "left",
    "lost hello": "behind",
    "bye": "left",
    "bye hello": "behind",
    "bye hello applied": "applied",
}


def _receipts() -> Iterator[Case]:
    reports: dict[str, Json] = {
        "applied": ONE.applied(),
        "newer": TWO.applied(),
        "failed": ONE.failed(),
        "staged": ONE.staged(),
        "bye": {"type": "bye"},
        "hello": hello(),
    }
    for words, state in RECEIPTS.items():
        case = Case(f"the receipt of a worker: {words}", "P11 P12 P13 P15 P18")
        case.joins(subscribed=False).joins("v", subscribed=False).published(ONE)
        newer = "newer" in words
        if newer:
            case.published(TWO, workers=["v"])
        for word in words.split():
            if word == "lost":
                case.wait(3000, sends=None).says("v", ping(), sends=None).wait(3000, tells=None)
            else:
                case.says("w", reports[word], **FREE)
        ends = [done(False, w=state, v="behind"), *([done(False, v="behind")] if newer else [])]
        yield case.does({"stop": True}, ends=ends)


def _lost() -> Iterator[Case]:
    case = Case("a silent worker is lost and returns", "P6 P17 P18")
    case.joins().published(ONE, grace_ms=2000).wait(4900, sends=None, ends=[], tells=[])
    case.wait(200, tells=["lost w"], status={"w": {"state": "lost"}}, ends=[])
    case.publish(TWO, TWO.announce(), ends=[done()])
    case.publish(THREE, workers=["w"], ends=[done(False, w="lost")])
    case.says("w", ping(subscribed=True), pong("w", m=3), tells=["back w"])
    case.says("w", ONE.applied(), ends=[done(w="applied")])
    yield case.publish(FOUR, FOUR.announce(), FOUR.chunks(), FOUR.end())
    case = Case("a call does not wait for a lost worker longer", "P18")
    case.joins().published(ONE, grace_ms=2000).wait(5100, ends=[]).wait(1800, ends=[])
    yield case.wait(200, ends=[done(False, w="lost")])
    case = Case("a worker is away and comes again", "P3 P18")
    case.joins().published(ONE).closed("w", tells=[], status={"w": {"state": "live"}}).wait(1900)
    case.says("2", hello(), welcome("2", {"m": 1}), tells=[]).wait(1000, sends=None, tells=[])
    yield case.says("2", ONE.applied(), ends=[done(w="applied")])
    case = Case("a worker is away for too long", "P18")
    case.joins().published(ONE, grace_ms=5000, gone_grace_ms=1000).closed("w").wait(1900)
    case.wait(200, tells=["lost w"], ends=[]).wait(800, ends=[])
    case.wait(300, ends=[done(False, w="lost")])
    yield case.says("2", hello(), welcome("2", {"m": 1}), status={"w": {"state": "live"}})
    case = Case("a message of a worker that is away", "P18")
    case.joins().closed("w").wait(1000).says("w", ping(), pong("w"))
    case.wait(1900, tells=[]).closed("w").wait(1900, tells=[])
    yield case.wait(200, tells=["lost w"])
    case = Case("a lost worker on another connection", "P4 P18")
    case.joins().closed("w").wait(2100, tells=["lost w"]).says(
        "2", ping(), refuse("2", "unknown-worker")
    )
    yield case.says("2", hello(), welcome("2"), tells=["back w"])
    case = Case("a worker that was lost before a call", "P18")
    case.joins().wait(5100, tells=["lost w"]).publish(ONE, ONE.announce(layout=True), ends=[done()])
    yield case.says("w", ping(), pong("w", m=1)).says(
        "w", ONE.applied(), status={"w": running(7, 1)}
    )
    case = Case("a loss ends what the worker was at", "P14 P18")
    case.joins().published(ONE, timeout_ms=100).says("w", ONE.progress(1)).wait(5100, **FREE)
    case.says("w", ping(), pong("w", m=1)).wait(4500, sends=None).says("w", ping(), sends=None)
    yield case.wait(1000, tells=[])
    case = Case("expected workers", "P15 P18").joins()
    case.published(ONE, expect=2).says("w", ONE.applied(), ends=[])
    case.joins("n", models={"n": None})
    case.says("v", hello("v"), welcome("v", {"m": 1})).says("x", hello("x"), welcome("x", {"m": 1}))
    yield case.says("v", ONE.applied(), ends=[done(w="applied", v="applied")])
    case = Case("an expected worker is missing", "P15").joins()
    case.published(ONE, expect=2, timeout_ms=1000).says("w", ONE.applied(), ends=[])
    yield case.wait(1100, sends=None, ends=[done(False, w="applied")])


def _with_base(
    base: Data, name: str, rules: str, workers: tuple[tuple[str, bool, int], ...]
) -> Case:
    """Return a case whose `workers` (name, takes patches, runs `base`) have joined."""
    case = Case(name, rules)
    for who, patched, _ in workers:
        features = [DELTA] if patched else []
        case.joins(who, features=features)
    case.published(base, keep=True)
    for who, _, runs in workers:
        if runs:
            case.says(who, base.applied(), **FREE)
    return case


def _patches() -> Iterator[Case]:
    size: Json = {"nbytes": 1600}
    one, two = (Data(n, **size) for n in (1, 2))

    begun = partial(_with_base, one)

    def patch(nbytes: int) -> Json:
        return {"epoch": EPOCH, "version": 1, "digest": one.digest, "nbytes": nbytes}

    def named(nbytes: int) -> Json:
        return {"encoding": DELTA, **patch(nbytes)}

    base = {"encoding": DELTA, "epoch": EPOCH, "version": 1}

    def part(data: Data, to_: str, nbytes: int, first: int, count: int) -> Json:
        some = bytes(range(256)) * 8
        of = some[:nbytes][first * 16 : (first + count) * 16]
        about = {"first": first, "count": count, "crc": crc32c(of), "payload": len(of)}
        return {"to": to_, "type": "chunk", **data.named, "patch": base, **about}

    announced = two.announce(keep=True, patches=[named(100)])
    end = {**two.end("m/dlt"), "patch": base}
    case = begun("a patch that fits all", "D6", (("w", True, 1), ("v", True, 1)))
    yield case.publish(
        two, announced, part(two, "m/dlt", 100, 0, 7), end, keep=True, patches=[patch(100)]
    )
    case = begun("a patch that fits some", "D6", (("w", True, 1), ("v", False, 1)))
    more = two.chunks(count=WINDOW), part(two, "m/dlt", 1200, 0, WINDOW)
    announced = two.announce(keep=True, patches=[named(1200)])
    case.publish(two, announced, *more, keep=True, patches=[patch(1200)])
    case.says("w", two.progress(5, patch=base), part(two, "m/dlt", 1200, WINDOW, 5))
    case.says("v", two.progress(3), two.chunks(first=WINDOW, count=3))
    case.says("w", two.progress(40, patch={**base, "version": 2}))
    case.says("v", two.applied(), ends=None)
    yield case.says("w", two.applied(patch=base), ends=[done(w="applied", v="applied")])
    case = begun("a patch that fits no subscriber", "D6", (("w", True, 0), ("v", False, 1)))
    announced = two.announce(keep=True, patches=[named(100)])
    yield case.publish(two, announced, two.chunks(count=WINDOW), keep=True, patches=[patch(100)])
    case = begun("a patch is fetched", "D8", (("w", True, 1),))
    case.published(two, keep=True, patches=[patch(100)])
    case.says("w", two.fetch(0, 2, patch=base), part(two, "w", 100, 0, 2))
    case.says("w", two.fetch(5, 2, patch=base), part(two, "w", 100, 5, 2))
    case.says("w", two.fetch(patch=base), {**two.end("w"), "patch": base})
    for data, first, count, of in (
        (two, 5, 3, base),
        (two, 8, 0, base),
        (two, 0, 1, {**base, "version": 2}),
        (two, 0, 1, {**base, "epoch": 6}),
        (Data(0), 0, 1, base),
    ):
        no = refuse("w", "no-patch", **data.named)
        case.says("w", data.fetch(first, count, patch=of), no)
    three = Data(3, **size)
    latest: Json = {"keep": True, "patches": [named(100)]}
    sends = gone("w", three), two.announce("w", **latest), two.end("w")
    case.says("w", three.fetch(0, 1, patch=base), *sends)
    yield case.says("w", two.fetch(0, 2), two.chunks("w", 0, 2))
    case = begun("patches end with their epoch", "D8 P3", (("w", True, 1),))
    case.published(two, keep=True, patches=[patch(100)])
    new = 900 + 90_000 - 10_010
    case.says("v", hello("v", epoch=900, age_ms=90_000), sends=None)
    moved = Data(2, **size, epoch=new)
    case.says("w", moved.fetch(), moved.announce("w", keep=True, patches=[]), moved.end("w"))
    yield case.says("w", moved.fetch(0, 1, patch=base), refuse("w", "no-patch", **moved.named))


TOKENS = [f"{n:032x}" for n in range(4)]


def _extras() -> Iterator[Case]:
    old = Data(40, epoch=5)
    offered = {
        "offer": {"seed": 1, "nbytes": NBYTES, "chunk_bytes": CHUNK_BYTES, "names": [[5, 40]]}
    }
    for words, running_, features, renamed in (
        ("its digest", ONE.runs(epoch=6, version=3), ["renaming"], True),
        ("its name", old.runs(digest=""), ["renaming"], True),
        ("another name", ONE.runs(epoch=5, version=39, digest=""), ["renaming"], False),
        ("its name with another digest", old.runs(digest=WRONG), ["renaming"], False),
        ("its digest without the feature", ONE.runs(epoch=6, version=3), [], False),
    ):
        case = Case(f"a worker runs {words}", "P21").does(offered)
        more = hello(models={"m": running_}, epoch=running_["epoch"], features=features)
        rename = to("w", "rename", **ONE.named, was=running_)
        case.says("w", more, welcome("w", {"m": 1}), *([rename] if renamed else []))
        if renamed:
            case.says("w", ONE.applied(digest=running_["digest"]), status={"w": running(7, 1)})
            case.published(TWO).says("w", TWO.applied(), ends=None)
        yield case
    case = Case("a report on the data connection", "P22 P12")
    upstream: Json = {"features": ["upstream"]}
    token, other = TOKENS[:2]
    case.says("w", hello(**upstream), welcome("w", features=[f"upstream.{token}"]))
    case.says("v", hello("v"), welcome("v", features=[])).published(ONE)
    wrong, tells = ONE.applied(digest=WRONG), ["wrong-digest w"]
    case.reports(token, wrong, status={"w": running(0, 0)}, tells=tells, forged=False)
    case.reports(token, wrong, tells=[], forged=False)
    case.reports(token, ONE.applied(), status={"w": running(7, 1)}, forged=False)
    case.reports(other, ONE.applied(), forged=True).reports("", ONE.applied(), forged=True)
    case.reports(token, ping(), forged=True).reports(token, ONE.staged(), forged=True)
    case.says("w", ONE.progress(2)).says("w", ONE.staged(), ONE.commit("w"))
    case.says("v", ONE.applied(), ends=[done(w="applied", v="applied")])
    case.says("w", hello(**upstream), welcome("w", {"m": 1}, features=[f"upstream.{token}"]))
    yield case.says("w", {"type": "bye"}).reports(token, ONE.applied(), forged=True)
    case = Case("a hello that is older than a report on the data connection", "P12 P22")
    case.joins(**upstream).published(ONE).published(TWO).reports(token, TWO.applied(), ends=None)
    behind: list[Json] = [{}, {"models": {"m": ONE.runs()}, "epoch": 7}]
    for fields in behind:
        late = hello(**upstream, **fields)
        case.says("w", late, status={"w": running(7, 2)}, **FREE)
    more = hello(**upstream, epoch=7)
    yield case.says("w", more, status={"w": running(0, 0)}, **FREE)
    case = Case("a report on the data connection of a torn model", "P22 P13")
    case.joins(**upstream).published(ONE).published(TWO).reports(token, ONE.applied(), ends=None)
    case.says("w", TWO.failed(intact=False), **FREE).reports(
        token, ONE.applied(), status={"w": running(0, 0)}
    )
    case.says("w", ONE.applied(), status={"w": running(7, 1)})
    yield case.reports(token, TWO.applied(), status={"w": running(7, 2)}, ends=None)
    case = Case("a report on the data connection of a worker that is away", "P18 P22")
    case.joins(**upstream).published(ONE).closed("w").wait(1000, sends=None)
    case.reports(token, ONE.applied(), ends=None).wait(900, sends=None, tells=[])
    yield case.wait(200, sends=None, tells=["lost w"])
    case = Case("a report on the data connection of a lost worker", "P18 P22")
    case.joins(**upstream).published(ONE).wait(4000, sends=None)
    case.reports(token, Data(1, epoch=5).applied()).wait(4000, sends=None, tells=[])
    case.wait(1200, sends=None, tells=["lost w"], ends=None)
    yield case.reports(token, ONE.applied(), status={"w": {"state": "lost", **running(5, 1)}})


def _limits() -> Iterator[Case]:
    for words, message, most in (
        ("hellos", hello("w"), 16),
        ("observers' requests", {"type": "observe"}, 16),
        ("pings", ping(), 60),
    ):
        case = Case(f"a connection sends too many {words}", "P3")
        if words == "pings":
            case.says("w", hello(), welcome("w"))
        case.says("w", message, times=most, sends=None, closes=False)
        case.says("w", message, closes=True).says("v", hello("v"), welcome("v"))
        yield case
    case = Case("a worker sends too many hellos from several instances", "P3").joins()
    case.says("2", hello(instance=SECOND), times=16, sends=None, closes=False)
    case.says("2", hello(instance=SECOND), closes=True).wait(500, sends=None)
    yield case.says("w", ping(), pong("w"))
    case = Case("a connection sends too much that is malformed", "P5").joins()
    case.writes("x", "{}", times=16, sends=None, closes=False).writes("x", "{}", closes=True)
    yield case.says("w", ping(), pong("w"))
    case = Case("a connection sends reports before hello", "P4")
    case.says("x", ONE.applied(), times=64, sends=None, closes=False)
    case.says("x", ONE.applied(), closes=True).wait(1000)
    yield case.says("y", ONE.applied(), times=32, sends=None, closes=False)
    case = Case("a worker sends reports as fast as it can", "P19").joins().published(ONE)
    case.says("w", ONE.progress(1), times=1000, sends=None, closes=False)
    yield case.says("w", ONE.fetch(0, 1), times=200, sends=None, closes=False)
    case = Case("pings come as often as the worker may send them", "P17").joins()
    for _ in range(3):
        case.says("w", ping(), times=30, sends=None, closes=False).wait(1000, sends=None)
    yield case
    case = Case("connections without a worker share a limit", "P3").joins("w")
    case.says("%", ping(), times=1023, sends=None, closes=False)
    case.says("x", hello("x")).says("w", ping(), pong("w")).wait(1000, sends=None)
    yield case.says("x", hello("x"), welcome("x"))


def _observing() -> Iterator[Case]:
    case = Case("an observer reads the roster", "P23")
    case.joins().published(ONE)
    row = {"name": "w", "state": "live"}
    first = {"epoch": 7, "since": 0, "workers": 1, "more": False, "follows": False}
    model = {"name": "m", "version": 1, "nbytes": NBYTES}
    case.says("o", {"type": "observe"}, to("o", "roster", **first, models=[model], rows=[row]))
    case.says("w", ONE.applied(), ends=None)
    doing = {"m": {"epoch": 7, "version": 1}}
    case.says("o", {"type": "observe"}, to("o", "roster", rows=[{**row, "models": doing}]))
    case.says("o", {"type": "observe", "epoch": 7, "since": 2**40}, to("o", "roster", since=0))
    case.says("o", {"type": "observe", "epoch": 6, "since": 1}, to("o", "roster", since=0))
    case.says("w", ONE.failed(), **FREE)
    yield case.says("o", ping(), refuse("o", "unknown-worker"))
    case = Case("too many observers", "P23")
    case.says("%", {"type": "observe"}, times=16, sends=None)
    case.says("x", {"type": "observe"}, refuse("x", "limit"))
    case.says("0", {"type": "observe"}, to("0", "roster"))
    case.wait(5000).says("3", {"type": "observe"}, sends=None)
    case.wait(5100).says("x", {"type": "observe"}, to("x", "roster"))
    yield case


def _verifying() -> Iterator[Case]:
    checking: Json = {"features": ["checking"]}
    verify = {"type": "verify", "worker": "w", "model": "m"}
    check = to("w", "check", **ONE.named, first=0)

    def answer(**fields: Any) -> Json:
        return {"type": "checked", **ONE.named, "first": 0, **fields}

    def verified(who: str = "o", **fields: Any) -> Json:
        return to(who, "verified", worker="w", model="m", first=0, **fields)

    case = Case("a worker is verified", "P24").joins(**checking).published(ONE)
    case.says("w", ONE.applied(), ends=None).says("o", verify, check)
    sum_ = crc32c(ONE.content)
    result: Json = {**_of(ONE), "count": 1, "names": 1}
    case.says("w", answer(sums=[sum_]), verified(**result, differing=0))
    case.says("w", answer(sums=[sum_])).says("o", verify, check)
    unlike: Json = {**result, "unlike": 1, "differing": 0}
    case.says("w", answer(sums=[None]), verified(**unlike)).says("o", verify, check)
    case.joins("v", **checking).says("v", answer(sums=[5]))
    differ = [{"name": "w", "published": sum_, "runs": 5}]
    case.says("w", {**answer(sums=[5]), "version": 2}).says("w", {**answer(sums=[5]), "first": 1})
    case.says("w", answer(sums=[5]), verified(**result, differing=1, differences=differ))
    case.says("o", verify, check)
    case.says("w", answer(code="busy", text="not now"), verified(code="busy"))
    case.says("o", verify, check).says("p", verify, verified("p", code="busy"))
    case.says("o", verify, check).wait(4000, sends=None).says("w", ping(), sends=None)
    case.wait(900).wait(200, verified(code="silent"))
    yield case.says("w", answer(sums=[5]))
    case = Case("a worker that cannot be verified", "P24")
    case.says("o", verify, verified(code="absent")).joins(features=[])
    case.says("o", verify, verified(code="unsupported"))
    case.says("o", {**verify, "model": "n"}, to("o", "verified", code="absent"))
    case.says("w", hello(**checking), welcome("w")).says("o", verify, verified(code="absent"))
    case.published(ONE, timeout_ms=1).published(TWO, timeout_ms=1)
    case.says("w", Data(1, epoch=5).applied(), **FREE).says("o", verify, verified(code="gone"))
    case.says("w", TWO.applied(), **FREE).wait(5100, **FREE)
    yield case.says("o", verify, verified(code="absent"))


def _of(data: Data) -> Json:
    return {"epoch": data.epoch, "version": data.version}


def _keys() -> Iterator[Case]:
    keys = {"w": ["w", "worker"], "g": ["gpu-*", "worker"], "eye": ["eye", "observer"]}
    keyed: Json = {"keys": keys}

    def join(case: Case, who: str = "w", key: str = "w") -> Case:
        return case.says(who, hello(who), key=key, sends=None)

    case = Case("a key is for its name", "K3 K4", dict(keyed))
    for key, name, code in (
        *(("w", "w", ""), ("w", "x", "wrong-name"), ("g", "gpu-1", ""), ("g", "v", "wrong-name")),
        *(("g", "gpu", "wrong-name"), ("eye", "eye", "not-allowed")),
    ):
        answer = refuse(name, code) if code else welcome(name)
        case.says(name, hello(name), answer, key=key)
    case.says("o", {"type": "observe"}, to("o", "roster", workers=2), key="eye")
    case.says("p", {"type": "observe"}, refuse("p", "not-allowed"), key="g")
    verify = {"type": "verify", "worker": "w", "model": "m"}
    case.says("p", verify, refuse("p", "not-allowed"), key="g")
    yield case.says("o", verify, to("o", "verified", code="unsupported"), key="eye")
    relay: Json = {"features": ["relay"]}
    relays = {**keys, "r": ["r-*", "relay"]}
    case = Case("a relay needs a relay's key", "K4 K11", {"keys": relays})
    case.says("w", hello("w", **relay), refuse("w", "not-allowed"), key="w")
    case.says("r", hello("r-1", **relay), welcome("r"), key="r")
    case.says("2", hello("r-2"), welcome("2"), key="r")
    case.says("o", {"type": "observe"}, refuse("o", "not-allowed"), key="r")
    allow = {"allow": {**relays, "r": ["r-*", "worker"]}}
    yield case.does(allow, refuse("r", "revoked"), tells=["left r-1"])
    case = Case("a key that is not allowed", "K8", dict(keyed))
    case.says("x", hello("w"), refuse("x", "revoked"), key="other")
    case.says("x", ping(), refuse("x", "revoked"), key="")
    join(case)
    case.does({"allow": {"g": ["gpu-*", "worker"]}}, refuse("w", "revoked"), tells=["left w"])
    case.says("w", ping(), refuse("w", "revoked"), key="w").does({"allow": keys}, tells=[])
    yield case.says("w", ping(), refuse("w", "unknown-worker"), key="w")
    case = Case("a connection is that of its key", "K10", {"keys": {**keys, "v": ["w", "worker"]}})
    join(case).says("w", ping(), key="v", closes=True).says(
        "w", {"type": "bye"}, key="g", closes=True
    )
    case.says("2", hello(), asked("w"), key="v").wait(100)
    case.says("w", ping(), pong("w"), key="w")
    yield case.says("2", hello(), refuse("2", "name-taken"), key="v")
    case = Case("tickets", "K6 K9", dict(keyed))
    upstream: Json = {"features": ["upstream"]}
    ticket = [f"ticket.{each}" for each in TOKENS]
    case.says("w", hello(**upstream), welcome("w", features=ticket[:1]), key="w")
    case.does({"ticket": TOKENS[1]}, owner=None).does({"ticket": TOKENS[0]}, owner=["w", "w"])
    case.does({"ticket": TOKENS[0]}, owner=None)
    case.says("w", hello(), welcome("w", features=ticket[1:2]), key="w")
    case.says("w", hello(), welcome("w", features=ticket[2:3]), key="w")
    case.does({"ticket": TOKENS[1]}, owner=None)
    for _ in range(7):
        case.wait(4000).says("w", ping(), sends=None, key="w")
    case.wait(2100).does({"ticket": TOKENS[2]}, owner=None)
    case.says("w", hello(), welcome("w", features=ticket[3:4]), key="w")
    yield case.says("w", {"type": "bye"}, key="w").does({"ticket": TOKENS[3]}, owner=None)
