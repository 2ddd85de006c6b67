"""The schemes over the bus do what they promise: between real processes, and within one."""

import multiprocessing
import os
import pickle  # as multiprocessing does it with a scheme that is handed to a worker
import queue
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from weightbus import PublishError, RefusedError, Settings, StateError, Subscriber, WeightBusError
from weightbus.bus.trust.keys import generate
from weightbus.codecs import state, torch_modules
from weightbus.codecs.apply import Reader
from weightbus.python_client.schemes import strategy
from weightbus.python_client.schemes.bus import _BusSender  # pyright: ignore[reportPrivateUsage]
from weightbus.python_client.schemes.receiver import Destination
from weightbus.tests.compose.waiting import stop, wait_for
from weightbus.tests.schemes.scheme_worker import Net, fill, values, work
from weightbus.torchrl import (
    MPTransport,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
    ZMQWeightSyncScheme,
)

SCHEMES = [ZMQWeightSyncScheme, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme]
QUICK = Settings(ping=0.2, lost_after=1.0)


class Worker:
    """A worker process that answers over a pipe."""

    def __init__(self, context: BaseContext, scheme: WeightSyncScheme, **told: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process: Any = context.Process(  # type: ignore[attr-defined]  # pyright: ignore
            target=work, args=(scheme, theirs, told), daemon=True
        )
        self.process.start()
        theirs.close()

    def told(self) -> Any:
        """Return what it says next."""
        assert self.pipe.poll(60.0), "the worker says nothing"
        return self.pipe.recv()

    def ask(self, command: str) -> Any:
        """Tell it to do something; return what it answers."""
        self.pipe.send(command)
        return self.told()

    def end(self) -> None:
        """End it, whatever state it is in."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10.0)
        self.pipe.close()


@contextmanager
def processes(
    scheme: WeightSyncScheme, *each: dict[str, Any], method: str = "spawn"
) -> Generator[list[Worker]]:
    """Start a worker for each; connect the sender; wait until they are all connected."""
    context = multiprocessing.get_context(method)
    workers: list[Worker] = []
    try:
        for worker_idx, told in enumerate(each):
            workers.append(Worker(context, scheme, **{"worker_idx": worker_idx, **told}))
        if not scheme.synchronized_on_sender:
            scheme.connect()
        yield workers
    finally:
        for worker in workers:
            worker.end()
        scheme.shutdown()


class Schemes:
    """Makes senders and receivers in this process, which end with the test: receivers first."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def sender(self, scheme: Any = None, **given: Any) -> Any:
        """Have a scheme be the sender of `policy`, for one worker unless it is told otherwise."""
        self.made.append(scheme := scheme or ZMQWeightSyncScheme(liveness=QUICK))
        scheme.init_on_sender(**{"model_id": "policy", "num_workers": 1, **given})
        return scheme

    def receiver(self, sender: Any, model: Any = None, worker_idx: int = 0, **given: Any) -> Any:
        """Return the receiver of a worker, which has joined, or will once `connect()` is called."""
        self.made.append(receiver := pickle.loads(pickle.dumps(sender)))  # noqa: S301
        connects = given.pop("connects", True)
        told = {"context": given.pop("context")} if "context" in given else {"model": model}
        receiver.init_on_receiver(
            **{"model_id": "policy", "worker_idx": worker_idx, **told, **given}
        )
        if connects:
            receiver.connect()
        return receiver

    def end(self) -> None:
        for scheme in reversed(self.made):
            scheme.shutdown()


@pytest.fixture(name="schemes")
def _schemes() -> Iterator[Schemes]:
    made = Schemes()
    yield made
    made.end()


@contextmanager
def one_process(
    workers: int = 2, *, sender: Any = None, first: int = 0, **settings: Any
) -> Generator[tuple[Any, Net, list[Any], list[Net]]]:
    """A sender and its receivers, all here."""
    made, net = Schemes(), fill(Net(), 1.0)
    try:
        sender = sender or ZMQWeightSyncScheme(liveness=QUICK, **settings)
        made.sender(sender, model=net, num_workers=workers)
        nets = [Net() for _ in range(workers)]
        receivers = [made.receiver(sender, each, first + i) for i, each in enumerate(nets)]
        sender.connect()
        yield sender, net, receivers, nets
    finally:
        made.end()


# Between processes.


@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, SharedMemWeightSyncScheme])
def test_spawned_workers_get_the_first_weights_and_every_send(kind: type[Any]) -> None:
    scheme, net = kind(liveness=QUICK), fill(Net(), 1.0)
    scheme.init_on_sender(model_id="policy", model=net, num_workers=2)
    with processes(scheme, {"meta": True}, {}) as (meta, real):
        assert meta.told() == {1.0}
        assert real.told() == "connected"
        fill(net, 2.0)
        assert meta.ask("values") == {1.0}, "in-place training reached a worker without a send"
        scheme.send(timeout=30.0)
        assert scheme.receipt is not None
        assert scheme.receipt.in_state("applied") == ["0", "1"]
        assert meta.ask("values") == real.ask("values") == {2.0}
        scheme.send(fill(Net(), 3.0), worker_ids=1)
        assert (meta.ask("values"), real.ask("values")) == ({2.0}, {3.0})
        assert scheme.versions() == {0: 2, 1: 3}
        scheme.send({0: fill(Net(), 5.0), 1: fill(Net(), 6.0)})
        assert (meta.ask("values"), real.ask("values")) == ({5.0}, {6.0})


def test_a_forked_copy_becomes_a_receiver() -> None:
    scheme, net = ZMQWeightSyncScheme(liveness=QUICK), fill(Net(), 1.0)
    scheme.init_on_sender(model_id="policy", model=net, num_workers=1)
    with processes(scheme, {"meta": True}, method="fork") as (worker,):
        assert worker.told() == {1.0}
        fill(net, 2.0)
        scheme.send()
        assert worker.ask("values") == {2.0}


def test_a_worker_that_cannot_apply_is_named_and_the_others_go_on(schemes: Schemes) -> None:
    net, good, odd = fill(Net(), 1.0), Net(), Net(5)
    sender = schemes.sender(model=net, num_workers=2)
    for worker_idx, target in enumerate((good, odd)):
        schemes.receiver(sender, target, worker_idx)
    sender.connect()
    with pytest.raises(PublishError, match=r"1 of 2 .*worker 1 failed.*(?s:.*)first\.bias"):
        sender.send(fill(net, 2.0), timeout=20.0)
    assert values(good) == {2.0}
    sender.send(fill(net, 3.0), worker_ids=[0])
    assert values(good) == {3.0}
    assert 2.0 not in values(odd)


def test_a_killed_and_a_stopped_worker_are_named_in_time_and_may_come_back() -> None:
    scheme, net = ZMQWeightSyncScheme(liveness=QUICK), fill(Net(), 1.0)
    scheme.init_on_sender(model_id="policy", model=net, num_workers=3)
    with processes(scheme, {}, {}, {}) as workers:
        good, stopped, killed = workers
        for worker in workers:
            assert worker.told() == "connected"
        scheme.send()
        os.kill(killed.process.pid, signal.SIGKILL)
        stop(stopped.process.pid)
        started = time.monotonic()
        with pytest.raises(PublishError, match=r"1 of 3 .*worker 1 .*worker 2 lost") as caught:
            scheme.send(fill(net, 2.0), timeout=4.0)
        assert time.monotonic() - started < 8.0
        receipt = caught.value.receipt
        assert receipt is scheme.receipt
        lost = [w.seconds or 0.0 for w in receipt.workers.values() if w.state == "lost"]
        assert receipt.seconds - max(lost) < 0.5, "who is lost is not waited for"
        assert good.ask("values") == {2.0}
        started = time.monotonic()
        scheme.send(fill(net, 3.0), worker_ids=0)
        assert time.monotonic() - started < 3.0, "a dead worker holds up the living"
        assert good.ask("values") == {3.0}
        os.kill(stopped.process.pid, signal.SIGCONT)
        again = Worker(multiprocessing.get_context("spawn"), scheme, worker_idx=2, meta=True)
        workers.append(again)
        assert again.told() == {2.0}, "a worker that joins gets the latest version for all"
        scheme.send(fill(net, 4.0), timeout=30.0)
        assert stopped.ask("values") == again.ask("values") == {4.0}


def test_older_vintage_over_pipes() -> None:
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    scheme, net = MultiProcessWeightSyncScheme(liveness=QUICK), Net()
    plain = pickle.loads(pickle.dumps(scheme))  # noqa: S301 - it has never seen the sender
    scheme.init_on_sender("policy", model=net, pipes=[ours for ours, _ in ends])
    workers = [Worker(context, plain, older=theirs) for _, theirs in ends]
    sender = scheme.get_sender()
    try:
        assert [w.told() for w in workers] == ["connected"] * 2
        fill(net, 4.0)
        sender.send_async(timeout=30.0)
        fill(net, 0.0)  # too late to be seen
        assert [w.ask("older receive") for w in workers] == [{4.0}] * 2
        sender.wait_async()
        for worker in workers:
            worker.pipe.send("older receive")
        sender.update_weights(fill(Net(), 5.0))
        assert [w.told() for w in workers] == [{5.0}] * 2
        assert sender.receipt is not None
        assert sender.receipt.in_state("applied") == ["0", "1"]
    finally:
        for worker in workers:
            worker.end()
        scheme.shutdown()


# Within one.


def test_memory_and_ties_stay_and_ids_are_checked() -> None:
    with one_process() as (sender, net, _, nets):
        before = [p.data_ptr() for p in nets[0].parameters()]
        sender.send(fill(net, 2.0))
        assert values(nets[0]) == values(nets[1]) == {2.0}
        assert [p.data_ptr() for p in nets[0].parameters()] == before
        with pytest.raises(ValueError, match="Worker 5 not registered"):
            sender.send(fill(net, 3.0), worker_ids=[0, 5])
        with pytest.raises(ValueError, match="no weights given for worker 1"):
            sender.send({0: net}, worker_ids=[0, 1])
        with pytest.raises(ValueError, match="seconds above 0"):
            sender.send(timeout=0)
        with pytest.raises(StateError, match="a object cannot travel"):
            sender.send({"first.weight": object()})
        assert values(nets[0]) == {2.0}


def test_a_worker_that_leaves_as_it_is_sent_to_has_left(
    schemes: Schemes, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, stays, goes = fill(Net(), 1.0), Net(), Net()
    sender = schemes.sender(model=net, num_workers=2)
    schemes.receiver(sender, stays, 0)
    leaving = schemes.receiver(sender, goes, 1)
    sender.connect()
    sender.send()
    look = vars(_BusSender)["_await_joined"]

    def leave_then(transport: Any, *told: Any) -> frozenset[str]:
        there: frozenset[str] = look(transport, *told)
        leaving.shutdown()
        publisher = vars(transport)["_publisher"]
        wait_for(lambda: "1" not in publisher.workers(), "the worker to leave", 30.0)
        return there

    monkeypatch.setattr(_BusSender, "_await_joined", leave_then)
    with pytest.raises(PublishError, match=r"worker 1 lost .*it has left") as caught:
        sender.send(fill(net, 2.0), worker_ids=[0, 1])
    assert caught.value.receipt.workers["0"].state == "applied"
    assert values(stays) == {2.0}


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
def test_a_send_takes_the_model_apart_once(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    with one_process(1, strategy=form) as (sender, net, _, nets):
        sender.send()
        watch(torch_modules, "contents_of")
        watch(strategy, "nested")
        watch(strategy, "named_leaves")
        watch(state, "named_leaves")
        sender.send(fill(net, 2.0))
        assert calls == ["contents_of", "named_leaves"][: 2 if form == "state_dict" else 1]
        assert 2.0 in values(nets[0])


class Doubling(ZMQWeightSyncScheme):
    """A user's own, with a way of its own to prepare weights."""

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: Any, context: Any = None
    ) -> Any:
        """Return the weights doubled."""
        prepared = super().prepare_weights(weights, model_id, strategy, context)
        return {name: 2 * tensor for name, tensor in strategy.tensors_of(prepared).items()}


def test_what_a_users_own_way_to_prepare_weights_returns_is_sent() -> None:
    with one_process(1, sender=Doubling(liveness=QUICK)) as (sender, net, _, nets):
        sender.send(fill(net, 2.0))
        assert values(nets[0]) == {4.0}


def test_a_send_that_nobody_has_waited_for_is_not_forgotten() -> None:
    with one_process() as (sender, net, _, nets):
        with pytest.raises(RuntimeError, match=r"No async send is pending\. Call send_async"):
            sender.wait_async()
        sender.send_async(fill(net, 2.0))
        fill(net, 7.0)
        with pytest.raises(RuntimeError, match=r"Cannot call send\(\) while an async send"):
            sender.send()
        with pytest.raises(RuntimeError, match=r"Cannot call send_async\(\) again while"):
            sender.send_async()
        sender.wait_async()
        assert values(nets[0]) == values(nets[1]) == {2.0}
        sender.send()
        assert values(nets[0]) == {7.0}


def test_reading_keeps_weights_still() -> None:
    with one_process(1) as (sender, net, (receiver,), (target,)):
        sender.send()
        with receiver.reading():
            sender.send_async(fill(net, 2.0))
            with pytest.raises(TimeoutError, match=r"still pending after 0\.3 s"):
                sender.wait_async(timeout=0.3)
            assert values(target) == {1.0}
        sender.wait_async()
        assert values(target) == {2.0}


def test_poll_mode_applies_where_receive_is_called() -> None:
    with one_process(1, background=False) as (sender, net, (receiver,), (target,)):
        assert receiver.receive(10.0) is not None  # the first weights
        assert receiver.receive(timeout=0.0) is None
        sender.send_async(fill(net, 2.0))
        with pytest.raises(TimeoutError):
            sender.wait_async(timeout=0.3)
        assert values(target) == {1.0}
        received = receiver.receive(10.0)
        assert received is not None
        assert received["first", "weight"].data_ptr() == target.first.weight.data_ptr()
        sender.wait_async()
        assert values(target) == {2.0}


def test_receive_in_the_background_returns_each_update_once() -> None:
    with one_process(1) as (sender, net, (receiver,), _):
        sender.send(fill(net, 2.0))
        assert receiver.receive(10.0) is not None
        assert receiver.receive(0.0) is None


def test_a_worker_that_has_left_is_named() -> None:
    with one_process(2) as (sender, net, receivers, nets):
        sender.send()
        receivers[1].shutdown()
        with pytest.raises(PublishError, match=r"1 of 2 .*worker 1 lost"):
            sender.send(fill(net, 2.0), timeout=2.0)
        assert values(nets[0]) == {2.0}


def test_missing_workers_are_waited_for_until_the_deadline(schemes: Schemes) -> None:
    net, targets = fill(Net(), 1.0), [Net(), Net()]
    sender = schemes.sender(ZMQWeightSyncScheme(num_workers=2), model=net, num_workers=None)
    sender.connect()
    with pytest.raises(PublishError, match=r"0 of 2 .*worker 0 behind: it has not joined"):
        sender.send(timeout=1.0)
    thread = threading.Thread(target=lambda: sender.send(fill(net, 2.0), timeout=30.0))
    thread.start()
    for worker_idx, target in enumerate(targets):
        schemes.receiver(sender, target, worker_idx)
    thread.join(30.0)
    assert [values(target) for target in targets] == [{2.0}] * 2
    assert sender.receipt.in_state("applied") == ["0", "1"]
    assert sender.versions() == {0: 3, 1: 3}


def test_a_worker_that_left_before_the_first_send_is_not_waited_for(schemes: Schemes) -> None:
    sender = schemes.sender(ZMQWeightSyncScheme(), model=fill(Net(), 1.0))
    sender.connect()
    receiver = schemes.receiver(sender, Net())
    assert receiver.receive(20.0) is not None
    receiver.shutdown()
    started = time.monotonic()
    with pytest.raises(PublishError, match=r"worker 0 lost .*it has left"):
        sender.send(timeout=60.0)
    assert time.monotonic() - started < 20.0, "it was waited for"


def test_threads_that_send_at_the_same_time_take_turns() -> None:
    with one_process() as (sender, net, _, nets):
        begin, errors = threading.Barrier(4), list[BaseException]()

        def send(value: float) -> None:
            own = fill(Net(), value)
            begin.wait(30.0)
            try:
                for _ in range(5):
                    sender.send(own)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=send, args=(value,)) for value in (2.0, 3.0, 4.0, 5.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert errors == []
        assert sender.versions() == {0: 21, 1: 21}
        assert values(nets[0]) == values(nets[1])
        fill(net, 9.0)
        sender.send()
        assert values(nets[0]) == {9.0}


def test_a_turn_that_does_not_come_within_the_deadline_names_who_goes_without() -> None:
    with one_process() as (sender, net, _, nets):
        sending, begun, go = sender.own_sending(), threading.Event(), threading.Event()

        def hold() -> None:
            with sending.turn(sender, 60.0):
                begun.set()
                assert go.wait(60.0)

        holding = threading.Thread(target=hold)
        holding.start()
        try:
            assert begun.wait(30.0)
            started = time.monotonic()
            with pytest.raises(PublishError, match=r"worker 0 behind.*not sent to: another thread"):
                sender.send(fill(net, 2.0), timeout=0.1)
            with pytest.raises(PublishError, match=r"worker 1 behind.*not sent to: another thread"):
                sender.send_async(timeout=0.1)
            assert time.monotonic() - started < 10.0, "the turn was waited for"
        finally:
            go.set()
            holding.join(30.0)
        sender.send()
        assert values(nets[0]) == {2.0}


NO_WEIGHTS = {
    "list": lambda net: list(net.parameters()),
    "generator": lambda net: net.parameters(),
    "int": lambda _: 5,
    "Tensor": lambda _: torch.ones(2),
    "method": lambda net: net.state_dict,
}


def test_what_is_no_weights_is_refused_and_takes_no_number() -> None:
    with one_process(1, strict=False) as (sender, net, _, nets):
        for version, (kind, make) in enumerate(NO_WEIGHTS.items(), start=2):
            given, refused = make(net), rf"a {kind} has no weights of 'policy': give an nn"
            for send in (
                sender.send,
                sender.send_async,
                sender.get_sender().update_weights,
                lambda odd: sender.send({0: odd}),
                sender.sender_transports[0].send_weights,
                lambda odd: ZMQWeightSyncScheme().init_on_sender("policy", weights=odd),
            ):
                with pytest.raises(TypeError, match=refused):
                    send(given)
            sender.send(fill(net, float(version)))
            assert sender.versions() == {0: version}
            assert values(nets[0]) == {float(version)}


def test_a_worker_without_weights_says_so(schemes: Schemes) -> None:
    sender = schemes.sender(model=fill(Net(), 1.0))
    schemes.receiver(sender, lambda td: td)
    sender.connect()
    with pytest.raises(PublishError, match=r"worker 0 failed .*a function, which has"):
        sender.send(timeout=20.0)


def test_a_collector_without_a_policy_of_its_own_sends_nothing(
    schemes: Schemes, caplog: pytest.LogCaptureFixture
) -> None:
    class Collector:
        policy, policy_device, num_workers = None, None, 1

    context = Collector()
    for sync in (True, False):
        own = MultiProcessWeightSyncScheme(sync=sync)
        sender = schemes.sender(own, context=context, num_workers=None)
        sender.connect()
        sender.send()
        assert "no weights were sent: there are no weights of 'policy'" in caplog.text
        assert sender.receipt is None


def test_receivers_that_count_from_one() -> None:
    with one_process(2, first=1) as (sender, net, _, nets):
        sender.send()
        assert sender.versions() == {0: 2, 1: 2}
        sender.send(fill(net, 2.0), worker_ids=0)
        assert (values(nets[0]), values(nets[1])) == ({2.0}, {1.0})
        assert sender.receipt is not None
        assert sender.receipt.in_state("applied") == ["0"]


def test_any_number_of_workers_may_join(schemes: Schemes) -> None:
    net, target = fill(Net(), 1.0), Net()
    sender = schemes.sender(ZMQWeightSyncScheme(), model=net, num_workers=None)
    sender.connect()
    with pytest.raises(RuntimeError, match=r"No transports available\."):
        sender.send()
    receiver = schemes.receiver(sender, target, 7)
    assert receiver.receive(20.0) is not None, "the first weights wait for workers that join"
    sender.send(fill(net, 2.0))
    assert sender.versions() == {7: 2}
    assert list(sender.sender_transports) == [7]


class Holder:
    """A context that is told of every update."""

    def __init__(self, policy: Net) -> None:
        self.policy = policy
        self.env = SimpleNamespace(transform=[Net()])
        self.updates: list[tuple[str, set[float]]] = []
        self.versions = 0

    def update_policy_weights_(self, *, model_id: str, policy_or_weights: Any) -> None:
        """Note what an update brings."""
        found = {float(v) for t in policy_or_weights.values(True, True) for v in t.unique()}
        self.updates.append((model_id, found))
        names = {".".join(k) for k in policy_or_weights.keys(True, True) if isinstance(k, tuple)}
        assert names == {f"{n}.{k}" for n in ("first", "second") for k in ("weight", "bias")}

    def increment_version(self) -> None:
        """Note that there was one."""
        self.versions += 1


@pytest.mark.parametrize(
    ("model_id", "told"), [("policy", [("policy", {2.0})]), ("env.transform[0]", [])]
)
def test_models_are_found_in_contexts_which_are_told(
    schemes: Schemes, model_id: str, told: list[Any]
) -> None:
    ours, theirs = Holder(policy=fill(Net(), 2.0)), Holder(policy=Net())
    fill(ours.env.transform[0], 2.0)
    sender = schemes.sender(model_id=model_id, context=ours)
    sender.connect(weights={})
    schemes.receiver(sender, model_id=model_id, context=theirs)
    with pytest.raises(PublishError):  # nothing is no state of this model
        sender.send({}, timeout=20.0)
    sender.send()
    target = theirs.policy if model_id == "policy" else theirs.env.transform[0]
    assert values(target) == {2.0}
    assert theirs.updates == told
    assert theirs.versions == (not told)
    assert sender.receipt.model == model_id
    sender.send("policy", timeout=20.0)  # by the path of another model
    assert values(target) == {2.0}


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
def test_a_context_that_fails_fails_the_update_and_the_next_one_mends_it(later: bool) -> None:
    class Failing(Holder):
        fails = True

        def update_policy_weights_(self, *, model_id: str, policy_or_weights: Any) -> Any:
            if not later:
                return self.told(model_id, policy_or_weights)

            async def tell() -> None:
                self.told(model_id, policy_or_weights)

            return tell()

        def told(self, model_id: str, policy_or_weights: Any) -> None:
            if self.fails:
                raise KeyError("a worker of its own said no")
            super().update_policy_weights_(model_id=model_id, policy_or_weights=policy_or_weights)

    context = Failing(policy=Net())
    with one_process(1) as (sender, net, (receiver,), (target,)):
        assert receiver.receive(20.0) is not None  # the first weights, which nobody refused
        receiver.context = context
        with pytest.raises(PublishError, match=r"worker 0 failed.*worker of its own said no"):
            sender.send(fill(net, 2.0))
        assert receiver.receive(0.0) is None
        context.fails = False
        sender.send(fill(net, 3.0))
        assert values(target) == {3.0}
        assert context.updates[-1] == ("policy", {3.0})


@pytest.mark.parametrize("factories", [[Net, Net], [None, Net]], ids=["each", "one"])
def test_a_collector_without_a_policy_of_its_own_passes_weights_on(
    schemes: Schemes, factories: list[type[Net] | None]
) -> None:
    """It leaves its policy to workers of its own."""
    context: Any = Holder(policy=Net())
    context.policy, context.policy_factory = None, factories
    sender = schemes.sender(model=fill(Net(), 1.0))
    schemes.receiver(sender, context=context)
    sender.connect()
    sender.send(fill(Net(), 2.0))
    assert context.updates[-1] == ("policy", {2.0})
    assert context.policy is None
    with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*first\.weight"):
        sender.send(Net(5))
    assert context.updates[-1] == ("policy", {2.0}), "what does not fit is not passed on"


def hollow() -> Net:
    with torch.device("meta"):
        return Net()


def test_a_model_on_the_meta_device_is_not_waited_for_for_ever(schemes: Schemes) -> None:
    sender = schemes.sender(ZMQWeightSyncScheme(timeout=0.3))
    sender.connect()  # without weights
    receiver = schemes.receiver(sender, hollow(), connects=False)
    with pytest.raises(TimeoutError, match="meta device, and no weights arrived within"):
        receiver.connect()
    assert not receiver.synchronized_on_receiver


@pytest.mark.parametrize("background", [True, False])
def test_a_model_on_the_meta_device_that_cannot_be_filled_says_why_at_once(
    schemes: Schemes, background: bool
) -> None:
    own = ZMQWeightSyncScheme(strategy="state_dict", background=background)
    sender = schemes.sender(own, model=Net())
    sender.connect()
    receiver = schemes.receiver(sender, hollow(), connects=False)
    started = time.monotonic()
    with pytest.raises(WeightBusError, match=r'(?s)passing: on the meta.*strategy="tensordict'):
        receiver.connect()
    assert time.monotonic() - started < receiver.timeout / 4
    assert not receiver.synchronized_on_receiver


@pytest.mark.parametrize("kind", SCHEMES)
def test_workers_that_have_weights_of_their_own_begin_with_them(
    schemes: Schemes, kind: type[Any]
) -> None:
    own = {i: WeightStrategy().extract_weights(fill(Net(), i + 1.0)) for i in range(2)}
    sender = schemes.sender(kind(liveness=QUICK), model_id=None, num_workers=None, params_map=own)
    nets = [hollow() for _ in own]
    sender.connect()
    for i, net in enumerate(nets):
        schemes.receiver(sender, net, i)
    assert [values(net) for net in nets] == [{1.0}, {2.0}]
    sender.send(fill(Net(), 3.0))
    assert sender.versions() == {0: 3, 1: 3}
    assert [values(net) for net in nets] == [{3.0}, {3.0}]
    sender.send()
    assert [values(net) for net in nets] == [{1.0}, {2.0}]


def test_connecting_ends_once_values_are_in_a_meta_device_model_not_once_it_has_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with one_process(1) as (_, _, [first], _):
        receiver, net = pickle.loads(pickle.dumps(first)), hollow()  # noqa: S301
        receiver.init_on_receiver(model_id="policy", model=net, worker_idx=9)
        looked, copied = threading.Event(), list[set[float]]()
        unfilled, copy_into = Destination.unfilled, Reader.copy_into

        def look(self: Destination) -> bool:
            if not any(parameter.is_meta for parameter in net.parameters()):
                looked.set()
            return unfilled(self)

        def copy(self: Reader, *args: Any, **options: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert looked.wait(30.0)
            copy_into(self, *args, **options)
            copied.append(values(net))

        monkeypatch.setattr(Destination, "unfilled", look)
        monkeypatch.setattr(Reader, "copy_into", copy)
        receiver.connect(timeout=30.0)
        assert copied, "it has memory, and no values"
        assert values(net) == {1.0}
        receiver.shutdown()


def test_a_send_comes_after_first_weights_that_nobody_has_taken_yet(schemes: Schemes) -> None:
    own = {i: fill(Net(), i + 1.0) for i in range(2)}
    sender = schemes.sender(model_id=None, num_workers=None, params_map=own)
    sender.connect()
    fill(own[1], 9.0)  # what workers begin with is what it was
    nets = [Net(), Net()]
    newer = threading.Thread(target=lambda: sender.send(fill(Net(), 5.0), worker_ids=0))
    for i in (1, 0):
        assert schemes.receiver(sender, nets[i], i).receive(20.0) is not None
        if i == 1:
            assert values(nets[1]) == {2.0}
            newer.start()  # it waits for worker 0
    newer.join(20.0)
    sender.send(fill(own[1], 7.0), worker_ids=1)
    assert [values(net) for net in nets] == [{5.0}, {7.0}]
    assert sender.versions()[0] < sender.versions()[1] <= 4


def test_transports_of_both_vintages() -> None:
    with one_process(2) as (sender, net, (receiver, _), nets):
        sender.send()
        one: Any = sender.sender_transports[1]
        one.send_weights(fill(net, 2.0))
        one.send_weights("policy", fill(net, 3.0))
        assert (values(nets[0]), values(nets[1])) == ({1.0}, {3.0})
        assert one.check_connection()
        assert one.receive_weights() is None
        with pytest.raises(RuntimeError, match="No pending future"):
            one.wait_ack()
        sender.sender_transports[1].send_weights_async(fill(net, 3.0))
        sender.sender_transports[1].wait_ack(20.0)
        assert receiver.receiver_transport is not None
        assert receiver.receiver_transport.receive_weights(10.0) is not None
        older: Any = receiver.create_transport("pipe")
        assert older.receive_weights(timeout=0.0) is None
        sender.send(fill(net, 4.0))
        assert older.receive_weights(timeout=10.0)[0] == "policy"
        with pytest.raises(RuntimeError, match="on a receiver side"):
            older.send_weights({})


class Door:
    """A publisher at which a worker joins just after the first look at who is there."""

    def __init__(self) -> None:
        self._there: dict[str, None] = {}
        self._tell: Any = None

    def on_worker(self, tell: Any) -> None:
        self._tell = tell

    def workers(self) -> dict[str, None]:
        before = dict(self._there)
        if not self._there:
            self._there["0"] = None
            self._tell(SimpleNamespace(worker="0"))
        return before


def test_who_joins_during_the_look_has_not_left() -> None:
    sender = _BusSender(cast("Any", Door()), 1)
    assert sender._await_joined([0], time.monotonic() + 60.0) == {"0"}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("keyed", [False, True])
def test_a_transport_made_of_a_pipe_reaches_one_worker(schemes: Schemes, *, keyed: bool) -> None:
    scheme = MultiProcessWeightSyncScheme(liveness=QUICK, keyed=keyed)  # the other learns its keys
    receiver, target = MultiProcessWeightSyncScheme(liveness=QUICK), Net()
    schemes.made += [scheme, receiver]
    ours, theirs = multiprocessing.Pipe()
    sender = scheme.create_sender()
    sender.register_worker(3, ours)
    receiver.init_on_worker("policy", model=target, pipe=theirs)
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(receiver.get_receiver().receive(20.0)))
    thread.start()
    sender.send(fill(Net(), 2.0), worker_ids=3)
    thread.join(20.0)
    assert got == [True]
    assert values(target) == {2.0}
    assert sender.receipt is not None
    assert sender.receipt.in_state("applied") == ["3"]
    with pytest.raises(ValueError, match="Worker 0 not registered"):
        sender.send(Net(), worker_ids=0)


@pytest.mark.parametrize("settings", [{"keyed": True}, {"address": "tcp://*:0"}])
def test_keys_travel_with_a_scheme_and_nobody_else_gets_in(settings: dict[str, Any]) -> None:
    """Where other hosts can connect there are keys, unless somebody says otherwise."""
    with one_process(1, **settings) as (sender, net, _, [target]):
        sender.send(fill(net, 2.0), timeout=20.0)
        assert values(target) == {2.0}
        address: str = sender.address.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        with (
            Subscriber(address, {"policy": torch.nn.Linear(2, 2)}, settings=QUICK) as stranger,
            pytest.raises(RefusedError, match="asks for keys"),
        ):
            stranger.wait_joined(20.0)


def test_a_scheme_that_is_to_have_no_keys_has_none_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(tmp_path / "keys", {"*": "worker"})
    monkeypatch.setenv("WEIGHTBUS_KEYS", str(tmp_path / "keys"))
    with one_process(1, keyed=False) as (sender, net, _, [target]):
        model = torch.nn.Linear(2, 2)
        with Subscriber(sender.address, {"policy": model}, settings=QUICK, keys="") as plain:
            plain.wait_joined(20.0)
        sender.send(fill(net, 2.0), timeout=20.0)
        assert values(target) == {2.0}


def test_a_transport_of_the_older_vintage_is_made_of_a_pipe_alone() -> None:
    ours, theirs = multiprocessing.Pipe()
    transport = MPTransport(ours, timeout=20.0)
    receiver, target = MultiProcessWeightSyncScheme(liveness=QUICK), Net()
    receiver.init_on_worker("policy", model=target, pipe=theirs)
    try:
        assert transport.check_connection()
        transport.send_weights_async("policy", fill(Net(), 2.0))
        assert receiver.get_receiver().receive(20.0)
        transport.wait_ack()
        assert values(target) == {2.0}
    finally:
        receiver.shutdown()
    del transport  # and with it what it has opened


def test_a_transport_of_queues_says_what_to_write_instead() -> None:
    with pytest.raises(TypeError, match=r"through a Queue: write MPTransport\(pipe\)"):
        MPTransport(queue.Queue())


def test_a_pipe_that_says_something_else() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.send_bytes(b'{"other": 1}')
    scheme = MultiProcessWeightSyncScheme(timeout=0.2)
    with pytest.raises(ValueError, match="pipe is not the sender's address"):
        scheme.init_on_worker("policy", model=Net(), pipe=theirs)
    with pytest.raises(TimeoutError, match="no address arrived through the pipe"):
        scheme.init_on_worker("policy", model=Net(), pipe=theirs)
    with pytest.raises(ValueError, match="pipe must be provided via context or kwargs"):
        scheme.init_on_worker("policy", model=Net())
    assert not scheme.initialized_on_receiver


def test_not_waiting_is_a_setting_of_the_schemes_of_one_host() -> None:
    sender = MultiProcessWeightSyncScheme(sync=False)
    with one_process(2, sender=sender) as (_, net, _, nets):
        sender.send(fill(net, 2.0))
        sender.send(fill(net, 3.0))  # waits for the one before
        assert sender.receipt is not None
        sender.wait_async()
        assert values(nets[0]) == values(nets[1]) == {3.0}


def test_registered_weights_are_sent_when_a_send_does_not_say(schemes: Schemes) -> None:
    weights, target = {"a": torch.ones(2)}, {"a": torch.zeros(2)}
    scheme = SharedMemWeightSyncScheme({"policy": weights}, auto_register=False)
    assert scheme.policy_weights == {"policy": weights}
    with pytest.raises(RuntimeError, match=r"Re-registering weights is not supported\."):
        scheme.register_shared_weights("policy", weights)
    schemes.sender(scheme)
    receiver = schemes.receiver(scheme, target)
    scheme.connect()
    scheme.send()
    assert target["a"].tolist() == [1.0, 1.0]
    receiver.shutdown()
    scheme.init_on_sender("other", num_workers=1)
    with pytest.raises(KeyError, match="'other' is not registered"):
        scheme.connect()


def test_whatever_is_dropped_is_closed(tmp_path: Path) -> None:
    before = {t.name for t in threading.enumerate()}
    address = f"ipc://{tmp_path}/bus"  # whose neighbour nobody else can have, as he may a port's
    with one_process(1, address=address) as (sender, _, receivers, _):
        sender.send()
    del sender, receivers
    again = ZMQWeightSyncScheme(address)  # it is free again
    again.init_on_sender("policy", model=Net())
    del again  # never shut down
    assert {t.name for t in threading.enumerate()} == before


def test_a_scheme_may_be_used_again_after_its_shutdown() -> None:
    with one_process(1) as (sender, net, _, _):
        sender.shutdown()
        sender.shutdown()
        assert not sender.initialized_on_sender
        with pytest.raises(RuntimeError, match="Must be initialized on sender before sending"):
            sender.send(net)
        sender.init_on_sender("policy", model=net)
        assert sender.initialized_on_sender
        assert not sender.synchronized_on_sender
