"""A forked child closes what it inherited, its parent notices nothing; nothing crosses an exec."""

import contextlib
import fcntl
import http.client
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Generator
from pathlib import Path

import pytest

from weightbus import Publisher, Settings
from weightbus.tests.cli.starting import python
from weightbus.tests.faults.forking import SECONDS, a_pair, descriptors, weights
from weightbus.tests.net.ports import lasting_address, lasting_ports

FORKS = pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="needs Linux")


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
