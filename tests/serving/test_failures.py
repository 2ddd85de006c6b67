"""Ranks that fail, in every phase of a transfer and in every way.

The trainer learns which rank it was and why, the server goes on generating, and until something is
loaded every rank that lives has its old weights, bit for bit. The next transfer mends the rest.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import weightbus
from weightbus.python_client.serving.server import VllmServers
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.serving.ranks import How, Phase, RankProcess, plain, summed, weights
from weightbus.tests.serving.standin import Server

RANKS = 2
SECONDS = 20.0  # for what does not fail by its deadline
SHORT = 1.0  # for what does
SLACK = 8.0  # that a busy machine may take for all else
SIGNATURES = {name: ("F32", array.shape) for name, array in weights(0.0).items()}


class Deployment:
    """A server of two ranks, and a trainer."""

    def __init__(self, make: Callable[[int], tuple[Any, Any]], *, shared: bool = True) -> None:
        self.ranks = [RankProcess(number, make) for number in range(RANKS)]
        assert not any(rank.said() for rank in self.ranks)
        self.server = Server(self.ranks)
        self.publisher = weightbus.Publisher(settings=weightbus.Settings(shared_memory=shared))
        self.servers = VllmServers(self.server.url)

    def transfers(self, seconds: float = SECONDS, *, join: bool = True) -> Transfers:
        made = Transfers(
            self.publisher,
            self.servers,
            model="policy",
            deployment="v",
            timeout=seconds,
            pause_timeout=seconds,
        )
        self.servers.within(SECONDS)
        if join:
            made.join(SIGNATURES)
        return made

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.servers.close()
        self.server.close()
        self.publisher.close()

    @property
    def sums(self) -> list[str]:
        return [rank.ask("sum") for rank in self.ranks if rank.process.is_alive()]


@pytest.fixture(name="make")
def _make() -> Callable[[int], tuple[Any, Any]]:
    return plain


@pytest.fixture(name="deployment")
def _deployment(make: Callable[[int], tuple[Any, Any]]) -> Iterator[Deployment]:
    made = Deployment(make)
    yield made
    made.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "network"])
def test_all_ranks_load_what_is_sent(make: Callable[[int], tuple[Any, Any]], shared: bool) -> None:
    deployment = Deployment(make, shared=shared)
    transfers = deployment.transfers()
    for value in (1.0, 2.0):
        receipt = transfers.send(weights(value), {"step": "7"})
        assert receipt.in_state("applied") == ["v-dp0-rank0", "v-dp0-rank1"]
        assert receipt.metadata == {"step": "7"}
        assert deployment.sums == [summed(weights(value))] * RANKS
        assert deployment.server.version == f"{receipt.epoch}.{receipt.version}"
    assert deployment.server.calls[1:] == 2 * [
        *("pause keep", "start_weight_update", "update_weights", "finish_weight_update"),
        *("update_weight_version", "resume"),
    ]
    deployment.close()


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
        deployment.transfers().send(weights(1.0))
        transfers = deployment.transfers(seconds, join=False)
        rank.ask("fail_at", phase=phase, how=how)
    before, version = deployment.sums, server.version
    since = time.monotonic()
    with pytest.raises(weightbus.WeightBusError) as failed:
        transfers.send(weights(2.0))
    assert time.monotonic() - since < (2 * seconds if how == "stop" else SECONDS) + SLACK

    said = str(failed.value)
    assert isinstance(failed.value, weightbus.PublishError), said
    assert failed.value.receipt.workers[f"v-dp0-rank{number}"].state != "applied"
    assert f"v-dp0-rank{number}" in said
    why = {"raise": "told to fail", "die": "process", "stop": "v-dp0-rank", "shape": "shape"}[how]
    assert why in said
    assert server.version == version
    assert how == "die" or not server.paused or how == "stop"
    if how == "stop":
        rank.go_on()
    loads = phase == "load" or (how == "shape" and phase != "stage")
    if not loads:
        living = [b for n, b in enumerate(before) if how != "die" or n != number]
        assert deployment.sums == living
    if how == "die":
        return
    if how == "shape":
        rank.ask("reshape", more=0)
    receipt = deployment.transfers().send(weights(3.0))
    assert len(receipt.in_state("applied")) == RANKS
    assert deployment.sums == [summed(weights(3.0))] * RANKS
    assert not server.paused
    assert server.version == f"{receipt.epoch}.{receipt.version}"
