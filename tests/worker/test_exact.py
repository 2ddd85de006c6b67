"""A user may want only one particular version of a model: `Subscriber.receive(version=)`."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from weightbus import ApplyError, Publisher, Settings, Subscriber
from weightbus.bus.effects import Effect, Rejected
from weightbus.bus.messages import Applied, Failed, Fetch, Staged
from weightbus.bus.worker.events import Report, Wanted
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays, both
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.worker.test_follower import EPOCH, Bench, commit, ready, sent, version

QUICK = Settings(ping=0.05, lost_after=SECONDS)


# The worker's machine alone.


def want(bench: Bench, number: int | None, epoch: int = EPOCH) -> list[Effect]:
    key = None if number is None else (epoch, number)
    return bench.done(bench.follower.happened(Wanted("a", key), bench.now))


def asked(effects: list[Effect]) -> list[tuple[int, bool]]:
    return [(fetch.version, fetch.layout) for fetch in sent(effects, Fetch)]


def gone(effects: list[Effect]) -> list[tuple[int, str]]:
    return [(e.version, e.text) for e in effects if isinstance(e, Rejected) and e.code == "gone"]


def test_no_other_version_takes_its_place() -> None:
    bench = Bench()
    bench.announce(version(1))
    bench.announce(version(2))
    want(bench, 2)
    bench.announce(version(3))
    bench.announce(version(1))
    assert ready(bench.feed(version(2)) + bench.end(version(2)))[0].key == (EPOCH, 2)
    assert bench.follower.planner.hear_of(EPOCH, 3, bench.now) == []
    bench.report((EPOCH, 2), "taken")
    bench.report((EPOCH, 2), "applied")
    assert asked(want(bench, None)) == [(0, False)], "what was heard of meanwhile is asked for"


def test_it_is_asked_for_by_its_number_once_it_can_be_there() -> None:
    bench = Bench()
    assert want(bench, 2) == []
    assert bench.follower.planner.hear_of(EPOCH, 1, bench.now) == []
    assert asked(bench.follower.planner.hear_of(EPOCH, 3, bench.now)) == [(2, True)]
    assert bench.follower.planner.hear_of(EPOCH, 3, bench.now) == [], "not all the time"
    bench.announce(version(2))
    bench.now += 10
    assert bench.follower.planner.hear_of(EPOCH, 3, bench.now) == [], "it is arriving"


def test_it_is_left_alone_for_a_while_after_it_has_failed() -> None:
    bench = Bench()
    want(bench, 2)
    assert asked(bench.follower.planner.hear_of(EPOCH, 3, bench.now)) == [(2, True)]
    assert sent(bench.announce(version(2), encoding="another"), Failed)
    timing = bench.follower.timing
    for _ in range(3):
        bench.now += timing.quiet
        assert asked(bench.follower.planner.hear_of(EPOCH, 3, bench.now)) == []
    bench.now += timing.quiet
    assert asked(bench.follower.planner.hear_of(EPOCH, 3, bench.now)) == [(2, True)]


def test_what_was_on_its_way_makes_room_for_it_and_what_is_ready_does_not_matter() -> None:
    bench = Bench()
    for number in (3, 4):
        bench.announce(version(number))
    bench.feed(version(4))
    assert ready(bench.end(version(4)))
    bench.announce(version(5))
    assert asked(want(bench, 3)) == [(3, True)]
    assert bench.follower.versions.in_phase["arriving"] is None
    bench.announce(version(3))
    assert [s.key for s in ready(bench.feed(version(3)) + bench.end(version(3)))] == [(EPOCH, 3)]
    bench.report((EPOCH, 4), "newer")
    bench.report((EPOCH, 3), "taken")
    assert sent(bench.report((EPOCH, 3), "applied"), Applied)


def test_an_older_one_is_let_go_once_it_is_wanted_no_more() -> None:
    """Meanwhile a newer version is ready, and will be applied: seed 7962 of the simulation."""
    bench = Bench()
    for number in (1, 2):
        bench.announce(version(number))
    bench.feed(version(2))
    assert ready(bench.end(version(2)))
    want(bench, 1)
    bench.announce(version(1))
    assert bench.follower.versions.in_phase["arriving"] is not None
    want(bench, None)
    bench.report((EPOCH, 2), "taken")
    assert ready(bench.feed(version(1)) + bench.end(version(1))) == []
    bench.announce(version(3))
    assert [s.key for s in ready(bench.feed(version(3)) + bench.end(version(3)))] == [(EPOCH, 3)]


@pytest.mark.parametrize("told", ["commit", "announcement"])
def test_a_newer_one_that_all_have_decided_on_ends_the_wait_however_that_is_told(told: str) -> None:
    bench, newer = Bench(), version(3)
    bench.deliver(newer, commit="together")
    want(bench, 2)
    effects = bench.follower.committed(commit(newer)) if told == "commit" else bench.announce(newer)
    assert [s.key for s in ready(effects)] == [newer.key]
    [(number, why)] = gone(effects)
    assert number == 2
    assert "all workers go on to a newer one" in why


@pytest.mark.parametrize("after", ["gone", "gone while it arrives", "aborted", "fenced"])
def test_what_is_not_to_be_had_any_more_is_told_once(after: str) -> None:
    bench = Bench()
    bench.follower.planner.hear_of(EPOCH, 3, bench.now)
    want(bench, 2)
    match after:
        case "gone":
            effects = bench.follower.gone(EPOCH, 2, bench.now)
        case "gone while it arrives":
            bench.announce(version(2))
            effects = bench.follower.gone(EPOCH, 2, bench.now)
        case "aborted":
            effects = bench.abort(version(2))
        case _:
            effects = bench.follower.reconnected(EPOCH + 1, 0, bench.now, shared=False)
    assert [number for number, _ in gone(effects)] == [2]
    assert gone(bench.follower.gone(EPOCH, 2, bench.now)) == []
    bench.now += 10
    news = [] if after == "fenced" else [(0, False)]
    assert asked(want(bench, None)) == news, "of the next publisher nothing was heard yet"


def test_who_polls_asks_no_more_often_and_is_told_what_came_between_two_calls() -> None:
    bench = Bench()
    bench.follower.planner.hear_of(EPOCH, 3, bench.now)
    polls, seconds, fetches = 1000, 10.0, list[tuple[int, bool]]()
    for _ in range(polls):
        fetches += asked(want(bench, 2)) + asked(want(bench, None))
        bench.now += seconds / polls
    most = seconds / bench.follower.timing.quiet
    assert most / 2 < fetches.count((2, True)) <= most
    assert fetches.count((0, False)) <= most
    assert gone(bench.follower.gone(EPOCH, 2, bench.now)) == [], "nobody waits for it"
    for _ in range(2):
        assert [number for number, _ in gone(want(bench, 2))] == [2]
        want(bench, None)
    assert asked(want(bench, 1)) == [(1, True)], "another one may be there"


def test_gone_of_another_does_not_matter() -> None:
    bench = Bench()
    bench.follower.planner.hear_of(EPOCH, 3, bench.now)
    want(bench, 2)
    assert bench.follower.gone(EPOCH, 1, bench.now) == []
    assert bench.follower.gone(EPOCH - 1, 2, bench.now) == []
    assert bench.follower.planner.only == (EPOCH, 2)


@pytest.mark.parametrize(("outcome", "why"), [("applied", "runs here"), ("declined", "could not")])
def test_what_cannot_be_applied_any_more_is_told_at_once(outcome: Any, why: str) -> None:
    bench = Bench()
    bench.announce(version(2))
    bench.feed(version(2))
    bench.end(version(2))
    bench.report((EPOCH, 2), "taken")
    bench.report((EPOCH, 2), outcome)
    [(number, text)] = gone(want(bench, 1 if outcome == "applied" else 2))
    assert number in (1, 2)
    assert why in text


# While the user's code hangs.


def late(bench: Bench, what: Any, *, still: bool) -> list[Effect]:
    return bench.done(
        bench.follower.happened(Report("a", (EPOCH, 1), what, "late", "", still), 0.0)
    )


@pytest.mark.parametrize("what", ["declined", "torn"])
def test_a_late_apply_has_failed_and_stays_where_it_is(what: Any) -> None:
    bench = Bench()
    bench.announce(version(1), acknowledge="staged")
    bench.feed(version(1))
    assert sent(bench.end(version(1)), Staged)
    bench.report((EPOCH, 1), "taken")
    intact = what == "declined"
    [failed] = sent(late(bench, what, still=True), Failed)
    assert (failed.code, failed.intact) == ("apply", intact)
    assert bench.follower.versions.in_phase["applying"] is not None, "its bytes may still be read"
    told = bench.follower.repeat()
    assert [f.intact for f in sent(told, Failed)] == [intact]
    assert not sent(told, Staged), "it has failed"
    assert late(bench, "applied", still=False) == [], "what is returned later counts for nothing"
    assert bench.follower.versions.in_phase["applying"] is None
    assert bench.follower.running is None
    assert ((EPOCH, 1) in bench.follower.versions.rejected) == intact


# With sockets and threads.


def quick(bus: Bus, **options: Any) -> tuple[Publisher, dict[str, Any], Subscriber]:
    publisher, target = bus.publisher(settings=QUICK), arrays(0)
    return publisher, target, bus.subscriber(publisher, target, name="w", settings=QUICK, **options)


def planner(subscriber: Subscriber) -> Any:
    return subscriber._loop._machine.followers["m"].planner  # noqa: SLF001 # pyright: ignore


def test_what_is_asked_for_is_applied_and_nothing_before_it(bus: Bus) -> None:
    publisher, target, subscriber = quick(bus)
    with ThreadPoolExecutor() as pool:
        got = pool.submit(subscriber.receive, SECONDS, version=2)
        wait_for(lambda: planner(subscriber).only == (publisher.epoch, 2), "wanted", SECONDS)
        first = publisher.publish_async("m", arrays(1), timeout=SECONDS)
        receipt = publisher.publish("m", arrays(2), timeout=SECONDS)
        update = got.result(SECONDS)
    assert update is not None
    assert (update.version, target["w"][0]) == (2, 2)
    assert first.result(SECONDS).in_state("skipped") == ["w"]
    key = (receipt.epoch, receipt.version)
    assert subscriber.receive(0, version=key) == update, "it runs"
    assert both(publisher, subscriber, arrays(3))[1].version == 3, "then all is as before"
    with pytest.raises(ApplyError, match=r"\(gone\).*version 3 of epoch \d+ runs here") as caught:
        subscriber.receive(SECONDS, version=2, model="m")
    assert (caught.value.code, caught.value.version, subscriber.version("m")) == ("gone", 2, 3)


def test_a_version_of_another_publisher_is_gone(bus: Bus) -> None:
    publisher, target, subscriber = quick(bus)
    publisher.publish("m", arrays(1), require=0, settings=Settings(wait="none"))
    with pytest.raises(ApplyError, match=f"the publisher is of epoch {publisher.epoch} now"):
        subscriber.receive(SECONDS, version=(publisher.epoch - 1, 1))
    assert (subscriber.version("m"), target["w"][0]) == (0, 0)
    update = subscriber.receive(SECONDS, version=1)
    assert update is not None
    assert (update.version, target["w"][0]) == (1, 1)


def test_it_has_a_deadline_and_then_nothing_is_missed(bus: Bus) -> None:
    publisher, target, subscriber = quick(bus)
    assert subscriber.receive(0.05, version=7) is None
    both(publisher, subscriber, arrays(1))
    with ThreadPoolExecutor() as pool:
        got = pool.submit(subscriber.receive, 0.5, version=7)
        wait_for(lambda: planner(subscriber).only == (publisher.epoch, 7), "wanted", SECONDS)
        second = publisher.publish_async("m", arrays(2), timeout=SECONDS)
        assert got.result(SECONDS) is None
    update = subscriber.receive(SECONDS)
    assert update is not None
    assert (update.version, target["w"][0]) == (2, 2)
    assert second.result(SECONDS).in_state("applied") == ["w"]


def test_all_of_them_decided_and_a_newer_one_waits(bus: Bus) -> None:
    """Inference engines that must all run the same version are updated in this way."""
    publisher, _, subscriber = quick(bus)
    future = publisher.publish_async("m", arrays(1), commit="together", timeout=SECONDS)
    with ThreadPoolExecutor() as pool:
        update = pool.submit(subscriber.receive, SECONDS, version=(publisher.epoch, 1)).result(
            SECONDS
        )
    assert update is not None
    assert update.version == 1
    assert future.result(SECONDS).in_state("applied") == ["w"]


def test_of_which_model_must_be_said_where_there_are_several(bus: Bus) -> None:
    publisher = bus.publisher()
    models = {"m": arrays(0), "n": arrays(0)}
    subscriber = bus.subscriber(publisher, None, models=models)
    with pytest.raises(ValueError, match="name its model with model=, one of m, n"):
        subscriber.receive(0, version=1)
    with pytest.raises(KeyError):
        subscriber.receive(0, version=1, model="o")
    publisher.publish_async("m", arrays(1), timeout=SECONDS)
    done = publisher.publish_async("n", arrays(2), timeout=SECONDS)
    update = subscriber.receive(SECONDS, version=1, model="n")
    assert update is not None
    assert (update.model, done.result(SECONDS).in_state("applied")) == ("n", [subscriber.name])
    assert subscriber.version("m") == 0


@pytest.mark.parametrize("version", [0, -1, True, 2**53, "1", (0, 1), (1, 0), (1.5, 1)])
def test_versions_are_numbers(version: Any) -> None:
    with Subscriber("tcp://127.0.0.1:1", {"m": arrays(0)}) as subscriber:  # noqa: SIM117
        with pytest.raises(ValueError, match=r"(version|epoch)="):
            subscriber.receive(0, version=version)
