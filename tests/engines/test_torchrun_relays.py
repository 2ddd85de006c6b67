"""Relays in scripts that the real torchrun starts, with two nodes on this host."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from torch._C._distributed_c10d import TCPStore

from weightbus import Publisher, Settings

SECONDS = 180.0  # six processes import torch, four of them twice
SCRIPT = Path(__file__).with_name("torchrun_script.py")
SIZE = 3 * 2**18  # numbers, as in the script
NETWORK = Settings(ping=0.1, lost_after=1.0, shared_memory=False)  # as from another host

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


class Torchrun:
    """Agents of one job, with two ranks each, which meet in a store of this process."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, nodes: int, *words: object, restarts: int = 0) -> "list[subprocess.Popen[str]]":
        meet = f"--rdzv-endpoint=127.0.0.1:{self._store.port}"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
        command += ["--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        command += ["--rdzv-backend=c10d", "--rdzv-conf=is_host=false", "--rdzv-id=job", meet]
        command += [str(SCRIPT), *map(str, words)]
        agents = list[subprocess.Popen[str]]()
        for number in range(nodes):
            log = self._stack.enter_context((self._folder / f"agent-{number}.log").open("w"))
            agent = subprocess.Popen(command, stdout=log, stderr=log, text=True)  # noqa: S603
            self._stack.callback(end, agent)
            agents.append(agent)
        return agents

    def finished(self, agents: "list[subprocess.Popen[str]]") -> list[dict[str, Any]]:
        """Return what each rank saw, once all have ended well."""
        codes = [agent.wait(SECONDS) for agent in agents]
        logs = [path.read_text() for path in sorted(self._folder.glob("agent-*.log"))]
        assert codes == [0] * len(agents), "\n".join(logs)
        files = sorted(self._folder.glob("rank-*.json"))
        return [json.loads(file.read_text()) for file in files]


def end(agent: "subprocess.Popen[str]") -> None:
    """End an agent, which ends its ranks."""
    agent.terminate()
    try:
        agent.wait(40)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


@pytest.fixture
def job(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield Torchrun(stack, tmp_path)


def test_workers_apply_through_the_relay_of_their_node(job: Torchrun, tmp_path: Path) -> None:
    with Publisher(settings=NETWORK) as publisher:
        agents = job.start(2, "workers", tmp_path, publisher.address)
        publisher.wait_for_workers(4, SECONDS)
        for value in (1, 2):
            weights = {"w": np.full(SIZE, value, np.float32)}
            last = {"last": ""} if value == 2 else {}
            receipt = publisher.publish("m", weights, expect=4, timeout=SECONDS, metadata=last)
            rows = {row.name: (row.state, row.through) for row in receipt.workers.values()}
            assert rows == {
                f"rank-{rank}": ("applied", (f"node-{rank // 2}",)) for rank in range(4)
            }
        (tmp_path / "published").touch()
        saw = job.finished(agents)
    received = [rank["received"] for rank in saw]
    assert received == [2 * 4 * SIZE, None] * 2, "each node receives each version once"
    assert [rank["values"] for rank in saw] == [[1, 2]] * 4
    assert {rank["sent"] for rank in saw} == {0}, "workers read the relay's memory"
    names = [["node-0", "node-1", "publisher"], ["node-1", "node-0", "publisher"]]
    assert [rank["names"] for rank in saw] == [names[0], names[0], names[1], names[1]]


def test_a_restarted_group_meets_again(job: Torchrun, tmp_path: Path) -> None:
    """A rank dies in the middle of a publish, so that torchrun starts all of them again."""
    saw = job.finished(job.start(2, "trainer", tmp_path, restarts=1))
    assert (tmp_path / "starts-of-3").read_text() == ".."
    home, other = [rank["names"] for rank in saw[1:3]]
    (publishes,) = [rank for rank in saw if "rows" in rank]
    through = {name: row[1:] for name, row in publishes["rows"].items()}
    assert {row[0] for row in publishes["rows"].values()} == {"applied"}
    assert through == {"rank-1": [], "rank-2": ["node-1"], "rank-3": ["node-1"]}
    assert (home, other) == (["publisher", "node-1"], ["node-1", "publisher"])
    assert [rank["values"] for rank in saw[1:]] == [[7]] * 3


def test_a_rank_that_calls_alone_learns_which_ranks_do_not(job: Torchrun, tmp_path: Path) -> None:
    first, second = job.finished(job.start(1, "alone", tmp_path))
    (text,) = first["texts"]
    assert text.startswith("DeadlineError: rank 1 did not call weightbus.torchrun.relays() in the")
    (text,) = second["texts"]
    assert text.startswith("DeadlineError: rank 0 did not call weightbus.torchrun.relays() in the")
    assert first["names"] == second["names"] == ["node-0", "publisher"]
