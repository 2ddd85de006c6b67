"""Servers of several processes, as the guide has them: each process that answers has a worker.

gunicorn and Celery are no dependencies of the tests. Of what they do, a test does here what matters
to a worker: the parent imports the application, forks, and calls what the guide says in each child.
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from weightbus import ClosedError, Publisher
from weightbus.tests.client.test_bus import SECONDS
from weightbus.tests.client.uvicorn_server import uvicorn_server
from weightbus.tests.docs.test_docs import GUIDES, blocks

BLOCKS = blocks(GUIDES / "servers.md", "python")
WEIGHTS = next(block for block in BLOCKS if "async def answer(" in block)
APPLICATION = next(block for block in BLOCKS if "async def lifespan(" in block)
PROCESSES = next(block for block in BLOCKS if "def begin(" in block)
ASKED = 40  # times, at most, until two processes have answered


def line(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"slope": np.full(3, value, np.float32), "offset": np.array(0, np.float32)}


def test_each_process_of_uvicorn_answers_with_what_was_published(tmp_path: Path) -> None:
    if not os.environ.get("CI"):
        pytest.importorskip("uvicorn")
    (tmp_path / "served.py").write_text(WEIGHTS + APPLICATION)
    with Publisher() as publisher, served_by_two(publisher.address, tmp_path) as url:
        publisher.wait_for_workers(2, SECONDS)
        for version in (1, 2):
            receipt = publisher.publish("line", line(version), timeout=SECONDS)
            assert len(receipt.in_state("applied")) == 2
        processes = set[int]()
        for _ in range(ASKED):
            with urlopen(f"{url}/predict?x=2", timeout=SECONDS) as response:  # noqa: S310
                told = json.load(response)
            assert (told["y"], told["version"]) == (12, 2)
            processes.add(told["process"])
            if len(processes) == 2:
                break
        assert processes == {w.pid for w in publisher.workers().values()}


@contextmanager
def served_by_two(address: str, folder: Path) -> Generator[str]:
    """Run the guide's application in two processes of uvicorn; yield where it serves."""
    words = ["-m", "uvicorn", "served:app", "--workers", "2", "--port", "0"]
    with uvicorn_server(
        [sys.executable, *words], cwd=folder, env={**os.environ, "TRAINER": address}
    ) as where:
        yield where


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("server", ["gunicorn --preload", "Celery"])
def test_each_process_that_is_forked_makes_its_worker(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent imports the application; two children answer, each with a worker of its own."""
    application = imported(WEIGHTS + PROCESSES.split("\nwith weightbus.Publisher")[0])
    with Publisher() as publisher:
        monkeypatch.setenv("TRAINER", publisher.address)

        def process(answers: int, over: int) -> None:
            if server == "Celery":
                application.begin(signal=object(), sender=None)
            else:  # the arbiter, and its worker
                application.begin(SimpleNamespace(), SimpleNamespace())
            os.read(over, 1)
            answer = application.predict_in_a_process([1.0, 2.0, 4.0])
            os.write(answers, json.dumps([*answer, os.getpid()]).encode() + b"\n")
            application.end()

        with forked(process, 2) as children:
            publisher.wait_for_workers(2, SECONDS)
            for version in (1, 2):
                receipt = publisher.publish("line", line(version), timeout=SECONDS)
                assert len(receipt.in_state("applied")) == 2
            assert {w.pid for w in publisher.workers().values()} == set(children.pids)
            told = children.told()
        assert sorted(told) == sorted([14.0, 2, pid] for pid in children.pids)
        states = {w.state for w in publisher.workers().values()}
        assert states <= {"left"} or not states, "each has said goodbye"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_that_is_made_before_the_fork_is_refused_where_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What gunicorn --preload does with a Subscriber that the import makes."""
    application = imported(WEIGHTS + PROCESSES.split("\nwith weightbus.Publisher")[0])
    with Publisher() as publisher:
        monkeypatch.setenv("TRAINER", publisher.address)
        application.begin()
        publisher.publish("line", line(1), expect=1, timeout=SECONDS)

        def process(answers: int, _over: int) -> None:
            try:
                application.predict_in_a_process([1.0, 2.0, 4.0])
            except ClosedError as error:
                os.write(answers, json.dumps([str(error)]).encode() + b"\n")

        with forked(process, 1) as children:
            ((text,),) = children.told()
        assert f"made in process {os.getpid()}, this is process {children.pids[0]}" in text
        application.end()


def imported(code: str) -> ModuleType:
    module = ModuleType("served")
    exec(compile(code, "served.py", "exec"), vars(module))  # noqa: S102 - the guide's
    return module


class Children:
    """Forked processes, and what they write."""

    def __init__(self, process: Any, count: int) -> None:
        self._answers, answers = os.pipe()
        over, self._over = os.pipe()
        self.pids: list[int] = []
        for _ in range(count):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # there are threads
                pid = os.fork()
            if not pid:
                status = 1
                try:
                    os.close(self._over)
                    process(answers, over)
                    status = 0
                except BaseException as error:
                    os.write(2, f"{error!r}\n".encode())
                finally:
                    os._exit(status)
            self.pids.append(pid)
        os.close(answers)
        os.close(over)
        self._running = [*self.pids]

    def told(self) -> list[list[Any]]:
        """Let them go on, and return a line of each."""
        os.close(self._over)
        with os.fdopen(self._answers) as lines:
            told = [json.loads(text) for text in lines]
        while self._running:
            assert os.waitstatus_to_exitcode(os.waitpid(self._running.pop(), 0)[1]) == 0
        return told

    def end(self) -> None:
        """End those that still run."""
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@contextmanager
def forked(process: Any, count: int) -> Generator[Children]:
    children = Children(process, count)
    try:
        yield children
    finally:
        children.end()
