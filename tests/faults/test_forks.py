"""A forked child closes what it inherited, its parent notices nothing; nothing crosses an exec."""

import asyncio
import contextlib
import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from weightbus import ClosedError, Publisher, Settings, Subscriber
from weightbus.tests.cli.starting import python
from weightbus.tests.faults.forking import SECONDS, a_pair, descriptors, in_child, weights
from weightbus.tests.net.ports import lasting_address, lasting_ports

FORKS = pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="needs Linux")

Call = Callable[[], object]


@FORKS
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_child_closes_all_sockets_and_the_parent_goes_on(tmp_path: Path, scheme: str) -> None:
    """In a process of its own: what other libraries open here at a fork is not ours to close."""
    address = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/bus"
    done = python("-m", "weightbus.tests.faults.forking", address, timeout=2 * SECONDS)
    assert done.stderr == ""


@FORKS
def test_a_child_keeps_no_page_and_nobody_who_looks_at_it() -> None:
    where = f"127.0.0.1:{lasting_ports(1)[0]}"
    with Publisher(dashboard=where) as publisher:
        browser = http.client.HTTPConnection(where, timeout=SECONDS)
        browser.request("GET", "/events")
        stream = browser.getresponse()
        with a_child_that_lives():
            publisher.publish("m", weights(1), settings=Settings(wait="none"))
            while b'"version":1' not in stream.readline():  # the parent's goes on
                pass
            publisher.close()
            with contextlib.suppress(http.client.IncompleteRead):
                stream.read()
            Publisher(dashboard=where).close()
        browser.close()


@contextlib.contextmanager
def a_child_that_lives() -> Generator[None]:
    """Have a forked child, with whatever it keeps of what it inherited."""
    ready, other = os.pipe()
    over, told = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, of course
        child = os.fork()
    if not child:
        os.close(told)
        os.write(other, b".")
        os.read(over, 1)  # or the test has ended
        os._exit(0)
    try:
        assert os.read(ready, 1)
        yield
    finally:
        os.write(told, b".")
        os.waitpid(child, 0)
        for number in (ready, other, over, told):
            os.close(number)


def test_nothing_crosses_an_exec() -> None:
    before = descriptors()
    with a_pair("tcp://127.0.0.1:0"):
        made = {n: what for n, what in descriptors().items() if n not in before}
        crossing = {
            n: what
            for n, what in made.items()
            if not fcntl.fcntl(int(n), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        }
    assert made
    assert not crossing


TRAINER = """
import os, sys
import torch, weightbus
from torch.utils.data import DataLoader, Dataset

class Pids(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return os.getpid()

model, copy = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
publisher = weightbus.Publisher(sys.argv[2], state=sys.argv[1])
subscriber = weightbus.Subscriber(publisher.address, {"m": copy}).start()
publisher.wait_for_workers(1, timeout=30)
publisher.publish("m", model)
loader = DataLoader(Pids(), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
pids = set()
for batch in loader:
    pids.update(batch.tolist())
    publisher.publish("m", model)
    assert torch.equal(copy.weight, model.weight)
print(publisher.address, publisher.data_address, *pids, flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def a_trainer(state: Path) -> Generator[tuple["subprocess.Popen[str]", list[str], list[int]]]:
    """A trainer with a DataLoader of two processes; its addresses, and their pids."""
    process = subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-c", TRAINER, str(state), lasting_address()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    loaders: list[int] = []
    try:
        assert process.stdout is not None
        control, data, *pids = process.stdout.readline().split()
        loaders = [int(pid) for pid in pids]
        yield process, [control, data], loaders
    finally:
        process.kill()
        for pid in loaders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@FORKS
def test_a_killed_trainer_can_start_again_while_its_data_loaders_live(tmp_path: Path) -> None:
    with a_trainer(tmp_path) as (process, (control, data), loaders):
        assert len(loaders) == 2
        process.kill()
        process.wait(SECONDS)
        for pid in loaders:
            os.kill(pid, 0)  # it lives: its loop looks for its parent every 5 s
        with Publisher(control, settings=Settings(data=data), state=tmp_path):
            pass


def test_a_child_that_runs_to_its_end_ends_in_order() -> None:
    code = (
        "import os, sys, warnings, weightbus\n"
        "warnings.simplefilter('ignore')\n"
        "publisher = weightbus.Publisher()\n"
        "subscriber = weightbus.Subscriber(publisher.address, {'m': {}})\n"
        "subscriber.wait_joined(30)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    with weightbus.Publisher() as own: print(own)\n"
        "    sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "subscriber.close()\n"
        "publisher.close()\n"
    )
    assert python("-c", code, timeout=SECONDS).stderr == ""


# Each call of what a child has inherited.


def test_every_call_of_a_subscriber_is_refused_in_a_child() -> None:
    """At once, whatever another thread had locked as the process forked."""
    with a_pair("tcp://127.0.0.1:0") as (publisher, worker, _):
        calls: dict[str, Call] = {
            "receive": lambda: worker.receive(SECONDS),
            "receive_awaitable": lambda: asyncio.run(worker.receive_awaitable(SECONDS)),
            "stage": lambda: worker.stage(SECONDS, version=1),
            "flush": lambda: worker.flush(SECONDS),
            "start": worker.start,
            "reading": worker.reading,
            "lock": lambda: worker.lock,
            "wait_for_version": lambda: worker.wait_for_version("m", 9, timeout=SECONDS),
            "wait_for_version_awaitable": lambda: asyncio.run(
                worker.wait_for_version_awaitable("m", 9, timeout=SECONDS)
            ),
            "__aiter__": lambda: asyncio.run(first_of(worker)),
            "update": lambda: worker.update("m"),
            "version": lambda: worker.version("m"),
            "wait_joined": lambda: worker.wait_joined(SECONDS),
            "error": lambda: _raised(worker.error),
        }
        # An address is as right in a child; there, no publisher is known to be lost.
        others = {"close", "close_awaitable", "address", "cut_off_s"}
        assert calls.keys() == public(Subscriber) - others | {"__aiter__"}
        with locked_elsewhere(vars(worker)["_ready_queue"].lock):
            told = told_in_child(calls, [worker.close])
        for name, (text, seconds) in told.items():
            assert f"made in process {os.getpid()}, this is process" in text, (name, text)
            assert "Make a Subscriber here, after the fork: in gunicorn's post_fork" in text, name
            assert seconds < 1.0, name
        publisher.publish("m", weights(2), timeout=SECONDS)
        assert worker.version("m") == 2


def test_every_call_of_a_publisher_is_refused_in_a_child(tmp_path: Path) -> None:
    with (
        Publisher(state=tmp_path) as publisher,
        Subscriber(publisher.address, {"m": weights(0)}, name="w"),  # which applies nothing
    ):
        publisher.wait_for_workers(1, SECONDS)
        under_way = publisher.publish_async("m", weights(1), timeout=SECONDS)
        end = publisher.on_worker(lambda _: None)
        calls: dict[str, Call] = {
            "prepare": lambda: publisher.prepare("m", weights(1)),
            "publish": lambda: publisher.publish("m", weights(1)),
            "publish_many": lambda: publisher.publish_many({"m": weights(1)}),
            "publish_async": lambda: publisher.publish_async("m", weights(1)),
            "publish_awaitable": lambda: asyncio.run(publisher.publish_awaitable("m", weights(1))),
            "wait_for_commit": lambda: publisher.wait_for_commit(under_way, SECONDS),
            "give_up": lambda: publisher.give_up(under_way, "no time"),
            "described": lambda: publisher.described({}),
            "rollback": lambda: publisher.rollback("m", (1, 1)),
            "history": lambda: publisher.history("m"),
            "workers": publisher.workers,
            "wait_for_workers": lambda: publisher.wait_for_workers(2, SECONDS),
            "wait_for_workers_awaitable": lambda: asyncio.run(
                publisher.wait_for_workers_awaitable(2, SECONDS)
            ),
            "on_worker": lambda: publisher.on_worker(lambda _: None),
        }
        assert calls.keys() == public(Publisher) - {"close", "close_awaitable", "epoch", "models"}
        calls["result"] = lambda: under_way.result(SECONDS)
        with locked_elsewhere(vars(vars(publisher)["_loop"])["_lock"]):
            told = told_in_child(calls, [end, publisher.close])
        text, seconds = told.pop("result")
        assert f"process {os.getpid()} publishes this version, and this forked process" in text
        assert seconds < 1.0
        for name, (text, seconds) in told.items():
            assert f"made in process {os.getpid()}, this is process" in text, (name, text)
            assert "Make a Publisher here, after the fork" in text, name
            assert seconds < 1.0, name
        assert "w" in publisher.workers()
        under_way.cancel()


def test_a_version_that_is_staged_is_not_applied_in_a_child() -> None:
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": weights(0)}, name="w") as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        under_way = publisher.publish_async("m", weights(1), timeout=SECONDS)
        with worker.stage(SECONDS, version=1) as staged:
            with locked_elsewhere(vars(worker)["_ready_queue"].lock):
                told = told_in_child({"apply": lambda: staged.apply(SECONDS)})
            text, seconds = told["apply"]
            assert f"made in process {os.getpid()}" in text
            assert seconds < 1.0
            assert staged.apply(SECONDS)
        assert under_way.result(SECONDS).in_state("applied") == ["w"]


async def first_of(worker: Subscriber) -> object:
    return await anext(aiter(worker))


def _raised(error: Exception | None) -> None:
    if error is not None:
        raise error


def public(of: type) -> set[str]:
    """Return the names of a class that are of use to users of an object."""
    return {n for n, v in vars(of).items() if n[0] != "_" and (callable(v) or hasattr(v, "fget"))}


@contextlib.contextmanager
def locked_elsewhere(lock: AbstractContextManager[object]) -> Generator[None]:
    """Have another thread hold a lock, which no thread of a forked child will let go."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(2 * SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(SECONDS)
        yield
    finally:
        over.set()
        thread.join(SECONDS)


def told_in_child(
    calls: Mapping[str, Call], silent: Sequence[Call] = ()
) -> dict[str, tuple[str, float]]:
    """Return what each call raises as ClosedError in a forked child, and after how long."""
    reading, writing = os.pipe()

    def call_all() -> None:
        told: dict[str, tuple[str, float]] = {}
        for name, call in calls.items():
            begun = time.monotonic()
            try:
                call()
            except ClosedError as error:
                told[name] = str(error), time.monotonic() - begun
        for call in silent:
            call()
        os.write(writing, json.dumps(told).encode())

    try:
        assert in_child(call_all) == 0
        os.set_blocking(reading, False)
        told = json.loads(os.read(reading, 2**16))
    finally:
        os.close(reading)
        os.close(writing)
    assert told.keys() == calls.keys()
    return {name: (text, seconds) for name, (text, seconds) in told.items()}
