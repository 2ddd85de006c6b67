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


def live(r: Roster) -> Peer:
    """Return the first worker, which has just joined."""
    peer = admit(r, "w", "1", 0.0)[1]
    assert peer is not None
    return peer


def test_new_then_known() -> None:
    r = Roster(LOST_AFTER)
    one, peer = admit(r, "w", "1", 0.0)
    other, same = admit(r, "w", "1", 3.0)
    assert (one, other) == ("new", "known")
    assert peer is same
    assert peer is not None
    assert peer.heard_at == 3.0


def test_a_reconnected_worker_is_found_by_its_new_identity_only() -> None:
    r = Roster(LOST_AFTER)
    r.admit(b"old", hello("w", "1"), 0.0)
    r.admit(b"new", hello("w", "1"), 1.0)
    assert r.by_identity(b"old") is None
    assert r.by_identity(b"new") is r.by_name("w")


def test_a_second_instance_is_refused_once_the_first_has_answered() -> None:
    r = Roster(LOST_AFTER)
    first = live(r)
    assert admit(r, "w", "2", 1.0) == ("contested", first)
    assert admit(r, "w", "2", 1.2) == ("contested", first), "it has had no chance to answer"
    first.heard_at = 1.3
    assert admit(r, "w", "2", 1.4) == ("taken", first)
    assert r.by_name("w") is first
    assert r.by_identity(b"w2") is None


def test_an_answer_holds_for_as_long_as_silence_would_be_loss() -> None:
    r = Roster(LOST_AFTER)
    first = live(r)
    admit(r, "w", "2", 1.0)
    first.heard_at = 1.3
    assert admit(r, "w", "2", 5.9)[0] == "taken"
    assert admit(r, "w", "2", 6.0)[0] == "contested", "asked again"
    assert admit(r, "w", "2", 6.5)[0] == "contested", "the old answer does not count"


def test_a_second_instance_follows_a_lost_first() -> None:
    r = Roster(LOST_AFTER)
    first = live(r)
    first.phase = "lost"
    admission, second = admit(r, "w", "2", 1.0)
    assert admission == "again"
    assert second is not None
    assert second is r.by_name("w")
    assert r.by_identity(b"w1") is None
    assert len(list(r)) == 1


def test_a_lost_worker_that_says_hello_itself_is_known() -> None:
    r = Roster(LOST_AFTER)
    peer = live(r)
    peer.phase = "lost"
    assert admit(r, "w", "1", 9.0) == ("known", peer)


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


def test_silence_counts_from_the_last_word_and_once() -> None:
    r = Roster(LOST_AFTER)
    _, peer = admit(r, "w", "1", 1.0)
    assert r.silent(5.9) == []
    assert r.silent(6.0) == [peer]
    assert peer is not None
    peer.phase = "lost"
    assert r.silent(9.0) == []
