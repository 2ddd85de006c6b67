"""Ranks that fail, in every phase of a transfer and in every way.

The trainer learns which rank it was and why, the server goes on generating, and until something is
loaded every rank that lives has its old weights, bit for bit. The next transfer mends the rest.
"""

import re
import time
from collections.abc import Iterator

import pytest

import weightbus
from weightbus.python_client.serving.server import VllmServers
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.serving.ranks import RANKS, How, Kind, Phase, RankProcess, plain, weights
from weightbus.tests.serving.standin import Executor, Server
from weightbus.types import Receipt
from weightbus.vllm import ServerError

SECONDS = 20.0  # for what does not fail by its deadline
SHORT = 1.0  # for what does
TRIES = 5  # transfers, of which all but the last may get answers to what was given up before
SLACK = 8.0  # that a busy machine may take for all else


class Deployment:
    """A server of two ranks, and for each test a trainer that nobody knows yet."""

    def __init__(self, kind: Kind) -> None:
        self._kind, self.weights = kind, kind.weights
        self.server = Server()
        self.servers = VllmServers(self.server.url)
        self.ranks: list[RankProcess] = []
        self._starts = 0
        self.publisher = weightbus.Publisher()

    def begin(self, *, shared: bool = True) -> "Deployment":
        """Have a trainer, and ranks that all live, of which no answer is left."""
        self.publisher.close()
        self.publisher = weightbus.Publisher(settings=weightbus.Settings(shared_memory=shared))
        self.settle()
        live = all(rank.process.is_alive() for rank in self.ranks)
        if not self.ranks or not live or self.server.executor.behind:
            self.restart()
        self.server.calls.clear()
        return self

    def settle(self) -> None:
        """Wait until the calls are over that a trainer has given up."""
        server = self.server
        wait_for(lambda: server.ended == server.begun, "calls that were given up", SECONDS)

    def restart(self) -> None:
        """Start the server again, as far as a trainer sees it."""
        for rank in self.ranks:
            rank.close()
        self._starts += 1
        self.ranks = [RankProcess(self._kind.make, n, self._starts) for n in range(RANKS)]
        assert not any(rank.said() for rank in self.ranks)
        self.server.executor = Executor(self.ranks)
        self.server.paused = False

    def transfers(self, seconds: float = SECONDS, *, join: bool = True) -> Transfers:
        made = Transfers(
            self.publisher,
            self.servers,
            model="policy",
            deployment="v",
            timeout=seconds,
            pause_timeout=seconds,
        )
        if join:
            made.join({n: ("F32", tuple(t.shape)) for n, t in self.weights(0.0).items()})
        return made

    def mend(self, value: float) -> Receipt:
        """Send weights that all ranks load; again, where a call gets what was left of another."""
        for _ in range(TRIES):
            try:
                return self.transfers().send(self.weights(value))
            except weightbus.WeightBusError:
                if not self.server.executor.behind:
                    raise
        raise AssertionError(f"not mended in {TRIES} transfers")

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.servers.close()
        self.server.close()
        self.publisher.close()

    @property
    def sums(self) -> list[str]:
        return [rank.ask("sum") for rank in self.ranks if rank.process.is_alive()]

    def expected(self, value: float) -> list[str]:
        return [rank.ask("expected", value=value) for rank in self.ranks]


@pytest.fixture(name="kind", scope="module")
def _kind() -> Kind:
    return Kind(plain, weights)


@pytest.fixture(name="deployed", scope="module")
def _deployed(kind: Kind) -> Iterator[Deployment]:
    made = Deployment(kind)
    yield made
    made.close()


@pytest.fixture(name="deployment")
def _deployment(deployed: Deployment) -> Deployment:
    return deployed.begin()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "network"])
def test_all_ranks_load_what_is_sent(deployed: Deployment, shared: bool) -> None:
    deployment = deployed.begin(shared=shared)
    transfers = deployment.transfers()
    for value in (1.0, 2.0):
        receipt = transfers.send(deployment.weights(value), {"step": "7"})
        assert receipt.in_state("applied") == ["v-dp0-rank0", "v-dp0-rank1"]
        assert receipt.metadata == {"step": "7"}
        assert deployment.sums == deployment.expected(value)
        assert deployment.server.version == f"{receipt.epoch}.{receipt.version}"
    assert deployment.server.calls[1:] == 2 * [
        *("start_weight_update", "update_weights", "pause keep", "update_weights"),
        *("finish_weight_update", "resume"),
    ]


@pytest.mark.parametrize("how", ["raise", "die", "stop", "shape"])
@pytest.mark.parametrize("number", range(RANKS))
@pytest.mark.parametrize("phase", ["stage", "start", "update", "load"])
def test_a_rank_that_fails(deployment: Deployment, phase: Phase, number: int, how: How) -> None:
    seconds = SHORT if how == "stop" else SECONDS
    rank, server = deployment.ranks[number], deployment.server
    if phase == "stage":  # which is seen once of each layout
        if how == "shape":
            rank.ask("reshape", more=1)
        else:
            rank.ask("fail_at", phase=phase, how=how)
        transfers = deployment.transfers(seconds)
    else:
        deployment.transfers().send(deployment.weights(1.0))
        transfers = deployment.transfers(seconds, join=False)
        rank.ask("fail_at", phase=phase, how=how)
    before, version = deployment.sums, server.version
    since = time.monotonic()
    with pytest.raises(weightbus.WeightBusError) as failed:
        transfers.send(deployment.weights(2.0))
    assert time.monotonic() - since < (2 * seconds if how == "stop" else SECONDS) + SLACK

    said = str(failed.value)
    assert isinstance(failed.value, weightbus.PublishError), said
    assert failed.value.receipt.workers[f"v-dp0-rank{number}"].state != "applied"
    assert f"v-dp0-rank{number}" in said
    why = {"raise": "told to fail", "die": "process", "stop": "v-dp0-rank", "shape": "shape|Size"}
    assert re.search(why[how], said)
    loads = phase == "load" or (how == "shape" and phase != "stage")
    broken = loads and how in ("raise", "shape")
    tried = failed.value.receipt
    assert server.version == (f"{tried.epoch}.{tried.version} in part" if broken else version)
    assert not server.paused
    if phase == "stage":
        assert "pause keep" not in server.calls
    if broken:
        another = deployment.ranks[1 - number]
        assert another.ask("sum") == another.ask("expected", value=2.0)
    if how == "stop":
        rank.go_on()
        deployment.settle()
        if loads:
            assert deployment.sums == deployment.expected(2.0), "it ends the load that it was at"
    if how == "die":
        rank.process.join(SECONDS)
    if not loads:
        living = [b for n, b in enumerate(before) if how != "die" or n != number]
        assert deployment.sums == living
    if how == "die":
        return
    if how == "shape":
        rank.ask("reshape", more=0)
    receipt = deployment.mend(3.0)
    assert len(receipt.in_state("applied")) == RANKS
    assert deployment.sums == deployment.expected(3.0)
    assert not server.paused
    assert server.version == f"{receipt.epoch}.{receipt.version}"


def test_the_ranks_of_a_server_that_was_started_again_join_again(deployment: Deployment) -> None:
    transfers = deployment.transfers()
    transfers.send(deployment.weights(1.0))
    deployment.restart()
    transfers.send(deployment.weights(2.0))
    assert deployment.sums == deployment.expected(2.0)


@pytest.mark.parametrize("phase", ["update", "load"])
def test_a_server_that_dies_in_a_transfer_is_reached_once_it_is_back(
    deployment: Deployment, phase: Phase
) -> None:
    transfers = deployment.transfers()
    transfers.send(deployment.weights(1.0))
    deployment.ranks[0].ask("fail_at", phase=phase, how="die")
    with pytest.raises(weightbus.PublishError, match="v-dp0-rank0"):
        transfers.send(deployment.weights(2.0))
    with pytest.raises(ServerError, match=deployment.server.url):
        transfers.send(deployment.weights(2.0))
    deployment.restart()
    receipt = transfers.send(deployment.weights(3.0))
    assert deployment.sums == deployment.expected(3.0)
    assert deployment.server.version == f"{receipt.epoch}.{receipt.version}"


def test_a_server_that_is_gone_is_named(kind: Kind) -> None:
    deployment = Deployment(kind).begin()
    transfers = deployment.transfers(SHORT)
    transfers.send(deployment.weights(1.0))
    for rank in deployment.ranks:
        rank.close()
    deployment.server.close()
    with pytest.raises(weightbus.WeightBusError, match=deployment.server.url):
        transfers.send(deployment.weights(2.0))
    deployment.servers.close()
    deployment.publisher.close()
