"""Calls between a trainer and a server that are lost, doubled, late or answered with an error.

Each cell of the table in `cells.py`, with a stand-in of a server, before ranks in their processes.
"""

from collections.abc import Iterator

import pytest

from weightbus.python_client.serving.server import VllmServers
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.serving.cells import CELLS, Seen, check
from weightbus.tests.serving.faulty import Fault, Proxy
from weightbus.tests.serving.ranks import RANKS, Kind, plain, weights
from weightbus.tests.serving.test_failing_ranks import SLACK, Deployment

SECONDS = 4.0  # that a version, or a pause, may take


@pytest.fixture(name="deployed", scope="module")
def _deployed() -> Iterator[Deployment]:
    made = Deployment(Kind(plain, weights))
    yield made
    made.close()


@pytest.mark.parametrize(("call", "fault"), CELLS)
def test_a_call_that_is_spoilt(deployed: Deployment, call: str, fault: Fault) -> None:
    deployment = deployed.begin()
    proxy = Proxy(deployment.server.url)
    servers = VllmServers(proxy.url)

    def transfers() -> Transfers:
        made = Transfers(
            deployment.publisher,
            servers,
            model="policy",
            deployment="v",
            timeout=SECONDS,
            pause_timeout=SECONDS,
        )
        made.join({n: ("F32", tuple(t.shape)) for n, t in weights(0.0).items()})
        return made

    seen = Seen(
        whole=lambda value: deployment.sums == deployment.expected(value),
        version=lambda: deployment.server.version,
        paused=lambda: deployment.server.paused,
        settle=deployment.settle,
    )
    try:
        check(call, fault, proxy, transfers, weights, seen, SECONDS, SLACK)
        assert len(deployment.ranks) == RANKS
    finally:
        proxy.close()
        servers.close()
