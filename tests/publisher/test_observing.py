"""Observers: what they are told is what is, whatever is lost on the way, and they cost nobody."""

import random
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher, RefusedError, Settings, Subscriber
from weightbus.bus.effects import Notice, Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import OBSERVER_SECONDS, PAGES_MAX, RECORDING_SECONDS
from weightbus.bus.messages import (
    Applied,
    Bye,
    Doing,
    Failed,
    Hello,
    ModelRow,
    Observe,
    Ping,
    Progress,
    Refuse,
    RosterPage,
    Staged,
    Verified,
    WorkerRow,
)
from weightbus.bus.observed import to_observer
from weightbus.bus.protocol_limits import (
    ERROR_MAX,
    EVENTS_LISTED,
    HEADER_BYTES_MAX,
    LABEL_MAX,
    MODELS_MAX,
    OBSERVERS_MAX,
    TEXT_MAX,
    VERSIONS_LISTED,
)
from weightbus.bus.publisher import observers
from weightbus.bus.publisher.effects import Effect
from weightbus.bus.publisher.version import VersionOffer
from weightbus.bus.structs import Message
from weightbus.bus.token_bucket import Rate
from weightbus.codecs.layout import Layout
from weightbus.python_client.observing.observer import Observer
from weightbus.python_client.observing.view import View
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.tests.publisher.test_publisher_machine import Bench, hello
from weightbus.tests.simulation.virtual_shell import hash_all

SECONDS = 30.0  # far more than anything here takes


class Watched(Bench):
    """A publisher whose notices its observers are told of, as by its shell."""

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Notice):
                self.machine.observers.happened(effect, self.now)

    def offer(self, layout: Layout, *, replaces_latest: bool) -> VersionOffer:
        made = super().offer(layout, replaces_latest=replaces_latest)
        hash_all(made)
        return made

    def say(self, name: str, message: Message) -> list[Effect]:
        effects = super().say(name, message)
        self.note(effects)
        return effects

    def answer(self, view: View, who: str = "observer") -> RosterPage | Refuse:
        """Ask as an observer does, over the wire."""
        frames = [encode(view.question())]
        (sent,) = self.machine.receive(who.encode(), frames, self.now)
        assert isinstance(sent, Send)
        answer = to_observer([encode(sent.message)])
        assert not isinstance(answer, Verified)
        return answer

    def ask(self, view: View) -> RosterPage:
        """Ask, and be told."""
        page = self.answer(view)
        assert isinstance(page, RosterPage)
        return page

    def look(self, view: View) -> None:
        """Ask until there is no more to be told."""
        view.whole = False
        for _ in range(1000):
            self.now += 0.2
            answer = self.ask(view)
            view.take(answer, self.now)
            if view.whole:
                return
        raise AssertionError("it never ends")


def truth(bench: Bench) -> dict[tuple[str, str], tuple[Any, ...]]:
    found = dict[tuple[str, str], tuple[Any, ...]]()
    for status in bench.machine.status(bench.now):
        for model in status.models:
            epoch, version = status.running.get(model, (0, 0))
            found[status.name, model] = (status.state == "lost", epoch, version)
    return found


def shown(view: View, now: float) -> dict[tuple[str, str], tuple[Any, ...]]:
    return {
        (s.worker, s.model): (s.verdict == "lost", s.epoch, s.version) for s in view.standings(now)
    }


def step(bench: Watched, rng: random.Random) -> None:
    """Have something happen."""
    name, latest = rng.choice("abcdefgh"), bench.machine.state.versions("a").latest
    version = latest.version if latest is not None else 1
    match rng.randrange(8):
        case 0:
            bench.publish()
        case 1:
            bench.say(name, hello(name))
        case 2:
            bench.say(name, Bye())
        case 3:
            bench.say(name, Ping(subscribed=rng.random() < 0.5))
        case 4 | 5:
            digest = latest.digest if latest is not None else "0" * 64
            known = Applied(model="a", epoch=7, version=version, digest=digest)
            bench.say(name, known)
        case 6:
            bench.say(name, Failed(model="a", epoch=7, version=version, code="apply", text="no"))
        case _:
            bench.now += rng.random()
            bench.note(bench.machine.tick(bench.now))


@pytest.mark.parametrize("seed", range(12))
def test_what_an_observer_is_told_is_what_is(seed: int) -> None:
    """Answers get lost, are doubled and late; in the end the view is the roster."""
    rng, bench, view = random.Random(seed), Watched(), View()
    late: list[RosterPage] = []
    for _ in range(rng.randrange(40, 400)):
        step(bench, rng)
        if rng.random() < 0.3:
            late.append(bench.ask(view))
        while late and rng.random() < 0.6:
            view.take(rng.choice(late), bench.now)
            late = late[-3:] if rng.random() < 0.5 else []
        bench.now += (
            0.2 if rng.random() < 0.97 else 2 * RECORDING_SECONDS
        )  # nobody looks on meanwhile
    bench.look(view)
    assert shown(view, bench.now) == truth(bench)


def test_what_happened_while_nobody_looked_on_is_told_then() -> None:
    bench, view = Watched("a", "b"), View()
    bench.publish()
    bench.look(view)
    bench.now += 2 * RECORDING_SECONDS
    for name in ("a", "b"):
        bench.say(name, Ping(subscribed=True))
    version, _ = bench.publish()
    bench.now += 0.5
    bench.say("a", Applied(model="a", epoch=7, version=2, digest=version.digest))
    bench.say("b", Failed(model="a", epoch=7, version=2, code="apply", text="no"))
    bench.look(view)
    assert shown(view, bench.now) == truth(bench)
    doing = {row.name: row.models["a"] for row in bench.ask(View()).rows}
    assert (doing["a"].took_us, doing["a"].failed) == (500_000, 0)
    assert (doing["b"].failed, doing["b"].error) == (2, "apply: no")


def test_nothing_is_told_twice_that_has_not_changed() -> None:
    bench, view = Watched("a", "b"), View()
    version, _ = bench.publish()
    applied = Applied(model="a", epoch=7, version=1, digest=version.digest)
    bench.say("a", applied)
    bench.look(view)
    bench.say("a", applied)
    bench.say("a", Ping(subscribed=True))
    answer = bench.ask(view)
    assert (answer.rows, answer.models, answer.events) == ([], [], [])
    bench.say("b", applied)
    answer = bench.ask(view)
    assert [row.name for row in answer.rows] == ["b"]


def test_many_workers_are_told_in_pages_that_fit_and_at_a_bounded_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate = Rate(300, 1000)
    monkeypatch.setattr(observers, "ROWS", rate)
    bench, view = Watched(), View()
    for number in range(1500):
        bench.say(f"worker-{number}", hello(f"worker-{number}"))
        bench.now += 0.005
    begun, rows = bench.now, 0
    while not view.whole:
        answer = bench.ask(view)
        assert len(encode(answer)) <= HEADER_BYTES_MAX
        rows += len(answer.rows) + len(answer.events) + len(answer.models)
        assert rows <= rate.burst + (bench.now - begun) * rate.per_second
        view.take(answer, bench.now)
        bench.now += 0.15
    assert len(view.workers) == 1500


def test_one_question_is_answered_by_several_pages_that_follow_one_another() -> None:
    bench, view = Watched(), View()
    for number in range(600):
        bench.say(f"w{number}", hello(f"w{number}", host="h" * 250))
        bench.now += 0.005
    asked = Observe(pages=PAGES_MAX + 1)
    sent = bench.machine.receive(b"o", [encode(asked)], bench.now)
    pages = [to_observer([encode(each.message)]) for each in sent if isinstance(each, Send)]
    told = [page for page in pages if isinstance(page, RosterPage)]
    assert [page.follows for page in told] == [True] * (PAGES_MAX - 1) + [False]
    assert all(page.more and len(encode(page)) <= HEADER_BYTES_MAX for page in told)
    assert all(view.take(page, bench.now) for page in told)
    bench.look(view)
    assert shown(view, bench.now) == truth(bench)


def test_a_busy_roster_is_complete_though_there_is_always_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers change faster than their rows are told; yet what was there at first has been told."""
    monkeypatch.setattr(observers, "PAGE_ROWS_MAX", 100)
    bench, view, pages = Watched(), View(), 0
    known = set[str]()
    for number in range(200):
        bench.say(f"w{number}", hello(f"w{number}"))
        bench.now += 0.005
    bench.publish(4096)
    while not view.workers:  # none is shown until all are told
        answer = bench.ask(view)
        assert view.take(answer, bench.now)
        assert not view.take(answer, bench.now) or not answer.since, "it is doubled"
        pages += 1
        known |= {row.name for row in answer.rows}
        for name in known:
            bench.say(name, Progress(model="a", epoch=7, version=1, chunks=pages))
        bench.now += 0.2
        assert pages < 50
    assert not view.whole
    assert len(view.workers) == 200
    assert len(view.standings(bench.now)) == 200
    goal = bench.machine.state.roster.revision
    bench.ask(view)
    assert not view.has(goal)
    bench.look(view)
    assert view.has(goal)


def test_a_view_is_complete_once_it_has_what_there_was_at_the_first_answer() -> None:
    view, row = View(), WorkerRow("w", "live", "pushed", 0, {"m": Doing()})
    page = RosterPage(epoch=7, since=0, revision=5, latest=9, workers=1, more=True, rows=[row])
    view.take(page, 0.0)
    assert not view.workers, "models are not told yet"
    model = ModelRow("m", 1, 10, "raw")
    page = RosterPage(epoch=7, since=5, revision=9, latest=12, workers=1, more=True, models=[model])
    view.take(page, 0.0)
    assert [*view.workers] == ["w"]
    assert (view.has(9), view.has(12)) == (True, False)


def test_the_worst_worker_fits_a_page() -> None:
    bench, view = Watched(), View()
    names = [f"{n:x>128}" for n in range(MODELS_MAX)]
    label = "\U0001f69a" * LABEL_MAX
    instance, models = "00" * 16, dict.fromkeys(names)
    bench.say("w" * 128, Hello(name="w" * 128, instance=instance, models=models, host=label))
    for name in names:
        bench.machine.state.versions(name)
        text = '\U0001f69a"' * (TEXT_MAX // 2)
        bench.say(
            "w" * 128, Failed(model=name, epoch=7, version=2**53 - 1, code="c" * 128, text=text)
        )
    bench.look(view)
    assert len(view.workers["w" * 128].models) == MODELS_MAX


def test_errors_are_told_whole_where_they_fit_and_without_control_characters() -> None:
    bench, view = Watched("a"), View()
    bench.publish()
    text = "x\x1b[2J\n\u202ey" + "z" * ERROR_MAX
    bench.say("a", Failed(model="a", epoch=7, version=1, code="apply", text=text))
    bench.look(view)
    (standing,) = view.standings(bench.now)
    assert standing.verdict == "failed"
    assert standing.error == (r"apply: x\x1b[2J; \u202ey" + "z" * ERROR_MAX)[:ERROR_MAX]
    version, _ = bench.publish()
    bench.say("a", Applied(model="a", epoch=7, version=2, digest=version.digest))
    bench.look(view)
    (standing,) = view.standings(bench.now)
    assert (standing.verdict, standing.error) == ("current", "")


def test_why_a_worker_is_lost_is_told() -> None:
    bench, view = Watched("a", "b"), View()
    bench.look(view)
    bench.note(bench.machine.unreachable(b"a", bench.now, "its process, 7, has ended"))
    bench.look(view)
    standings = {s.worker: (s.verdict, s.error) for s in view.standings(bench.now)}
    assert standings == {"a": ("lost", "its process, 7, has ended"), "b": ("current", "")}


def test_who_leaves_is_gone_without_telling_everything_again() -> None:
    bench, view = Watched("a", "b"), View()
    bench.look(view)
    bench.say("a", Bye())
    answer = bench.ask(view)
    view.take(answer, bench.now)
    assert (set(view.workers), view.whole, answer.since > 0) == ({"b"}, True, True)


def test_who_left_too_long_ago_to_be_told_is_found_out() -> None:
    names = [f"w{n}" for n in range(2 * EVENTS_LISTED)]
    bench, view = Watched(*names), View()
    bench.look(view)
    for name in names[1:]:
        bench.say(name, Bye())
    answer = bench.ask(view)
    view.take(answer, bench.now)
    assert not view.whole
    bench.look(view)
    assert set(view.workers) == {"w0"}


def test_one_worker_and_one_kind_leave_room_for_the_events_of_others() -> None:
    bench, view = Watched("a", "bad"), View()
    bench.say("c", hello("c"))
    bench.say("c", Bye())
    for n in range(10 * EVENTS_LISTED):
        bench.say("bad", Applied(model="a", epoch=7, version=n + 1, digest="f" * 64))
        if n % EVENTS_LISTED == 9:
            bench.say("a", Applied(model="a", epoch=7, version=n + 1, digest="f" * 64))
    bench.note(bench.machine.unreachable(b"a", bench.now, "its process, 7, has ended"))
    bench.look(view)
    told = [(event.kind, event.worker) for event, _ in view.events]
    assert len(told) == EVENTS_LISTED
    assert {("joined", "c"), ("left", "c"), ("lost", "a")} < set(told)
    assert told.count(("wrong-digest", "a")) == 10, "all of them"
    assert told[-1] == ("lost", "a"), "in order"


def test_lag_is_told_in_versions_and_seconds() -> None:
    bench, view = Watched("a"), View()
    version, _ = bench.publish()
    bench.say("a", Applied(model="a", epoch=7, version=1, digest=version.digest))
    first = bench.now = bench.now + 1.0
    for _ in range(100):
        bench.publish()
        bench.now += 1.0
    bench.look(view)
    (standing,) = view.standings(bench.now)
    assert (standing.version, standing.newest, standing.lag) == (1, 101, 100)
    assert standing.lag_s is not None
    assert 0.6 * (bench.now - first) <= standing.lag_s <= bench.now - first + 0.001
    assert len(view.models(bench.now)["a"][0].published) <= VERSIONS_LISTED
    bench.say("a", Progress(model="a", epoch=7, version=101, chunks=1))
    bench.look(view)
    (standing,) = view.standings(bench.now)
    assert standing.phase == "receiving 101, 33 %"


def verdicts(bench: Watched, view: View) -> dict[str, tuple[str, int]]:
    bench.look(view)
    return {s.worker: (s.verdict, s.newest) for s in view.standings(bench.now)}


def test_those_who_look_on_see_what_is_meant_or_committed_for_some() -> None:
    bench, view = Watched("a", "b"), View()
    first, _ = bench.publish()
    for name in "ab":
        bench.say(name, Applied(model="a", epoch=7, version=1, digest=first.digest))
    assert verdicts(bench, view) == {"a": ("current", 1), "b": ("current", 1)}
    alone, _ = bench.publish(workers=("a",))
    assert verdicts(bench, view) == {"a": ("behind", 2), "b": ("current", 1)}
    assert bench.machine.make_room("a", [alone.snapshot], replaces_latest=False)
    assert verdicts(bench, view) == {"a": ("current", 1), "b": ("current", 1)}
    third, _ = bench.publish(workers=("a", "b"), commit="together")
    for name, verdict in (("a", ("current", 1)), ("b", ("behind", 3))):
        bench.say(name, Staged(model="a", epoch=7, version=3, digest=third.digest))
        assert verdicts(bench, view) == {"a": verdict, "b": verdict}


def test_the_rate_is_that_from_publishing_to_applied_or_of_what_arrives() -> None:
    bench, view = Watched("a", "b"), View()
    version, _ = bench.publish(4096)
    bench.now += 0.5
    bench.say("a", Applied(model="a", epoch=7, version=1, digest=version.digest))
    bench.say("b", Progress(model="a", epoch=7, version=1, chunks=64))
    bench.look(view)
    begun = bench.now
    bench.say("b", Progress(model="a", epoch=7, version=1, chunks=128))
    bench.look(view)
    found = {s.worker: s for s in view.standings(bench.now)}
    assert found["a"].took_s == pytest.approx(0.5)
    assert found["a"].rate == pytest.approx(4096 / 0.5)
    assert found["b"].rate == pytest.approx(4096 / 4 / (bench.now - begun))


def test_observers_are_bounded_and_forgotten() -> None:
    bench = Watched()
    for number in range(OBSERVERS_MAX):
        assert isinstance(bench.answer(View(), f"o{number}"), RosterPage)
    refused = bench.answer(View(), "one more")
    assert isinstance(refused, Refuse)
    assert refused.code == "limit"
    assert isinstance(bench.answer(View(), "o0"), RosterPage)
    bench.now += OBSERVER_SECONDS
    assert isinstance(bench.answer(View(), "one more"), RosterPage)


def test_an_observer_that_asks_too_often_is_hung_up_on() -> None:
    bench, view = Watched(), View()
    kinds = set[str]()
    for _ in range(100):
        (effect,) = bench.machine.receive(b"o", [encode(view.question())], bench.now)
        kinds.add(type(effect).__name__)
    assert kinds == {"Send", "HangUp"}


def test_a_revision_that_there_was_not_is_answered_from_the_beginning() -> None:
    bench = Watched("a")
    for asked in (Observe(epoch=7, since=2**50), Observe(epoch=6, since=1)):
        page = bench.machine.observers.pages(asked, bench.now)[0]
        assert (page.since, len(page.rows)) == (0, 1)


# Over sockets.


def arrays(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.full(1000, value, np.float32)}


def test_observers_see_what_receipts_say(publisher: Publisher) -> None:
    target = arrays(0)
    with (
        Observer(publisher.address) as first,
        Observer(publisher.address) as second,
        Subscriber(publisher.address, {"m": target}, name="w") as subscriber,
    ):
        subscriber.start()
        publisher.wait_for_workers(1, SECONDS)
        for _ in range(3):
            receipt = publisher.publish("m", arrays(1))
            for observer in (first, second):
                assert observer.look(SECONDS)
                (standing,) = observer.view.standings(0)
                assert standing.version == receipt.version
                assert (standing.verdict, standing.language) == ("current", "Python")
        assert set(publisher.workers()) == {"w"}, "an observer is not a worker"
        subscriber.close()
        wait_for(lambda: first.look(1) and not first.view.workers, "it has left", SECONDS)


def test_an_observer_outlives_its_publisher() -> None:
    address = lasting_address()
    with Publisher(address) as publisher, Observer(address) as observer:
        assert observer.look(SECONDS)
        epoch = observer.view.epoch
        publisher.close()
        assert not observer.look(0.3)
        with Publisher(address, settings=Settings(epoch=epoch + 1)) as later:
            assert later.publish("m", arrays(1), settings=Settings(wait="none")).version == 1
            wait_for(
                lambda: observer.look(1) and observer.view.epoch == epoch + 1, "the later", SECONDS
            )
            assert observer.view.models(0)["m"][0].version == 1


def test_one_observer_too_many_is_told(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightbus.bus.publisher.observers.OBSERVERS_MAX", 1)
    with Observer(publisher.address) as first, Observer(publisher.address) as second:
        assert first.look(SECONDS)
        with pytest.raises(RefusedError, match="1 observers are here already"):
            second.look(SECONDS)
