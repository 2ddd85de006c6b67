"""A worker's weights are held against what was published, tensor by tensor; and nobody waits."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus import Publisher, Subscriber
from weightbus.bus.effects import Effect as WorkerEffect
from weightbus.bus.effects import Examine, Send
from weightbus.bus.errors import ApplyError, ProtocolError, TornError
from weightbus.bus.headers import encode
from weightbus.bus.limits import CHECKS
from weightbus.bus.messages import (
    CHECKING,
    Applied,
    Beacon,
    Bye,
    Check,
    Checked,
    Hello,
    Refuse,
    Verified,
    Verify,
)
from weightbus.bus.observed import to_observer, to_publisher, unchecked
from weightbus.bus.protocol_limits import (
    CHECK_NAMES_MAX,
    DIFFERENCES_LISTED,
    OBSERVERS_MAX,
    TEXT_MAX,
)
from weightbus.bus.publisher.effects import Effect
from weightbus.bus.publisher.version import Version
from weightbus.bus.worker.events import Examined
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs import apply
from weightbus.codecs.apply import summing
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.codecs.state import state_of, write_into
from weightbus.python_client.applying.reading import InUseError, ReadingLock
from weightbus.python_client.cli.verify import WorkerVerdict
from weightbus.python_client.observing import checking
from weightbus.python_client.observing.observer import Observer
from weightbus.python_client.observing.view import Standing
from weightbus.tests.cli.test_cli import result_of, run
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.publisher.test_publisher_machine import Bench, digest, hello, sent
from weightbus.tests.simulation.virtual_shell import hash_all, perform
from weightbus.tests.worker.test_worker_machine import welcome

SECONDS = 30.0  # far more than anything here takes
Weights = dict[str, Any]


# What differs is found, and nothing else.


def sums_of(layout: Layout, target: object) -> dict[str, int | None]:
    sums = list[int | None]()
    for _ in summing(layout, target, layout.sorted_names, sums):
        pass
    return dict(zip(layout.sorted_names, sums, strict=True))


def published(source: object) -> tuple[Layout, dict[str, int]]:
    """Return a layout, and the sum of each name's bytes in a version."""
    state = state_of(source)
    layout = state.layout()
    data = np.zeros(layout.nbytes, np.uint8)
    write_into(state, layout, data)
    specs = {name: layout.by_name(name) for name in layout.names()}
    return layout, {name: crc32c(data[s.begin : s.end]) for name, s in specs.items()}


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text("abc.", min_size=1), st.tuples(dtypes, shapes), max_size=6), st.data()
)
def test_a_target_sums_to_what_was_published_but_where_it_was_changed(
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]], data: st.DataObject
) -> None:
    made = {name: torch.ones(shape).to(dtype) for name, (dtype, shape) in kinds.items()}
    layout, expected = published(made)
    assert sums_of(layout, made) == expected
    transposed = {n: t.mT.contiguous().mT if t.dim() > 1 else t for n, t in made.items()}
    assert sums_of(layout, transposed) == expected
    arrays = {n: t.numpy() for n, t in made.items() if t.dtype != torch.bfloat16}
    assert {n: s for n, s in sums_of(layout, arrays).items() if s is not None} == {
        name: expected[name] for name in arrays
    }
    some = sorted(name for name, tensor in made.items() if tensor.numel())
    changed = data.draw(st.sets(st.sampled_from(some))) if some else set[str]()
    for name in changed:
        made[name].view(-1)[0] = 0
    assert {n for n, s in sums_of(layout, made).items() if s != expected[n]} == changed


@pytest.mark.parametrize("step", [16, 100, 2**22])
def test_no_more_of_a_tensor_is_copied_than_is_summed_at_once(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Whoever applies a version waits for that; an element is not split."""
    copied, whole = list[int](), apply._bytes_of  # noqa: SLF001 # pyright: ignore

    def bytes_of(leaf: Any, spec: Any) -> Any:
        data = whole(leaf, spec)
        copied.append(data.size)
        return data

    monkeypatch.setattr(apply, "STEP_BYTES", step)
    monkeypatch.setattr(apply, "_bytes_of", bytes_of)
    apart = torch.arange(480.0).reshape(2, 40, 6).permute(2, 0, 1)
    made: Weights = {
        "apart": apart,
        "strided": torch.arange(100.0)[::3].requires_grad_(),
        "conj": torch.randn(3, 7, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.0),
        "empty": torch.ones(4, 0),
        "array": np.asfortranarray(apart.numpy()),
        "number": np.ones((), np.int64),
        "big": np.arange(30, dtype=">i8"),
    }
    layout, expected = published(made)
    assert sums_of(layout, made) == expected
    assert max(copied) <= step


def test_tied_tensors_are_summed_by_each_name_and_casts_by_none() -> None:
    tensor = torch.ones(3)
    layout, expected = published({"a": tensor, "b": tensor})
    untied = {"a": torch.ones(3), "b": torch.zeros(3)}
    found = sums_of(layout, untied)
    assert (found["a"] == expected["a"], found["b"] == expected["b"]) == (True, False)
    assert sums_of(layout, {"a": torch.ones(3).half()}) == {"a": None, "b": None}


# The publisher asks, compares, and answers.


class Verifiable(Bench):
    """A publisher with workers that can be verified, which run its latest version."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.say(name, hello(name, features=[CHECKING]))

    def run(self, version: Version, *names: str) -> None:
        for name in names:
            self.say(
                name, Applied(model="a", epoch=7, version=version.version, digest=digest(version))
            )

    def ask(self, worker: str = "w", who: str = "o", first: int = 0) -> list[Effect]:
        frames = [encode(Verify(worker=worker, model="a", first=first))]
        return perform(self.machine, self.machine.receive(who.encode(), frames, self.now), self.now)

    def answer(self, version: Version, *sums: int | None, worker: str = "w") -> list[Effect]:
        number = version.version
        said = Checked(model="a", epoch=7, version=number, sums=[*sums])
        return self.say(worker, said)


def verdict(effects: list[Effect], to: str = "o") -> Verified:
    (told,) = sent(effects, Verified, to)
    read = to_observer([encode(told)])
    assert isinstance(read, Verified)
    return read


def sum_of(version: Version) -> int:
    return crc32c(np.arange(version.layout.nbytes, dtype=np.uint8))


def test_a_worker_is_asked_and_held_against_the_version() -> None:
    bench = Verifiable("w")
    version, _ = bench.publish()
    bench.run(version, "w")
    (check,) = sent(bench.ask(), Check, "w")
    assert (check.model, check.epoch, check.version, check.first) == ("a", 7, 1, 0)
    same = verdict(bench.answer(version, sum_of(version)))
    assert (same.count, same.names, same.differing, same.code) == (1, 1, 0, None)
    bench.ask()
    other = verdict(bench.answer(version, 7))
    (difference,) = other.differences
    assert (other.differing, difference.name, difference.runs) == (1, "w", 7)
    assert difference.published == sum_of(version)
    bench.ask()
    unlike = verdict(bench.answer(version, None))
    assert (unlike.unlike, unlike.differing) == (1, 0)


def test_what_nobody_asked_for_has_no_effect() -> None:
    bench = Verifiable("w", "v")
    version, _ = bench.publish()
    bench.run(version, "w", "v")
    assert not bench.answer(version, 7)
    bench.ask()
    assert not bench.answer(version, 7, worker="v")
    assert not bench.say("w", Checked(model="a", epoch=7, version=1, first=1, sums=[7]))
    assert not bench.say("w", Checked(model="a", epoch=7, version=2, sums=[7]))
    assert verdict(bench.answer(version, 7)).differing == 1
    assert not bench.answer(version, 7), "it was answered"


def test_the_version_is_not_lent_while_it_is_read_and_is_afterwards() -> None:
    bench = Verifiable("w")
    version, _ = bench.publish()
    bench.run(version, "w")
    assert version.reclaimable
    bench.ask()
    said = Checked(model="a", epoch=7, version=1, sums=[7])
    effects = bench.machine.receive(b"w", [encode(said)], bench.now)
    assert not version.reclaimable
    found = perform(bench.machine, effects, bench.now)
    assert verdict(found).differing == 1
    assert version.reclaimable


def test_why_a_worker_cannot_be_verified_is_said() -> None:
    bench = Verifiable("w")
    bench.say("old", hello("old", client="other-client/1.0"))
    assert verdict(bench.ask("nobody")).code == "absent"
    assert verdict(bench.ask("w")).code == "absent", "it runs nothing"
    told = verdict(bench.ask("old"))
    assert told.code == "unsupported"
    assert "other-client/1.0 computes no checksums" in told.text
    version, _ = bench.publish()
    bench.run(version, "w")
    later, _ = bench.publish()
    bench.pass_time(1.0)
    bench.publish()
    assert verdict(bench.ask()).code == "gone"
    bench.run(later, "w")
    bench.say("w", Bye())
    assert verdict(bench.ask()).code == "absent"


def test_a_version_that_goes_while_it_is_compared_is_told() -> None:
    bench = Verifiable("w")
    version, _ = bench.publish()
    bench.run(version, "w")
    bench.ask()
    later, _ = bench.publish()
    bench.run(later, "w")
    assert verdict(bench.answer(version, 7)).code == "gone"


def test_questions_are_bounded_and_end() -> None:
    names = [f"w{n}" for n in range(OBSERVERS_MAX + 1)]
    bench = Verifiable(*names)
    version, _ = bench.publish()
    bench.run(version, *names)
    assert sent(bench.ask("w0"), Check, "w0")
    assert verdict(bench.ask("w0", "another"), "another").code == "busy"
    assert sent(bench.ask("w0"), Check, "w0"), "the same observer may ask again"
    for number, name in enumerate(names[1:OBSERVERS_MAX]):
        assert sent(bench.ask(name, f"o{number}"), Check, name)
    assert verdict(bench.ask(names[-1], "p"), "p").code == "busy"
    found: list[Effect] = []
    for _ in range(10):
        bench.now += 0.5
        for name in names:
            bench.run(version, name)
        found = perform(bench.machine, bench.machine.tick(bench.now), bench.now)
    told = [m for m in sent(found, Verified) if isinstance(m, Verified)]
    assert {each.code for each in told} == {"silent"}
    assert len(told) == OBSERVERS_MAX
    assert sent(bench.ask(names[-1], "p"), Check, names[-1])


def test_the_largest_answer_fits_a_header() -> None:
    names = [f"{n:04}" + '"' * 600 for n in range(2 * DIFFERENCES_LISTED)]
    bench = Verifiable("w")
    layout = Layout.plan([(name, "U8", (1,)) for name in names])
    version, _ = bench.machine.offer(bench.offer(layout, replaces_latest=True))
    bench.say("w", Applied(model="a", epoch=7, version=1, digest=hash_all(version)))
    bench.ask()
    told = verdict(bench.answer(version, *[1] * len(names)))
    assert (told.count, told.differing) == (len(names), len(names))
    assert 10 < len(told.differences) <= DIFFERENCES_LISTED


# The worker has it looked at, and bounds that.


class Asked:
    """A worker that is asked again and again."""

    def __init__(self) -> None:
        self.machine = WorkerMachine(
            Hello(name="w", instance="a" * 32, models={}), ["a"], lambda _m, _l: ""
        )
        self.now = 100.0
        self.machine.connected(self.now)
        self.machine.receive([encode(welcome())], self.now)

    def ask(self, epoch: int = 7, **fields: Any) -> list[WorkerEffect]:
        check = Check(model="a", epoch=epoch, version=1, **fields)
        return self.machine.receive([encode(check)], self.now)


def test_a_worker_looks_so_often_and_says_that_it_is_busy() -> None:
    asked = Asked()
    kinds = [type(asked.ask()[0]) for _ in range(20)]
    assert kinds == [Examine] * int(CHECKS.burst) + [Send] * (20 - int(CHECKS.burst))
    (busy,) = asked.ask()
    assert isinstance(busy, Send)
    assert isinstance(busy.message, Checked)
    assert busy.message.code == "busy"
    asked.now += 1 / CHECKS.per_second
    (effect,) = asked.ask()
    assert isinstance(effect, Examine)


def test_a_worker_is_asked_on_its_control_connection_in_its_session_alone() -> None:
    asked = Asked()
    assert not [e for e in asked.ask(epoch=6) if isinstance(e, Examine)]
    check = Check(model="a", epoch=7, version=1)
    beacon = Beacon(model="a", epoch=7, version=0)
    asked.machine.receive_published([b"a/ctl", encode(beacon)], asked.now)
    asked.now += 10.0  # a hello would be said
    for each in (check, Check(model="a", epoch=8, version=1)):
        assert not asked.machine.receive_published([b"a/ctl", encode(each)], asked.now)
    answer = Checked(model="a", epoch=7, version=1, sums=[1])
    (said,) = asked.machine.happened(Examined(answer), asked.now)
    assert isinstance(said, Send)
    assert said.message == answer
    asked.machine.receive([encode(Refuse(code="name-taken", text=""))], asked.now)
    assert not asked.machine.happened(Examined(answer), asked.now), "nobody is there"


def test_why_there_are_no_sums_is_as_long_as_words_may_be() -> None:
    told = unchecked(Check(model="a", epoch=7, version=1), "unreadable", "x" * (TEXT_MAX + 1))
    read = to_publisher([encode(told)])
    assert isinstance(read, Checked)
    assert read.text == "x" * (TEXT_MAX - 1) + "…"
    assert encode(unchecked(Check(model="a", epoch=7, version=1), "unreadable", "x\udcff"))


# What is said of it.

_NONE = ("", 0.0, 0.0, "", "python", "", "", 0, "pulled", "raw", 0.0)
STANDING = Standing("a", "w", "current", 7, 1, 1, 0, None, *_NONE)


def test_a_mixture_of_versions_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has another version by each answer, of which each alone would be the same."""
    versions = itertools.count(1)

    def answer(asked: Verify, _until: float) -> Verified:
        known: dict[str, Any] = {
            "version": next(versions),
            "names": 4,
            "count": 2,
            "first": asked.first,
        }
        return Verified(worker="w", model="a", epoch=7, **known)

    with Observer("tcp://127.0.0.1:1") as observer:
        monkeypatch.setattr(observer, "_ask", lambda *_: True)
        monkeypatch.setattr(observer, "_verified", answer)
        told = observer.verify("w", "a", SECONDS)
    assert (told.code, told.names, told.count) == ("changed", 4, 0)
    assert WorkerVerdict(STANDING, told).verdict == "unknown"


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ({"names": 3, "count": 3}, "same"),
        ({"names": 3, "count": 3, "unlike": 2}, "same"),
        ({"names": 3, "count": 3, "unlike": 3}, "unknown"),
        ({"names": 3, "count": 2}, "unknown"),
        ({"names": 3}, "unknown"),
        ({}, "same"),  # a version without tensors
        ({"code": "gone", "text": "it is gone"}, "unknown"),
        ({"names": 3, "count": 2, "differing": 1}, "differs"),
    ],
)
def test_weights_are_the_same_if_all_of_them_were_compared(
    told: dict[str, Any], verdict: str
) -> None:
    found = WorkerVerdict(STANDING, Verified(worker="w", model="a", **told))
    assert found.verdict == verdict
    if verdict == "unknown":
        assert found.why


class Applying:
    """What applies versions, and stands still; and a target of two tensors."""

    def __init__(self) -> None:
        self.lock, self.layout = ReadingLock(), Layout.plan([(n, "U8", (1,)) for n in "ab"])
        self.free = list[bool]()  # whether somebody could have written, in each step
        self.steps_of_version = 2

    def lock_of(self, _model: str) -> ReadingLock:
        return self.lock

    def layout_of(self, _model: str, _key: tuple[int, int]) -> Layout | None:
        return self.layout if len(self.free) < self.steps_of_version else None

    def summing(self, _layout: Layout, names: list[str], sums: list[int | None]) -> Iterator[int]:
        for _ in names:
            writer = threading.Thread(target=self._write)
            writer.start()
            writer.join(SECONDS)
            sums.append(7)
            yield 1

    def _write(self) -> None:
        try:
            with self.lock.writing(0.0):
                self.free.append(True)
        except InUseError:
            self.free.append(False)

    def checker(self, told: list[Examined]) -> checking.Checker:
        return checking.Checker({"a": self}, self, told.append)  # type: ignore[dict-item, arg-type]

    def answer(self) -> Checked:
        told = list[Examined]()
        self.checker(told).ask(Check(model="a", epoch=7, version=1))
        return wait_for(lambda: told, "the answer", SECONDS)[0].answer


def test_nobody_writes_within_a_step_and_sums_are_of_one_version() -> None:
    steady, overtaken = Applying(), Applying()
    steady.steps_of_version = 3
    answer = steady.answer()
    assert (answer.sums, answer.code, steady.free) == ([7, 7], None, [False, False])
    overtaken.steps_of_version = 1
    answer = overtaken.answer()
    assert (answer.sums, answer.code, overtaken.free) == ([], "changed", [False])


def test_another_model_that_holds_no_version_is_no_matter() -> None:
    """Nor one whose writer hangs; but what is asked for must hold one."""
    for other, code in (("b", None), ("a", "unreadable")):
        torn, late = Applying(), Applying()
        torn.steps_of_version = late.steps_of_version = 3
        torn.lock.mark_invalid(
            other, TornError("torn", model=other, epoch=7, version=1, code="apply")
        )
        assert torn.answer().code == code
        error = ApplyError("late", model=other, epoch=7, version=1, code="apply")
        with late.lock.writing(SECONDS):
            late.lock.release_readers(other, error)
            assert late.answer().code == code


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_worker_that_has_no_thread_for_it_is_busy(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """And goes on: whoever asks is the thread that owns its sockets."""

    def fails(_self: threading.Thread) -> None:
        raise error

    applying, told = Applying(), list[Examined]()
    applying.steps_of_version, check = 3, Check(model="a", epoch=7, version=1)
    checker = applying.checker(told)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", fails)
        checker.ask(check)
    assert [each.answer.code for each in told] == ["busy"]
    checker.ask(check)
    assert wait_for(lambda: told[1:], "the answer", SECONDS)[0].answer.code is None


# Over sockets.


def weights() -> Weights:
    return {
        "a": np.ones(1000, np.float32),
        "b": np.zeros((3, 4), np.int64),
        "0": np.ones(0, np.int64),
    }


def test_a_worker_that_changed_its_weights_is_found_by_name(publisher: Publisher) -> None:
    here, there = weights(), weights()
    with (
        Subscriber(publisher.address, {"m": here}, name="good") as good,
        Subscriber(publisher.address, {"m": there}, name="odd") as odd,
    ):
        good.start()
        odd.start()
        publisher.wait_for_workers(2, SECONDS)
        publisher.publish("m", weights())
        assert run("verify", publisher.address).exit_code == 0
        there["b"][1, 1] = 7
        done = run("verify", publisher.address, "--json")
        found = {row["worker"]: row for row in result_of(done)["workers"]}
        assert done.exit_code == 1
        assert (found["good"]["verdict"], found["odd"]["verdict"]) == ("same", "differs")
        assert [d["name"] for d in found["odd"]["differences"]] == ["b"]
        assert (found["odd"]["tensors"], found["odd"]["compared"]) == (3, 3)
        shown = run("verify", publisher.address, "--worker", "odd").stdout
        assert "differs" in shown
        assert "good" not in shown
        publisher.publish("m", weights())
        assert run("verify", publisher.address).exit_code == 0, "a new version mends it"


def test_files_and_functions_and_those_who_cannot(publisher: Publisher, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    with (
        Subscriber(publisher.address, {"m": file}, name="file") as first,
        Subscriber(publisher.address, {"m": lambda _pairs: None}, name="function") as second,
    ):
        first.start()
        second.start()
        publisher.wait_for_workers(2, SECONDS)
        publisher.publish("m", weights())
        done = run("verify", publisher.address, "--json")
        found = {row["worker"]: row for row in result_of(done)["workers"]}
        assert (done.exit_code, found["file"]["verdict"]) == (3, "same")
        assert found["function"]["code"] == "unsupported"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        done = run("verify", publisher.address, "--json")
        found = {row["worker"]: row for row in result_of(done)["workers"]}
        assert (done.exit_code, found["file"]["verdict"]) == (1, "differs")
        file.write_bytes(b"no file of weights")
        done = run("verify", publisher.address, "--worker", "file", "--json")
        assert result_of(done)["workers"][0]["code"] == "unreadable"
        assert run("verify", publisher.address, "--worker", "nobody").exit_code == 2


def test_a_large_model_is_verified_in_pieces(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "CHECK_NAMES_MAX", 3)
    monkeypatch.setattr(checking, "CHECK_BYTES", 100)
    here = {f"t{n:02}": np.full(20, n, np.uint8) for n in range(20)}
    with (
        Subscriber(publisher.address, {"m": here}, name="w") as worker,
        Observer(publisher.address) as observer,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", {name: array.copy() for name, array in here.items()})
        here["t05"][0], here["t19"][0] = 99, 99
        told = observer.verify("w", "m", SECONDS)
    assert (told.code, told.count, told.names) == (None, 20, 20)
    assert [each.name for each in told.differences] == ["t05", "t19"]
    assert CHECK_NAMES_MAX > 3


def test_workers_are_verified_while_versions_come(publisher: Publisher) -> None:
    """Nothing that differs is found where nothing does; and the publishes go on."""
    here = {"w": np.zeros(2**20, np.uint8)}
    with (
        Subscriber(publisher.address, {"m": here}, name="w") as worker,
        Observer(publisher.address) as observer,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        codes = list[str | None]()
        for number in range(20):
            publisher.publish("m", {"w": np.full(2**20, number, np.uint8)})
            later = publisher.publish_async("m", {"w": np.full(2**20, number + 1, np.uint8)})
            told = observer.verify("w", "m", SECONDS)
            assert not told.differing
            codes.append(told.code)
            later.result(SECONDS)
    assert None in codes


def test_an_earlier_publisher_is_said_to_be_one(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:

    def earlier(frames: Any) -> Any:
        if b'"verify"' in bytes(frames[0]):
            raise ProtocolError("not a header of WBP/1")
        return to_publisher(frames)

    with Subscriber(publisher.address, {"m": weights()}, name="w") as worker:
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        monkeypatch.setattr("weightbus.bus.publisher.machine.to_publisher", earlier)
        done = run("verify", publisher.address)
    assert done.exit_code == 2
    assert "earlier release" in done.stderr


def test_a_worker_goes_on_answering_pings_while_it_is_looked_at(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model hangs, in the thread that looks; nobody thinks that it is lost."""
    release = threading.Event()

    def hangs(*_arguments: object) -> Iterator[int]:
        release.wait(SECONDS)
        yield 1

    with Subscriber(publisher.address, {"m": weights()}, name="w") as worker:
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", weights())
        monkeypatch.setattr("weightbus.python_client.applying.targets.summing", hangs)
        with Observer(publisher.address) as observer:
            told = observer.verify("w", "m", 1.5)
        release.set()
        assert told.code == "silent"
        assert publisher.workers()["w"].state == "live"
