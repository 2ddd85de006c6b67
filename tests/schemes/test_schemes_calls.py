"""What workers answer to calls becomes a receipt by the deadline, and what is known of them."""

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from weightbus.bus.errors import PublishError
from weightbus.codecs.state import State
from weightbus.python_client.schemes.call_receiver import Call, IncomingVersion, Registry
from weightbus.python_client.schemes.call_sender import CallSender, Channel, Peers
from weightbus.python_client.schemes.model import CallResult
from weightbus.python_client.schemes.ray import answers_to
from weightbus.python_client.schemes.scheme import Scheme
from weightbus.python_client.schemes.sender import Sending
from weightbus.python_client.schemes.transport import Transport, Weights
from weightbus.python_client.schemes.worker_transports import WorkerTransport

SECONDS = 20.0  # far more than anything here takes
WEIGHTS = Weights("policy", {"a": torch.ones(3)})


class Snapshot:
    def __init__(self, state: State) -> None:
        self.layout = state.layout()
        self.ends: list[bool] = []

    def done(self, clean: bool) -> None:
        self.ends.append(clean)


class Answering(Peers):
    """Workers that answer when the test has them do so."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count))
        self.calls: list[tuple[int, Call, Future[CallResult]]] = []
        self.snapshots: list[Snapshot] = []

    def pack(self, state: State) -> Snapshot:
        self.snapshots.append(Snapshot(state))
        return self.snapshots[-1]

    def call(self, worker: int, payload: Any, what: Call, timeout: float) -> "Future[CallResult]":
        del payload, timeout
        future: Future[CallResult] = Future()
        self.calls.append((worker, what, future))
        return future

    def explain(self, worker: int, error: BaseException) -> CallResult:
        return CallResult("lost", f"{worker}: {error}")


def test_a_late_greeting_does_not_replace_a_newer_one() -> None:
    registry = Registry()

    def greeted(version: int, worker: int = 0) -> IncomingVersion:
        what = Call("key", "policy", worker, 1, version, 10.0, True, "tensordict")
        greeting = IncomingVersion.of(what, b"", np.zeros(1, np.uint8), waits=False)
        assert registry.find_or_keep(greeting) is None
        return greeting

    newer, late, other = greeted(2), greeted(1), greeted(1, worker=1)
    assert late.answer is not None
    assert late.answer.state == "skipped"
    assert (newer.answer, other.answer) == (None, None)
    assert registry._kept == [newer, other]  # noqa: SLF001 # pyright: ignore


def test_an_async_send_of_a_transport_waits_for_the_one_before() -> None:
    peers, scheme = Answering(1), Scheming()
    transport = WorkerTransport(scheme, CallSender(Channel(), peers, "tensordict"))
    transport.send_weights_async(WEIGHTS)
    peers.calls[0][2].set_result(CallResult("failed", "it does not fit"))
    with pytest.raises(PublishError, match="it does not fit"):
        transport.send_weights_async(WEIGHTS)
    assert len(peers.calls) == 1
    transport.send_weights_async(WEIGHTS)
    peers.calls[1][2].set_result(CallResult("applied"))
    transport.send_weights_async(WEIGHTS)
    peers.calls[2][2].set_result(CallResult("applied"))
    transport.wait_ack()
    with pytest.raises(RuntimeError, match="No pending future"):
        transport.wait_ack()


class Scheming(Scheme):
    """A scheme whose weights are prepared already."""

    def prepared(self, weights: Any = None, model_id: str | None = None) -> Any:
        del model_id
        return weights


def test_coroutines_of_a_users_own_calls_share_the_time() -> None:
    began: list[int] = []

    async def meet(worker: int) -> None:
        began.append(worker)
        while len(began) < 3:
            await asyncio.sleep(0)

    async def fail() -> None:
        raise ValueError("no")

    async def hang() -> None:
        await asyncio.Event().wait()

    answers = answers_to({"0": meet(0), "1": meet(1), "2": meet(2), "3": fail()}, SECONDS)
    assert [answers[name].result(0) for name in "012"] == [CallResult("applied")] * 3
    with pytest.raises(ValueError, match="no"):
        answers["3"].result(0)
    begun = time.monotonic()
    slow = answers_to({"0": hang(), "1": hang(), "2": Future(), "3": Future()}, 0.5)
    assert time.monotonic() - begun < 1.0, "the time of one, and not of four"
    assert all(isinstance(answer.exception(0), TimeoutError) for answer in slow.values())


@pytest.mark.parametrize("late_first", [False, True])
def test_a_worker_that_runs_no_version_is_left_out_until_it_runs_a_newer(late_first: bool) -> None:
    peers = Answering(1)
    sender = CallSender(Channel(), peers, "tensordict")
    sent = [sender.send(WEIGHTS, None, timeout=10.0) for _ in range(4)]
    first, second, torn, fourth = (future for _, _, future in peers.calls)
    first.set_result(CallResult("applied"))
    assert sender.versions() == {0: 1}
    answers = [(second, CallResult("applied")), (torn, CallResult("failed", "torn", intact=False))]
    for future, answer in reversed(answers) if late_first else answers:
        future.set_result(answer)
    assert sender.versions() == {}, "what it ran before is gone, whichever answer came last"
    fourth.set_result(CallResult("applied"))
    assert sender.versions() == {0: 4}
    states = [future.result(1.0).workers["0"].state for future in sent]
    assert states == ["applied", "applied", "failed", "applied"]


def test_a_version_that_was_refused_whole_leaves_the_one_before_running() -> None:
    peers = Answering(1)
    sender = CallSender(Channel(), peers, "tensordict")
    for _ in range(2):
        sender.send(WEIGHTS, None, timeout=10.0)
    peers.calls[0][2].set_result(CallResult("applied"))
    peers.calls[1][2].set_result(CallResult("failed", "it does not fit"))
    assert sender.versions() == {0: 1}


def test_a_receipt_is_there_as_soon_as_all_have_answered_in_whatever_way() -> None:
    peers = Answering(4)
    future = CallSender(Channel(), peers, "tensordict").send(WEIGHTS, None, timeout=600.0)
    answers = [CallResult("applied"), CallResult("skipped", "newer"), CallResult("staged", "aside")]
    for (_, _, call), answer in zip(peers.calls, answers, strict=False):
        assert not future.done()
        call.set_result(answer)
    peers.calls[3][2].set_exception(OSError("gone"))
    receipt = future.result(1.0)
    rows = {name: (w.state, w.detail) for name, w in receipt.workers.items()}
    assert rows == {
        "0": ("applied", ""),
        "1": ("skipped", "newer"),
        "2": ("staged", "aside"),
        "3": ("lost", "3: gone"),
    }
    assert (receipt.model, receipt.version, receipt.nbytes) == ("policy", 1, 12)
    assert peers.snapshots[0].ends == [False], "a call that failed may still be reading it"


def test_who_has_not_answered_by_the_deadline_is_behind() -> None:
    peers = Answering(3)
    sender = CallSender(Channel(), peers, "tensordict")
    started = time.monotonic()
    future = sender.send(WEIGHTS, None, timeout=0.2)
    peers.calls[0][2].set_result(CallResult("applied"))
    peers.calls[1][2].set_result(CallResult("behind", "it is busy"))
    receipt = future.result(10.0)
    assert time.monotonic() - started >= 0.2
    rows = {name: (w.state, w.seconds is None, w.detail) for name, w in receipt.workers.items()}
    assert rows["0"] == ("applied", False, "")
    assert rows["1"] == ("behind", True, "it is busy")
    assert rows["2"][:2] == ("behind", True)
    assert "no answer within 0.2 s" in rows["2"][2]
    peers.calls[2][2].set_result(CallResult("applied"))
    assert sender.versions() == {0: 1, 2: 1}, "late, but it does run it"


def test_a_send_to_nobody_is_over_at_once() -> None:
    future = CallSender(Channel(), Answering(0), "tensordict").send(WEIGHTS, None, timeout=600.0)
    assert future.result(1.0).workers == {}


def test_answers_from_many_threads_make_one_receipt() -> None:
    peers = Answering(32)
    future = CallSender(Channel(), peers, "tensordict").send(WEIGHTS, None, timeout=600.0)
    threads = [
        threading.Thread(target=call.set_result, args=(CallResult("applied"),))
        for _, _, call in peers.calls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(future.result(1.0).in_state("applied")) == 32
    assert peers.snapshots[0].ends == [True]


class Silent(Transport):
    """A transport that never answers, because its thread is stuck, say."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def workers(self) -> range:
        return range(2)

    def send(self, weights: Weights, workers: Any, *, timeout: float) -> "Future[Any]":
        del weights, timeout
        self.asked.append(workers)
        return Future()


@pytest.mark.parametrize("weights", [WEIGHTS, {0: WEIGHTS, 1: WEIGHTS}], ids=["all", "each"])
def test_a_carrier_that_does_not_answer_costs_no_more_than_the_deadline(weights: Any) -> None:
    transport = Silent()
    sending = Sending(transport)
    started = time.monotonic()
    sending.start(weights, None, 0.5)
    with pytest.raises(PublishError, match=r"0 of 2 .*worker 0 behind.*worker 1 behind") as caught:
        sending.finish()
    assert time.monotonic() - started < 3.0
    assert sending.receipt is caught.value.receipt
    assert not sending.pending, "the next send is not held up"
    assert transport.asked == ([None] if weights is WEIGHTS else [[0], [1]])
