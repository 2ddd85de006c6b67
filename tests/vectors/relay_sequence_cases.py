"""The cases of `publisher_sequences.json` with relays: what a publisher makes of `below`.

The relay `r` has a session, and so has `s`; `x`, `y` and `z` are workers behind them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from weightbus.tests.vectors.levels import highest
from weightbus.tests.vectors.parts import Json
from weightbus.tests.vectors.publisher_sequence_cases import (
    EPOCH,
    FIRST,
    FOUR,
    FREE,
    ONE,
    SECOND,
    THREE,
    TWO,
    Case,
    Data,
    done,
    hello,
    ping,
    pong,
    refuse,
    running,
    to,
    welcome,
)

RELAY: Json = {"features": ["relay"]}
NAMED_MAX, RELAYS_MAX = 256, 16
TOGETHER: Json = {"commit": "together", "wait": "staged"}
UNKNOWN = refuse("r", "unknown-worker")


def row(
    name: str,
    runs: Data | None = None,
    *through: str,
    instance: str = FIRST,
    road: str = "pushed",
    state: str = "live",
    heard_ms: int = 0,
    relay: bool = False,
    **doing: Any,
) -> Json:
    """The row of a worker that runs a version of `m`; `doing`: what else it does with the model."""
    known: Json = {} if runs is None else {"epoch": runs.epoch, "version": runs.version}
    fixed: Json = {"name": name, "instance": instance, "road": road, "state": state}
    more: Json = {"relay": relay, "through": [*through], "heard_ms": heard_ms}
    return {**fixed, **more, "models": {"m": {**known, **doing}}}


def staged(name: str, data: Data, *through: str) -> Json:
    """The row of a worker that has staged a version."""
    return row(name, None, *through, incoming=data.version, phase="staged")


def failed(name: str, data: Data) -> Json:
    """The row of a worker that has failed a version."""
    return row(name, failed=data.version, error="apply: no")


def below(*rows: Json, **fields: Any) -> Json:
    """A report of workers behind a relay."""
    return {"type": "below", "epoch": EPOCH, "rows": [*rows], **fields}


def behind(*through: str, **fields: Any) -> Json:
    """The status of a live worker behind these relays."""
    return {"state": "live", "through": [*through], **fields}


def lost(*through: str) -> Json:
    """The status of a lost worker behind these relays."""
    return behind(*through, state="lost")


def begun(name: str, rules: str, *rows: Json, relays: str = "r", **options: Any) -> Case:
    """A case with relays, of which `r` has reported workers behind it."""
    case = Case(name, rules, options)
    for relay in relays:
        case.joins(relay, **RELAY)
    return case.says("r", below(*rows, first=True), tells=[f"joined {r['name']}" for r in rows])


def sequence_cases() -> Iterator[Json]:
    """Yield all sequences."""
    parts = _rows(), _calls(), _commits(), _named(), _owed(), _lost(), _names(), _others()
    for case in chain.from_iterable(parts):
        rules = case.rules.split()
        head = {"name": case.name, "level": highest(rules), "rules": rules}
        yield {**head, **case.options, "steps": case.steps}


def _rows() -> Iterator[Case]:
    case = Case("a relay reports the workers behind it", "R4 R5")
    case.says("r", hello("r", **RELAY), welcome("r", features=["relay"]), tells=["joined r"])
    case.says("r", ping(subscribed=True), pong("r"), status={"r": {"relay": True, "through": []}})
    rows = row("x"), row("s", relay=True), row("y", None, "s")
    at = {"x": behind("r", relay=False), "s": behind("r", relay=True), "y": behind("r", "s")}
    case.says("r", below(*rows, first=True), status=at, tells=["joined x", "joined s", "joined y"])
    case.says("r", below(row("x", ONE)), status={"x": behind("r", **running(EPOCH, 1))}, tells=[])
    case.says("r", below(row("x")), status={"x": behind("r", **running(0, 0))}, tells=[])
    case.says("r", below(left=["x", "nobody"]), status={"x": None}, tells=["left x"])
    # a report of another epoch, and what is no longer behind the relay
    case.says("r", below(row("z"), epoch=EPOCH - 1), status={"z": None}, tells=[])
    case.says("r", below(row("z"), row("s", relay=True), first=True, more=True), tells=["joined z"])
    gone = {"y": lost("r", "s"), "s": behind("r"), "z": behind("r")}
    yield case.says("r", below(row("v")), status=gone, tells=["joined v", "lost y"])
    case = Case("a worker that is no relay reports others", "R5")
    case.says("w", hello("w"), welcome("w", features=[]))
    yield case.says("w", below(row("x"), first=True), status={"x": None})
    case = begun("a worker behind a relay gets no messages", "R5", row("x", road="pulled"))
    pushed = ONE.announce(layout=True), ONE.chunks(), ONE.end()
    case.publish(ONE, *pushed, timeout_ms=10**6)
    for chunks in range(3):  # its silence is the relay's
        arriving = row("x", incoming=1, phase="receiving", chunks=chunks, count=3, heard_ms=6000)
        case.says("r", below(arriving), status={"x": behind("r")}).wait(4000, tells=[])
    stuck = row("x", incoming=1, phase="receiving", chunks=2, count=3, idle_ms=30_000)
    case.says("r", below(stuck)).wait(100, tells=["stuck x"])
    yield case.wait(4900, tells=["lost r", "lost x"])


def _calls() -> Iterator[Case]:
    rows = row("x"), row("s", relay=True), row("y", None, "s")
    through = {"x": ["r"], "y": ["r", "s"]}
    over = done(x="applied", y="applied", through=through)
    case = begun("a call waits for workers behind relays", "R5 P12", *rows).published(ONE)
    case.says("r", ONE.applied()).says("r", below(row("x", ONE)))
    yield case.says("r", below(row("s", ONE, relay=True), row("y", ONE, "s")), ends=[over])
    case = begun("a worker behind a relay runs a newer version", "R5 P12", row("x"))
    case.published(ONE).published(TWO)
    behind_r: Json = {"x": ["r"]}
    newer = done(x="skipped", through=behind_r), done(x="applied", through=behind_r)
    yield case.says("r", below(row("x", TWO)), ends=[*newer])
    case = begun("a worker behind a relay fails a version", "R5 P13", row("x"), row("y"))
    case.published(ONE).says("r", below(failed("x", ONE)), tells=["failed x"])
    case.says("r", below(failed("x", ONE)), tells=[])
    over = done(False, x="failed", y="applied", through={"x": ["r"], "y": ["r"]})
    yield case.says("r", below(row("y", ONE)), ends=[over])
    case = begun("a relay is none of the expected workers", "R5 P18", relays="rs")
    case.published(ONE, expect=2).says("r", ONE.applied()).says("s", ONE.applied())
    case.says("r", below(row("x", ONE), row("v", relay=True))).says("s", below(row("y")))
    over = done(x="applied", y="applied", through={"x": ["r"], "y": ["s"]})
    yield case.says("s", below(row("y", ONE)), ends=[over])
    case = begun("a worker leaves a relay", "R5 P18", row("x")).published(ONE)
    yield case.says("r", below(left=["x"]), tells=["left x"], ends=[done(x="left")])
    case = begun("enough workers behind a relay", "R5", row("x"), row("y"))
    case.published(ONE, require=1)
    over = done(x="behind", y="applied", through={"x": ["r"], "y": ["r"]})
    yield case.says("r", below(row("y", ONE)), ends=[over])
    yield from _patched()
    case = begun("a version that waits for its user behind a relay", "R5 P11", row("x"))
    case.published(ONE, timeout_ms=1000).says("r", below(staged("x", ONE)))
    yield case.wait(1100, ends=[done(False, x="behind", through=behind_r)])
    case = begun("a version is staged behind a relay", "R5 P11", row("x"))
    case.published(ONE, wait="staged")
    over = done(x="staged", through=behind_r)
    yield case.says("r", below(staged("x", ONE)), ends=[over])


def _patched() -> Iterator[Case]:
    one, two = (Data(number, nbytes=1600) for number in (1, 2))
    patch: Json = {"epoch": EPOCH, "version": 1}
    offered: Json = {"keep": True, "patches": [{**patch, "digest": one.digest, "nbytes": 100}]}
    base: Json = {"encoding": "delta-1", **patch}
    unknown: Json = {**base, "version": 7}
    names = "xyz"
    through = {name: ["r"] for name in names}

    def patched(name: str, **options: Any) -> Case:
        case = Case(name, "R5").joins("r", features=["relay", "delta-1"])
        case.says("r", below(*map(row, names), first=True), tells=[f"joined {n}" for n in names])
        case.published(one, keep=True).says("r", one.applied(), **FREE)
        case.says("r", below(*(row(n, one, took_us=9) for n in names)), **FREE)
        return case.published(two, **offered, **options)

    case = patched("patches behind a relay").says("r", two.applied(patch=base), **FREE)
    case.says("r", below(row("x", two, took_us=9, patch=base), row("y", two, took_us=9)))
    over = done(x="applied", y="applied", z="applied", through=through, patched={"x": 100})
    yield case.says("r", below(row("z", two, patch=base)), ends=[over])
    case = patched("staged patches behind a relay", wait="staged")
    staged_by = partial(row, runs=one, incoming=2, phase="staged", took_us=9)
    case.says("r", below(staged_by("x", incoming_patch=base), staged_by("y")))
    over = done(x="staged", y="staged", z="staged", through=through, patched={"x": 100})
    yield case.says("r", below(staged_by("z", incoming_patch=unknown)), ends=[over])


def _commits() -> Iterator[Case]:
    both = row("x"), row("y")
    through = {"x": ["r"], "y": ["r"]}
    over = [done(x="staged", y="staged", through=through)]
    case = begun("a commit waits for workers behind a relay", "R5 P10 P11", *both)
    case.published(ONE, **TOGETHER).says("r", ONE.staged()).says("r", below(staged("x", ONE)))
    yield case.says("r", below(staged("y", ONE)), ONE.commit("r"), ends=over)
    case = begun("a relay stages after the decision", "R5 P10 P11", *both)
    case.published(ONE, **TOGETHER)
    case.says("r", below(staged("x", ONE), staged("y", ONE)), ends=over)
    yield case.says("r", ONE.staged(), ONE.commit("r"))
    case = begun("a decision with workers here and behind a relay", "R5 P10 P11", row("x"))
    case.joins().published(ONE, **TOGETHER).says("r", ONE.staged()).says("w", ONE.staged())
    over = [done(w="staged", x="staged", through={"x": ["r"]})]
    yield case.says("r", below(staged("x", ONE)), ONE.commit("w"), ONE.commit("r"), ends=over)
    case = begun("an abort reaches a relay", "R5 P10 P13", *both)
    case.published(ONE, **TOGETHER).says("r", below(staged("x", ONE)))
    over = [done(False, x="staged", y="failed", through=through)]
    yield case.says("r", below(failed("y", ONE)), ONE.abort("r"), tells=["failed y"], ends=over)
    case = begun("a relay that joins before a decision", "R5 P10 P18", row("x"))
    case.published(ONE, **TOGETHER, grace_ms=60_000).says("r", {"type": "bye"}, **FREE)
    modes: Json = {"commit": "together", "acknowledge": "staged"}
    announced = ONE.announce("r", **modes), ONE.end("r")
    again = hello("r", instance=SECOND, **RELAY)
    case.says("r", again, welcome("r", features=["relay"]), *announced)
    over = [done(x="staged", through={"x": ["r"]})]
    yield case.says("r", below(staged("x", ONE), first=True), ends=over)


def _named() -> Iterator[Case]:
    rows: tuple[Json, ...] = row("x"), row("y"), row("q", relay=True), row("z", None, "q")
    case = begun("a version for named workers behind relays", "R8", *rows, relays="rs")
    case.joins().published(ONE)
    announced: tuple[Json, ...]
    announced = TWO.announce("r", workers=["x", "z", "w"]), TWO.announce("w", workers=[])
    case.publish(TWO, *announced, workers=["x", "w", "z"])
    fetched = TWO.announce("r", layout=True, workers=["x", "z", "w"]), TWO.end("r")
    case.says("r", TWO.fetch(layout=True), *fetched)
    elsewhere = TWO.announce("s", layout=True, workers=["w", "x", "z"])
    case.says("s", TWO.fetch(layout=True), elsewhere, TWO.end("s"))
    case.says("w", TWO.applied(), ends=[]).says("r", TWO.applied(), ends=[])
    early = {"x": ["r"], "y": ["r"], "z": ["r", "q"]}
    first = done(w="skipped", x="skipped", y="applied", z="skipped", through=early)
    places = {"x": ["r"], "z": ["r", "q"]}
    over = done(w="applied", x="applied", z="applied", through=places)
    later = row("x", TWO), row("y", ONE), row("z", TWO, "q")
    case.says("r", below(*later), ends=[first, over])
    yield case.publish(Data(3), workers=["x", "nobody"], fails=True)
    case = begun("too many workers behind one relay are named", "R8")
    names = [f"w{n}" for n in range(NAMED_MAX + 1)]
    case.says("r", below(row("w%")), times=len(names))
    case.publish(ONE, workers=names, fails=True)
    announced = (ONE.announce("r", workers=sorted(names[1:])),)
    yield case.publish(ONE, *announced, workers=names[1:])
    case = begun("a version for named workers to be applied together", "R8 P10", *rows, relays="rs")
    modes: Json = {"commit": "together", "acknowledge": "staged"}
    announced = (ONE.announce("r", workers=["z"], **modes),)
    case.publish(ONE, *announced, workers=["z"], **TOGETHER).says("r", ONE.staged())
    ends = [done(z="staged", through={"z": ["r", "q"]})]
    yield case.says("r", below(staged("z", ONE, "q")), ONE.commit("r"), ends=ends)
    case = begun("the way to a named worker is over", "R8 P18", row("x"), grace_ms=0)
    case.closed("r").wait(5000, **FREE)
    yield case.publish(ONE, workers=["x"], ends=[done(False, x="lost", through={"x": ["r"]})])


def _owed() -> Iterator[Case]:
    case = begun("a named worker comes to another relay", "R8", row("x"), relays="rs")
    case.publish(ONE, ONE.announce("r", workers=["x"]), workers=["x"]).wait(200)
    case.says("s", below(row("x")), tells=["joined x"], status={"x": behind("s")})
    case.says("r", ping(), pong("r"))
    announced = pong("s"), ONE.announce("s", workers=["x"]), ONE.end("s")
    case.says("s", ping(), *announced).says("s", ping(), *announced)
    case.says("s", ONE.progress(1)).wait(3000).says("s", ping(), pong("s"))
    # no progress for `lost_ms`: the relay may have dropped the version
    case.wait(2000).says("s", ping(), *announced)
    case.says("s", ONE.applied()).says("s", ping(), pong("s"))
    case.says("s", below(row("x", ONE)), ends=[done(x="applied", through={"x": ["s"]})])
    yield case.says("s", ping(), pong("s"))
    case = begun("the versions of named workers behind one relay", "R8", row("x"), row("y"))
    case.published(ONE, workers=["x"]).published(TWO, workers=["y"])
    first, second = (
        (pong("r"), data.announce("r", workers=[name]), data.end("r"))
        for data, name in ((ONE, "x"), (TWO, "y"))
    )
    case.says("r", TWO.progress(1)).says("r", ping(), *first)
    case.says("r", ONE.applied()).says("r", ping(), pong("r"))
    case.wait(4000).says("r", ping(), pong("r")).wait(1000).says("r", ping(), *second)
    over = [done(x="applied", through={"x": ["r"]}), done(y="applied", through={"y": ["r"]})]
    case.says("r", below(row("x", ONE), row("y", TWO)), ends=over).says("r", ping(), pong("r"))
    case.published(THREE, workers=["x"], timeout_ms=1000).published(FOUR)
    yield case.wait(1000, **FREE).says("r", ping(), pong("r", m=4))
    case = begun("versions of named workers that follow at once", "R8", *map(row, "xyz"))
    case.publish(ONE, ONE.announce("r", workers=["x"]), workers=["x"])
    case.publish(TWO, workers=["y"]).publish(THREE, workers=["z"])
    case.says("r", ONE.applied(), TWO.announce("r", workers=["y"]), TWO.end("r"))
    case.says("r", TWO.failed(code="too-large"), **FREE)
    yield case.says("r", ping(), pong("r"), THREE.announce("r", workers=["z"]), THREE.end("r"))
    case = begun("a named worker has its version from elsewhere", "R8", row("x"))
    case.published(ONE, workers=["x"]).says("r", below(row("x", ONE)), **FREE)
    yield case.says("r", ping(), pong("r"))
    case = begun("a named worker that has to stage moves", "R8 P10", row("x"), relays="rs")
    case.published(ONE, workers=["x"], **TOGETHER).wait(200)
    modes: Json = {"commit": "together", "acknowledge": "staged"}
    case.says("s", below(row("x")), status={"x": behind("s")})
    announced = pong("s"), ONE.announce("s", workers=["x"], **modes), ONE.end("s")
    case.says("s", ping(), *announced).says("s", ONE.staged()).says("s", ping(), pong("s"))
    over = [done(x="staged", through={"x": ["s"]})]
    yield case.says("s", below(staged("x", ONE)), ONE.commit("s"), ends=over)


def _lost() -> Iterator[Case]:
    rows = row("x"), row("q", relay=True), row("y", None, "q")
    gone = {"r": lost(), "x": lost("r"), "q": lost("r"), "y": lost("r", "q")}
    free = partial(Case.says, sends=None, ends=None)
    case = begun("a relay falls silent", "R5 P18", *rows)
    case.wait(4900, tells=[]).wait(100, tells=None, status=gone)
    case.says("r", ping(), UNKNOWN, tells=[])
    case.says("r", hello("r", **RELAY), welcome("r", features=["relay"]), tells=["back r"])
    case.says("r", below(row("x"), first=True), status={"x": behind("r")}, tells=["back x"])
    yield case.says("r", below(), status={"y": lost("r", "q")})
    case = begun("a relay was away", "R5 P18", *rows).closed("r", status={"x": behind("r")})
    case.says("r", ping(), UNKNOWN, status=gone, tells=None)
    yield free(case, "r", hello("r", **RELAY)).says("r", below(row("x")), status={"x": behind("r")})
    case = begun("a relay comes back in time", "R5 P18", *rows).closed("r")
    case.says("2", hello("r", **RELAY), welcome("2", features=["relay"]), tells=[])
    rest = {"x": behind("r"), "q": behind("r"), "y": lost("r", "q")}
    first = below(row("x"), row("q", relay=True), first=True)
    yield case.says("2", first, tells=["lost y"], status=rest)
    case = begun("a relay leaves", "R5 P18", row("x"))
    yield case.says("r", {"type": "bye"}, tells=["left r", "lost x"], status={"x": lost("r")})
    case = begun("a worker of a lost relay comes through another", "R5 R6", row("x"), relays="rs")
    case.published(ONE, timeout_ms=60_000, grace_ms=10_000).wait(3000)
    case.says("s", ping(), pong("s", m=1)).wait(2000, tells=["lost r", "lost x"])
    case.says("s", below(row("x")), tells=["joined x"], status={"x": behind("s")})
    yield case.says("s", below(row("x", ONE)), ends=[done(x="applied", through={"x": ["s"]})])
    case = begun("a worker is lost to its relay", "R5 P18", row("x"))
    case.published(ONE, grace_ms=0)
    over = [done(False, x="lost", through={"x": ["r"]})]
    case.says("r", below(row("x", state="lost")), tells=["lost x"], ends=over)
    yield case.says("r", below(row("x")), tells=["back x"], status={"x": behind("r")})
    case = begun("a relay's key is revoked", "R5 K8", keys={"r": ["r", "relay"]}, relays="")
    case.steps.clear()
    case.says("r", hello("r", **RELAY), key="r", sends=None)
    case.says("r", below(row("x")), key="r", tells=["joined x"])
    revoked = {"allow": {"w": ["w", "worker"]}}
    yield case.does(revoked, refuse("r", "revoked"), tells=["left r", "lost x"])


def _names() -> Iterator[Case]:
    case = begun("a worker changes its relay", "R6", row("x"), relays="rs").wait(200)
    moved: Json = {"x": behind("s")}
    case.says("s", below(row("x", heard_ms=100)), tells=["joined x"], status=moved)
    case.says("r", below(row("x", heard_ms=150)), tells=[], status=moved)
    case.says("r", below(row("x", state="lost")), tells=[], status=moved)
    yield case.says("r", below(left=["x"]), tells=[], status=moved)
    case = begun("a report from before a worker changed its relay", "R6", row("x"), relays="rs")
    case.wait(200).says("s", below(row("x", heard_ms=100)), tells=["joined x"])
    case.says("r", below(row("x", heard_ms=150)), tells=[]).says("s", {"type": "bye"}, tells=None)
    yield case.wait(100, tells=["joined x"], status={"x": behind("r")})
    case = begun("two processes of one name behind relays", "R6", row("x"), relays="rs")
    other = row("x", instance=SECOND)
    case.says("s", below(other), tells=[], status={"x": behind("r")})
    case.says("r", below(row("x", state="lost")), tells=["lost x"])
    yield case.wait(100, tells=["joined x"], status={"x": behind("s")})
    case = begun("a contested name leaves", "R6", row("x"), relays="rs")
    case.says("s", below(other)).says("s", below(left=["x"]), tells=[])
    yield case.says("r", below(left=["x"]), tells=["left x"]).wait(
        100, tells=[], status={"x": None}
    )
    case = begun("a worker behind a relay and one with a session", "R6 P3", row("x"))
    taken = refuse("x", "name-taken")
    case.says("x", hello("x", instance=SECOND), taken, tells=["refused x"])
    case.says("x", hello("x"), welcome("x"), tells=["joined x"], status={"x": behind()})
    case.says("r", below(other), tells=[], status={"x": behind()})
    case.says("x", {"type": "bye"}, tells=["left x"])
    yield case.wait(100, tells=["joined x"], status={"x": behind("r")})
    case = begun("rows of a loop", "R7", row("x"))
    rows = row("y", None, "q", "y"), row("r", relay=True), row("z", None, *["q"] * RELAYS_MAX)
    case.says("r", below(*rows), tells=[], status={"y": None, "z": None, "r": behind()})
    deep = [f"q{n}" for n in range(RELAYS_MAX - 1)]
    yield case.says("r", below(row("z", None, *deep)), status={"z": behind("r", *deep)})


def _others() -> Iterator[Case]:
    rows = row("x", ONE, road="shared"), row("s", relay=True), row("y", None, "s", road="pulled")
    case = begun("observers see workers behind relays", "R5 P23", *rows)
    seen = [
        {"name": "r", "relay": True, "through": []},
        {"name": "x", "relay": False, "through": ["r"], "road": "shared"},
        {"name": "s", "relay": True, "through": ["r"]},
        {"name": "y", "relay": False, "through": ["r", "s"], "road": "pulled"},
    ]
    case.says("o", {"type": "observe"}, to("o", "roster", workers=4, rows=seen))
    verify = {"type": "verify", "worker": "x", "model": "m"}
    yield case.says("o", verify, to("o", "verified", code="unsupported"))
    case = begun("a later epoch and a relay", "R4 P3", row("x"))
    new = 900 + 90_000 - 10_010
    later = hello("v", epoch=900, age_ms=90_000)
    sends = to("r", "pong", epoch=new), welcome("v", epoch=new)
    case.says("v", later, *sends, status={"x": behind("r")})
    welcomed = welcome("r", epoch=new, features=["relay"])
    case.says("r", below(row("x", ONE))).says("r", hello("r", **RELAY), welcomed)
    case.says("r", below(row("x"), first=True, epoch=new)).published(Data(1, epoch=new))
    over = [done(x="applied", through={"x": ["r"]}, v="applied")]
    case.says("v", Data(1, epoch=new).applied(), **FREE)
    yield case.says("r", below(row("x", Data(1, epoch=new)), epoch=new), ends=over)
