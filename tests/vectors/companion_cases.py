"""The sequences of the feature `companions`: versions of two models that are applied at once. (C2)

The worker of most cases wants the models `m` and `n`, whose versions have the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from weightbus.tests.vectors.parts import Json
from weightbus.tests.vectors.sequence_cases import (
    EPOCH,
    LAYOUT,
    REPEAT,
    RETRY,
    Case,
    announce,
    applied,
    chunk,
    digest_of,
    end,
    message,
    number,
    told,
    welcome,
)

NONE = {"m": 0, "n": 0}


@dataclass
class Two(Case):
    """A sequence of a worker of two models."""

    options: Json = field(default_factory=lambda: {"models": ["m", "n"]})

    def joined(self) -> "Two":
        """Let the worker in."""
        super().joined()
        return self

    def delivered(
        self, model: str, version: int, beside: dict[str, int], epoch: int = EPOCH, **expect: Any
    ) -> "Two":
        """Push a version that is committed already; `beside`: its companions."""
        self.data(announce(version, epoch=epoch, model=model, companions=beside), LAYOUT)
        for index in range(3):
            self.data(*chunk(version, index, epoch=epoch, model=model))
        self.data(end(version, epoch=epoch, model=model), **expect)
        return self

    def staged(self, model: str, beside: dict[str, int]) -> "Two":
        """Push version 1, which waits for a commit."""
        together: Json = {"commit": "together", "acknowledge": "staged", "companions": beside}
        self.data(announce(1, model=model, **together), LAYOUT)
        for index in range(3):
            self.data(*chunk(1, index, model=model))
        self.data(end(1, model=model), sends=[_staged(model)], silent=["applied"], runs=NONE)
        return self

    def commit(self, model: str, **expect: Any) -> "Two":
        """Commit version 1."""
        digest = digest_of(1)
        self.control(message("commit", **number(1, EPOCH, model), digest=digest), **expect)
        return self

    def left(self) -> "Two":
        """End the session."""
        unknown = message("refuse", code="unknown-worker", text="")
        self.control(unknown).wait(RETRY)
        return self


def cases() -> Iterator[Json]:
    """Yield all sequences."""
    yield from told((*_committing(), *_late(), *_sessions()))


def _staged(model: str) -> Json:
    return {"type": "staged", **number(1, EPOCH, model), "digest": digest_of(1)}


def _applied(model: str, version: int = 1, epoch: int = EPOCH) -> Json:
    return {**applied(version, epoch), "model": model}


def _both(name: str) -> Two:
    case = Two(name, "C2").joined()
    return case.staged("m", {"n": 1}).staged("n", {"m": 1})


def _committing() -> Iterator[Case]:
    case = _both("companions are applied at once, when the last is committed")
    case.commit("m", silent=["applied"], runs=NONE).commit("m", silent=["applied"], runs=NONE)
    yield case.commit("n", sends=[_applied("m"), _applied("n")], runs={"m": 1, "n": 1})
    case = _both("the order of the commits does not matter")
    case.commit("n", silent=["applied"], runs=NONE)
    yield case.commit("m", sends=[_applied("m"), _applied("n")], runs={"m": 1, "n": 1})
    case = _both("a version that waits for its companion is reported as staged")
    case.commit("m").wait(REPEAT, sends=[_staged("m"), _staged("n")], silent=["applied"])
    yield case.commit("n", runs={"m": 1, "n": 1})
    case = Two("a committed version waits until its companion has arrived", "C2").joined()
    case.staged("m", {"n": 1}).commit("m", silent=["applied"], runs=NONE)
    sends = [_applied("m"), _applied("n")]
    yield case.delivered("n", 1, {"m": 1}, sends=sends, runs={"m": 1, "n": 1})
    case = _both("an abort drops companions").commit("m", runs=NONE)
    for model in "mn":
        case.control(message("abort", **number(1, EPOCH, model)))
    case.commit("m", silent=["applied"]).commit("n", silent=["applied"], runs=NONE)
    yield case.wait(REPEAT, silent=["staged", "applied"])


def _late() -> Iterator[Case]:
    case = Two("companions that come committed wait for each other", "C2").joined()
    case.delivered("n", 3, {"m": 2}, silent=["applied"], runs=NONE)
    sends = [_applied("m", 2), _applied("n", 3)]
    yield case.delivered("m", 2, {"n": 3}, sends=sends, runs={"m": 2, "n": 3})
    case = Two("companions of models that the worker does not want do not matter", "C2").joined()
    yield case.delivered("m", 1, {"z": 1}, sends=[_applied("m")], runs={"m": 1})
    case = Two("a newer version of the other model will do", "C2").joined()
    case.delivered("m", 1, {"n": 1}, silent=["applied"], runs=NONE)
    sends = [_applied("n", 2), _applied("m")]
    yield case.delivered("n", 2, {}, sends=sends, runs={"m": 1, "n": 2})
    case = Two("a companion may run already", "C2").joined()
    case.delivered("n", 1, {}, runs={"n": 1})
    yield case.delivered("m", 1, {"n": 1}, sends=[_applied("m")], runs={"m": 1, "n": 1})
    case = Two("an older version of the other model will not do", "C2").joined()
    case.delivered("n", 1, {}, runs={"n": 1})
    yield case.delivered("m", 1, {"n": 2}, silent=["applied"], runs={"m": 0, "n": 1})
    case = _both("versions of two groups do not mix").commit("m")
    case.delivered("n", 2, {"m": 2}, silent=["applied"], runs=NONE)
    case.commit("n", silent=["applied"], runs=NONE)
    sends = [_applied("m", 2), _applied("n", 2)]
    yield case.delivered("m", 2, {"n": 2}, sends=sends, runs={"m": 2, "n": 2})
    case = Two("three companions are applied at once", "C2", options={"models": ["m", "n", "o"]})
    case.joined().delivered("m", 1, {"n": 1, "o": 1}, runs=NONE)
    case.delivered("n", 1, {"m": 1, "o": 1}, silent=["applied"], runs=NONE)
    runs = {"m": 1, "n": 1, "o": 1}
    sends = [_applied(model) for model in "mno"]
    yield case.delivered("o", 1, {"m": 1, "n": 1}, sends=sends, runs=runs)


def _sessions() -> Iterator[Case]:
    case = _both("a commit holds in the next session").commit("m").left()
    case.control(welcome(m=1, n=1), sends=[_staged("m"), _staged("n")], runs=NONE)
    sends = [_applied("m"), _applied("n")]
    yield case.control(
        announce(1, model="n", companions={"m": 1}), sends=sends, runs={"m": 1, "n": 1}
    )
    case = _both("what waits for its companion is dropped when another publisher begins")
    case.commit("m").left().control(welcome(EPOCH + 1), silent=["staged"])
    yield case.commit("n", silent=["applied"]).wait(REPEAT, silent=["staged"], runs=NONE)
    later = EPOCH + 1
    case = Two("a companion that runs may get its name", "C2").joined()
    case.delivered("n", 1, {}, runs={"n": 1}).left().control(welcome(later, m=1, n=1))
    case.delivered("m", 1, {"n": 1}, epoch=later, silent=["applied"], runs={"m": 0})
    was = {"epoch": EPOCH, "version": 1, "digest": digest_of(1)}
    sends = [_applied("n", 1, later), _applied("m", 1, later)]
    rename = message("rename", **number(1, later, "n"), was=was)
    yield case.control(rename, sends=sends, runs={"m": 1, "n": 1})
