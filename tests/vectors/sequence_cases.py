"""The cases of `sequences.json`: what a worker must do with one message after another.

One model `m` of three chunks. Every case says what it starts from: most of them with a session, in
which the worker was welcomed by a publisher of epoch 7.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from weightbus.tests.vectors.layout_cases import info
from weightbus.tests.vectors.parts import Json, crc32c, digest, padded, spans, text_of

EPOCH, CHUNK_BYTES = 7, 4
LAYOUT = padded({"w": info("U8", [10], 0, 10)})
OTHER_LAYOUT = padded({"v": info("U8", [10], 0, 10)})
EMPTY_LAYOUT = padded({"w": info("U8", [0], 0, 0)})
TICK, RETRY, REPEAT, PATIENCE, LOST = 150, 300, 1_200, 2_500, 6_000  # milliseconds, with room
DEAF = 4_500  # less than what makes silence, and seven times that is more than a session lasts
NOTHING = ["fetch", "progress", "staged", "applied", "failed"]  # no effect on any version
IN_PLACE = {"m": {"w": {"dtype": "U8", "shape": [10]}}}


def data_of(version: int, nbytes: int = 10) -> bytes:
    """Return the bytes of a version."""
    return bytes((version * 16 + index) % 256 for index in range(nbytes))


def number(version: int, epoch: int, model: str = "m") -> Json:
    """Return what names a version."""
    return {"model": model, "epoch": epoch, "version": version}


def message(kind: str, **fields: Any) -> bytes:
    """Return a header."""
    return text_of({"wbp": 1, "type": kind, **fields})


def digest_of(version: int, layout: bytes = LAYOUT, nbytes: int = 10) -> str:
    """Return the digest of a version."""
    data = data_of(version, nbytes)
    crcs = [crc32c(data[begin:end]) for begin, end in spans(nbytes, CHUNK_BYTES)]
    return digest(hashlib.sha256(layout).hexdigest(), CHUNK_BYTES, crcs)


def announce(
    version: int, *, layout: bytes = LAYOUT, nbytes: int = 10, epoch: int = EPOCH, **fields: Any
) -> bytes:
    """Return the header of an announcement."""
    known: Json = {
        **number(version, epoch),
        "layout": hashlib.sha256(layout).hexdigest(),
        "layout_bytes": len(layout),
        "nbytes": nbytes,
        "chunk_bytes": CHUNK_BYTES,
        "commit": "auto",
        "acknowledge": "applied",
        "encoding": "raw",
    }
    return message("announce", **{**known, **fields})


def chunk(
    version: int, index: int, *, epoch: int = EPOCH, crc: int | None = None, model: str = "m"
) -> list[bytes]:
    """Return a chunk, header and payload."""
    begin, end = spans(10, CHUNK_BYTES)[index]
    part = data_of(version)[begin:end]
    sum_ = crc32c(part) if crc is None else crc
    return [message("chunk", **number(version, epoch, model), index=index, crc=sum_), part]


def end(version: int, *, epoch: int = EPOCH, of: str | None = None, model: str = "m") -> bytes:
    """Return an end."""
    return message("end", **number(version, epoch, model), digest=of or digest_of(version))


def welcome(epoch: int = EPOCH, age_ms: int = 0, ping_ms: int = 1000, **models: int) -> bytes:
    """Return a welcome."""
    told = {"epoch": epoch, "data": "tcp://*:9", "ping_ms": ping_ms, "lost_ms": 5 * ping_ms}
    return message("welcome", **told, age_ms=age_ms, models=models)


@dataclass
class Case:
    """One sequence under construction."""

    name: str
    rules: str  # of the protocol, that it is about
    options: Json = field(default_factory=dict[str, Any])
    steps: list[Json] = field(default_factory=list[Json])

    def control(self, *frames: bytes, **expect: Any) -> "Case":
        """A message on the control channel."""
        self.steps.append({"control": list(frames), "expect": expect})
        return self

    def data(self, *frames: bytes, **expect: Any) -> "Case":
        """A published message."""
        self.steps.append({"data": list(frames), "expect": expect})
        return self

    def pong(self) -> "Case":
        """The last ping is answered."""
        self.steps.append({"pong": EPOCH, "expect": {}})
        return self

    def wait(self, ms: int, **expect: Any) -> "Case":
        """Time passes."""
        self.steps.append({"wait_ms": ms, "expect": expect})
        return self

    def joined(self) -> "Case":
        """Let the worker in."""
        self.wait(RETRY, sends=[{"type": "hello"}])
        return self.control(welcome(), sends=[])

    def pushed(self, version: int, **expect: Any) -> "Case":
        """Push a whole version."""
        self.data(announce(version), LAYOUT)
        for index in range(3):
            self.data(*chunk(version, index))
        return self.data(end(version), **expect)

    def fetched(self, version: int, **expect: Any) -> "Case":
        """Give all chunks of a version on request."""
        for index in range(3):
            self.control(*chunk(version, index))
        return self.control(end(version), **expect)


def applied(version: int, epoch: int = EPOCH) -> Json:
    """Return what says that a version is applied."""
    return {"type": "applied", **number(version, epoch), "digest": digest_of(version)}


def sequence_cases() -> Iterator[Json]:
    """Yield all sequences."""
    yield from told(
        (
            *(*_joining(), *_receiving(), *_many_chunks(), *_answered_before(), *_slow_layouts()),
            *(*_catching_up(), *_whole()),
        )
    )
    yield from told(
        (
            *(*_refusing(), *_for_good(), *_backoff(), *_news_put_off(), *_deciding(), *_living()),
            *_not_too_much(),
        )
    )


def renaming_cases() -> Iterator[Json]:
    """Yield the sequences of the feature `renaming`."""
    yield from told(_renaming())


def told(cases: Iterable[Case]) -> Iterator[Json]:
    """Yield cases as the tables have them."""
    for case in cases:
        told = {"name": case.name, "level": level_of(case), "rules": case.rules.split()}
        yield {**told, "models": ["m"], **case.options, "steps": case.steps}


def level_of(case: Case) -> int | None:
    """Return what a worker must be able to do to play a case: by what is said to it."""
    said = b"".join(
        frame for step in case.steps for c in ("control", "data") for frame in step.get(c, [])
    )
    if b'"type":"rename"' in said or b'"companions":' in said:
        return None
    words = ('"commit":"together"', '"acknowledge":"staged"', '"type":"commit"', '"type":"abort"')
    if any(word.encode() in said for word in words):
        return 3
    return 2 if any("data" in step or "pong" in step for step in case.steps) else 1


def applying_cases() -> Iterator[Json]:
    """Yield sequences in which the user fails to apply."""
    yield from told(chain(_failing(), _failing_again()))


def failed(version: int, *, intact: bool) -> Json:
    """Return what is said of an apply that has failed."""
    return {"type": "failed", **number(version, EPOCH), "code": "apply", "intact": intact}


def case_of(name: str, *applies: str) -> Case:
    """Return a case in which version 1 runs, and the next applies end so."""
    case = Case(name, "W24", options={"applies": ["done", *applies]})
    return case.joined().pushed(1, runs={"m": 1})


def _failing() -> Iterator[Case]:
    def hello(**fields: Any) -> Json:
        return {"type": "hello", **fields}

    running = {"epoch": EPOCH, "version": 1, "digest": digest_of(1)}
    unknown = message("refuse", code="unknown-worker", text="")
    beacon = message("beacon", model="m", epoch=EPOCH, version=2)
    case = case_of("a version that is turned down leaves the one before", "refused")
    case.pushed(2, sends=[failed(2, intact=True)], silent=["applied"], runs={"m": 1})
    case.data(beacon, silent=["fetch"])
    case.wait(REPEAT, sends=[applied(1), failed(2, intact=True)])
    case.control(unknown).wait(RETRY, sends=[hello(models={"m": running}, epoch=EPOCH)])
    case.control(welcome()).wait(REPEAT, sends=[applied(1), failed(2, intact=True)])
    yield case.pushed(3, sends=[applied(3)], runs={"m": 3})
    case = case_of("after an apply that failed half-way nothing runs", "torn")
    case.pushed(2, sends=[failed(2, intact=False)], silent=["applied"], runs={"m": 0})
    case.wait(REPEAT, sends=[failed(2, intact=False)], silent=["applied"])
    case.control(unknown).wait(RETRY, sends=[hello(models={"m": None}, epoch=EPOCH)])
    case.control(welcome()).wait(REPEAT, sends=[failed(2, intact=False)], silent=["applied"])
    yield case.pushed(3, sends=[applied(3)], runs={"m": 3})
    case = case_of("while the next arrives it is still said that nothing runs", "torn")
    case.pushed(2, runs={"m": 0}).data(announce(3)).data(*chunk(3, 0))
    case.wait(REPEAT, sends=[failed(2, intact=False)])
    case.control(*chunk(3, 1)).control(*chunk(3, 2))
    case.control(end(3), sends=[applied(3)], runs={"m": 3})
    yield case.wait(REPEAT, sends=[applied(3)], silent=["failed"])


def _failing_again() -> Iterator[Case]:
    beacon = message("beacon", model="m", epoch=EPOCH, version=2)
    unknown = message("refuse", code="unknown-worker", text="")

    def again(case: Case, version: int, said: Json, runs: int = 0) -> Case:
        news = message("beacon", model="m", epoch=EPOCH, version=version)
        case.wait(RETRY).data(news, sends=[{"type": "fetch", "version": 0}])
        case.control(announce(version), asks=[0, 1, 2])
        return case.fetched(version, sends=[said], runs={"m": runs})

    torn = failed(2, intact=False)
    case = case_of("an apply that failed half-way is tried again", "torn", "done")
    yield again(case.pushed(2, runs={"m": 0}), 2, applied(2), 2)
    case = case_of("it is tried three times", *["torn"] * 4).pushed(2, runs={"m": 0})
    again(again(case, 2, torn), 2, torn).wait(RETRY).data(beacon, silent=["fetch"])
    case.pushed(3, sends=[failed(3, intact=False)], runs={"m": 0}).wait(RETRY)
    case.data(message("beacon", model="m", epoch=EPOCH, version=3), silent=["fetch"])
    yield case.pushed(4, sends=[applied(4)], runs={"m": 4})
    for before in (3, 2):
        name = f"and twice more in the next session, after {before} times"
        case = case_of(name, *["torn"] * (before + 2)).pushed(2, runs={"m": 0})
        for _ in range(before - 1):
            again(case, 2, torn)
        case.control(unknown).wait(RETRY).control(welcome())
        again(again(case, 2, torn), 2, torn).wait(RETRY)
        yield case.data(beacon, silent=["fetch"])
    applies = ["torn", "torn", "done", "torn", "torn", "done", "refused"]
    case = case_of("once a version runs, the next is tried as often", *applies)
    again(case.pushed(2, runs={"m": 0}), 2, torn).pushed(3, sends=[applied(3)], runs={"m": 3})
    case.pushed(4, sends=[failed(4, intact=False)], runs={"m": 0})
    again(again(case, 4, failed(4, intact=False)), 4, applied(4), 4)
    yield case.pushed(5, sends=[failed(5, intact=True)], runs={"m": 4})
    case = case_of("an older version mends what a newer one has torn", "done", "torn", "done")
    case.pushed(2, runs={"m": 2}).pushed(4, runs={"m": 0})
    yield case.pushed(3, sends=[applied(3)], runs={"m": 3})
    case = case_of("the epoch of what has failed is remembered", "torn").control(unknown)
    later = EPOCH + 1
    case.wait(RETRY).control(welcome(later, m=1)).control(announce(1, epoch=later), LAYOUT)
    for index in range(3):
        case.control(*chunk(1, index, epoch=later))
    case.control(end(1, epoch=later), runs={"m": 0}).control(unknown)
    case.wait(RETRY, sends=[{"type": "hello", "models": {"m": None}, "epoch": later}])
    case.control(welcome(EPOCH, m=9), silent=NOTHING)
    yield case.control(announce(9), LAYOUT, silent=NOTHING, runs={"m": 0})


def _joining() -> Iterator[Case]:
    case = Case("hello is said until it is answered", "W1 W18")
    case.wait(RETRY, sends=[{"type": "hello", "name": "w", "models": {"m": None}}])
    case.wait(RETRY, sends=[{"type": "hello"}])
    case.control(welcome())
    yield case.wait(REPEAT, sends=[{"type": "ping"}], silent=["hello"])
    case = Case("before the welcome nothing counts", "W3").wait(RETRY)
    case.control(announce(1), LAYOUT, silent=NOTHING)
    yield case.control(message("beacon", model="m", epoch=EPOCH, version=1), silent=NOTHING)
    case = Case("the welcome names a version: it is asked for", "W4").wait(RETRY)
    yield case.control(welcome(m=1), sends=[{"type": "fetch", "version": 0, "epoch": EPOCH}])
    case = Case("the first published message is answered with a ping", "W18").joined()
    beacon = message("beacon", model="m", epoch=EPOCH, version=0)
    yield case.data(beacon, sends=[{"type": "ping", "subscribed": True}])
    case = Case("a ping is answered with its token", "W18").joined()
    yield case.control(message("ping", token=9), sends=[{"type": "pong", "token": 9}])
    for name, ping_ms, often in (
        ("a publisher that pings seldom is pinged as often as ever", 10_000, REPEAT),
        ("a publisher that pings often is pinged as often", 200, RETRY),
    ):
        case = Case(name, "W18 W19").wait(RETRY).control(welcome(ping_ms=ping_ms))
        alive = message("pong", epoch=EPOCH, models={})
        for _ in range(6):
            case.wait(often, sends=[{"type": "ping"}], silent=["hello"]).control(alive)
        yield case


def _sessions() -> Iterator[Case]:
    """Yield what a session takes over from the one before, and what another welcome changes."""
    gone, later = message("refuse", code="unknown-worker", text=""), EPOCH + 1
    case = Case("what was asked for before a session is asked for again", "W28").joined()
    case.control(announce(1), LAYOUT, asks=[0, 1, 2]).control(*chunk(1, 0))
    case.control(gone).wait(RETRY, asks=[]).control(welcome()).wait(TICK, asks=[1, 2])
    case.control(*chunk(1, 1)).control(*chunk(1, 2))
    yield case.control(end(1), sends=[applied(1)], runs={"m": 1})
    case = Case("what was pushed before a session is fetched at once", "W28").joined()
    case.data(announce(1), LAYOUT).data(*chunk(1, 0)).control(gone)
    case.control(welcome()).wait(TICK, asks=[1, 2])
    case.control(*chunk(1, 1)).control(*chunk(1, 2))
    yield case.control(end(1), sends=[applied(1)], runs={"m": 1})
    case = Case("what arrives of an earlier epoch is dropped", "W28").joined()
    case.control(announce(1), LAYOUT, asks=[0, 1, 2]).control(gone).wait(RETRY)
    yield case.control(welcome(later)).wait(PATIENCE, silent=["progress"], asks=[], runs={"m": 0})
    case = Case("a second welcome tells what there is, and changes nothing else", "W29").joined()
    case.control(announce(1), LAYOUT, asks=[0, 1, 2]).control(*chunk(1, 0))
    case.control(welcome(m=1)).wait(TICK, silent=["hello"], asks=[])
    case.control(*chunk(1, 1)).control(*chunk(1, 2))
    case.control(end(1), sends=[applied(1)], runs={"m": 1}).wait(RETRY)
    yield case.control(welcome(m=2), sends=[{"type": "fetch", "version": 0}], runs={"m": 1})
    case = Case("who hears nothing published fetches everything", "W31 W33").joined()
    alive = message("pong", epoch=EPOCH, models={})
    case.wait(DEAF).control(alive).wait(DEAF, silent=["hello"])
    pong = message("pong", epoch=EPOCH, models={"m": 1})
    case.control(pong, sends=[{"type": "fetch", "version": 0}])
    case.control(announce(1), LAYOUT, asks=[0, 1, 2])
    case.fetched(1, sends=[applied(1)], runs={"m": 1})
    beacon = message("beacon", model="m", epoch=EPOCH, version=1)
    yield case.data(beacon, sends=[{"type": "ping", "subscribed": True}], silent=["fetch"])


def _ages() -> Iterator[Case]:
    gone = message("refuse", code="unknown-worker", text="")

    def aged(age_ms: int) -> Json:
        return {"type": "hello", "epoch": EPOCH, "age_ms": age_ms}

    case = Case("the age of a publisher is told to others", "W1").wait(RETRY)
    case.control(welcome(age_ms=60_000)).pushed(1, runs={"m": 1}).wait(4_000)
    case.control(message("pong", epoch=EPOCH, models={})).wait(4_000)
    case.control(gone, sends=[aged(68_000)])
    case.control(welcome(age_ms=50_000, m=1)).wait(400)  # one that was long on its way
    yield case.control(gone, sends=[aged(68_400)])
    case = Case("the age is that of the publisher whose weights run", "W1").wait(RETRY)
    case.control(welcome(age_ms=60_000)).pushed(1, runs={"m": 1}).wait(1_000)
    case.control(gone, sends=[aged(61_000)])
    case.control(welcome(EPOCH + 1, age_ms=5_000)).wait(1_000)
    yield case.control(gone, sends=[aged(62_000)])
    case = Case("a publisher that says no age is as old as it has been known", "W1").joined()
    case.pushed(1, runs={"m": 1}).wait(1_000)
    yield case.control(gone, sends=[aged(1_000)])


def _receiving() -> Iterator[Case]:
    yield (
        Case("a pushed version", "W9 W13 W16").joined().pushed(1, sends=[applied(1)], runs={"m": 1})
    )
    case = Case("a fetched version", "W4 W7 W13 W16 W31").joined()
    pong = message("pong", epoch=EPOCH, models={"m": 1})
    case.control(pong, sends=[{"type": "fetch", "version": 0}])
    case.control(announce(1), sends=[{"type": "fetch", "version": 1, "layout": True}])
    case.control(announce(1), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    case = (
        Case("chunks out of order, twice, and after the end", "W9 W30")
        .joined()
        .data(announce(1), LAYOUT)
    )
    case.data(*chunk(1, 2)).data(end(1)).data(*chunk(1, 0)).data(*chunk(1, 0), runs={"m": 0})
    yield case.data(*chunk(1, 1), sends=[applied(1)], runs={"m": 1})
    case = Case("a gap is fetched at once", "W10").joined().data(announce(1), LAYOUT)
    case.data(*chunk(1, 2), asks=[0, 1]).control(*chunk(1, 0)).control(*chunk(1, 1))
    yield case.data(end(1), sends=[applied(1)], runs={"m": 1})
    for name, damaged in {
        "a wrong CRC": chunk(1, 1, crc=5),
        "too few bytes": [chunk(1, 1)[0], data_of(1)[4:7]],
        "too many bytes": [chunk(1, 1)[0], data_of(1)[4:9]],
    }.items():
        case = (
            Case(f"a chunk with {name} is fetched again", "W9").joined().data(announce(1), LAYOUT)
        )
        case.data(*chunk(1, 0)).data(*damaged).data(*chunk(1, 2)).data(end(1))
        case.wait(TICK, asks=[1], runs={"m": 0})
        yield case.control(*chunk(1, 1), sends=[applied(1)], runs={"m": 1})
    case = Case("a chunk that the version does not have", "W9").joined().data(announce(1), LAYOUT)
    beyond = message("chunk", **number(1, EPOCH), index=3, crc=crc32c(b"")), b""
    case.data(*beyond, runs={"m": 0})
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    case = Case("a lost end is asked for", "W30").joined().data(announce(1), LAYOUT)
    case.data(*chunk(1, 0)).data(*chunk(1, 1)).data(*chunk(1, 2), runs={"m": 0})
    case.wait(RETRY, sends=[{"type": "fetch", "version": 1}])
    yield case.control(end(1), sends=[applied(1)], runs={"m": 1})
    case = Case("a fetched chunk, too, ends the silence of a push", "W30").joined()
    case.data(announce(1), LAYOUT).data(*chunk(1, 2), asks=[0, 1]).wait(200)
    case.control(*chunk(1, 0)).wait(200, silent=["fetch"])
    case.wait(TICK, sends=[{"type": "fetch", "version": 1, "count": 0}], asks=[])
    case.control(*chunk(1, 1))
    yield case.control(end(1), sends=[applied(1)], runs={"m": 1})
    case = (
        Case("a request is repeated", "W12 W31")
        .joined()
        .control(announce(1), LAYOUT, asks=[0, 1, 2])
    )
    case.wait(REPEAT).pong().wait(PATIENCE, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    yield from _empty()
    case = Case("a stray chunk tells of a version", "W4").joined()
    yield case.data(*chunk(1, 0), sends=[{"type": "fetch", "version": 0}])
    case = (
        Case("a layout that is known is not asked for again", "W7")
        .joined()
        .pushed(1, runs={"m": 1})
    )
    case.data(announce(2))
    for index in range(3):
        case.data(*chunk(2, index))
    yield case.data(end(2), sends=[applied(2)], runs={"m": 2})
    case = Case("the latest version wins, and is finished before anything newer", "W8 W26").joined()
    case.data(announce(1), LAYOUT).data(*chunk(1, 0)).data(announce(2), asks=[])
    case.wait(RETRY, asks=[0, 1, 2]).data(announce(3)).wait(RETRY, asks=[])
    case.control(*chunk(2, 0)).control(*chunk(2, 1)).control(*chunk(2, 2))
    newest = {"type": "fetch", "version": 0}
    yield case.control(end(2), sends=[applied(2), newest], runs={"m": 2})


def _empty() -> Iterator[Case]:
    case = Case("a version of no bytes", "W13").joined()
    empty = digest_of(1, EMPTY_LAYOUT, 0)
    case.data(announce(1, layout=EMPTY_LAYOUT, nbytes=0), EMPTY_LAYOUT)
    yield case.data(end(1, of=empty), sends=[{"type": "applied", "digest": empty}], runs={"m": 1})
    case = Case("of a version of no bytes nothing but the end is fetched", "W13 W31").joined()
    one = {"type": "fetch", "version": 1}
    case.control(announce(1, layout=EMPTY_LAYOUT, nbytes=0), EMPTY_LAYOUT, sends=[one], asks=[])
    case.wait(RETRY, silent=["fetch"])
    case.control(end(1, of=empty), sends=[{"type": "applied", "digest": empty}], runs={"m": 1})
    yield case.wait(REPEAT, silent=["fetch"])


def _many_chunks() -> Iterator[Case]:
    """Yield what shows only where there are more chunks than a window has."""
    count = 40
    nbytes, layout = count * CHUNK_BYTES, padded({"w": info("U8", [160], 0, 160)})
    told = announce(1, layout=layout, nbytes=nbytes)

    def part(index: int) -> list[bytes]:
        data = data_of(1, nbytes)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        return [message("chunk", **number(1, EPOCH), index=index, crc=crc32c(data)), data]

    def report(chunks: int) -> Json:
        return {"type": "progress", **number(1, EPOCH), "chunks": chunks}

    whole = digest_of(1, layout, nbytes)
    there = {"type": "applied", **number(1, EPOCH), "digest": whole}
    case = Case("no more than a window is asked for", "W11").joined()
    case.control(told, layout, asks=[*range(16)])
    for index in range(15):
        case.control(*part(index))
    case.control(*part(15)).wait(TICK)
    for index in range(16, 24):
        case.control(*part(index))
    for index in range(24, count):
        case.wait(TICK).control(*part(index))
    yield case.control(end(1, of=whole), sends=[there], runs={"m": 1})
    case = Case("progress is reported", "W23").joined().data(told, layout)
    for index in range(count):
        case.data(*part(index), **({"sends": [report(index + 1)]} if index % 16 == 15 else {}))
    yield case.data(end(1, of=whole), sends=[there], runs={"m": 1})
    case = Case("progress of a slow push is reported, too", "W23").joined().data(told, layout)
    for index in range(count):
        slow = index < 3
        if slow:
            case.wait(TICK)
        said = slow or index % 16 == 15
        case.data(*part(index), **({"sends": [report(index + 1)]} if said else {}))
    yield case.data(end(1, of=whole), sends=[there], runs={"m": 1})
    yield from _slow_answers()


def _slow_answers() -> Iterator[Case]:
    case = Case("who gets no answer asks less often", "W12 W32").joined()
    case.control(announce(1), LAYOUT, asks=[0, 1, 2])
    case.wait(1_500, asks=[]).pong().wait(200, asks=[0, 1, 2])  # at 1.6 s
    case.wait(1_200, asks=[]).pong().wait(500, asks=[]).wait(400, asks=[0, 1, 2])  # at 3.6 s
    case.wait(1_200, asks=[]).pong().wait(2_300, asks=[]).wait(500, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    case = Case("patience falls back when something arrives", "W12 W32").joined()
    case.control(announce(1), LAYOUT, asks=[0, 1, 2])
    case.wait(1_500, asks=[]).pong().wait(200, asks=[0, 1, 2])
    case.wait(1_400, asks=[]).pong().wait(700, asks=[0, 1, 2])
    case.control(*chunk(1, 0)).wait(1_500, asks=[]).pong().wait(200, asks=[1, 2])
    case.control(*chunk(1, 1)).control(*chunk(1, 2))
    yield case.control(end(1), sends=[applied(1)], runs={"m": 1})
    case = Case("what was announced with other chunks than there are", "W12").joined()
    case.control(announce(1, chunk_bytes=5), LAYOUT, asks=[0, 1])
    case.control(*chunk(1, 0)).control(*chunk(1, 1))
    for _ in range(30):
        case.wait(1_000, silent=["failed"]).pong()
    failed = {"type": "failed", **number(1, EPOCH), "code": "digest-mismatch"}
    case.wait(3_000, sends=[failed], runs={"m": 0})
    alive = message("pong", epoch=EPOCH, models={"m": 1})  # to a ping that was sent before
    case.wait(REPEAT).control(alive, sends=[{"type": "fetch", "version": 0}])
    case.control(announce(1), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    case = Case("what is on its way is not asked for again", "W12").joined()
    case.control(announce(1), LAYOUT, asks=[0, 1, 2])
    for _ in range(4):
        case.wait(3_000, asks=[]).control(alive)
    case.wait(3_000, asks=[]).control(alive).wait(2_000, asks=[0, 1, 2])  # after 16 s all the same
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})


def _answered_before() -> Iterator[Case]:
    """Yield a request that no pong to an earlier ping answers."""
    often = welcome(ping_ms=200)
    case = Case("a pong of an earlier session answers no request of this one", "W12 W28")
    case.wait(RETRY).control(often).control(announce(1), LAYOUT, asks=[0, 1, 2])
    case.wait(RETRY, sends=[{"type": "ping"}], asks=[]).pong()
    case.control(message("refuse", code="unknown-worker", text=""))
    case.control(often).wait(TICK, asks=[0, 1, 2]).wait(1_500, asks=[])
    case.pong().wait(TICK, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})


def _slow_layouts() -> Iterator[Case]:
    """Yield what is asked while a layout takes long to come: it may have many bytes."""
    asked = {"type": "fetch", "version": 1, "layout": True}
    beacon = message("beacon", **number(1, EPOCH))
    alive = message("pong", epoch=EPOCH, models={"m": 1})  # to a ping that was sent before
    case = Case("a layout that is on its way is not asked for again", "W4 W7").joined()
    case.control(announce(1), sends=[asked])
    for _ in range(5):
        case.wait(3_000, silent=["fetch"]).control(alive, silent=["fetch"])
        case.data(beacon, silent=["fetch"])
    case.wait(2_000, sends=[asked])  # after 16 s all the same
    case.control(announce(1), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    case = Case("a layout that was lost is asked for again", "W7").joined()
    case.control(announce(1), sends=[asked]).wait(REPEAT, silent=["fetch"]).pong()
    case.wait(TICK, sends=[asked]).control(announce(1), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    case = Case("a newer version than one whose layout is awaited is news", "W4 W7").joined()
    newer = message("pong", epoch=EPOCH, models={"m": 2})
    latest = {"type": "fetch", "version": 0, "layout": True}
    yield case.control(announce(1), sends=[asked]).wait(RETRY).control(newer, sends=[latest])


def _catching_up() -> Iterator[Case]:
    latest = {"type": "fetch", "version": 0}
    for name, rules, word in (
        ("gone", "W26 W27", message("refuse", code="gone", text="", **number(2, EPOCH))),
        ("aborted", "W14 W26", message("abort", **number(2, EPOCH))),
    ):
        case = Case(f"a version that was caught up with is {name}", rules).joined()
        case.data(announce(1), LAYOUT).data(*chunk(1, 0)).data(announce(2))
        case.wait(RETRY, asks=[0, 1, 2]).control(word, sends=[latest]).wait(RETRY)
        case.control(message("pong", epoch=EPOCH, models={"m": 3}), sends=[latest])
        case.control(announce(3), asks=[0, 1, 2])
        case.fetched(3, sends=[applied(3)], runs={"m": 3})
        yield case.pushed(4, sends=[applied(4)], runs={"m": 4})
    abort, layout = message("abort", **number(3, EPOCH)), {"type": "fetch", "version": 3}
    case = Case("an abort of another version than the one that is caught up with", "W14 W26")
    case.joined().data(announce(1), LAYOUT).data(*chunk(1, 0)).data(announce(2))
    gone = message("refuse", code="gone", text="", **number(2, EPOCH))
    case.wait(RETRY, asks=[0, 1, 2]).control(abort, silent=["fetch"]).control(gone, sends=[latest])
    case.wait(RETRY).control(abort, silent=["fetch"])
    case.control(announce(3, layout=OTHER_LAYOUT), sends=[layout]).wait(RETRY)
    case.control(abort, silent=["fetch"]).control(announce(4), asks=[0, 1, 2])
    yield case.fetched(4, sends=[applied(4), latest], runs={"m": 4})
    case = Case("an undecided version that was announced while catching up", "P10 W14 W26").joined()
    together: Json = {"commit": "together", "acknowledge": "staged"}
    case.data(announce(1), LAYOUT).data(*chunk(1, 0)).data(announce(2)).wait(RETRY, asks=[0, 1, 2])
    case.data(announce(3, **together)).fetched(2, sends=[applied(2), latest], runs={"m": 2})
    case.wait(RETRY).control(announce(3, **together), asks=[0, 1, 2])
    case.fetched(3, sends=[{**applied(3), "type": "staged"}], runs={"m": 2})
    commit = message("commit", **number(3, EPOCH), digest=applied(3)["digest"])
    yield case.control(commit, sends=[applied(3)], runs={"m": 3})


def _whole() -> Iterator[Case]:
    """Yield versions that come with their announcement."""
    cut = 16  # bytes of a chunk
    sums = digest(hashlib.sha256(LAYOUT).hexdigest(), cut, [crc32c(data_of(2))])
    content = {"crc": crc32c(data_of(2)), "digest": sums}
    there = {"type": "applied", **number(2, EPOCH), "digest": sums}
    one = message("chunk", **number(2, EPOCH), index=0, crc=crc32c(data_of(2)))

    def known(name: str) -> Case:
        return Case(name, "W9 W13 W31").joined().pushed(1, runs={"m": 1})

    def whole(**fields: Any) -> bytes:
        told: Json = {"chunk_bytes": cut, "whole": content, **fields}
        return announce(2, **told)

    yield known("a whole version").data(whole(), data_of(2), sends=[there], runs={"m": 2})
    for name, header, payload in (
        ("with a wrong CRC", whole(whole={**content, "crc": 5}), data_of(2)),
        ("with damaged bytes", whole(), data_of(3)),
        ("with too few bytes", whole(), data_of(2)[1:]),
    ):
        case = known(f"a whole version {name}").data(header, payload, runs={"m": 1})
        case.wait(RETRY, asks=[0], runs={"m": 1})
        yield case.control(one, data_of(2), sends=[there], runs={"m": 2})
    case = known("a whole version with a wrong digest")
    case.data(whole(whole={**content, "digest": "0" * 64}), data_of(2), runs={"m": 1})
    case.wait(RETRY, asks=[0]).control(one, data_of(2), runs={"m": 1})
    yield case.control(end(2, of=sums), sends=[there], runs={"m": 2})
    case = Case("a whole version of a layout that is not known", "W7").joined()
    case.data(whole(), data_of(2), sends=[{"type": "fetch", "version": 2, "layout": True}])
    case.control(announce(2, chunk_bytes=cut), LAYOUT, asks=[0], runs={"m": 0})
    case.control(one, data_of(2)).control(end(2, of=sums), runs={"m": 2})
    yield case
    case = known("a whole version that waits for its commit")
    together: Json = {"commit": "together", "acknowledge": "staged"}
    staged = {"type": "staged", **number(2, EPOCH), "digest": sums}
    case.data(whole(**together), data_of(2), sends=[staged], runs={"m": 1})
    commit = message("commit", **number(2, EPOCH), digest=sums)
    yield case.control(commit, sends=[there], runs={"m": 2})


def _refusing() -> Iterator[Case]:
    def failed(code: str) -> list[Json]:
        return [{"type": "failed", **number(1, EPOCH), "code": code}]

    wrong = "0" * 64
    case = (
        Case("a digest that does not match three times", "W13").joined().data(announce(1), LAYOUT)
    )
    for index in range(3):
        case.data(*chunk(1, index))
    case.data(end(1, of=wrong), silent=["applied", "failed"])
    for last in (False, True):
        case.wait(TICK, asks=[0, 1, 2])
        for index in range(3):
            case.control(*chunk(1, index))
        expect: Json = {"sends": failed("digest-mismatch")} if last else {"silent": ["failed"]}
        case.control(end(1, of=wrong), **expect, runs={"m": 0})
    yield case
    for name, header, payload, code in (
        ("an encoding that is not known", announce(1, encoding="zip"), LAYOUT, "unsupported"),
        ("an encryption", announce(1, encryption="aes"), LAYOUT, "unsupported"),
        ("another layout than announced", announce(1), OTHER_LAYOUT, "layout-invalid"),
        ("a layout cut short", announce(1), LAYOUT[:-1], "layout-invalid"),
        ("other bytes than the layout has", announce(1, nbytes=11), LAYOUT, "layout-invalid"),
        ("too many chunks", announce(1, nbytes=2**23, chunk_bytes=1), LAYOUT, "too-many-chunks"),
    ):
        case = Case(f"declined: {name}", "W6").joined()
        case.data(header, payload, sends=failed(code), runs={"m": 0})
        yield case.pushed(2, sends=[applied(2)], runs={"m": 2})
    case = Case("declined: more bytes than are taken", "W6", options={"bytes_max": 20}).joined()
    case.data(announce(1, nbytes=21), sends=failed("too-large"))
    case.data(announce(1, nbytes=21), silent=NOTHING)
    yield case.pushed(2, sends=[applied(2)], runs={"m": 2})
    case = Case("declined: a layout that does not fit", "W6", options={"in_place": IN_PLACE})
    unfit = announce(1, layout=OTHER_LAYOUT)
    case.joined().data(unfit, OTHER_LAYOUT, sends=failed("layout-mismatch"))
    yield case.pushed(2, sends=[applied(2)], runs={"m": 2})
    case = Case("a model that nobody asked for", "W4").joined()
    yield case.data(announce(1, model="n"), LAYOUT, silent=NOTHING)
    case = Case("a malformed message changes nothing", "W21").joined().data(announce(1), LAYOUT)
    case.data(*chunk(1, 0)).data(b"{", silent=NOTHING).control(b'{"wbp":2}', silent=NOTHING)
    case.control(message("abort", model="m", epoch=EPOCH, version=0), silent=["hello"])
    yield case.data(*chunk(1, 1)).data(*chunk(1, 2)).data(end(1), sends=[applied(1)], runs={"m": 1})
    case = Case("what is not newer is ignored", "W5").joined().pushed(2, runs={"m": 2})
    case.data(announce(2), silent=NOTHING).data(announce(1), silent=NOTHING)
    yield case.control(message("pong", epoch=EPOCH, models={"m": 1}), silent=NOTHING)
    case = (
        Case("a version that is gone", "W27").joined().control(announce(1), LAYOUT, asks=[0, 1, 2])
    )
    gone = message("refuse", code="gone", text="", **number(1, EPOCH))
    case.control(gone, sends=[{"type": "fetch", "version": 0}])
    yield case.pushed(2, sends=[applied(2)], runs={"m": 2})


def _for_good() -> Iterator[Case]:
    failed = {"type": "failed", **number(1, EPOCH), "code": "too-large"}
    case = Case("what is declined for good is not asked for again", "W6 W15 W17")
    case.options = {"bytes_max": 20}
    case.joined().control(announce(1, nbytes=21), LAYOUT, sends=[failed])
    alive = message("pong", epoch=EPOCH, models={"m": 1})
    for _ in range(6):
        case.control(alive, silent=["fetch"])
        case.wait(REPEAT, sends=[failed], silent=["fetch"])
    newer = message("pong", epoch=EPOCH, models={"m": 2})
    case.control(newer, sends=[{"type": "fetch", "version": 0}])
    case.control(announce(2), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(2, sends=[applied(2)], runs={"m": 2})


def _failed(code: str, version: int = 1) -> Json:
    return {"type": "failed", **number(version, EPOCH), "code": code}


def _after(case: Case, seconds: int) -> Case:
    """News in each second until then lead to nothing, and the first one after it to a fetch."""
    alive = message("pong", epoch=EPOCH, models={"m": 1})
    for _ in range(seconds - 1):
        case.control(alive, silent=["fetch"]).wait(1_000, silent=["fetch"])
    case.control(alive, silent=["fetch"]).wait(700, silent=["fetch"])
    case.control(alive, silent=["fetch"]).wait(500, silent=["fetch"])
    return case.control(alive, sends=[{"type": "fetch", "version": 0}])


def _backoff() -> Iterator[Case]:
    """Yield versions that fail again and again, and are asked for ever less often."""

    def mismatched(case: Case) -> Case:
        """The version comes as often as it may, and never matches its digest."""
        case.control(announce(1), LAYOUT, asks=[0, 1, 2])
        for last in (False, False, True):
            for index in range(3):
                case.control(*chunk(1, index))
            told: Json = {"sends": [_failed("digest-mismatch")]} if last else {"silent": ["failed"]}
            case.control(end(1, of="0" * 64), **told, runs={"m": 0})
            if not last:
                case.wait(TICK, asks=[0, 1, 2])
        return case

    case = Case("a digest that never matches is put off ever longer", "W13 W36").joined()
    mismatched(case.data(message("beacon", **number(0, EPOCH))))
    for seconds in (1, 2, 4, 8, 16, 16):
        _after(case, seconds)
        mismatched(case)
    _after(case, 16).control(announce(1), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    zipped = announce(1, encoding="zip")
    case = Case("an encoding that is not known is put off", "W6 W36").joined()
    case.control(zipped, LAYOUT, sends=[_failed("unsupported")])
    for seconds in (1, 2, 4):
        _after(case, seconds).control(zipped, sends=[_failed("unsupported")])
    _after(case, 8).control(announce(1), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    case = Case("what is tried again is no longer reported as failed", "W17 W36").joined()
    case.data(zipped, LAYOUT, sends=[_failed("unsupported")])
    case.wait(REPEAT, sends=[_failed("unsupported")])
    case.data(announce(1), LAYOUT).wait(REPEAT, silent=["failed"], asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    case = Case("a layout that is never valid is put off", "W6 W7 W36").joined()
    one = {"type": "fetch", "version": 1, "layout": True}
    case.control(announce(1), sends=[one])
    case.control(announce(1), OTHER_LAYOUT, sends=[_failed("layout-invalid")])
    for seconds in (1, 2):
        _after(case, seconds).control(announce(1), sends=[one])
        case.control(announce(1), OTHER_LAYOUT, sends=[_failed("layout-invalid")])
    _after(case, 4).control(announce(1), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})


def _news_put_off() -> Iterator[Case]:
    """Yield what a worker hears while a version is put off."""
    alive = message("pong", epoch=EPOCH, models={"m": 1})
    newest = {"type": "fetch", "version": 0}
    zipped = announce(1, encoding="zip")
    case = Case("a newer version than the one that is put off is news", "W36").joined()
    case.control(zipped, LAYOUT, sends=[_failed("unsupported")]).control(alive, silent=["fetch"])
    newer = message("pong", epoch=EPOCH, models={"m": 2})
    case.control(newer, sends=[newest]).control(announce(2), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(2, sends=[applied(2)], runs={"m": 2})
    case = Case("a failure is reported until another version arrives", "W17").joined()
    case.control(zipped, LAYOUT, sends=[_failed("unsupported")])
    case.wait(REPEAT, sends=[_failed("unsupported")]).control(announce(2), LAYOUT)
    yield case.wait(REPEAT, silent=["failed"])
    case = Case("what is put off is taken where it comes by itself", "W36").joined()
    case.data(zipped, LAYOUT, sends=[_failed("unsupported")])
    yield case.pushed(1, sends=[applied(1)], runs={"m": 1})
    case = Case("a new session asks no sooner for what is put off", "W28 W36").joined()
    case.control(zipped, LAYOUT, sends=[_failed("unsupported")])
    _after(case, 1).control(zipped, sends=[_failed("unsupported")])
    case.control(message("refuse", code="unknown-worker", text="")).wait(RETRY)
    case.control(welcome(m=1), silent=["fetch"]).wait(1_000).control(alive, silent=["fetch"])
    yield case.wait(1_000).control(alive, sends=[newest])
    later = EPOCH + 1
    case = Case("a version of another epoch is not put off with its like", "W28 W36").joined()
    case.control(zipped, LAYOUT, sends=[_failed("unsupported")])
    case.control(message("refuse", code="unknown-worker", text="")).wait(RETRY)
    yield case.control(welcome(later, m=1), sends=[newest])
    name = "what is before a version that is put off waits with it, until that is aborted"
    case = Case(name, "W14 W36")
    fails = announce(2, encoding="zip", commit="together", acknowledge="staged")
    case.joined().control(fails, LAYOUT, sends=[_failed("unsupported", 2)])
    case.control(alive, silent=["fetch"]).control(message("abort", **number(2, EPOCH)))
    yield case.control(alive, sends=[newest])


def _deciding() -> Iterator[Case]:
    staged = {"type": "staged", **number(1, EPOCH), "digest": digest_of(1)}
    together: Json = {"commit": "together", "acknowledge": "staged"}

    def held(name: str, rules: str = "W14") -> Case:
        case = Case(name, rules).joined().data(announce(1, **together), LAYOUT)
        for index in range(3):
            case.data(*chunk(1, index))
        return case.data(end(1), sends=[staged], silent=["applied"], runs={"m": 0})

    def commit(version: int = 1, epoch: int = EPOCH, of: str | None = None) -> bytes:
        return message("commit", **number(version, epoch), digest=of or digest_of(version))

    case = held("a version is committed", "W14 W17").wait(
        REPEAT, sends=[staged], silent=["applied"]
    )
    yield case.control(commit(), sends=[applied(1)], runs={"m": 1})
    for name, wrong in {
        "another digest": commit(of="0" * 64),
        "another version": commit(2),
        "another epoch": commit(epoch=EPOCH + 1),
    }.items():
        case = held(f"a commit of {name} has no effect")
        case.control(wrong, silent=["applied"], runs={"m": 0})
        yield case.control(commit(), sends=[applied(1)], runs={"m": 1})
    case = Case("a commit before all has come has no effect", "W14").joined()
    case.data(announce(1, **together), LAYOUT).data(*chunk(1, 0)).control(commit())
    case.data(*chunk(1, 1)).data(*chunk(1, 2))
    case.data(end(1), sends=[staged], silent=["applied"], runs={"m": 0})
    yield case.control(commit(), sends=[applied(1)], runs={"m": 1})
    case = held("an announcement as auto commits", "W5 W14")
    yield case.control(announce(1), sends=[applied(1)], runs={"m": 1})
    abort = message("abort", **number(1, EPOCH))
    case = held("a version is aborted").control(abort, runs={"m": 0})
    case.control(commit(), silent=["applied"], runs={"m": 0})
    case.wait(REPEAT, silent=["staged", "applied"])
    yield case.pushed(2, sends=[applied(2)], runs={"m": 2})
    case = Case("an abort while it arrives", "W14").joined().data(announce(1), LAYOUT)
    case.data(*chunk(1, 0)).control(abort).wait(TICK, asks=[])
    case.data(*chunk(1, 1)).data(*chunk(1, 2)).data(end(1), silent=["applied", "staged"])
    yield case.pushed(2, sends=[applied(2)], runs={"m": 2})
    unknown = message("refuse", code="unknown-worker", text="")
    case = held("staged is said again in the next session", "W14 W28").control(unknown)
    case.wait(RETRY).control(welcome(), sends=[staged], silent=["applied"], runs={"m": 0})
    yield case.control(commit(), sends=[applied(1)], runs={"m": 1})
    case = held("what waits for the commit of an earlier epoch is dropped", "W14 W28")
    case.control(unknown).wait(RETRY).control(welcome(EPOCH + 1), silent=["staged"])
    yield case.control(commit(), silent=["applied"]).wait(REPEAT, silent=["staged"], runs={"m": 0})
    case = held("a newer version replaces one that waits for its commit", "W8")
    case.pushed(2, sends=[applied(2)], runs={"m": 2})
    yield case.control(commit(), silent=["applied"], runs={"m": 2})
    case = Case("staged is said where it is asked for", "W14").joined()
    case.data(announce(1, acknowledge="staged"), LAYOUT)
    for index in range(3):
        case.data(*chunk(1, index))
    yield case.data(end(1), sends=[staged, applied(1)], runs={"m": 1})


def _living() -> Iterator[Case]:
    running = {"m": {"epoch": EPOCH, "version": 1, "digest": digest_of(1)}}
    case = Case("reports are repeated", "W17").joined().pushed(1, runs={"m": 1})
    yield case.wait(REPEAT, sends=[applied(1), {"type": "ping"}])
    case = Case("progress of each model is repeated", "W17", options={"models": ["m", "n"]})
    case.joined().data(announce(1), LAYOUT).data(announce(1, model="n"), LAYOUT)
    told = {**number(1, EPOCH), "type": "progress", "phase": "receiving"}
    yield case.wait(REPEAT, sends=[told, {**told, "model": "n"}])
    case = Case("messages of another epoch have no effect", "W3").joined()
    for epoch in (EPOCH - 1, EPOCH + 1):
        case.data(announce(1, epoch=epoch), LAYOUT, silent=NOTHING)
        case.data(*chunk(1, 0, epoch=epoch), silent=NOTHING)
        case.control(end(1, epoch=epoch), silent=NOTHING)
        case.control(message("pong", epoch=epoch, models={"m": 9}), silent=NOTHING)
    yield case.pushed(1, sends=[applied(1)], runs={"m": 1})
    case = Case("who is not known says hello again", "W1 W20").joined().pushed(1, runs={"m": 1})
    case.wait(RETRY).control(message("refuse", code="unknown-worker", text=""))
    hello = {"type": "hello", "models": running, "epoch": EPOCH}
    case.wait(RETRY, sends=[hello], runs={"m": 1}).control(welcome(m=1), silent=["fetch"])
    yield case.pushed(2, sends=[applied(2)], runs={"m": 2})
    case = (
        Case("a publisher of a later epoch is followed", "W2 W28").joined().pushed(5, runs={"m": 5})
    )
    case.control(message("refuse", code="unknown-worker", text="")).wait(RETRY)
    later = EPOCH + 1
    case.control(welcome(later, m=1), sends=[{"type": "fetch", "version": 0, "epoch": later}])
    case.control(announce(1, epoch=later), LAYOUT, asks=[0, 1, 2])
    for index in range(3):
        case.control(*chunk(1, index, epoch=later))
    yield case.control(end(1, epoch=later), sends=[applied(1, later)], runs={"m": 1})
    yield from _sessions()
    case = (
        Case("a publisher of a lower epoch is not followed", "W2 W15")
        .joined()
        .pushed(1, runs={"m": 1})
    )
    case.control(message("refuse", code="unknown-worker", text="")).wait(RETRY)
    case.control(welcome(EPOCH - 1, m=9), silent=NOTHING)
    case.control(announce(9, epoch=EPOCH - 1), LAYOUT, silent=NOTHING)
    yield case.wait(2 * RETRY, sends=[{"type": "hello"}], silent=["applied"], runs={"m": 1})
    yield from _ages()
    case = Case("a silent publisher is lost", "W19").joined().pushed(1, runs={"m": 1})
    case.wait(LOST).wait(RETRY, sends=[{"type": "hello", "models": running}], runs={"m": 1})
    yield case.control(welcome(m=1)).pushed(2, sends=[applied(2)], runs={"m": 2})
    case = Case("a published check has no effect", "W3 W19").joined().wait(RETRY)
    check = {"model": "m", "version": 1, "first": 0}
    case.data(message("check", **check, epoch=EPOCH + 1), silent=["hello"]).wait(DEAF)
    case.data(message("check", **check, epoch=EPOCH))
    yield case.wait(LOST - DEAF, sends=[{"type": "hello"}])
    case = Case("published messages alone keep a session only so long", "W19").joined()
    for _ in range(6):
        case.wait(DEAF, silent=["hello"])
        case.data(message("beacon", model="m", epoch=EPOCH, version=0))
    yield case.wait(DEAF, sends=[{"type": "hello"}])
    case = Case("a refused name is asked for again", "W1 W20").wait(RETRY)
    case.control(message("refuse", code="name-taken", text=""))
    yield case.wait(2 * RETRY, sends=[{"type": "hello"}])


def _not_too_much() -> Iterator[Case]:
    """Yield what a worker must not conclude: from news twice, from words of another epoch."""
    alive = message("pong", epoch=EPOCH, models={"m": 1})
    newest = {"type": "fetch", "version": 0}
    case = Case("news that comes twice at once leads to one fetch", "W4").joined()
    case.control(alive, sends=[newest]).control(alive, silent=["fetch"]).wait(RETRY)
    yield case.control(alive, sends=[newest])
    case = Case("what was declined is asked for in the next session", "W15 W28")
    case.options = {"bytes_max": 20}
    case.joined().control(announce(1, nbytes=21), LAYOUT, sends=[_failed("too-large")])
    case.wait(RETRY).control(alive, silent=["fetch"])
    case.control(message("refuse", code="unknown-worker", text="")).wait(RETRY)
    yield case.control(welcome(m=1), sends=[newest])
    case = Case("a version of another epoch is gone", "W27").joined()
    case.control(announce(1), LAYOUT, asks=[0, 1, 2])
    gone = message("refuse", code="gone", text="", **number(1, EPOCH - 1))
    case.control(gone, silent=["fetch"])
    yield case.fetched(1, sends=[applied(1)], runs={"m": 1})
    case = Case("words of another epoch lead to few hellos", "W3").joined().wait(RETRY)
    other = message("pong", epoch=EPOCH + 1, models={})
    yield case.control(other).control(other, silent=["hello"]).control(other, silent=["hello"])
    case = Case("who catches up does not look at news", "W26").joined()
    case.data(announce(1), LAYOUT).data(*chunk(1, 0)).data(announce(2)).wait(RETRY, asks=[0, 1, 2])
    case.control(message("pong", epoch=EPOCH, models={"m": 3}), silent=["fetch"])
    case.fetched(2, sends=[applied(2), newest], runs={"m": 2})
    case.data(announce(3)).data(*chunk(3, 0)).data(announce(4)).wait(RETRY, asks=[0, 1, 2])
    yield case.fetched(4, sends=[applied(4)], runs={"m": 4})
    case = Case("on a slow link patience is longer", "W12 W32").joined()
    case.data(message("beacon", **number(0, EPOCH)))
    case.control(announce(1), LAYOUT, asks=[0, 1, 2]).wait(900).control(*chunk(1, 0))
    case.wait(REPEAT, asks=[]).pong().wait(2_000, asks=[]).wait(700, asks=[1, 2])
    case.control(*chunk(1, 1)).control(*chunk(1, 2))
    yield case.control(end(1), sends=[applied(1)], runs={"m": 1})
    case = Case("as long as nothing published has come, pings say so", "W18").joined()
    yield case.wait(REPEAT, sends=[{"type": "ping", "subscribed": False}])


def _renaming() -> Iterator[Case]:
    """Yield what a worker makes of the word that its version has another name."""
    later = EPOCH + 1

    def rename(version: int = 1, epoch: int = later, /, **was: Any) -> bytes:
        old = {"epoch": EPOCH, "version": 1, "digest": digest_of(1), **was}
        return message("rename", **number(version, epoch), was=old)

    def again(name: str) -> Case:
        """A worker that runs version 1 comes to a publisher that was restarted."""
        case = Case(name, "W25").joined().pushed(1, sends=[applied(1)], runs={"m": 1})
        return case.control(welcome(later), asks=[])

    there = {**applied(1, later), "digest": digest_of(1)}
    case = again("what runs has another name").control(rename(), sends=[there], runs={"m": 1})
    case.control(announce(1, epoch=later), silent=NOTHING)
    case.control(message("beacon", model="m", epoch=later, version=1), silent=NOTHING)
    yield case.wait(REPEAT, sends=[there], asks=[], runs={"m": 1})
    case = again("what runs has another number").control(rename(2), runs={"m": 2})
    yield case.control(announce(1, epoch=later), silent=NOTHING, runs={"m": 2})
    case = again("a name comes twice").control(rename(), sends=[there])
    yield case.control(rename(), silent=NOTHING, runs={"m": 1})
    for name, header in {
        "another version than runs": rename(2, version=2),
        "another epoch's version": rename(2, epoch=later),
        "other bytes": rename(2, digest=digest_of(2)),
        "bytes that nobody hashed": rename(2, digest=""),
        "a name of another epoch": rename(2, later + 1),
    }.items():
        case = again(f"{name}: no name of what runs")
        yield case.control(header, silent=NOTHING, runs={"m": 1})
    case = Case("nothing runs that could have a name", "W25").joined()
    yield case.control(rename(2, EPOCH), silent=NOTHING, runs={"m": 0})
    case = again("a version that arrives gives way to the name")
    case.data(announce(1, epoch=later), LAYOUT)
    case.data(*chunk(1, 0, epoch=later)).control(rename(), sends=[there], asks=[])
    yield case.data(*chunk(1, 1, epoch=later), silent=NOTHING, runs={"m": 1})
    case = again("a newer version that arrives stays")
    case.data(announce(3, epoch=later), LAYOUT).data(*chunk(3, 0, epoch=later))
    case.control(rename(2), silent=["applied"], runs={"m": 1})
    case.data(*chunk(3, 1, epoch=later)).data(*chunk(3, 2, epoch=later))
    yield case.data(end(3, epoch=later), sends=[applied(3, later)], runs={"m": 3})
