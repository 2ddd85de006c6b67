"""What TRL takes as `weight_transfer=`, called as TRL's trainers call it, without TRL."""

import contextlib
import inspect
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest
import torch

import weightbus
from weightbus.bus.errors import ClosedError
from weightbus.codecs.errors import StateError
from weightbus.python_client.serving.server import VllmServer, VllmServers
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.serving.faulty import Proxy
from weightbus.tests.serving.ranks import PlainEngine, weights
from weightbus.tests.serving.standin import Local, Server, Worker
from weightbus.trl import WeightTransfer
from weightbus.types import Pairs
from weightbus.vllm import ServerError

SECONDS = 30.0  # far more than anything here takes
SHORT = 1.0  # for what does not come
SLACK = 8.0  # that a busy machine may take for all else


class WeightTransferProtocol(Protocol):
    """TRL's own (1.16); `make serving` compares with that of the package."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class Rollouts:
    def __init__(self, size: int = 0) -> None:
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(size)


class Trainer:
    """What a trainer of TRL's does with weights, line by line, in the order of its own."""

    def __init__(self, weight_transfer: WeightTransferProtocol, model: torch.nn.Module) -> None:
        self.weight_transfer, self.model = weight_transfer, model
        self.rollout_worker = Rollouts()
        self.model_version = 0
        self.state = SimpleNamespace(global_step=100)

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self.model.named_parameters():
            yield name, param.detach()

    def sync(self) -> None:
        self.weight_transfer.pause()
        self.weight_transfer.send_weights(self._streaming_iter())
        self.weight_transfer.resume()
        self.model_version += 1

    def logged(self) -> dict[str, float]:
        found: dict[str, float] = {}
        while not self.rollout_worker.metrics_queue.empty():
            found |= self.rollout_worker.metrics_queue.get()
        return found


def layers(value: float) -> torch.nn.Module:
    """Return a module of the weights that ranks have."""
    model = torch.nn.Module()
    for name, array in weights(value).items():
        outer, number, last = name.split(".")
        if not hasattr(model, outer):
            model.add_module(outer, torch.nn.Module())
        inner = torch.nn.Module()
        inner.register_parameter(last, torch.nn.Parameter(torch.from_numpy(array)))
        model.get_submodule(outer).add_module(number, inner)
    return model


@pytest.fixture(name="publisher")
def _publisher() -> Iterator[weightbus.Publisher]:
    with weightbus.Publisher() as publisher:
        yield publisher


@pytest.fixture(name="begun")
def _begun(publisher: weightbus.Publisher) -> Iterator[Callable[..., Trainer]]:
    """Trainers whose training has begun, and ends."""
    made: list[Trainer] = []

    def begin(model: torch.nn.Module | None = None, **options: Any) -> Trainer:
        options = {"timeout": SECONDS, **options}
        made.append(Trainer(WeightTransfer(publisher, **options), model or layers(0.0)))
        made[-1].weight_transfer.init_weight_transfer()
        return made[-1]

    yield begin
    for trainer in made:
        trainer.weight_transfer.destroy()


def apply(worker: weightbus.Subscriber, version: int) -> None:
    """Apply what is committed, up to a version: the trainer knows that before the worker does."""
    while (update := worker.receive(SECONDS)) is not None and update.version < version:
        pass
    assert update is not None
    assert update.version == version


def receipt_of(trainer: Trainer) -> weightbus.types.Receipt:
    transfer = trainer.weight_transfer
    assert isinstance(transfer, WeightTransfer)
    assert transfer.receipt is not None
    return transfer.receipt


# Workers of your own.


def test_it_has_what_trl_calls() -> None:
    for name, theirs in inspect.getmembers(WeightTransferProtocol, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(WeightTransfer, name))
            assert [*ours.parameters] == [*inspect.signature(theirs).parameters]


def test_workers_get_each_update_and_the_log_says_how_far_they_are_behind(
    publisher: weightbus.Publisher, begun: Callable[..., Trainer]
) -> None:
    trainer, target = begun(metadata={"run": "a"}), layers(9.0)
    trainer.sync()  # before anybody is there: it waits for who joins
    with weightbus.Subscriber(publisher.address, {"policy": target}, name="w") as worker:
        publisher.wait_for_workers(1, SECONDS)
        assert worker.receive(SECONDS) is not None
        for value in (1.0, 2.0):
            trainer.model.load_state_dict(layers(value).state_dict())
            trainer.sync()
            update = worker.receive(SECONDS)
            assert update is not None
            assert update.version == trainer.model_version
            assert update.metadata == {"run": "a", "step": "100"}
            for mine, theirs in zip(target.parameters(), trainer.model.parameters(), strict=True):
                assert torch.equal(mine, theirs)
        wait_for(lambda: running(publisher, "w") == 3, "it says so", SECONDS)
        trainer.sync()
        logged = trainer.logged()
    assert receipt_of(trainer).in_state("applied") == ["w"]
    assert logged.pop("weightbus/update_s") < SECONDS
    assert 0 < logged.pop("weightbus/lag_s_max") < SECONDS
    assert logged == {
        "weightbus/version_max": 4.0,
        "weightbus/workers": 1.0,
        "weightbus/lag_versions_max": 0.0,
    }


def test_a_worker_that_is_at_something_else_is_not_waited_for(
    publisher: weightbus.Publisher, begun: Callable[..., Trainer]
) -> None:
    trainer, target = begun(timeout=SECONDS), layers(9.0)
    with weightbus.Subscriber(publisher.address, {"policy": target}, name="w") as worker:
        publisher.wait_for_workers(1, SECONDS)
        for _ in range(3):
            trainer.sync()
        assert trainer.logged()["weightbus/lag_versions_max"] == 2.0
        apply(worker, 3)


@pytest.mark.parametrize("options", [{}, {"require": 0}], ids=["alive", "none"])
def test_a_worker_that_cannot_load_a_version_ends_the_training_unless_none_is_required(
    publisher: weightbus.Publisher, begun: Callable[..., Trainer], options: dict[str, Any]
) -> None:
    failed, other = threading.Event(), layers(9.0)

    def load(pairs: Pairs) -> None:
        if pairs.version > 1:
            raise weightbus.UnchangedError("the engine is full")

    trainer = begun(layers(1.0), **options)
    publisher.on_worker(lambda event: failed.set() if event.kind == "failed" else None)
    with (
        weightbus.Subscriber(publisher.address, {"policy": load}, name="w") as worker,
        weightbus.Subscriber(publisher.address, {"policy": other}, name="other").start() as others,
    ):
        publisher.wait_for_workers(2, SECONDS)
        trainer.sync()
        apply(worker, 1)
        trainer.model = layers(2.0)
        trainer.sync()
        with pytest.raises(weightbus.ApplyError):
            worker.receive(SECONDS)
        assert failed.wait(SECONDS)
        assert others.wait_for_version("policy", 2, timeout=SECONDS) is not None
        assert all(map(torch.equal, other.parameters(), layers(2.0).parameters()))
        if options:
            trainer.sync()
            return
        with pytest.raises(weightbus.PublishError, match=r"w failed .*the engine is full") as told:
            trainer.sync()
    assert told.value.receipt.version == 2
    assert trainer.model_version == 2


def test_a_worker_that_has_not_received_the_weights_in_time_ends_the_training(
    publisher: weightbus.Publisher, begun: Callable[..., Trainer]
) -> None:
    trainer, target = begun(layers(1.0), timeout=SHORT), layers(9.0)
    with (
        weightbus.Subscriber(publisher.address, {"policy": target}, name="w") as worker,
        contextlib.ExitStack() as ended,
    ):
        other = started(publisher, ended)
        publisher.wait_for_workers(2, SECONDS)
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(weightbus.PublishError, match="other behind: nothing heard of it yet"):
            trainer.sync()
        assert worker.receive(SHORT) is None
    assert all(map(torch.equal, target.parameters(), layers(9.0).parameters()))


def test_what_a_worker_cannot_take_is_said_at_once_and_nobody_has_changed_anything(
    publisher: weightbus.Publisher, begun: Callable[..., Trainer]
) -> None:
    fits, other = layers(9.0), {"layers.0.weight": np.zeros(3, np.float32)}
    trainer, began = begun(), time.monotonic()
    with (
        weightbus.Subscriber(publisher.address, {"policy": fits}, name="fits").start(),
        weightbus.Subscriber(publisher.address, {"policy": other}, name="other").start(),
    ):
        publisher.wait_for_workers(2, SECONDS)
        with pytest.raises(weightbus.PublishError, match=r"other failed .*layers\.0\.weight"):
            trainer.sync()
    assert time.monotonic() - began < SECONDS
    assert all(map(torch.equal, fits.parameters(), layers(9.0).parameters()))
    assert not trainer.logged()


def test_a_worker_that_died_is_missed_only_if_it_is_expected(
    publisher: weightbus.Publisher, begun: Callable[..., Trainer]
) -> None:
    lives = weightbus.Subscriber(publisher.address, {"policy": layers(9.0)}, name="lives").start()
    dies = weightbus.Subscriber(publisher.address, {"policy": layers(9.0)}, name="dies").start()
    publisher.wait_for_workers(2, SECONDS)
    strict, lenient = begun(expect=2, timeout=SHORT), begun()
    strict.sync()
    dies.close()
    with lives:
        lenient.sync()
        began = time.monotonic()
        with pytest.raises(
            weightbus.PublishError, match=r"1 of 2 workers are missing \(worker dies"
        ):
            strict.sync()
        assert time.monotonic() - began < SHORT + SLACK
        lenient.sync()


WORKER = """
import signal, sys, numpy, weightbus
weights = {f"layers.{i}.weight": numpy.zeros((64, 64), "f4") for i in range(3)}
with weightbus.Subscriber(sys.argv[1], {"policy": weights}, name="other").start():
    signal.pause()
"""


def started(publisher: weightbus.Publisher, ended: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """Return a worker's process, which is killed at the end."""
    command = [sys.executable, "-c", WORKER, publisher.address]
    process = ended.enter_context(subprocess.Popen(command))  # noqa: S603 - our own
    ended.callback(process.kill)
    return process


def running(publisher: weightbus.Publisher, name: str) -> int:
    """Return which version a worker runs."""
    return publisher.workers()[name].running.get("policy", (0, 0))[1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_does_not_end_the_training(how: int) -> None:
    soon = weightbus.Settings(ping=0.05, lost_after=0.5)
    with weightbus.Publisher(settings=soon) as publisher:
        trainer = Trainer(WeightTransfer(publisher, timeout=SECONDS), layers(1.0))
        trainer.weight_transfer.init_weight_transfer()
        target = layers(9.0)
        with (
            weightbus.Subscriber(publisher.address, {"policy": target}, name="w") as worker,
            contextlib.ExitStack() as ended,
        ):
            other = started(publisher, ended)
            publisher.wait_for_workers(2, SECONDS)
            trainer.sync()
            other.send_signal(how)
            trainer.model = layers(2.0)
            trainer.sync()
            apply(worker, 2)
            if how == signal.SIGSTOP:
                other.send_signal(signal.SIGCONT)
            else:
                started(publisher, ended)
            wait_for(lambda: running(publisher, "other") == 2, "the newest version", SECONDS)
        assert all(map(torch.equal, target.parameters(), layers(2.0).parameters()))
        trainer.weight_transfer.destroy()


def test_an_iterator_that_raises_in_the_middle_publishes_nothing(
    begun: Callable[..., Trainer],
) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)
        raise RuntimeError("a rank of the trainer has died")

    trainer = begun()
    with pytest.raises(RuntimeError, match="a rank of the trainer has died"):
        trainer.weight_transfer.send_weights(broken())
    trainer.sync()
    assert trainer.logged()["weightbus/version_max"] == 1.0


def sent(publisher: weightbus.Publisher, pairs: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Return what a worker gets of what a trainer sends, by the names that it has there."""
    found: dict[str, Any] = {}

    def load(got: Pairs) -> None:
        found.update((name, array.copy()) for name, array in got.arrays())

    transfer = WeightTransfer(publisher, timeout=SECONDS)
    transfer.init_weight_transfer()
    with weightbus.Subscriber(publisher.address, {"policy": load}) as worker:
        publisher.wait_for_workers(1, SECONDS)
        transfer.send_weights(iter(pairs))
        assert worker.receive(SECONDS) is not None
    return found


def test_names_are_those_of_checkpoints(publisher: weightbus.Publisher) -> None:
    one = torch.ones(2)
    pairs = [
        ("module._orig_mod.a.weight", one),
        ("_orig_mod.module.b", one * 2),
        ("layers.0._orig_mod.c", one * 3),
        ("vision.module.d", one * 4),  # a name of the model's own
    ]
    assert {name: array[0] for name, array in sent(publisher, pairs).items()} == {
        "a.weight": 1.0,
        "b": 2.0,
        "layers.0.c": 3.0,
        "vision.module.d": 4.0,
    }
    with pytest.raises(StateError, match=r"_orig_mod\.a: .* another a"):
        sent(publisher, [("module.a", one), ("_orig_mod.a", one)])


def test_a_log_that_is_full_or_not_there_hinders_nothing(begun: Callable[..., Trainer]) -> None:
    trainer = begun()
    trainer.rollout_worker = Rollouts(1)
    for _ in range(2):
        trainer.sync()
    assert trainer.logged()["weightbus/version_max"] == 1.0
    transfer = trainer.weight_transfer
    assert isinstance(transfer, WeightTransfer)
    transfer.send_weights(iter([("a", torch.zeros(1))]))
    assert transfer.metrics["weightbus/version_max"] == 3.0


def test_an_address_is_a_publisher_for_as_long_as_the_training_takes() -> None:
    transfer = WeightTransfer("tcp://127.0.0.1:0")
    with pytest.raises(ClosedError, match="init_weight_transfer"):
        transfer.send_weights(iter([]))
    transfer.init_weight_transfer()
    publisher = transfer.publisher
    assert publisher is not None
    transfer.send_weights(iter([("a", torch.zeros(1))]))
    transfer.destroy()
    transfer.destroy()
    assert transfer.publisher is None
    with pytest.raises(ClosedError):
        publisher.workers()


def test_the_last_update_is_taken_after_the_batch_that_a_worker_is_at() -> None:
    transfer = WeightTransfer("tcp://127.0.0.1:0", timeout=SECONDS, linger=SECONDS)
    trainer, target = Trainer(transfer, layers(1.0)), layers(9.0)
    transfer.init_weight_transfer()
    assert transfer.publisher is not None
    with weightbus.Subscriber(transfer.publisher.address, {"policy": target}, name="w") as worker:
        transfer.publisher.wait_for_workers(1, SECONDS)
        trainer.sync()
        ends = threading.Thread(target=transfer.destroy)
        ends.start()  # while the worker is at a batch
        assert ends.is_alive()
        apply(worker, 1)
        ends.join(SECONDS)
        assert not ends.is_alive()
    assert all(map(torch.equal, target.parameters(), layers(1.0).parameters()))
    assert receipt_of(trainer).in_state("applied") == ["w"]


def test_a_worker_that_never_comes_back_from_a_batch_is_named_when_training_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transfer = WeightTransfer("tcp://127.0.0.1:0", timeout=SECONDS, linger=SHORT)
    trainer, target, began = Trainer(transfer, layers(1.0)), layers(9.0), time.monotonic()
    transfer.init_weight_transfer()
    assert transfer.publisher is not None
    with weightbus.Subscriber(transfer.publisher.address, {"policy": target}, name="w") as worker:
        transfer.publisher.wait_for_workers(1, SECONDS)
        trainer.sync()
        transfer.destroy()
        assert SHORT <= time.monotonic() - began < SECONDS
        assert "w staged" in caplog.text
        assert "of the end of training" in caplog.text
        apply(worker, 1)  # what it has staged it takes although the trainer is gone
    assert all(map(torch.equal, target.parameters(), layers(1.0).parameters()))


# Servers.


class Deployment:
    """Servers of two ranks each, and what they are told."""

    def __init__(self, count: int = 1) -> None:
        self.engines = [PlainEngine(number % 2) for number in range(2 * count)]
        ranks = [Local(Worker(engine)) for engine in self.engines]
        self.servers = [Server(ranks[2 * i : 2 * i + 2]) for i in range(count)]
        self.urls = [server.url for server in self.servers]

    def run(self, value: float) -> list[bool]:
        """Return of each rank whether it runs weights of this value."""
        wanted = weights(value)
        return [
            all((engine.model[name] == wanted[name]).all() for name in wanted)
            for engine in self.engines
        ]

    def close(self) -> None:
        for engine in self.engines:
            engine.shutdown()
        for server in self.servers:
            server.close()


@pytest.fixture(name="served")
def _served() -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def make(count: int = 1) -> Deployment:
        made.append(Deployment(count))
        return made[-1]

    yield make
    for deployment in made:
        deployment.close()


def test_servers_stand_still_only_while_they_load_what_they_have(
    served: Callable[..., Deployment],
    begun: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment, standing = served(2), list[bool]()
    trainer = begun(layers(1.0), server=deployment.urls)
    wait = weightbus.Publisher.wait_for_commit

    def staged(*given: Any) -> tuple[int, int] | None:
        done = wait(*given)
        standing.extend(server.paused for server in deployment.servers)
        return done

    monkeypatch.setattr(weightbus.Publisher, "wait_for_commit", staged)
    trainer.sync()
    assert standing == [False, False], "all ranks have the version, and the servers generate"
    assert deployment.run(1.0) == [True] * 4
    receipt = receipt_of(trainer)
    assert len(receipt.in_state("applied")) == 4
    for server in deployment.servers:
        assert not server.paused
        assert server.version == f"{receipt.epoch}.{receipt.version}"
        assert [c for c in server.calls if c in ("pause keep", "resume")] == [
            "pause keep",
            "resume",
        ]
    logged = trainer.logged()
    assert 0 < logged["weightbus/paused_s"] < logged["weightbus/update_s"]
    assert logged["weightbus/lag_s_max"] > 0


@pytest.mark.parametrize("step", ["pause", "start", "update", "load of rank 0", "load", "resume"])
def test_servers_go_on_whatever_fails(
    step: str,
    served: Callable[..., Deployment],
    begun: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = served()
    trainer = begun(layers(1.0), server=deployment.urls[0], timeout=4.0, pause_timeout=SHORT)
    trainer.sync()
    (server,) = deployment.servers
    trainer.model = layers(2.0)

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("told to fail")

    owner, name = {
        "pause": (VllmServer, "pause"),
        "start": (deployment.engines[1], "start_weight_update"),
        "update": (deployment.engines[1], "update_weights"),
        "load of rank 0": (deployment.engines[0], "loaded"),
        "load": (deployment.engines[1], "loaded"),
        "resume": (VllmServer, "resume"),
    }[step]
    monkeypatch.setattr(owner, name, fail)
    if step == "resume":  # as it was loaded, it is asked once more
        trainer.sync()
        assert deployment.run(2.0) == [True, True]
    else:
        with pytest.raises(weightbus.WeightBusError, match="told to fail") as failed:
            trainer.sync()
        assert "load" in step or deployment.run(1.0) == [True, True]
        rank = 0 if step == "load of rank 0" else 1
        assert f"vllm-dp0-rank{rank} " in str(failed.value)
        assert step in ("pause", "load of rank 0") or server.url in str(failed.value)
    assert not server.paused
    assert [call for call in server.calls if call in ("pause keep", "resume")][-1] == "resume"


def test_weights_that_do_not_fit_a_server_end_the_training_and_pause_nothing(
    served: Callable[..., Deployment], begun: Callable[..., Trainer]
) -> None:
    deployment = served()
    trainer = begun(layers(1.0), server=deployment.urls)
    trainer.sync()
    (server,) = deployment.servers
    before, calls = server.version, len(server.calls)
    trainer.model = layers(2.0)
    trainer.model.get_submodule("layers.2").weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(
        weightbus.PublishError, match=r"vllm-dp0-rank[01] failed .*layers\.2\.weight: shape"
    ):
        trainer.sync()
    assert deployment.run(1.0) == [True, True]
    assert "pause keep" not in server.calls[calls:]
    assert (server.version, server.paused) == (before, False)


def test_a_rank_that_has_not_received_the_weights_in_time_ends_the_training(
    served: Callable[..., Deployment],
    begun: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment, go_on = served(), threading.Event()
    trainer = begun(layers(1.0), server=deployment.urls, timeout=4 * SHORT)

    def hang(_layout: object) -> str:
        go_on.wait(SECONDS)
        return ""

    monkeypatch.setattr(deployment.engines[1].rank, "fault", hang)
    with pytest.raises(weightbus.PublishError, match="vllm-dp0-rank1 behind: nothing heard"):
        trainer.sync()
    go_on.set()
    assert deployment.run(0.0) == [True, True]
    assert "pause keep" not in deployment.servers[0].calls


def test_a_server_that_does_not_answer_its_resume_is_named_and_called_until_training_ends(
    served: Callable[..., Deployment],
    begun: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = served()
    proxy = Proxy(deployment.urls[0])
    trainer = begun(layers(1.0), server=proxy.url, timeout=4.0, pause_timeout=SHORT)
    pass_on, lost = proxy.pass_on, list[str]()

    def lose(caller: Any, body: bytes) -> None:
        if caller.path == "/resume":
            lost.append(caller.path)
            caller.close_connection = True
        else:
            pass_on(caller, body)

    monkeypatch.setattr(proxy, "pass_on", lose)
    with pytest.raises(ServerError, match=f"{proxy.url} .*POST /resume"):
        trainer.sync()
    assert len(lost) > 1
    assert deployment.run(1.0) == [True, True]
    assert deployment.servers[0].paused
    monkeypatch.undo()
    trainer.weight_transfer.destroy()
    assert not deployment.servers[0].paused
    proxy.close()


def test_a_server_that_stands_still_after_a_failure_goes_on_when_training_ends(
    served: Callable[..., Deployment],
    begun: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = served()
    trainer = begun(layers(1.0), server=deployment.urls, timeout=4.0, pause_timeout=SHORT)

    def fail(*_: object) -> None:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(deployment.engines[1], "finish_weight_update", fail)
    monkeypatch.setattr(VllmServer, "resume", fail)
    with pytest.raises(weightbus.WeightBusError, match="told to fail"):
        trainer.sync()
    assert deployment.servers[0].paused
    monkeypatch.undo()
    trainer.weight_transfer.destroy()
    assert not deployment.servers[0].paused


def test_of_two_servers_one_is_dead(
    served: Callable[..., Deployment], begun: Callable[..., Trainer]
) -> None:
    deployment = served(2)
    trainer = begun(layers(1.0), server=deployment.urls, timeout=SHORT, pause_timeout=SHORT)
    trainer.sync()
    lives, dies = deployment.servers
    dies.close()
    for engine in deployment.engines[2:]:
        engine.shutdown()
    trainer.model, began = layers(2.0), time.monotonic()
    with pytest.raises(weightbus.WeightBusError, match=rf"{dies.url} cannot be reached"):
        trainer.sync()
    assert time.monotonic() - began < 3 * SHORT + SLACK
    assert not lives.paused
    assert deployment.run(1.0) == [True] * 4


def test_of_two_servers_one_dies_while_it_is_paused(
    served: Callable[..., Deployment],
    begun: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = served(2)
    trainer = begun(layers(1.0), server=deployment.urls, timeout=SHORT, pause_timeout=SHORT)
    trainer.sync()
    lives, dies = deployment.servers
    finish = VllmServers.finish_weight_update

    def die(*given: Any) -> None:
        dies.close()
        finish(*given)

    monkeypatch.setattr(VllmServers, "finish_weight_update", die)
    trainer.model, began = layers(2.0), time.monotonic()
    with pytest.raises(weightbus.WeightBusError, match=rf"{dies.url} cannot be reached"):
        trainer.sync()
    assert time.monotonic() - began < 3 * SHORT + SLACK
    assert not lives.paused


def test_a_server_that_hangs_is_given_up_by_the_deadline_and_goes_on(
    served: Callable[..., Deployment],
    begun: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment, end = served(), threading.Event()
    trainer = begun(layers(1.0), server=deployment.urls, timeout=4.0, pause_timeout=SHORT)
    trainer.sync()

    def hang(*_: object) -> None:
        assert end.wait(SECONDS)

    monkeypatch.setattr(deployment.engines[1], "update_weights", hang)
    trainer.model, began = layers(2.0), time.monotonic()
    with pytest.raises(
        weightbus.PublishError, match=r"gave no answer within .* s: POST /update_weights"
    ):
        trainer.sync()
    assert time.monotonic() - began < 4.0 + 3 * SHORT + 2 * SLACK
    assert not deployment.servers[0].paused
    assert deployment.run(1.0) == [True, True]
    end.set()


def test_what_makes_no_sense_with_servers_is_refused() -> None:
    with pytest.raises(TypeError, match="leave out require"):
        WeightTransfer("tcp://127.0.0.1:0", server="http://127.0.0.1:1", require=1)
    with pytest.raises(ValueError, match="is not a server's URL"):
        WeightTransfer("tcp://127.0.0.1:0", server="gpu-1:8000")
