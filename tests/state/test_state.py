"""A version survives its publisher: what is on disk is offered again, and can be gone back to."""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from weightbus import Publisher, Settings, StateFolderError, Subscriber
from weightbus.bus.headers import encode
from weightbus.bus.limits import SNAPSHOTS_MAX
from weightbus.bus.messages import Hello, Ping, Running
from weightbus.python_client.files.state_folder import TABLE, Saved, StateFolder
from weightbus.python_client.publishing import state_writer
from weightbus.tests.client.settling import settled
from weightbus.tests.net.ports import lasting_address
from weightbus.types import Update

SECONDS = 60.0  # far more than anything here takes

Weights = dict[str, Any]


def weights(value: int, nbytes: int = 3_000) -> Weights:
    return {"w": np.full(nbytes, value, np.uint8)}


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def holds(publisher: Publisher, count: int) -> bool:
    return len(publisher.history("m")) == count


class Fleet:
    """Publishers that come and go over one folder at one address, and their subscribers."""

    def __init__(self, path: Path, *, shared_memory: bool) -> None:
        self.path, self.address, self.shared_memory = path, lasting_address(), shared_memory
        self.made: list[Subscriber] = []
        self.publisher: Publisher | None = None

    def start(self, **options: Any) -> Publisher:
        """Start a publisher instead of the one before."""
        if self.publisher is not None:
            self.publisher.close()
        known: dict[str, Any] = {"state": self.path, "shared_memory": self.shared_memory}
        self.publisher = Publisher(self.address, **settled(known | options))
        return self.publisher

    def subscriber(self, target: object, **options: Any) -> Subscriber:
        self.made.append(
            made := Subscriber(self.address, {"m": target}, **settled(options)).start()
        )
        assert made.wait_joined(SECONDS)
        return made

    def close(self) -> None:
        for one in self.made:
            one.close()
        if self.publisher is not None:
            self.publisher.close()


@pytest.fixture(name="fleet", params=[False, True], ids=["network", "shared memory"])
def _fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path / "state", shared_memory=request.param)
    yield fleet
    fleet.close()


def test_a_late_joiner_gets_what_the_publisher_before_had_published(fleet: Fleet) -> None:
    first = fleet.start(chunk_bytes=1_000)
    receipt = first.publish("m", weights(1), settings=Settings(verify=True))
    second = fleet.start()  # with chunks of another size: the version keeps its own
    target = weights(0)
    late = fleet.subscriber(target)
    update = late.wait_for_version("m", epoch=second.epoch, timeout=SECONDS)
    assert update is not None
    assert (update.epoch, update.version) == (second.epoch, 1)
    assert np.array_equal(target["w"], weights(1)["w"])
    (stored,) = second.history("m")
    assert stored.names == ((second.epoch, 1), (first.epoch, 1))
    if not fleet.shared_memory:
        assert update.digest == stored.digest
    assert second.publish("m", weights(2), timeout=SECONDS).version == receipt.version + 1


def renamed(fleet: Fleet, worker: Subscriber, digest: str) -> Publisher:
    """Restart the publisher; return it once the worker runs the new name of what it ran."""
    again = fleet.start()
    update = worker.wait_for_version("m", epoch=again.epoch, timeout=SECONDS)
    assert update is not None
    assert (update.epoch, update.version) == (again.epoch, 1)
    assert update.digest == digest, "its own, or none: never the publisher's"
    eventually(lambda: again.workers()["w0"].running == {"m": (again.epoch, 1)})
    return again


def test_who_runs_it_already_takes_its_new_name_and_nothing_else(fleet: Fleet) -> None:
    fleet.start().publish("m", weights(1))
    hooks: list[Update] = []
    target = weights(0)
    worker = fleet.subscriber(target, name="w0", on_commit=hooks.append)
    before = worker.wait_for_version("m", timeout=SECONDS)
    assert before is not None
    target["w"][:] = 99  # whoever copied it again would show
    renamed(fleet, worker, before.digest)
    again = renamed(fleet, worker, before.digest)
    assert len(hooks) == 1
    assert set(target["w"]) == {99}
    again.publish("m", weights(2), timeout=SECONDS)
    assert set(target["w"]) == {2}
    assert [h.version for h in hooks] == [1, 2]


def test_going_back_publishes_old_bytes_as_a_new_version(fleet: Fleet) -> None:
    target = weights(0)
    first = fleet.start(history=2)
    worker = fleet.subscriber(target)
    for value in (1, 2, 3):
        first.publish("m", weights(value), timeout=SECONDS)
        eventually(lambda: len(first.history("m")) == value)  # noqa: B023
    again = fleet.start(history=2)
    again.wait_for_workers(1, SECONDS)
    newest, middle, oldest = again.history("m")
    assert [s.version for s in (newest, middle, oldest)] == [3, 2, 1]
    receipt = again.rollback("m", oldest.key, settings=Settings(verify=True), timeout=SECONDS)
    assert (receipt.version, receipt.digest) == (2, oldest.digest)
    assert [w.state for w in receipt.workers.values()] == ["applied"]
    assert set(target["w"]) == {1}
    assert worker.version("m") == 2
    eventually(lambda: again.history("m")[0].key == (again.epoch, 2))
    assert [s.version for s in again.history("m")[1:]] == [3, 2], "so many older ones are kept"
    with pytest.raises(StateFolderError, match=r"version \(1, 1\) of 'm' is not in .*; there are"):
        again.rollback("m", (1, 1))


def test_a_version_that_is_not_meant_for_all_is_not_kept(tmp_path: Path) -> None:
    with Publisher(state=tmp_path) as publisher:
        publisher.publish("m", weights(1))
        with Subscriber(publisher.address, {"m": weights(0)}, name="w0") as worker:
            worker.start()
            assert worker.wait_for_version("m", timeout=SECONDS)
            publisher.publish("m", weights(2), workers=["w0"], timeout=SECONDS)
            publisher.publish("m", weights(3), commit="together", timeout=SECONDS)
            publisher.publish("m", weights(4), workers=["w0"], timeout=SECONDS)
    with StateFolder(tmp_path) as folder:
        assert [stored.version for stored in folder.versions("m")] == [3]


def test_what_is_damaged_is_not_offered_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(state=tmp_path) as publisher:
        publisher.publish("m", weights(1))
        publisher.publish("n", weights(2))
    (file,) = tmp_path.glob("m@*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with Publisher(state=tmp_path) as publisher:
        assert f"{file.name} is damaged: it hashes to" in caplog.text
        with (
            Subscriber(publisher.address, {"m": weights(0)}) as lacks,
            Subscriber(publisher.address, {"n": weights(0)}) as gets,
        ):
            assert gets.receive(SECONDS)
            assert lacks.receive(0.0) is None
        with pytest.raises(StateFolderError, match="is damaged"):
            publisher.rollback("m", publisher.history("m")[0].key)
        publisher.publish("m", weights(3))


def test_the_epoch_rises_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(state=tmp_path) as first:
        pass
    monkeypatch.setattr(time, "time_ns", lambda: 10**15)
    with Publisher(state=tmp_path) as second:
        assert second.epoch == first.epoch + 1
    with pytest.raises(
        ValueError, match=rf"above all that .*choose a whole number from {second.epoch + 1} to"
    ):
        Publisher(state=tmp_path, settings=Settings(epoch=second.epoch))
    Publisher(state=tmp_path, settings=Settings(epoch=second.epoch + 5)).close()


def test_a_forked_child_does_not_keep_the_folder(tmp_path: Path) -> None:
    publisher = Publisher(state=tmp_path)
    mine, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        mine.close()
        its.send(b"here")
        its.recv(1)  # until the test is done with us
        os._exit(0)
    its.close()
    try:
        assert mine.recv(4) == b"here"
        publisher.close()
        Publisher(state=tmp_path).close()
    finally:
        mine.close()
        os.waitpid(child, 0)


def test_one_that_is_dropped_writes_what_is_left_and_lets_the_folder_go(tmp_path: Path) -> None:
    made = [Publisher(state=tmp_path)]
    made[0].publish("m", weights(1))
    with pytest.warns(ResourceWarning):
        made.clear()  # nothing that runs holds it, so it is collected at once

    def free() -> bool:
        try:
            with StateFolder(tmp_path) as folder:
                return len(folder.versions("m")) == 1
        except StateFolderError:
            return False

    eventually(free)


def test_without_a_folder_there_is_nothing_to_go_back_to() -> None:
    with Publisher() as publisher, pytest.raises(StateFolderError, match="state="):
        publisher.history("m")


class Disk:
    """Stands before `StateFolder._replace`: a disk that is full, or that hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.open, self.entered = False, threading.Event(), threading.Event()
        self.open.set()
        original = StateFolder._replace  # pyright: ignore[reportPrivateUsage]

        def replace(folder: StateFolder, name: str, *arguments: Any) -> None:
            if name != TABLE:
                self.entered.set()
                assert self.open.wait(SECONDS)
                if self.full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(folder, name, *arguments)

        monkeypatch.setattr(StateFolder, "_replace", replace)


def test_a_full_disk_is_a_warning_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    with Publisher(state=tmp_path) as publisher:
        publisher.publish("m", weights(1))
        eventually(lambda: len(publisher.history("m")) == 1)
        disk.full = True
        for value in (2, 3):
            disk.entered.clear()
            publisher.publish("m", weights(value))
            assert disk.entered.wait(SECONDS)
        eventually(lambda: "No space left" in caplog.text)
        assert [stored.version for stored in publisher.history("m")] == [1]
        disk.full = False
        publisher.publish("m", weights(4))
        eventually(lambda: publisher.history("m")[0].version == 4)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    full = [r for r in warnings if "No space left" in r.getMessage()]
    assert len(full) == 1, "it says so now and then, not each time"


def test_what_was_not_written_in_time_is_said_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    publisher = Publisher(state=tmp_path)
    disk.open.clear()
    publisher.publish("m", weights(1))
    assert disk.entered.wait(SECONDS)
    publisher.close(timeout=0.1)
    assert "closed without the latest version of m (there was no time for it)" in caplog.text
    with pytest.raises(StateFolderError, match="belongs to a publisher of this process"):
        Publisher(state=tmp_path)  # the disk may yet do what it was asked for
    disk.open.set()
    publisher.close(timeout=SECONDS)


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_slow_disk_keeps_nobody_waiting_and_one_more_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_memory: bool
) -> None:
    disk = Disk(monkeypatch)
    with Publisher(state=tmp_path, settings=Settings(shared_memory=shared_memory)) as publisher:
        disk.open.clear()
        for value in range(1, 30):
            publisher.publish("m", weights(value))
            if value == 1:
                assert disk.entered.wait(SECONDS)
        pool = publisher._models["m"].pool  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        assert len(pool) <= SNAPSHOTS_MAX + 1
        disk.open.set()
        eventually(lambda: [s.version for s in publisher.history("m")] == [29])
    with StateFolder(tmp_path) as folder:
        memory = np.empty(3_000, np.uint8)
        folder.open(folder.versions("m")[0]).copy_to(memory)
        assert set(memory) == {29}


def test_a_publish_goes_first_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_writer, "CALM_SECONDS", 0.2)
    with Publisher(state=tmp_path) as publisher, Subscriber(publisher.address, {"m": weights(0)}):
        publisher.wait_for_workers(1, SECONDS)
        future = publisher.publish_async("m", weights(1), timeout=SECONDS)  # nobody applies it
        eventually(lambda: len(publisher.history("m")) == 1)
        assert not future.done()


def test_it_rests_after_a_version_but_not_from_epochs_or_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_writer, "REST_SECONDS", SECONDS)
    monkeypatch.setattr(state_writer, "REST_TIMES", 10**9)
    with Publisher(state=tmp_path) as publisher:
        publisher.publish("m", weights(1))
        eventually(lambda: len(publisher.history("m")) == 1)
        publisher.publish("m", weights(2))
        kept = publisher._state_writer  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        assert kept is not None
        step = 2 * state_writer.AHEAD
        for epoch in range(2**52, 2**52 + 10 * step, step):  # more than moments in a version
            eventually(partial(kept.recorded, epoch))
        assert [stored.version for stored in publisher.history("m")] == [1]
    with StateFolder(tmp_path) as folder:
        assert 2**52 + 9 * step <= folder.epoch <= 2**52 + 10 * step
        assert [stored.version for stored in folder.versions("m")] == [2]


def test_an_epoch_is_recorded_before_it_is_taken(tmp_path: Path) -> None:
    with StateFolder(tmp_path) as folder:
        kept = state_writer.StateWriter(folder)
        assert not kept.recorded(12345), "nobody waits for the disk"
        eventually(lambda: kept.recorded(12345))
        assert kept.recorded(12346), "who asks again may ask for a little more"
        assert folder.epoch == 12345 + state_writer.AHEAD
        assert str(folder.epoch).encode() in (tmp_path / TABLE).read_bytes()
        assert kept.close(SECONDS)


def test_an_epoch_is_taken_in_the_end_though_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_writer, "RECORD_SECONDS", 0.1)
    with StateFolder(tmp_path) as folder:
        kept, disk = state_writer.StateWriter(folder), Hanging(monkeypatch)
        assert not kept.recorded(12345)
        assert disk.entered.wait(SECONDS)
        eventually(lambda: kept.recorded(12345))
        assert "epoch 12345 is not in" in caplog.text
        assert not kept.recorded(12345 + 2 * state_writer.AHEAD), (
            "the next one is waited for as well"
        )
        disk.open.set()
        assert kept.close(SECONDS)


class Hanging:
    """Stands before `os.fsync`: a disk that takes its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        original = os.fsync

        def fsync(file: int) -> None:
            self.entered.set()
            assert self.open.wait(SECONDS)
            original(file)

        monkeypatch.setattr(os, "fsync", fsync)


def test_while_the_disk_hangs_everybody_is_served_whatever_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is being written, and a later epoch is needed; nothing else waits for either."""
    monkeypatch.setattr(state_writer, "RECORD_SECONDS", SECONDS)
    with Publisher(state=tmp_path) as publisher, zmq.Context() as context:
        disk, epoch = Hanging(monkeypatch), publisher.epoch
        publisher.publish("m", weights(1))
        assert disk.entered.wait(SECONDS)
        with (
            Subscriber(publisher.address, {"other": weights(0)}, name="w").start() as worker,
            context.socket(zmq.DEALER) as later,
        ):
            assert worker.wait_joined(SECONDS)
            later.linger = 0
            later.connect(publisher.address)
            ahead = Running(epoch + 1000, 1, "")
            hello = Hello(
                name="ahead",
                instance="a" * 32,
                models={"m": ahead},
                epoch=ahead.epoch,
                age_ms=10**7,
            )
            later.send(encode(hello))
            later.send(encode(Ping()))  # unknown, so it is answered: the hello was heard before
            assert later.poll(60_000)
            receipt = publisher.publish("other", weights(2), require=1, timeout=SECONDS)
            assert receipt.workers["w"].state == "applied"
            assert publisher.epoch == epoch, "it is not on disk yet"
            disk.open.set()

            def taken() -> bool:
                later.send(encode(hello))
                return publisher.epoch > epoch

            eventually(taken)
        assert publisher._folder is not None  # noqa: SLF001  # pyright: ignore
        assert publisher._folder.epoch >= publisher.epoch  # noqa: SLF001  # pyright: ignore


@pytest.mark.parametrize("damaged", [False, True])
def test_the_latest_is_to_be_had_while_an_old_one_is_read_and_if_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    with Publisher(state=tmp_path, history=1) as publisher:
        for value in (1, 2):
            publisher.publish("m", weights(value))
            eventually(partial(holds, publisher, value))
        pool = publisher._models["m"].pool  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        blocks = pool._blocks  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        eventually(lambda: not any(s is not None and s.state == "kept" for s in blocks.values()))
        entered, disk = threading.Event(), threading.Event()
        copy_to = Saved.copy_to

        def slowly(saved: Saved, memory: Any) -> None:
            memory[:100] = 99
            entered.set()
            assert disk.wait(SECONDS)
            if damaged:
                raise StateFolderError("it is damaged")
            copy_to(saved, memory)

        monkeypatch.setattr(Saved, "copy_to", slowly)
        with ThreadPoolExecutor() as threads:
            first = publisher.history("m")[-1].key
            back = threads.submit(publisher.rollback, "m", first, timeout=SECONDS)
            assert entered.wait(SECONDS)
            target = weights(0)
            with Subscriber(publisher.address, {"m": target}) as late:
                update = late.receive(timeout=SECONDS)
                assert update is not None
                assert (update.version, set(target["w"])) == (2, {2})
            disk.set()
            if not damaged:
                assert back.result(SECONDS).version == 3
                return
            with pytest.raises(StateFolderError, match="damaged"):
                back.result(SECONDS)
        target = weights(0)
        with Subscriber(publisher.address, {"m": target}) as late:
            update = late.receive(timeout=SECONDS)
            assert update is not None
            assert update.version == 2
