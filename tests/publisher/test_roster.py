"""A name belongs to one living worker."""

import pytest

from weightbus.bus.messages import Hello
from weightbus.bus.publisher import roster
from weightbus.bus.publisher.roster import Admission, Peer, Roster

LOST_AFTER = 5.0


def hello(name: str, instance: str) -> Hello:
    return Hello(name=name, instance=instance * 32, models={"a": None})


def admit(r: Roster, name: str, instance: str, now: float) -> tuple[Admission, Peer | None]:
    return r.admit(f"{name}{instance}".encode(), hello(name, instance), now)


def test_the_lost_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "WORKERS_MAX", 2)
    r = Roster(LOST_AFTER)
    _, first = admit(r, "w1", "1", 0.0)
    admit(r, "w2", "1", 0.0)
    assert admit(r, "w3", "1", 0.0) == ("full", None)
    assert admit(r, "w2", "1", 0.0)[0] == "known", "who is in stays in"
    assert first is not None
    first.phase = "lost"
    assert admit(r, "w3", "1", 0.0)[0] == "new"
    assert {p.name for p in r} == {"w2", "w3"}


def test_the_workers_that_departed_are_no_more_than_the_roster_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster, "WORKERS_MAX", 2)
    r = Roster(LOST_AFTER)
    assert r.take_departed() == []
    for name in "w1", "w2", "w3":
        _, peer = admit(r, name, "1", 0.0)
        assert peer is not None
        r.forget(peer)
    assert [peer.name for peer in r.take_departed()] == ["w2", "w3"]
    assert r.take_departed() == []
