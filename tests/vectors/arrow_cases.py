"""Sequences for arrows of the worker's tables that no other sequence needs (`flip_arrows.py`).

Whether a version is still waited for shows in what a worker makes of a chunk of another one, which
is news only where none is.
"""

from collections.abc import Iterator

from weightbus.tests.vectors.parts import Json
from weightbus.tests.vectors.sequence_cases import (
    EPOCH,
    LAYOUT,
    PATIENCE,
    REPEAT,
    RETRY,
    TICK,
    Case,
    announce,
    applied,
    chunk,
    end,
    message,
    number,
    told,
    welcome,
)

LATER = EPOCH + 1
TOGETHER: Json = {"commit": "together", "acknowledge": "staged"}
NEWEST: Json = {"type": "fetch", "version": 0}
UNKNOWN = message("refuse", code="unknown-worker", text="")
GONE = message("refuse", code="gone", text="", model="m", epoch=EPOCH, version=1)
ABORT = message("abort", **number(1, EPOCH))


def cases() -> Iterator[Json]:
    """Yield those of `sequences.json`."""
    yield from told((*_announced(), *_dropped(), _refused()))


def applying_cases() -> Iterator[Json]:
    """Yield that of `applying.json`."""
    case = Case("what a torn apply has ended is not waited for", "W4 W24")
    case.options["applies"] = ["done", "torn"]
    case.joined().pushed(1, runs={"m": 1}).pushed(2, runs={"m": 0})
    case.wait(RETRY, silent=["fetch"])
    yield from told([case.data(*chunk(3, 0), sends=[NEWEST])])


def _announced() -> Iterator[Case]:
    """A version waits for its layout, until something happens to it."""

    def awaited(name: str, rules: str) -> Case:
        case = Case(name, rules).joined()
        asked = {"type": "fetch", "version": 1, "layout": True}
        return case.data(announce(1, **TOGETHER), sends=[asked])

    case = awaited("a newer version replaces one whose layout is awaited", "W7 W8")
    wanted = {"type": "fetch", "version": 2, "layout": True}
    case.data(announce(2), sends=[wanted]).wait(REPEAT).pong().wait(TICK, sends=[wanted])
    case.control(announce(2), LAYOUT, asks=[0, 1, 2])
    yield case.fetched(2, sends=[applied(2)], runs={"m": 2})
    for name, rules, happens in (
        ("a version whose layout is awaited is gone", "W4 W27", GONE),
        ("a version whose layout is awaited is aborted", "W4 W14", ABORT),
    ):
        case = awaited(name, rules).control(happens).wait(RETRY)
        yield case.data(*chunk(2, 0), sends=[NEWEST])
    case = awaited("a layout is no longer awaited in the next session", "W4 W28")
    case.control(UNKNOWN).wait(RETRY).control(welcome(LATER)).wait(RETRY)
    yield case.data(*chunk(1, 0, epoch=LATER), sends=[{**NEWEST, "epoch": LATER}])
    case = Case("what was declined for a while is news again", "W4 W6").joined()
    failed = {"type": "failed", **number(1, EPOCH), "code": "unsupported"}
    case.data(announce(1, encoding="another"), sends=[failed]).wait(REPEAT)  # W36
    yield case.data(*chunk(1, 0), sends=[NEWEST])


def _dropped() -> Iterator[Case]:
    """A version was here, and is not waited for any more."""

    def pushed(case: Case, version: int) -> Case:
        case.data(announce(version, **TOGETHER), LAYOUT)
        for index in range(3):
            case.data(*chunk(version, index))
        return case.data(end(version), sends=[{"type": "staged", **number(version, EPOCH)}])

    case = Case("a version that was given up is not fetched on", "W13").joined()
    case.data(announce(1), LAYOUT)
    for _ in range(3):
        for index in range(3):
            case.data(*chunk(1, index))
        case.data(end(1, of="0" * 64))
    case.wait(PATIENCE, silent=["fetch", "progress"])
    yield case.data(*chunk(2, 0), sends=[NEWEST])
    case = Case("what is gone while it arrives is not waited for", "W4 W27").joined()
    case.data(announce(1), LAYOUT).data(*chunk(1, 0)).control(GONE, sends=[NEWEST]).wait(RETRY)
    yield case.data(*chunk(2, 0), sends=[NEWEST])
    case = Case("what a newer staged version ends is not waited for", "W4 W8").joined()
    pushed(pushed(case, 1), 2)
    yield case.data(*chunk(3, 0), sends=[NEWEST])
    case = Case("what was aborted is not waited for", "W4 W14").joined()
    pushed(case, 1).control(ABORT).wait(RETRY, silent=["fetch"])
    yield case.data(*chunk(2, 0), sends=[NEWEST])
    case = Case("what was staged in an earlier epoch is not waited for", "W4 W28").joined()
    pushed(case, 1).control(UNKNOWN).wait(RETRY).control(welcome(LATER))
    yield case.data(*chunk(1, 0, epoch=LATER), sends=[{**NEWEST, "epoch": LATER}])
    case = Case("what has run is not waited for", "W4 W17").joined().pushed(1).pushed(2)
    case.data(*chunk(3, 0), sends=[NEWEST])
    yield case.wait(REPEAT, sends=[applied(2)], runs={"m": 2})


def _refused() -> Case:
    case = Case("a refusal ends the session", "W1 W20")
    for code in ("name-taken", "stale-epoch", "limit", "protocol-version"):
        case.joined().control(message("refuse", code=code, text=""), silent=["hello"])
        case.control(announce(1), LAYOUT, silent=["fetch"])
    return case.wait(RETRY, sends=[{"type": "hello"}])
