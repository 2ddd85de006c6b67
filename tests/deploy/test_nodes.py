"""What the manifests of `deploy/kubernetes` start works together, as far as one host can show it.

No cluster: two "nodes" are two relays, each with a worker that is led to it, and the trainer.
"""

import signal
from collections.abc import Generator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.deploy.pods import SECONDS, Pod, programs
from weightbus.tests.deploy.rendered import EXAMPLE, render, with_keys


class Cluster:
    """A trainer, and on each of two nodes a relay and a worker; none of them is started."""

    def __init__(self, tmp_path: Path) -> None:
        manifests, path = render(with_keys(tmp_path) / EXAMPLE), programs(tmp_path / "bin")
        names = dict[str, str]()

        def pod(kind: str, name: str, node: str, services: dict[str, str]) -> Pod:
            what = kind.partition("-")[0]
            workload = {"trainer": "StatefulSet", "relay": "DaemonSet", "worker": "Deployment"}
            return Pod(manifests, (workload[what], what), name, node, services, tmp_path, path)

        self.trainer = pod("trainer", "trainer-0", "node-0", names)
        names["trainer"] = self.trainer.address
        self.relays, self.workers = list[Pod](), list[Pod]()
        for node in ("node-1", "node-2"):
            relay = pod("relay", f"relay-of-{node}", node, names)
            local = {**names, "relay": relay.address}  # internalTrafficPolicy: Local
            self.relays.append(relay)
            self.workers.append(pod("worker", f"worker-on-{node}", node, local))

    def through(self) -> dict[str, tuple[str, ...]]:
        """Return, of the newest receipt, each worker that applied with the relays before it."""
        newest = self.trainer.rows()[-1:]
        return {
            name: tuple(row["through"].get(name, ()))
            for row in newest
            for name, state in row["workers"].items()
            if state == "applied"
        }


def waits(relay: Pod) -> bool:
    """Return whether a relay that listens is not ready, since it has no trainer."""
    relay.check()
    status, text = relay.probe()
    return status == 1 and ("has not joined" in text or "has no publisher" in text)


@pytest.fixture(name="cluster")
def _cluster(tmp_path: Path) -> Generator[Cluster]:
    cluster = Cluster(tmp_path)
    with ExitStack() as stack:
        for pod in (cluster.trainer, *cluster.relays, *cluster.workers):
            stack.callback(pod.stop)
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_get_versions_through_the_relay_of_their_node(cluster: Cluster) -> None:
    behind = {"worker-on-node-1": ("relay-node-1",), "worker-on-node-2": ("relay-node-2",)}
    everything = [cluster.trainer, *cluster.relays, *cluster.workers]
    for pod in everything[1:]:
        pod.start()
    for relay in cluster.relays:  # so the Service leads nobody to a relay that has nothing
        wait_for(partial(waits, relay), "it waits for the trainer", SECONDS)
    assert not any(worker.ready() for worker in cluster.workers)
    cluster.trainer.start()
    for pod in everything:
        wait_for(pod.ready, f"{pod.name} is ready", SECONDS)
    wait_for(lambda: cluster.through() == behind, "each through its node's relay", SECONDS)

    cluster.relays[0].stop(signal.SIGKILL)
    moved = behind | {"worker-on-node-1": ()}
    wait_for(lambda: cluster.through() == moved, "the worker goes on to the trainer", SECONDS)
    assert cluster.workers[0].ready()
    assert cluster.relays[0].probe()[0] == 1
    cluster.relays[0].start()
    wait_for(cluster.relays[0].ready, "the relay is back", SECONDS)
    wait_for(lambda: cluster.through() == behind, "and the worker, too", SECONDS)
    for pod in everything:
        pod.check()
