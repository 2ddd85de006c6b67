"""Shared memory: proven to be of this host, never torn, gone with its last user."""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

import weightbus
from weightbus import ApplyError, PublishError, Settings
from weightbus.bus.limits import SNAPSHOTS_MAX
from weightbus.bus.memory.segment import HEADER_BYTES, MappedSegment, MappedSegments, Segment
from weightbus.bus.memory.snapshots import Pool
from weightbus.bus.messages import Shared
from weightbus.bus.staged import StaleError
from weightbus.tests.cli.starting import python
from weightbus.tests.compose.waiting import stop

NBYTES = 1 << 16


def filled(value: int, version: int = 1) -> Segment:
    segment = Segment(NBYTES)
    assert segment.claim()
    segment.data[:] = value
    segment.release("policy", 7, version)
    return segment


def test_a_view_shows_what_was_filled_in() -> None:
    segment = filled(3)
    view = MappedSegment(segment.shared, NBYTES)
    with view.reading("policy", 7, 1):
        assert (view.data == 3).all()
    with pytest.raises(ValueError, match="read-only"):
        view.data[0] = 1


def pages_mapped(view: MappedSegment) -> int:
    """Return how many bytes of a view are in this process's page tables."""
    begin = view.data.__array_interface__["data"][0] - HEADER_BYTES
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{begin:x}-"):
            return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("Rss:"))
    raise AssertionError("it is not mapped at all")


def test_a_view_can_be_mapped_ahead() -> None:
    nbytes = 64 * NBYTES  # more than the kernel maps around a page that is touched
    segment = Segment(nbytes)
    view = MappedSegment(segment.shared, nbytes)
    assert pages_mapped(view) < nbytes
    for _ in view.touching():
        assert view.touched
    assert pages_mapped(view) >= nbytes


@pytest.mark.parametrize("stamp", [("policy", 7, 2), ("policy", 8, 1), ("other", 7, 1)])
def test_another_version_is_stale(stamp: tuple[str, int, int]) -> None:
    segment = filled(3)
    with pytest.raises(StaleError), MappedSegment(segment.shared, NBYTES).reading(*stamp):
        pytest.fail("it was given out")


def test_a_view_that_is_held_twice_is_held_until_both_let_go() -> None:
    segment = filled(3)
    view = MappedSegment(segment.shared, NBYTES)
    with view.reading("policy", 7, 1):
        with view.reading("policy", 7, 1):
            pass
        with pytest.raises(StaleError), view.reading("policy", 7, 2):
            pytest.fail("it was given out")
        assert not segment.claim()
    assert segment.claim()


def test_a_segment_that_is_being_filled_is_stale_and_one_that_is_read_is_not_overwritten() -> None:
    segment = filled(3)
    view = MappedSegment(segment.shared, NBYTES)
    with view.reading("policy", 7, 1):
        assert not segment.claim()
        assert (view.data == 3).all()
    assert segment.claim()
    with pytest.raises(StaleError), view.reading("policy", 7, 1):
        pytest.fail("it was given out")
    segment.release("policy", 7, 2)
    with view.reading("policy", 7, 2):
        pass


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/proc/self/fd/0", "/proc/1/fd/../../etc/passwd", "/proc/99999999/fd/3", ""],
)
def test_other_paths_are_not_opened(path: str) -> None:
    assert MappedSegments().open(Shared(path, "0" * 32), NBYTES) is None


def test_another_token_or_size_is_not_ours() -> None:
    segment = filled(3)
    shared = segment.shared
    assert MappedSegments().open(Shared(shared.path, "0" * 32), NBYTES) is None
    assert MappedSegments().open(shared, NBYTES + 1) is None
    assert MappedSegments().open(shared, NBYTES) is not None


def test_a_pipe_is_not_opened_and_does_not_block() -> None:
    reading, writing = os.pipe()
    try:
        path = f"/proc/{os.getpid()}/fd/{reading}"
        assert MappedSegments().open(Shared(path, "0" * 32), NBYTES) is None
    finally:
        os.close(reading)
        os.close(writing)


def test_only_this_user_may_read_and_nobody_may_resize() -> None:
    segment = filled(3)
    path = segment.shared.path
    assert os.stat(path).st_mode & 0o777 == 0o600
    with open(path, "r+b") as file, pytest.raises(PermissionError):
        file.truncate(HEADER_BYTES)


@contextlib.contextmanager
def reader(shared: Shared) -> Generator["subprocess.Popen[str]"]:
    """A process that holds the segment and waits."""
    code = (
        "import sys\n"
        "from weightbus.bus.messages import Shared\n"
        "from weightbus.bus.memory.segment import MappedSegment\n"
        f"view = MappedSegment(Shared({shared.path!r}, {shared.token!r}), {NBYTES})\n"
        "with view.reading('policy', 7, 1):\n"
        "    print('holding', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    print(set(view.data.tolist()), flush=True)\n"
    )
    process = subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "holding\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_reader_that_is_killed_lets_go() -> None:
    segment = filled(3)
    with reader(segment.shared) as process:
        assert not segment.claim()
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert segment.claim()


def test_a_stopped_reader_keeps_its_version_while_others_get_newer_ones() -> None:
    pool = Pool("policy", share=True)
    first = pool.take(NBYTES, replaces_latest=True)
    where = first.shared
    assert where is not None
    first.data[:] = 3
    first.stamp("policy", 7, 1)
    with reader(where) as process:
        stop(process.pid)
        snapshot = first
        for number in range(2, 6):
            snapshot.make_reclaimable()
            snapshot = pool.take(NBYTES, replaces_latest=True)
            assert snapshot.shared != where
            snapshot.data[:] = number
            snapshot.stamp("policy", 7, number)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate("go\n", timeout=30)
        assert out.strip() == "{3}"
    assert len(pool) == 2
    snapshot.make_reclaimable()
    assert pool.take(NBYTES, replaces_latest=True).shared == where, "it serves again"


def test_one_copy_and_nothing_on_the_network() -> None:
    source = {"w": np.arange(1 << 20, dtype=np.float32)}
    target = {"w": np.zeros(1 << 20, np.float32)}
    with (
        weightbus.Publisher() as publisher,
        weightbus.Subscriber(publisher.address, {"policy": target}, name="w0").start(),
    ):
        publisher.wait_for_workers(1, timeout=30)
        for verify in (False, True):
            receipt = publisher.publish("policy", source, settings=Settings(verify=verify))
            assert receipt.workers["w0"].state == "applied"
            assert bool(receipt.digest) == verify  # nothing was hashed unless asked for
            assert np.array_equal(target["w"], source["w"])
            source["w"] += 1.0


@pytest.mark.parametrize("here", [True, False])
def test_either_side_can_decline(here: bool) -> None:
    target = {"w": np.zeros(1 << 18, np.float32)}
    with (
        weightbus.Publisher(settings=Settings(shared_memory=here)) as publisher,
        weightbus.Subscriber(
            publisher.address,
            {"policy": target},
            name="w0",
            settings=Settings(shared_memory=not here),
        ).start(),
    ):
        publisher.wait_for_workers(1, timeout=30)
        receipt = publisher.publish("policy", {"w": np.ones(1 << 18, np.float32)})
        assert receipt.digest
        assert (target["w"] == 1).all()


def test_no_shared_memory_means_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_name: str, _flags: int) -> int:
        raise OSError("none left")

    monkeypatch.setattr(os, "memfd_create", nothing)
    target = {"w": np.zeros(1 << 18, np.float32)}
    with (
        weightbus.Publisher() as publisher,
        weightbus.Subscriber(publisher.address, {"policy": target}, name="w0").start(),
    ):
        publisher.wait_for_workers(1, timeout=30)
        publisher.publish("policy", {"w": np.ones(1 << 18, np.float32)})
        assert (target["w"] == 1).all()


def segments_open() -> int:
    """Return how many segments this process has, or maps: each counts, twice while it is ours."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found += "memfd:weightbus" in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("target", ["file", "memory"])
def test_memory_of_another_size_goes_at_once_on_both_sides(tmp_path: Path, target: str) -> None:
    """Also at the worker, which maps what the publisher has given up."""
    into = tmp_path / "file" if target == "file" else {"w": np.zeros(3)}
    before = segments_open()  # those of publishers that other tests have kept
    with (
        weightbus.Publisher() as publisher,
        weightbus.Subscriber(publisher.address, {"policy": into}, strict=False) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, timeout=30)
        counts: list[int] = []
        for size in range(30):
            publisher.publish("policy", {"w": np.ones(3), "more": np.ones(9_000 + size)})
            counts.append(segments_open() - before)
    # The probe and one block, each twice, and as often for the worker.
    assert max(counts) <= 2 + 2 * SNAPSHOTS_MAX


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("started", [False, True])
def test_a_version_that_fails_leaves_its_memory_though_the_error_is_kept(started: bool) -> None:
    """Errors have tracebacks, and so all that was there where they were raised."""
    before = segments_open()

    def turn_down(_offer: weightbus.types.Offer) -> None:
        raise OSError(errno.ENOSPC, "no room")

    into = {"w": np.zeros(3)}
    with (
        weightbus.Publisher() as publisher,
        weightbus.Subscriber(
            publisher.address,
            {"policy": into},
            strict=False,
            settings=Settings(before_apply=turn_down),
        ) as worker,
    ):
        if started:
            worker.start()
        publisher.wait_for_workers(1, timeout=30)
        counts: list[int] = []
        for size in range(12):
            content = {"w": np.ones(3), "more": np.ones(9_000 + size)}
            future = publisher.publish_async("policy", content, timeout=30)
            while not started and not future.done():
                with contextlib.suppress(ApplyError):
                    worker.receive(0.05)
            with pytest.raises(PublishError):
                future.result(30)
            counts.append(segments_open() - before)
    assert max(counts[4:]) <= 2 + 2 * SNAPSHOTS_MAX


@pytest.mark.parametrize("call", ["fchmod", "posix_fallocate"])
def test_a_segment_that_cannot_be_made_closes_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def nothing(*_: object) -> None:
        raise OSError("none left")

    closed: list[int] = []
    close = os.close

    def noted(fd: int) -> None:
        closed.append(fd)
        close(fd)

    monkeypatch.setattr(os, call, nothing)
    monkeypatch.setattr(os, "close", noted)
    with pytest.raises(OSError, match="none left"):
        Segment(NBYTES)
    assert len(closed) == 1


def test_many_models_leave_descriptors_for_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    models = [f"m{i}" for i in range(64)]
    with weightbus.Publisher() as publisher:
        half = len(os.listdir("/proc/self/fd")) + 40  # segments of fewer than all models
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * half, before[1]))
        try:
            for model in models:
                publisher.publish(model, {"w": np.ones(3)}, settings=Settings(wait="none"))
            targets = {model: {"w": np.zeros(3)} for model in models}
            with weightbus.Subscriber(publisher.address, targets).start() as worker:
                for model in models:
                    assert worker.wait_for_version(model, timeout=30), model
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_to_do_about_too_few_descriptors_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (6, 6))
    with pytest.raises(OSError, match="ulimit -n"):
        Segment(0)


AT_THE_END = """
import os
from weightbus.bus import spare
from weightbus.bus.memory import segment
from weightbus.python_client.files import places
os.modules = segment, spare, places  # they are emptied before os is
one = segment.Segment(64)
other = segment.MappedSegment(one.shared, 64)
os.kept = one, other, spare.Spare(), places.Place(os.dup(0), "", None)
"""


def test_what_is_left_at_the_interpreters_end_is_closed_without_a_word() -> None:
    done = python("-c", AT_THE_END)
    assert done.stderr == ""
