"""A version goes between two forward passes of a receiver's model, whatever these do."""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import contextvars
import copy
import pickle
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrl")

import torch
from torch import nn

from weightbus.codecs.state import state_of
from weightbus.python_client.applying.reading import InUseError, ReadingLock
from weightbus.python_client.schemes.call_receiver import Call, IncomingVersion, deliver
from weightbus.python_client.schemes.forward_passes import ForwardPasses
from weightbus.tests.training.torchrl_parts import policy, valued_echo

SECONDS = 20.0  # what anything here may take on a busy machine


class Held(nn.Module):
    """Stays in its forward pass until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.here, self.go = threading.Event(), threading.Event()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first = self.weight[0].item()
        self.here.set()
        assert self.go.wait(SECONDS)
        return inputs + torch.tensor([first, self.weight[1].item()])


@contextmanager
def guarded(model: nn.Module) -> Generator[ReadingLock]:
    passes = ForwardPasses(ReadingLock())
    passes.guard(model)
    yield passes.lock
    passes.release()


def free(lock: ReadingLock) -> bool:
    """Tell whether a writer can get in, in another thread."""
    got: list[bool] = []

    def write() -> None:
        try:
            with lock.writing(SECONDS):
                got.append(True)
        except InUseError:
            got.append(False)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join(2 * SECONDS)
    return got == [True]


def hooks(model: Any) -> list[Any]:
    return [*vars(model)["_forward_pre_hooks"].values(), *vars(model)["_forward_hooks"].values()]


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    came: list[Any] = []
    thread = threading.Thread(target=lambda: came.append(call()))
    thread.start()
    return thread, came


def test_a_writer_waits_for_a_pass_and_a_pass_for_a_writer() -> None:
    model = Held()
    with guarded(model) as lock:
        thread, came = in_thread(lambda: model(torch.zeros(2)))
        assert model.here.wait(SECONDS)
        with pytest.raises(InUseError, match="a forward pass in thread"), lock.writing(0.0):
            pass
        model.go.set()
        thread.join(SECONDS)
        model.here.clear()
        with lock.writing(SECONDS):
            thread, came = in_thread(lambda: model(torch.zeros(2)))
            with torch.no_grad():
                model.weight[0] = 1.0
            assert not model.here.wait(0.05), "it has begun to read what is being written"
            with torch.no_grad():
                model.weight[1] = 1.0
        thread.join(SECONDS)
        assert came[0].tolist() == [1.0, 1.0]


def test_a_threads_later_passes_wait_for_a_writer_and_a_writer_for_them() -> None:
    model = Held()
    model.go.set()
    begin, runs, third = threading.Event(), threading.Event(), threading.Event()
    with guarded(model) as lock:

        def passes() -> Any:
            model(torch.zeros(2))
            model.here.clear()
            runs.set()
            assert begin.wait(SECONDS)
            model(torch.zeros(2))
            model.here.clear()
            model.go.clear()
            third.set()
            return model(torch.zeros(2))

        thread, came = in_thread(passes)
        assert runs.wait(SECONDS)
        with lock.writing(SECONDS):
            begin.set()
            assert not model.here.wait(0.05), "it has begun to read what is being written"
            with torch.no_grad():
                model.weight.fill_(1.0)
        assert third.wait(SECONDS)
        assert model.here.wait(SECONDS)
        with pytest.raises(InUseError, match="a forward pass in thread"), lock.writing(0.0):
            pass
        model.go.set()
        thread.join(SECONDS)
        assert came[0].tolist() == [1.0, 1.0]


def test_a_thread_that_inherits_the_context_of_passes_may_write_after_them() -> None:
    """The context keeps the reader of its passes, which are of another thread now."""
    model = Held()
    model.go.set()
    with guarded(model) as lock:
        for _ in range(3):
            model(torch.zeros(2))
        inherited = contextvars.copy_context()
        model.go.clear()
        model.here.clear()

        def write() -> str:
            assert model.here.wait(SECONDS)
            try:
                with lock.writing(0.0):
                    return "written during a pass"
            except InUseError:
                return "in use"
            finally:
                model.go.set()

        thread, came = in_thread(lambda: inherited.run(write))
        model(torch.zeros(2))
        thread.join(SECONDS)
        assert came == ["in use"]


def test_a_pass_that_began_before_the_hooks_is_waited_for() -> None:
    model = Held()
    thread, _ = in_thread(lambda: model(torch.zeros(2)))
    assert model.here.wait(SECONDS)
    passes = ForwardPasses(ReadingLock())
    guarding, _ = in_thread(lambda: passes.guard(model))
    guarding.join(0.05)
    assert guarding.is_alive()
    model.go.set()
    guarding.join(SECONDS)
    assert not guarding.is_alive()
    thread.join(SECONDS)
    assert free(passes.lock)


class Failing(nn.Module):
    """Raises what it is given, calls itself before that, and goes on otherwise."""

    def forward(self, error: type[BaseException] | None, depth: int = 0) -> int:
        if depth:
            return int(self(error, depth - 1)) + 1
        if error is not None:
            raise error
        return 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_pass_that_raises_leaves_nothing_behind(error: type[BaseException], depth: int) -> None:
    model = Failing()
    with guarded(model) as lock:
        for _ in range(2):
            with pytest.raises(error):
                model(error, depth)
        assert free(lock)
        with pytest.raises(error):
            model(error, depth)
        assert model(None, depth) == depth
        assert not lock.held, "the pass that raised still counts"
        with lock.reading():
            assert model(None, depth) == depth
            assert lock.held


def test_a_hook_that_raises_before_ours_ends_no_pass_of_others() -> None:
    model = nn.Identity()
    with guarded(model) as lock:

        def fail(*_: Any) -> None:
            raise ValueError("no")

        before = model.register_forward_pre_hook(fail, prepend=True)
        with lock.reading():
            with pytest.raises(ValueError, match="no"):
                model(1)
            assert lock.held
        before.remove()
        assert model(1) == 1
        assert free(lock)


def test_copies_are_without_hooks_and_need_nothing_of_ours() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    with guarded(model) as lock:
        pickled = pickle.dumps(model)
        assert b"weightbus" not in pickled
        for twin in (copy.deepcopy(model), pickle.loads(pickled)):  # noqa: S301
            with lock.writing(SECONDS):
                thread, came = in_thread(partial(twin, torch.ones(1)))
                thread.join(SECONDS)
                assert came, "a copy takes the lock of its original"
    assert not hooks(model)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_module_takes_the_lock_outside_of_its_graphs(fullgraph: bool) -> None:
    model, held = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), list[bool]()
    with guarded(model) as lock:
        watch: Any = torch.compiler.disable(lambda *_: held.append(lock.held))
        model.register_forward_pre_hook(watch)
        compiled = torch.compile(model, fullgraph=fullgraph, backend="eager")
        for _ in range(20):
            compiled(torch.ones(2))
        assert held == [True] * 20
        assert not lock.held
        assert free(lock)


def test_another_model_takes_the_place_of_the_first() -> None:
    first, second = policy(), policy()
    passes = ForwardPasses(ReadingLock())
    passes.guard(first)
    passes.guard(second)
    assert not hooks(first)
    assert hooks(second)
    passes.guard(5)
    assert not hooks(second)


def test_of_a_transform_what_it_calls_is_guarded() -> None:
    env, held = valued_echo(), list[bool]()
    with guarded(env.transform) as lock:
        env.transform[0].net.register_forward_pre_hook(lambda *_: held.append(lock.held))
        env.rollout(2)
    assert held
    assert all(held)


def test_weights_handed_to_a_collectors_own_method_wait_for_its_pass() -> None:
    class Owner:
        def __init__(self) -> None:
            self.policy, self.taken = Held(), threading.Event()

        def update_policy_weights_(self, policy_or_weights: Any) -> None:
            del policy_or_weights
            self.taken.set()

    owner = Owner()
    state = state_of({"weight": torch.ones(2)})
    data = state.layout()

    def bring(number: int) -> Any:
        call = Call("no key", "policy", 0, 1, number, SECONDS, False, "tensordict")
        content = np.zeros(data.nbytes, np.uint8)
        incoming = IncomingVersion.of(call, data.header, content, waits=False)
        return deliver(incoming, lambda: owner)

    assert bring(1)[0] == "applied"
    owner.taken.clear()
    passing, _ = in_thread(lambda: owner.policy(torch.zeros(2)))
    assert owner.policy.here.wait(SECONDS)
    bringing, came = in_thread(lambda: bring(2))
    assert not owner.taken.wait(0.05), "it was given weights in the middle of a pass"
    owner.policy.go.set()
    for thread in (passing, bringing):
        thread.join(SECONDS)
    assert came[0][0] == "applied"


class Parts(nn.Module):
    """Only holds others, until something calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Held(), Held()


class CalledItself(Parts):
    """Has a `__call__` of its own, and calls no hooks."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.a(inputs) - self.b(inputs)


def test_a_forward_of_the_instance_is_one_pass() -> None:
    model = Parts()
    model.forward = lambda inputs: model.a(inputs) - model.b(inputs)
    with guarded(model) as lock:
        thread, _ = in_thread(lambda: model(torch.zeros(2)))
        assert model.a.here.wait(SECONDS)
        model.a.go.set()
        assert model.b.here.wait(SECONDS)
        with pytest.raises(InUseError), lock.writing(0.0):
            pass
        model.b.go.set()
        thread.join(SECONDS)
        assert not hooks(model.a), "the parts need none"
        assert free(lock)


def test_a_call_of_the_class_itself_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = CalledItself()
    with guarded(model) as lock:
        assert "CalledItself has a __call__ of its own" in caplog.text
        thread, _ = in_thread(lambda: model(torch.zeros(2)))
        assert model.a.here.wait(SECONDS)
        with pytest.raises(InUseError), lock.writing(0.0):
            pass
        model.a.go.set()
        model.b.go.set()
        thread.join(SECONDS)
        assert free(lock)
