"""TorchRL's collectors of nodes take the schemes as their own."""

import contextlib
import multiprocessing
import re
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

pytest.importorskip("torchrl")

from weightbus.tests.net.ports import lasting_ports
from weightbus.tests.training import torchrl_story as story

SECONDS = 180.0  # what one part of a story may take on a busy machine

pytestmark = pytest.mark.timeout(600)  # several processes start, each of which imports TorchRL


@contextlib.contextmanager
def told(tell: Any, *args: Any) -> Generator[Connection]:
    """Have a story told by another process, which ends with all that it started."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=tell, args=(*args, theirs))
    process.start()
    theirs.close()
    teller = psutil.Process(process.pid)
    try:
        yield ours
    finally:
        running = [*teller.children(recursive=True), teller] if process.is_alive() else []
        for one in running:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was ending already
                one.kill()
        process.join(SECONDS)
        ours.close()


def next_of(pipe: Connection) -> dict[str, Any]:
    assert pipe.poll(SECONDS), "nothing more is told"
    return pipe.recv()


STORIES = [
    pytest.param(story.nodes, story.zmq_scheme, "kill", id="distributed-zmq"),
    pytest.param(story.rpc, story.rpc_scheme, "kill", id="rpc-rpc"),
    pytest.param(story.rpc, story.zmq_scheme, "shut down", id="rpc-zmq"),
]


@pytest.mark.parametrize(("make", "make_scheme", "end"), STORIES)
def test_a_collector_of_nodes_runs_with_a_scheme(make: Any, make_scheme: Any, end: str) -> None:
    with told(story.tell, make, make_scheme, lasting_ports(2)) as pipe:
        seen = next_of(pipe)
        wrong = seen.pop("wrong")
        assert seen == {
            "accepted": True,
            "at the start": {0: {1.0}, 1: {1.0}},
            "trained in place": {0: {1.0}, 1: {1.0}},
            "sent": {0: {2.0}, 1: {2.0}},
            "applied": ["0", "1"],
            "sent to 1": {0: {2.0}, 1: {3.0}},
            "versions": {0: 2, 1: 3},
            "the trainer has": 2.0,
            "sent what does not fit": {0: {2.0}, 1: {3.0}},
        }
        assert re.search(r"(?s)worker 0 failed.*module\.wrong.*worker 1 failed", wrong), wrong
        pipe.send(end)
        ended = next_of(pipe)
        if end == "kill":
            assert "worker 1 lost" in ended["killed"]
            assert ended["applied"] == ["0"]
        else:
            assert ended == {"initialized": False, "threads": []}
