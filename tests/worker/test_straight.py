"""The shortcut for a version that arrives with its announcement has the result of the single steps.

Two workers receive the same random messages and reports. One of them never uses the shortcut, and
gets a separate report when an apply begins.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from weightbus.bus.effects import Effect, Ready, WholeStaged
from weightbus.bus.headers import encode
from weightbus.bus.limits import Timing
from weightbus.bus.messages import (
    Abort,
    Announce,
    Beacon,
    Chunk,
    Commit,
    End,
    Hello,
    Ping,
    Refuse,
    Rename,
    Running,
    Welcome,
    Whole,
)
from weightbus.bus.publisher import offers
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Outcome, Report, Wanted
from weightbus.bus.worker.follower import Follower
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.tables import TRANSITIONS
from weightbus.codecs.checksum import digest
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.tests.simulation.performing import done
from weightbus.tests.simulation.virtual_shell import version_of

EPOCH, MODEL, TOPIC = 7, "a", b"a/ctl"
LAYOUTS = {nbytes: Layout.plan([("w", "U8", (nbytes,))]) for nbytes in (4, 8)}
WELCOME = Welcome(epoch=EPOCH, data="tcp://d:1", ping_ms=1000, lost_ms=5000, models={})
STEPS = (
    *(*["whole"] * 4, *["apply"] * 4, "latest"),
    *("begin", "layout", "announce", "chunk", "end", "time"),
)
RARE = (
    "damaged",
    "strange",
    "commit",
    "abort",
    "gone",
    "want",
    "beacon",
    "rename",
    "welcome",
    "time",
)
ENDS: tuple[Outcome, ...] = ("put-back", "declined", "failed", "torn", "newer")


def data_of(version: int, nbytes: int) -> bytes:
    return bytes((version + i) % 256 for i in range(nbytes))


def whole_of(version: int, nbytes: int) -> Whole:
    crc = crc32c(data_of(version, nbytes))
    return Whole(crc=crc, digest=digest(LAYOUTS[nbytes].id, nbytes, [crc]))


class Side:
    """One of the two workers, and the versions that were ready there."""

    def __init__(self) -> None:
        identity = Hello(
            name="w", instance="a" * 32, models={}, client="client", host="host", pid=5
        )
        self.machine = WorkerMachine(identity, [MODEL], lambda _m, _l: "", 100, Timing())
        self.ready: list[tuple[int, int]] = []
        self.does(self.machine.connected(0.0), 0.0)
        self.hears(WELCOME, 0.0)

    @property
    def follower(self) -> Follower:
        return self.machine.followers[MODEL]

    def does(self, effects: list[Effect], now: float) -> list[object]:
        effects = done(self.machine, effects, now)
        self.ready += [e.staged.key for e in effects if isinstance(e, Ready)]
        return [described(e) for e in effects]

    def hears(self, message: Message, now: float, *payload: bytes) -> list[object]:
        return self.does(self.machine.receive([encode(message), *payload], now), now)

    def gets(self, message: Message, now: float, *payload: bytes) -> list[object]:
        frames = [TOPIC, encode(message), *payload]
        return self.does(self.machine.receive_published(frames, now), now)

    def receives(self, message: Announce, now: float, data: bytes) -> list[object]:
        """Receive the data directly in the place for it, if the machine returns a lease."""
        lease = self.machine.place([TOPIC, encode(message)], len(data))
        if lease is None:
            return self.gets(message, now, b"")
        lease.view[:] = data
        lease.received(len(data))
        return self.does(self.machine.receive_published(lease, now), now)

    def tells(self, event: Report | Wanted, now: float) -> list[object]:
        return self.does(self.machine.happened(event, now), now)

    @property
    def state(self) -> object:
        """The worker's whole state, except for the addresses of bytes."""
        follower, holds = self.follower, self.follower.versions
        held = [seen(h) for h in holds.all(*(phase for phase in TRANSITIONS if TRANSITIONS[phase]))]
        at = {phase: getattr(h, "key", None) for phase, h in holds.in_phase.items()}
        memory = plain(holds, "_nbytes", "_in_use", "newest_known") | {"free": len(holds._free)}  # noqa: SLF001 # pyright: ignore
        asking = plain(
            follower.planner, *(vars(follower.planner).keys() - {"_versions", "_timing"})
        )
        applying = plain(follower, "torn_applies", "epoch", "network_only", "failed")
        return held, at, holds.mode, list(holds.rejected), memory, asking, applying


def plain(of: object, *names: str) -> dict[str, str]:
    return {name: repr(vars(of)[name]) for name in names}


def seen(held: Any) -> object:
    """Return the state of a version, for comparison."""
    staged = getattr(held, "staged", None)
    about = None if staged is None else described(Ready(staged))
    waits = [getattr(held, name, None) for name in ("pushed", "lacks", "deferred_outcome")]
    return type(held), held.key, held.phase, waits, map_of(held), about


def map_of(held: Any) -> object:
    chunks = held.chunks
    return chunks if chunks is None else (chunks.crcs, chunks.here, chunks.whole, chunks.digest)


def described(effect: Effect) -> object:
    if not isinstance(effect, Ready | WholeStaged):
        return repr(effect)
    staged = effect.staged
    fields = {
        f: getattr(staged, f) for f in ("key", "digest", "report_staged", "patch", "metadata")
    }
    return type(effect).__name__, staged.layout.id, bytes(staged.data), repr(fields)


class Pair:
    """Both workers, which receive the same messages."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sides = Side(), Side()
        self.straight = 0
        short = self.sides[0].follower._stage_whole  # noqa: SLF001 # pyright: ignore

        def counted(announce: Announce, data: bytes) -> object:
            taken = short(announce, data)
            self.straight += taken is not None
            return taken

        patch.setattr(self.sides[0].follower, "_stage_whole", counted)
        patch.setattr(self.sides[1].follower, "_stage_whole", lambda _announce, _data: None)
        self.now, self.newest = 1.0, 0

    def both(self, what: str, do: Callable[[Side], list[object]]) -> None:
        one, other = (do(side) for side in self.sides)
        assert one == other, f"{what}, at {self.now}"
        assert self.sides[0].state == self.sides[1].state
        assert self.sides[0].ready == self.sides[1].ready

    def step(self, what: str, number: int, nbytes: int, how: int) -> None:
        """Cause one event at both workers, of the version newest + `number`."""
        self.now += (0.0, 0.01, 0.3, 1.0)[how % 4]
        now, version = self.now, max(1, self.newest + number)
        self.newest = max(self.newest, version)
        commit = "together" if how in (2, 3) else "auto"
        acknowledge = "staged" if how in (3, 5) else "applied"
        data, crc = data_of(version, nbytes), whole_of(version, nbytes)
        made = version_of(version, np.frombuffer(data, np.uint8), nbytes, EPOCH)
        announce = structs.replace(
            offers.announcement(made),
            commit=commit,
            acknowledge=acknowledge,
            encoding="another" if what == "strange" else "raw",
            layout=LAYOUTS[nbytes].id,
            layout_bytes=len(LAYOUTS[nbytes].header),
            metadata={"step": str(version)} if how % 2 else {},
        )
        named: dict[str, Any] = {"model": MODEL, "epoch": EPOCH, "version": version}
        key = (EPOCH, version)
        match what:
            case "whole" | "damaged" | "strange":
                said = structs.replace(announce, whole=crc)
                sent = data if what != "damaged" else bytes(nbytes)
                placed = bool(how & 4)
                self.both(
                    f"{what} {key}",
                    lambda s: s.receives(said, now, sent) if placed else s.gets(said, now, sent),
                )
            case "layout":
                self.both(what, lambda s: s.hears(announce, now, LAYOUTS[nbytes].header))
            case "announce":
                self.both(what, lambda s: s.gets(announce, now))
            case "chunk":
                chunk = Chunk(**named, index=0, crc=crc.crc)
                self.both(what, lambda s: s.hears(chunk, now, data))
            case "end":
                self.both(what, lambda s: s.gets(End(**named, digest=crc.digest), now))
            case "commit":
                self.both(what, lambda s: s.hears(Commit(**named, digest=crc.digest), now))
            case "abort":
                self.both(what, lambda s: s.hears(Abort(**named, text="no"), now))
            case "gone":
                self.both(what, lambda s: s.hears(Refuse(code="gone", text="no", **named), now))
            case "beacon":
                self.both(what, lambda s: s.gets(Beacon(**named), now))
            case "rename":
                was = self.sides[0].follower.running or Running(EPOCH, 1, crc.digest)
                self.both(what, lambda s: s.hears(Rename(**named, was=was), now))
            case "welcome":
                later = structs.replace(WELCOME, models={MODEL: version})
                self.both(what, lambda s: s.hears(later, now))
            case "want":
                self.both(what, lambda s: s.tells(Wanted(MODEL, key), now))
            case "latest":
                self.both(what, lambda s: s.tells(Wanted(MODEL, None), now))
            case "begin" | "apply" if self.sides[0].ready:
                mine = self.sides[0].ready[-1]
                begun = Report(MODEL, mine, "taken")
                if what == "begin" or how % 2:
                    self.both(f"taken {mine}", lambda s: s.tells(begun, now))
                else:
                    assert self.sides[1].tells(begun, now) == []
                if what == "apply":
                    end: Outcome = "applied" if how < 12 else ENDS[how % len(ENDS)]
                    self.both(f"{end} {mine}", lambda s: s.tells(Report(MODEL, mine, end), now))
            case _:
                self.both("time", lambda s: s.does(s.machine.tick(now), now))
        self.both("ping", lambda s: s.hears(Ping(token=1), now))


@pytest.mark.parametrize("seed", range(8))
def test_the_straight_way_leads_where_the_other_does(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, straight = random.Random(seed), 0
    for _ in range(40):
        pair = Pair(monkeypatch)
        for what in ("layout", "whole", "apply"):
            pair.step(what, 2 * (what != "apply"), 4, 0)
        for _ in range(60):
            what = draw.choice(STEPS if draw.random() < 0.85 else RARE)
            number = draw.choice((1, 1, 2, 2, 2, 0, -1, -2))
            pair.step(what, number, draw.choice((4, 4, 4, 4, 8)), draw.randrange(16))
        straight += pair.straight
    assert straight > 20, "too few to tell"


def test_most_small_versions_go_straight() -> None:
    with pytest.MonkeyPatch.context() as patch:
        pair, ways = Pair(patch), Counter[int]()
        pair.step("layout", 1, 4, 0)
        for _ in range(20):
            before = pair.straight
            pair.step("whole", 2, 4, 4)
            pair.step("apply", 0, 4, 0)
            ways[pair.straight - before] += 1
    assert ways == {1: 19, 0: 1}, "the first needs a buffer of its own"
