"""Publishers and subscribers over real sockets: every kind of weights, every way to publish."""

import errno
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from weightbus import (
    AddressError,
    ApplyError,
    ClosedError,
    Publisher,
    PublishError,
    Settings,
    StateError,
    Subscriber,
    UnknownWorkerError,
    WorkersMissingError,
)
from weightbus.bus.net import copier
from weightbus.bus.net.copier import AT_ONCE_BYTES
from weightbus.bus.net.worker_loop import WorkerLoop
from weightbus.bus.publisher import offers
from weightbus.bus.staged import Copying
from weightbus.bus.worker.events import LoopEvent, Report
from weightbus.codecs import native
from weightbus.python_client.publishing.options import PublishOptions
from weightbus.python_client.subscriber import COPY_SECONDS
from weightbus.tests.client.settling import settled
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.types import Update

SECONDS = 60.0  # far more than anything here takes
LARGE = AT_ONCE_BYTES // 4 + 1  # numbers of a model that is not copied at once


class Bus:
    """Makes publishers and subscribers, and closes them."""

    def __init__(self, *, shared_memory: bool) -> None:
        self.made: list[Publisher | Subscriber] = []
        self.shared_memory = shared_memory

    def publisher(self, **options: Any) -> Publisher:
        options.setdefault("shared_memory", self.shared_memory)
        self.made.append(made := Publisher(**settled(options)))
        return made

    def subscriber(self, publisher: Publisher | str, target: object, **options: Any) -> Subscriber:
        """Return a subscriber that has joined, if its publisher is there."""
        address = publisher if isinstance(publisher, str) else publisher.address
        models = options.pop("models", {"m": target})
        self.made.append(made := Subscriber(address, models, **settled(options)))
        if isinstance(publisher, Publisher):
            assert made.wait_joined(SECONDS)
        return made

    def close(self) -> None:
        for one in reversed(self.made):  # so that every goodbye is heard
            one.close()


def both(
    publisher: Publisher, subscriber: Subscriber, weights: object, **options: Any
) -> tuple[Any, Update]:
    """Publish, and apply in this thread; return what either side says."""
    future: Future[Any] = publisher.publish_async("m", weights, **settled(options))
    update = subscriber.receive(SECONDS)
    assert update is not None
    return future.result(SECONDS), update


def arrays(value: float, size: int = 1000) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.full(size, value, np.float32)}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


# What may be given.

WAYS: tuple[Callable[..., object], ...] = (
    Publisher.publish,
    Publisher.publish_async,
    Publisher.publish_awaitable,
    Publisher.rollback,
)


def keywords(call: Callable[..., object]) -> dict[str, object]:
    """Return the keywords of a call, with their defaults."""
    parameters = inspect.signature(call).parameters.values()
    assert not [p for p in parameters if p.kind is p.VAR_KEYWORD], "keywords that nobody can see"
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_every_way_to_publish_takes_the_same_keywords() -> None:
    first, *others = map(keywords, WAYS)
    assert all(other == first for other in others)
    assert first.keys() == PublishOptions.__optional_keys__, "others pass on what it takes"


def test_there_are_few_keywords_and_each_has_a_default() -> None:
    for call, most in ((Publisher.publish, 7), (Publisher.__init__, 8), (Subscriber.__init__, 6)):
        assert len(keywords(call)) <= most
        assert inspect.Parameter.empty not in keywords(call).values()
    everything = len(inspect.signature(Publisher).parameters)
    assert (everything, len(inspect.signature(Subscriber).parameters)) <= (9, 8)


def test_settings_are_refused_where_they_say_nothing(bus: Bus) -> None:
    publisher = bus.publisher()
    for call, kind in (
        (lambda few: Publisher(settings=few), "Publisher"),
        (lambda few: publisher.publish("m", arrays(1), settings=few), "publish"),
    ):
        with pytest.raises(ValueError, match=rf"resident=True is a setting of .* not of a {kind}"):
            call(Settings(resident=True))
    with pytest.raises(ValueError, match=r"wait='none' is a setting of a publish or a Publisher"):
        Subscriber(publisher.address, {"m": arrays(0)}, settings=Settings(wait="none"))


def test_settings_of_a_publisher_hold_for_each_publish(bus: Bus) -> None:
    publisher, target = bus.publisher(dtype="bf16"), arrays(0)
    bus.subscriber(publisher, target, name="w", cast=True).start()
    publisher.wait_for_workers(1, SECONDS)
    publisher.publish("m", arrays(1.001))
    assert target["w"][0] == 1.0, "rounded"
    publisher.publish("m", arrays(1.001), settings=Settings())
    assert target["w"][0] == np.float32(1.001), "its own take their place"


def test_an_option_of_settings_is_no_keyword() -> None:
    old: Any = Publisher
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_bytes'"):
        old(chunk_bytes=2**16)


# Kinds of weights.


def test_a_module_is_overwritten_in_place(bus: Bus) -> None:
    torch.manual_seed(0)
    source, target = network(), network()
    target[0].weight.requires_grad_(False)  # type: ignore[index] # pyright: ignore
    before = {k: (p.data_ptr(), p.requires_grad) for k, p in target.named_parameters()}
    publisher = bus.publisher()
    receipt, update = both(publisher, bus.subscriber(publisher, target, name="w"), source)
    assert receipt.in_state("applied") == ["w"]
    assert (update.version, update.epoch) == (receipt.version, receipt.epoch)
    assert update.digest in ("", receipt.digest)  # read from shared memory, it is not hashed
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name
    after = {k: (p.data_ptr(), p.requires_grad) for k, p in target.named_parameters()}
    assert after == before


def test_from_numpy_to_torch_and_to_a_file(bus: Bus, tmp_path: Path) -> None:
    source = {"w": np.arange(6.0, dtype=np.float32), "empty": np.zeros((0, 3), np.float32)}
    target = {"w": torch.zeros(6), "empty": torch.zeros(0, 3)}
    publisher = bus.publisher()
    one = bus.subscriber(publisher, target, name="tensors")
    other = bus.subscriber(publisher, tmp_path / "m.safetensors", name="file").start()
    receipt, _ = both(publisher, one, source)
    assert receipt.in_state("applied") == ["file", "tensors"]
    assert target["w"].tolist() == source["w"].tolist()
    saved = load_file(tmp_path / "m.safetensors")
    assert np.array_equal(saved["w"], source["w"])
    assert saved["empty"].shape == (0, 3)
    assert other.version("m") == receipt.version
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_every_bit_of_every_dtype_arrives_in_many_chunks(bus: Bus) -> None:
    """Those of NaNs with a payload among them; the last chunk is a ragged one."""
    bits = np.random.default_rng(0).integers(0, 256, 2**15, np.uint8)
    kinds: list[Any] = [np.float64, np.float32, np.int64, np.uint8, ml_dtypes.bfloat16]
    kinds += [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    source = {np.dtype(kind).name: bits.view(kind) for kind in kinds}
    source |= {"bool": (bits & 1).view(np.bool_), "ragged": bits[:1001]}
    target = {name: np.zeros_like(array) for name, array in source.items()}
    publisher = bus.publisher(chunk_bytes=1000)
    both(publisher, bus.subscriber(publisher, target), source)
    assert [n for n in source if target[n].tobytes() != source[n].tobytes()] == []
    raw = {kind: torch.from_numpy(bits) for kind in (torch.bfloat16, torch.float8_e4m3fn)}
    raw |= {torch.int64: torch.from_numpy(bits), torch.bool: torch.from_numpy(bits & 1)}
    tensors = {str(kind): tensor.view(kind) for kind, tensor in raw.items()}
    into = {str(kind): torch.zeros(2**15, dtype=torch.uint8).view(kind) for kind in raw}
    publisher = bus.publisher()
    both(publisher, bus.subscriber(publisher, into), tensors)
    found = [n for n in into if not torch.equal(*(t[n].view(torch.uint8) for t in (into, tensors)))]
    assert found == []


def grow(target: dict[str, Any], size: int) -> None:
    target["w"] = np.zeros(size)


@pytest.mark.parametrize("background", [False, True])
def test_a_version_that_did_not_fit_comes_once_the_target_does(bus: Bus, background: bool) -> None:
    publisher, target = bus.publisher(), {"w": np.zeros(3)}
    subscriber = bus.subscriber(publisher, target, name="w")
    both(publisher, subscriber, {"w": np.ones(3)})
    if background:
        subscriber.start()
    with pytest.raises(PublishError, match="layout-mismatch"):
        publisher.publish("m", {"w": np.full(4, 2.0)}, timeout=SECONDS)
    if not background:
        with pytest.raises(ApplyError, match=r"it is applied without another publish"):
            subscriber.receive(SECONDS)
    grow(target, 4)
    update = None if background else subscriber.receive(SECONDS)
    assert background or (update is not None and update.version == 2)
    assert subscriber.wait_for_version("m", 2, timeout=SECONDS)
    assert target["w"].tolist() == [2.0] * 4


def test_a_target_that_fitted_and_does_not_is_no_failure_of_the_user(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, target = bus.publisher(), {"w": np.zeros(3)}
    subscriber = bus.subscriber(publisher, target, name="w").start()
    publisher.publish("m", {"w": np.ones(3)}, timeout=SECONDS)
    grow(target, 4)
    with pytest.raises(PublishError, match=r"layout-mismatch.*shape \[3\] published, \[4\] here"):
        publisher.publish("m", {"w": np.full(3, 2.0)}, timeout=SECONDS)
    assert "Traceback" not in caplog.text
    grow(target, 3)
    assert subscriber.wait_for_version("m", 2, timeout=SECONDS)
    assert target["w"].tolist() == [2.0] * 3


# Ways to publish.


def test_a_targeted_publish_changes_its_workers_only(bus: Bus) -> None:
    publisher, one, two = bus.publisher(), arrays(0), arrays(0)
    first = bus.subscriber(publisher, one, name="one")
    second = bus.subscriber(publisher, two, name="two")
    receipt, _ = both(publisher, first, arrays(7), workers=["one"])
    assert list(receipt.workers) == ["one"]
    assert second.receive(0) is None
    assert (one["w"][0], two["w"][0]) == (7, 0)
    with pytest.raises(UnknownWorkerError, match="no worker named three has joined"):
        publisher.publish("m", arrays(8), workers=["one", "three"])


def test_together_waits_for_all_and_commits_all(bus: Bus) -> None:
    publisher, one, two = bus.publisher(), arrays(0), arrays(0)
    first = bus.subscriber(publisher, one)
    second = bus.subscriber(publisher, two).start()
    receipt, _ = both(publisher, first, arrays(3), commit="together")
    assert receipt.in_state("applied") == sorted([first.name, second.name])
    assert (one["w"][0], two["w"][0]) == (3, 3)


def test_together_commits_after_a_burst(bus: Bus) -> None:
    """The worker is catching up, and so ignores the first announcement."""
    publisher, target = bus.publisher(ping=0.2), arrays(0, LARGE)
    worker = bus.subscriber(publisher, target, ping=0.2).start()
    publisher.wait_for_workers(1, SECONDS)
    for value in range(1, 6):
        publisher.publish_async("m", arrays(value, LARGE), timeout=SECONDS)
    receipt = publisher.publish("m", arrays(6, LARGE), commit="together", timeout=SECONDS)
    assert receipt.in_state("applied") == [worker.name]
    assert target["w"][0] == 6


def test_together_aborts_everywhere_if_one_cannot(bus: Bus) -> None:
    publisher, one, two = bus.publisher(), arrays(0), arrays(0, 5)
    bus.subscriber(publisher, one, name="fits").start()
    bus.subscriber(publisher, two, name="other-shape").start()
    with pytest.raises(PublishError, match="shape") as caught:
        publisher.publish("m", arrays(3), commit="together", timeout=SECONDS)
    assert caught.value.receipt.in_state("failed") == ["other-shape"]
    assert one["w"][0] == 0
    receipt = publisher.publish("m", arrays(4), commit="together", require=1, timeout=SECONDS)
    assert receipt.in_state("failed") + receipt.in_state("behind") == ["other-shape"]
    assert one["w"][0] == 4


def test_a_publisher_can_wait_until_all_have_staged(bus: Bus) -> None:
    """What has to stand still while weights change need not do so before."""
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target)
    future = publisher.publish_async("m", arrays(3), commit="together", timeout=SECONDS)
    assert publisher.wait_for_commit(future, SECONDS)
    assert not future.done()
    assert target["w"][0] == 0
    assert worker.receive(SECONDS) is not None
    assert future.result(SECONDS).in_state("applied") == [worker.name]
    assert publisher.wait_for_commit(future, 0.0)


def test_a_publish_waits_for_the_workers_that_it_names_and_goes_to_all(bus: Bus) -> None:
    publisher = bus.publisher()
    other, named = bus.subscriber(publisher, arrays(0), name="other"), arrays(0)
    future = publisher.publish_async(
        "m", arrays(3), commit="together", require=["named"], timeout=SECONDS
    )
    assert publisher.wait_for_commit(future, 0.2) is None, "it waits until that one has joined"
    worker = bus.subscriber(publisher, named, name="named").start()
    receipt = future.result(SECONDS)
    assert receipt.workers["named"].state == "applied"
    assert receipt.workers["other"].state != "applied"
    assert other.receive(SECONDS) is not None
    assert worker.version("m") == receipt.version
    with pytest.raises(ValueError, match="names other, which are not in workers="):
        publisher.publish("m", arrays(4), workers=["named"], require=["named", "other"])


def test_a_publish_that_is_given_up_says_how_far_each_worker_is(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target, name="w")
    waits = publisher.publish_async(
        "m", arrays(3), commit="together", require=["w", "x"], timeout=SECONDS
    )
    publisher.give_up(waits, "no time is left")
    with pytest.raises(PublishError, match=r"0 of the 2 .*x is not there; no time is left"):
        waits.result(SECONDS)
    future = publisher.publish_async(
        "m", arrays(4), commit="together", require=["w"], timeout=SECONDS
    )
    assert publisher.wait_for_commit(future, SECONDS)
    publisher.give_up(future, "no time is left")
    with pytest.raises(PublishError, match="applied by 0 of the 1 workers") as caught:
        future.result(SECONDS)
    assert caught.value.receipt.in_state("staged") == ["w"]
    assert worker.receive(SECONDS) is not None
    assert target["w"][0] == 4, "what is committed may still be applied"
    publisher.give_up(future, "it is over")
    with pytest.raises(TypeError, match="takes a future of publish_async"):
        publisher.give_up(object(), "")  # type: ignore[arg-type]


def test_a_publisher_does_not_wait_for_what_is_given_up_or_not_together(bus: Bus) -> None:
    publisher = bus.publisher()
    bus.subscriber(publisher, arrays(0, 5)).start()
    future = publisher.publish_async("m", arrays(3), commit="together", timeout=SECONDS)
    assert not publisher.wait_for_commit(future, SECONDS)
    with pytest.raises(PublishError, match="shape"):
        future.result(0.0)
    slow = publisher.publish_async("m", arrays(3), commit="together", expect=2, timeout=SECONDS)
    assert not publisher.wait_for_commit(slow, 0.0)
    alone = publisher.publish_async("m", arrays(3), timeout=SECONDS)
    assert not publisher.wait_for_commit(alone, SECONDS)
    assert isinstance(alone.exception(SECONDS), PublishError)
    assert isinstance(slow.exception(SECONDS), PublishError)
    with pytest.raises(TypeError, match="publish_async"):
        publisher.wait_for_commit(Future(), 0.0)


def test_the_snapshot_is_what_arrives_though_training_goes_on(bus: Bus) -> None:
    publisher, target = bus.publisher(chunk_bytes=4096), arrays(0, 1_000_000)
    subscriber = bus.subscriber(publisher, target)
    source = arrays(1, 1_000_000)
    future = publisher.publish_async("m", source)
    source["w"][:] = 2
    assert subscriber.receive(SECONDS) is not None
    assert target["w"].min() == target["w"].max() == 1
    assert future.result(SECONDS).version == 1


def test_the_latest_overtakes_what_is_on_its_way(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    bus.subscriber(publisher, target).start()
    futures = [publisher.publish_async("m", arrays(value)) for value in range(1, 30)]
    receipts = [future.result(SECONDS) for future in futures]
    assert receipts[-1].in_state("applied")
    assert target["w"][0] == 29


def test_many_models_on_one_bus(bus: Bus) -> None:
    publisher = bus.publisher()
    targets = {name: arrays(0) for name in ("actor", "critic", "x.y-z_0")}
    all_, some = dict(targets), {"critic": arrays(0)}
    bus.subscriber(publisher, None, models=all_, name="all").start()
    bus.subscriber(publisher, None, models=some, name="some").start()
    for value, name in enumerate(targets, 1):
        receipt = publisher.publish(name, arrays(value), timeout=SECONDS)
        assert sorted(receipt.workers) == (["all", "some"] if name == "critic" else ["all"])
    assert [t["w"][0] for t in targets.values()] == [1, 2, 3]
    assert some["critic"]["w"][0] == 2


def test_whoever_joins_late_gets_the_latest(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    assert publisher.publish("m", arrays(1)).workers == {}
    publisher.publish("m", arrays(2))
    update = bus.subscriber(publisher, target).receive(SECONDS)
    assert update is not None
    assert update.version == 2
    assert target["w"][0] == 2


def test_waiting_for_a_version_of_the_publisher_that_took_over(bus: Bus) -> None:
    old, target = bus.publisher(address=lasting_address()), arrays(0)
    subscriber = bus.subscriber(old, target).start()
    for value in (1, 2):
        old.publish("m", arrays(value), timeout=SECONDS)
    old.close()
    new = bus.publisher(address=old.address)
    assert subscriber.wait_for_version("m", 1, timeout=0) is not None, "version 2 of the old one"
    assert subscriber.wait_for_version("m", 1, epoch=new.epoch, timeout=0) is None
    new.wait_for_workers(1, SECONDS)
    receipt = new.publish("m", arrays(3), timeout=SECONDS)
    update = subscriber.wait_for_version("m", 1, epoch=receipt.epoch, timeout=SECONDS)
    assert update is not None
    assert (update.epoch, update.version) == (receipt.epoch, 1)
    assert subscriber.wait_for_version("m", 2, epoch=receipt.epoch, timeout=0) is None


def test_a_hook_runs_before_first_use_and_may_read(bus: Bus) -> None:
    publisher, target, seen = bus.publisher(), arrays(0), list[tuple[int, float]]()

    def hook(update: Update) -> None:
        assert subscriber.version("m") == update.version - 1, "not in use yet"
        with subscriber.reading(timeout=0):
            seen.append((update.version, float(target["w"][0])))

    subscriber = bus.subscriber(publisher, target, on_commit=hook)
    both(publisher, subscriber, arrays(1))
    both(publisher, subscriber, arrays(2))
    assert seen == [(1, 1.0), (2, 2.0)]


def test_a_hook_that_exits_does_not_end_the_background(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)

    def hook(_update: Update) -> None:
        sys.exit("enough")

    subscriber = bus.subscriber(publisher, target, on_commit=hook).start()
    for value in (1, 2):
        with pytest.raises(PublishError, match="apply: SystemExit: enough"):
            publisher.publish("m", arrays(value), timeout=SECONDS)
        assert target["w"][0] == value, "it was copied, then the hook exited"
    assert "SystemExit('enough')" in str(subscriber.error)


def test_a_shortfall_says_what_was_waited_for(bus: Bus) -> None:
    publisher = bus.publisher()
    for name, size in (("good", 1000), ("bad", 3)):
        bus.subscriber(publisher, arrays(0, size), name=name)
    with pytest.raises(PublishError, match=r"is staged by 1 of 2 workers after .*s; bad failed"):
        publisher.publish("m", arrays(1), settings=Settings(wait="staged"), timeout=SECONDS)


def test_a_full_disk_is_tried_again(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Applied as soon as there is room, and nothing is left of the attempts before."""
    fsync = os.fsync
    lacking = [errno.ENOSPC, errno.EMFILE]

    def written(file: int) -> None:
        if lacking:
            error = lacking.pop(0)
            raise OSError(error, os.strerror(error))
        fsync(file)

    monkeypatch.setattr(os, "fsync", written)
    timing = Settings(ping=0.1, lost_after=SECONDS)
    publisher = bus.publisher(settings=timing)
    worker = bus.subscriber(publisher, tmp_path / "file", settings=timing).start()
    with pytest.raises(PublishError, match=r"no-memory: .*No space left"):
        publisher.publish("m", arrays(1), timeout=SECONDS)
    assert worker.wait_for_version("m", timeout=SECONDS)
    assert load_file(tmp_path / "file")["w"][0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_is_named_to_the_publisher(bus: Bus, tmp_path: Path) -> None:
    publisher = bus.publisher()
    (home := tmp_path / "home").mkdir()
    worker = bus.subscriber(publisher, home / "file").start()
    home.rmdir()
    where = rf"apply: FileNotFoundError: \[Errno 2\] .*{home} .*'{home}/file'"
    with pytest.raises(PublishError, match=where):
        publisher.publish("m", arrays(1), timeout=SECONDS)
    home.mkdir()
    publisher.publish("m", arrays(2), timeout=SECONDS)
    assert load_file(home / "file")["w"][0] == 2
    assert worker.version("m") == 2


def test_a_slow_disk_delays_nothing_but_its_file(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not pings, nor what is applied to other models, large or small, in memory or on other disks.

    Nor readers of what is in memory.
    """
    fsync, slow, go_on = os.fsync, threading.Event(), threading.Event()

    def slowly(handle: int) -> None:
        if "/.slow." in os.readlink(f"/proc/self/fd/{handle}"):
            slow.set()
            assert go_on.wait(SECONDS)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", slowly)
    timing = Settings(ping=0.1, lost_after=SECONDS)
    publisher, large = bus.publisher(settings=timing), 2**20  # more than is applied at once
    small, big = arrays(0), arrays(0, large)
    models = {"m": tmp_path / "slow", "file": tmp_path / "fast", "small": small, "large": big}
    worker = bus.subscriber(publisher, None, models=models, name="w", settings=timing).start()
    for model in ("small", "file", "large"):  # what is new takes longer
        publisher.publish(model, arrays(1, large if model == "large" else 1000), timeout=SECONDS)
    pending = publisher.publish_async("m", arrays(1), timeout=SECONDS)
    try:
        assert slow.wait(SECONDS)
        for version in range(2, 5):
            for model in ("small", "large", "file"):
                weights = arrays(version, large if model == "large" else 1000)
                publisher.publish(model, weights, timeout=SECONDS / 4)
        with worker.reading(SECONDS / 4):
            assert (small["w"] == 4).all()
            assert (big["w"] == 4).all()
        deadline = time.monotonic() + SECONDS / 4
        while "applying" not in publisher.workers()["w"].phase.get("m", ""):  # which a ping tells
            assert time.monotonic() < deadline
        assert not pending.done()
    finally:
        go_on.set()
    pending.result(SECONDS)
    assert load_file(tmp_path / "slow")["w"][0] == 1


def test_hooks_of_files_and_models_are_called_one_at_a_time(bus: Bus, tmp_path: Path) -> None:
    inside, changed, met = list[None](), threading.Condition(), list[bool]()

    def hook(_: object) -> None:
        with changed:
            inside.append(None)
            changed.notify_all()
            met.append(changed.wait_for(lambda: len(inside) > 1, 0.02))
            inside.pop()

    publisher = bus.publisher()
    models = {"m": tmp_path / "file", "n": arrays(0)}
    bus.subscriber(publisher, None, models=models, before_apply=hook, on_commit=hook).start()
    for version in range(5):
        calls = [publisher.publish_async(m, arrays(version), timeout=SECONDS) for m in models]
        for call in calls:
            call.result(SECONDS)
    assert met == [False] * 20


def test_close_does_not_wait_for_a_hook_that_hangs(bus: Bus) -> None:
    publisher, entered, leave = bus.publisher(), threading.Event(), threading.Event()

    def hook(_update: Update) -> None:
        entered.set()
        leave.wait(SECONDS)

    subscriber = bus.subscriber(publisher, arrays(0), on_commit=hook).start()
    publisher.publish("m", arrays(1), settings=Settings(wait="none"))
    assert entered.wait(SECONDS)
    before = time.monotonic()
    subscriber.close()
    assert time.monotonic() - before < COPY_SECONDS / 2
    leave.set()


def test_what_the_publisher_is_told_can_be_seen_here_before(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell, seen = WorkerLoop.tell, list[int]()

    def told(loop: WorkerLoop, event: LoopEvent) -> None:
        if isinstance(event, Report) and event.what == "applied":
            seen.append(subscriber.version("m"))
        tell(loop, event)

    monkeypatch.setattr(WorkerLoop, "tell", told)
    publisher = bus.publisher()
    subscriber = bus.subscriber(publisher, arrays(0))
    both(publisher, subscriber, arrays(1))
    assert seen == [1]


@pytest.fixture(name="slowly")
def _slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Copying from shared memory, held up until it may go on, or nobody wants it."""
    copying, begun, go_on = copier.copying, threading.Event(), threading.Event()

    def slow(copy: Copying) -> Generator[None, None, Any]:
        begun.set()
        while not go_on.is_set() and copy.live:
            yield
        return (yield from copying(copy))

    monkeypatch.setattr(copier, "copying", slow)
    return begun, go_on


def test_a_worker_that_copies_a_large_version_does_everything_else_meanwhile(
    slowly: tuple[threading.Event, threading.Event],
) -> None:
    """Pings, above all: else it would be lost, and another model is as good a question."""
    (begun, go_on), bus = slowly, Bus(shared_memory=True)
    target, publisher = arrays(0, LARGE), bus.publisher()
    models = {"m": target, "other": arrays(0)}
    bus.subscriber(publisher, None, name="w", models=models).start()
    future = publisher.publish_async("m", arrays(1, LARGE), commit="together", timeout=SECONDS)
    assert begun.wait(SECONDS)
    publisher.publish("other", arrays(1), timeout=SECONDS)
    assert not future.done()
    go_on.set()
    assert future.result(SECONDS).workers["w"].state == "applied"
    assert target["w"][0] == 1
    bus.close()


def test_a_copy_that_is_aborted_is_no_version_and_the_next_one_is_applied(
    slowly: tuple[threading.Event, threading.Event],
) -> None:
    bus = Bus(shared_memory=True)
    target, publisher = arrays(0, LARGE), bus.publisher()
    bus.subscriber(publisher, target).start()
    future = publisher.publish_async("m", arrays(1, LARGE), commit="together", timeout=1.0)
    assert slowly[0].wait(SECONDS)
    assert isinstance(future.exception(SECONDS), PublishError)
    publisher.publish("m", arrays(2, LARGE), timeout=SECONDS)
    assert target["w"][0] == 2
    bus.close()


# Reading.


def test_a_version_waits_for_a_slow_reader(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    subscriber = bus.subscriber(publisher, target)
    reading, leave = threading.Event(), threading.Event()

    def forward() -> None:
        with subscriber.reading():
            reading.set()
            leave.wait(SECONDS)

    thread = threading.Thread(target=forward)
    thread.start()
    assert reading.wait(SECONDS)
    publisher.publish("m", arrays(1), settings=Settings(wait="staged"), timeout=SECONDS)
    for _ in range(3):
        assert subscriber.receive(0) is None, "it is in use"
    assert target["w"][0] == 0
    leave.set()
    thread.join(SECONDS)
    assert subscriber.receive(SECONDS) is not None, "and was not lost"
    assert target["w"][0] == 1


# Weights that do not fit.


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ({"w": np.zeros(3)}, {"v": np.zeros(3)}, "w: published as F64"),
        ({"w": np.zeros(3)}, {"w": np.zeros(4)}, "shape [3] published, [4] here"),
        ({"w": np.zeros(3)}, {"w": np.zeros(3, np.float32)}, "dtype F64 published, F32 here"),
        (
            {"w": np.zeros(3, ml_dtypes.bfloat16)},
            {"w": np.zeros(3, np.float32)},
            "dtype BF16 published, F32 here",
        ),
    ],
    ids=["name", "shape", "dtype", "bf16"],
)
def test_what_does_not_fit_is_named_on_both_sides(
    bus: Bus, source: dict[str, Any], target: dict[str, Any], says: str
) -> None:
    publisher = bus.publisher()
    subscriber = bus.subscriber(publisher, target, name="w")
    with pytest.raises(PublishError) as caught:
        publisher.publish("m", source, timeout=SECONDS)
    assert says in str(caught.value)
    assert "layout-mismatch" in caught.value.receipt.workers["w"].detail
    with pytest.raises(ApplyError) as refused:
        subscriber.receive(SECONDS)
    assert says in str(refused.value)
    assert (refused.value.model, refused.value.version) == ("m", 1)


def test_names_that_the_target_lacks_are_passed_over_if_not_strict(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0, 3)
    subscriber = bus.subscriber(publisher, target, strict=False)
    both(publisher, subscriber, arrays(1, 3) | {"yours": np.ones(2)})
    assert target["w"].tolist() == [1, 1, 1]
    publisher.publish("m", {"yours": np.ones(2)}, require=0, settings=Settings(wait="none"))
    with pytest.raises(ApplyError, match=r"w: F32 \[3\] in the target, not published"):
        subscriber.receive(SECONDS)


def test_too_large_a_model_is_refused(bus: Bus) -> None:
    publisher = bus.publisher()
    bus.subscriber(publisher, arrays(0), name="w", bytes_max=3999)
    with pytest.raises(PublishError, match=r"too-large: 4000 bytes; .* at most 3999"):
        publisher.publish("m", arrays(1), timeout=SECONDS)


def test_what_cannot_travel_publishes_nothing(bus: Bus) -> None:
    publisher = bus.publisher()
    with pytest.raises(StateError):
        publisher.publish("m", {"w": np.array(["text"])})
    assert publisher.publish("m", arrays(1)).version == 1


# Addresses.


def test_an_address_in_use_says_so(bus: Bus) -> None:
    publisher = bus.publisher()
    with pytest.raises(AddressError, match=r"in use by a publisher of this process: close\(\)"):
        bus.publisher(address=publisher.address)
    with pytest.raises(AddressError, match=r"pass another data="):
        bus.publisher(data=publisher.data_address)


@pytest.mark.parametrize("listens", [True, False])
def test_any_port_means_any_port_for_data_too(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, *, listens: bool
) -> None:
    """The port beside a free one need not be free, and nobody waits until it is."""
    from weightbus.bus.net import endpoints, listening

    monkeypatch.setattr(listening, "time", SimpleNamespace(monotonic=time.monotonic))
    taken = bus.publisher().address
    with socket.create_connection(endpoints.host_and_port(taken)) as connection:
        if not listens:
            taken = f"tcp://127.0.0.1:{connection.getsockname()[1]}"
        beside: Callable[[str], str] = endpoints.beside
        monkeypatch.setattr(
            endpoints, "beside", lambda own: beside(own) if own.endswith(":0") else taken
        )
        publisher, target = bus.publisher(address="tcp://127.0.0.1:0"), arrays(0)
    both(publisher, bus.subscriber(publisher, target), arrays(1))
    assert target["w"][0] == 1


def test_ipc(bus: Bus, tmp_path: Path) -> None:
    publisher, target = bus.publisher(address=f"ipc://{tmp_path}/bus"), arrays(0)
    assert publisher.data_address == f"ipc://{tmp_path}/bus.data"
    both(publisher, bus.subscriber(publisher, target), arrays(1))
    assert target["w"][0] == 1


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6")
def test_both_families_by_one_address(bus: Bus) -> None:
    publisher, targets = (
        bus.publisher(address="tcp://[::]:0", insecure=True),
        [arrays(0), arrays(0)],
    )
    for host, target in zip(("127.0.0.1", "[::1]"), targets, strict=True):
        bus.subscriber(publisher.address.replace("[::]", host), target).start()
    publisher.publish("m", arrays(1), expect=2, timeout=SECONDS)
    assert [target["w"][0] for target in targets] == [1, 1]


# Mistakes.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"require": "most"}, "whole number from 0 to"),
        ({"workers": [], "require": 1}, "for 0 workers only"),
    ],
)
def test_a_publish_that_cannot_be_met_is_refused_with_a_reason(
    bus: Bus, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        bus.publisher().publish("m", arrays(1), **given)


def test_missing_workers_are_counted_and_named(bus: Bus) -> None:
    publisher = bus.publisher()
    bus.subscriber(publisher, arrays(0), name="only")
    with pytest.raises(WorkersMissingError, match=r"1 of 2 workers joined within 0.1 s \(only\)"):
        publisher.wait_for_workers(2, 0.1)
    with pytest.raises(WorkersMissingError, match="0 of 1 workers that want 'other'"):
        publisher.wait_for_workers(1, 0.1, "other")


def test_a_subscriber_that_applies_in_the_background_is_not_received_from(bus: Bus) -> None:
    subscriber = bus.subscriber(bus.publisher(), arrays(0)).start()
    with pytest.raises(ClosedError, match=r"in the background since start\(\)"):
        subscriber.receive(0)


def test_prepare_publishes_nothing_and_takes_the_memory(bus: Bus) -> None:
    model, target = {"w": torch.rand(1000)}, {"w": torch.zeros(1000)}
    publisher = bus.publisher()
    publisher.prepare("m", model)
    with pytest.raises(StateError):
        publisher.prepare("other", {"w": torch.rand(3, device="meta")})
    subscriber = bus.subscriber(publisher, target)
    assert subscriber.receive(0) is None
    receipt, update = both(publisher, subscriber, model)
    assert (receipt.version, update.version) == (1, 1)
    assert torch.equal(target["w"], model["w"])


def test_small_versions_in_a_row_are_applied_in_order_in_the_background(bus: Bus) -> None:
    """Those that find the weights in use are left to another thread, which must not go back."""
    target = {"w": torch.zeros(100)}
    publisher = bus.publisher()
    worker = bus.subscriber(publisher, target).start()
    seen: list[int] = []
    for version in range(1, 101):
        with worker.reading():
            seen.append(worker.version("m"))
            publisher.publish(
                "m", {"w": torch.full((100,), float(version))}, settings=Settings(wait="none")
            )
    receipt = publisher.publish("m", {"w": torch.full((100,), 101.0)}, timeout=SECONDS)
    assert receipt.in_state("applied") == [worker.name]
    assert seen == sorted(seen)
    assert target["w"].tolist() == [101.0] * 100


def test_each_byte_is_hashed_once_and_over_shared_memory_none(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is copied, for workers known beforehand; when it is sent, for one that comes."""
    gathered, hashed = list[int](), list[int]()
    gather, crc32c = native.gather, native.crc32c

    def counted(to: Any, *rest: Any) -> Any:
        gathered.append(to.nbytes)
        return gather(to, *rest)

    def later(data: Any) -> int:
        hashed.append(len(data))
        return crc32c(data)

    monkeypatch.setattr(native, "gather", counted)
    monkeypatch.setattr(offers, "crc32c", later)
    publisher = bus.publisher(chunk_bytes=1000)
    weights = {"w": np.arange(2_500, dtype=np.float32)}
    first = bus.subscriber(publisher, {"w": np.zeros(2_500, np.float32)})
    loop = publisher._loop  # noqa: SLF001 # pyright: ignore
    wait_for(lambda: loop.known.sends("m", None, shared=False), "a ping", SECONDS)
    receipt, _ = both(publisher, first, weights)
    assert gathered == ([] if bus.shared_memory else [10_000])
    assert not hashed
    target = {"w": np.zeros(2_500, np.float32)}
    update = bus.subscriber(publisher, target, shared_memory=False).receive(SECONDS)
    assert update is not None
    assert update.digest
    assert receipt.digest in ("", update.digest)
    assert hashed == ([1000] * 10 if bus.shared_memory else [])
    assert np.array_equal(target["w"], weights["w"])
