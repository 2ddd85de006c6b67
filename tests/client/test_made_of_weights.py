"""A module that makes something of its weights when they are loaded computes with the new ones."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn

import weightbus
from weightbus import ApplyError, Publisher, PublishError, Settings, StateError, Subscriber
from weightbus.codecs.apply import copy_into
from weightbus.tests.codecs.made_of_weights import (
    PARTS,
    WIDTH,
    Counted,
    Folded,
    Fused,
    Halved,
    Transposed,
    answers,
    model_of,
    trained,
)
from weightbus.tests.codecs.test_codecs_apply import published
from weightbus.torchrl import WeightStrategy

SECONDS = 30.0
ALL = [*PARTS, Counted]


@pytest.fixture(name="trainer", params=[True, False], ids=["shared memory", "network"])
def _trainer(request: pytest.FixtureRequest) -> Any:
    settings = Settings(shared_memory=request.param, ping=0.05)
    with Publisher("tcp://127.0.0.1:0", settings=settings) as publisher:
        yield publisher


def send(trainer: Publisher, model: nn.Module) -> Any:
    return trainer.publish("m", model, timeout=SECONDS, require="all")


@pytest.mark.parametrize("part", ALL)
def test_a_worker_answers_as_the_trainer_does(trainer: Publisher, part: Any) -> None:
    """Also what it answers within `on_commit`, which is called when all is done."""
    worker, seen = model_of(part), list[torch.Tensor]()
    settings = Settings(on_commit=lambda _: seen.append(answers(worker)))
    with Subscriber(trainer.address, {"m": worker}, settings=settings).start():
        trainer.wait_for_workers(1, timeout=SECONDS)
        for _ in range(3):
            source = trained(part)
            send(trainer, source)
            assert torch.equal(answers(worker), answers(source))
            assert torch.equal(seen.pop(), answers(source))


@pytest.mark.parametrize("part", ALL)
def test_weightbus_load_does_what_load_state_dict_does(tmp_path: Path, part: Any) -> None:
    source, restarted = trained(part), model_of(part)
    with Publisher("tcp://127.0.0.1:0", state=tmp_path) as publisher:
        publisher.publish("m", source, timeout=SECONDS)
    assert weightbus.load(tmp_path, "m", into=restarted) is not None
    assert torch.equal(answers(restarted), answers(source))


@pytest.mark.parametrize("names", ["tensordict", "state_dict"])
@pytest.mark.parametrize("inplace", [True, False], ids=["in place", "replaced"])
@pytest.mark.parametrize("part", ALL)
def test_the_schemes_do_it_too(part: Any, names: Any, inplace: bool) -> None:
    strategy, source, worker = WeightStrategy(names), trained(part), model_of(part)
    strategy.apply_weights(worker, strategy.extract_weights(source), inplace)
    assert torch.equal(answers(worker), answers(source))


@pytest.mark.parametrize("part", ALL)
def test_a_module_on_meta_is_given_memory_before_it_is_loaded(part: Any) -> None:
    strategy, source = WeightStrategy("state_dict"), trained(part)
    with torch.device("meta"):
        worker = model_of(part)
    if isinstance(worker, Counted):
        worker.offset = torch.zeros(WIDTH)
    strategy.apply_weights(worker, strategy.extract_weights(source))
    assert torch.equal(answers(worker), answers(source))


def test_a_copy_and_a_hook_keep_memory_and_are_remembered(trainer: Publisher) -> None:
    """A hook that is registered later counts from then on; one that is removed no more."""
    worker = nn.Linear(WIDTH, WIDTH)
    calls, address = list[object](), worker.weight.data_ptr()
    with Subscriber(trainer.address, {"m": worker}) as bus:
        bus.wait_joined(SECONDS)

        def update() -> int:
            receipt = trainer.publish_async("m", nn.Linear(WIDTH, WIDTH), timeout=SECONDS)
            assert bus.receive(SECONDS) is not None
            receipt.result(SECONDS)
            return len(calls)

        assert [update(), update()] == [0, 0]
        hook = worker.register_load_state_dict_post_hook(lambda *given: calls.append(given))
        assert [update(), update()] == [1, 2]
        hook.remove()
        assert [update(), update()] == [2, 2]
    assert worker.weight.data_ptr() == address


def test_pages_are_not_exchanged_under_what_was_made_of_them(
    trainer: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    worker, source = Transposed(), cast("Any", trained(Transposed))[1]
    settings = Settings(resident=True, shared_memory=False)
    with (
        caplog.at_level(logging.WARNING),
        Subscriber(trainer.address, {"m": worker}, settings=settings).start(),
    ):
        trainer.wait_for_workers(1, timeout=SECONDS)
        send(trainer, source)
    assert torch.equal(answers(worker), answers(source))
    assert "a Transposed runs code of its own when weights are loaded" in caplog.text


def test_what_a_load_keeps_does_not_change_with_the_next_version(trainer: Publisher) -> None:
    class Keeping(nn.Linear):
        kept: ClassVar[list[torch.Tensor]] = []

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            self.kept.append(state_dict[f"{prefix}weight"])
            super()._load_from_state_dict(state_dict, prefix, *args)

    worker, sources = Keeping(WIDTH, WIDTH), [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    with Subscriber(trainer.address, {"m": worker}).start():
        trainer.wait_for_workers(1, timeout=SECONDS)
        for source in sources:
            send(trainer, source)
    for kept, source in zip(worker.kept, sources, strict=True):
        assert torch.equal(kept, source.weight)


def test_tied_names_of_which_one_is_published_are_all_loaded() -> None:
    class Tied(Folded):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.weight

    source, worker = Folded(), Tied()
    source.load_state_dict(source.state_dict())
    load_directly(source, worker)
    assert torch.equal(answers(worker), answers(source))
    assert worker.again is worker.weight


def load_directly(source: nn.Module, worker: nn.Module) -> None:
    copy_into(*published(source), worker)


@pytest.mark.parametrize("say", ["raises", "missing"])
def test_a_hook_that_fails_leaves_no_version_and_is_told(trainer: Publisher, say: str) -> None:
    def fail(_: nn.Module, keys: Any) -> None:
        if say == "raises":
            raise RuntimeError("a hook is unlucky")
        keys.missing_keys.append("the scale")

    worker = nn.Linear(WIDTH, WIDTH)
    worker.register_load_state_dict_post_hook(fail)
    with Subscriber(trainer.address, {"m": worker}, name="w") as bus:
        bus.wait_joined(SECONDS)
        sent = trainer.publish_async("m", nn.Linear(WIDTH, WIDTH), timeout=SECONDS)
        with pytest.raises(ApplyError):
            bus.receive(SECONDS)
        assert bus.version("m") == 0
        with pytest.raises(PublishError) as refused:
            sent.result(SECONDS)
    told = refused.value.receipt.workers["w"].detail
    assert ("a hook is unlucky" if say == "raises" else "the scale") in told


def unfused() -> nn.Module:
    module = Fused()
    module._load_state_dict_pre_hooks.clear()  # noqa: SLF001
    return module


def unhalved() -> nn.Module:
    class Saved(Halved):
        _load_from_state_dict = nn.Module._load_from_state_dict  # noqa: SLF001

    return Saved()


@pytest.mark.parametrize("make", [unfused, unhalved])
def test_parts_made_on_the_fly_are_refused_with_the_way_out(
    make: Callable[[], nn.Module],
) -> None:
    """Also beside a part that loads in a way of its own: it cannot load those of another."""
    for worker in (make(), nn.Sequential(Folded(), make())):
        with pytest.raises(StateError, match=r"by state_dict.*load_state_dict\(dict\(pairs"):
            load_directly(worker, worker)


def test_the_way_out_is_one(trainer: Publisher) -> None:
    source, worker = cast("Any", trained(Fused))[1], Fused()
    function = lambda pairs: worker.load_state_dict(dict(pairs))  # noqa: E731
    with Subscriber(trainer.address, {"m": function}).start():
        trainer.wait_for_workers(1, timeout=SECONDS)
        send(trainer, source)
    assert torch.equal(answers(worker), answers(source))


def test_a_hook_that_hangs_ends_with_the_deadline_of_users_code(trainer: Publisher) -> None:
    worker, go = nn.Linear(WIDTH, WIDTH), threading.Event()
    worker.register_load_state_dict_post_hook(lambda *_: go.wait(SECONDS) and None)
    settings = Settings(apply_timeout=0.2)
    with Subscriber(trainer.address, {"m": worker}, name="w", settings=settings).start():
        trainer.wait_for_workers(1, timeout=SECONDS)
        try:
            with pytest.raises(PublishError) as refused:
                send(trainer, nn.Linear(WIDTH, WIDTH))
        finally:
            go.set()
    assert "did not return within 0.2 s" in refused.value.receipt.workers["w"].detail
