"""A Ray cluster of several nodes on this machine, and the workers of tests in its actors."""

import contextlib
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import weightbus
from weightbus import Settings, Subscriber
from weightbus.tests.schemes.ray_cluster import SECONDS, START_SECONDS

SOON = Settings(ping=0.25, lost_after=1.0)
STORE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@contextmanager
def cluster(nodes: int) -> Generator[Cluster]:
    """Run Ray with so many nodes on this machine, and leave no process of it behind."""
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home directory
        head = {**STORE, "include_dashboard": False}
        made: Any = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(nodes - 1):
                made.add_node(**STORE)
            ray.init(address=made.address, log_to_driver=False, configure_logging=False)
            yield made
        finally:
            started = set(psutil.Process().children(recursive=True)) - before
            ray.shutdown()
            made.shutdown()
    _, alive = psutil.wait_procs(started, timeout=SECONDS)
    assert not alive, "Ray left processes behind"


def lose(made: Any, node: Any) -> float:
    """Kill all processes of a node at once, as when its power fails; return when that was."""
    raylet: Any = node.all_processes["raylet"][0].process
    processes = [*psutil.Process(raylet.pid).children(recursive=True), raylet]
    killed_at = time.monotonic()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    made.remove_node(node, allow_graceful=False)
    return killed_at


class Workers:
    """Some workers of the model m in one actor, which apply in the background."""

    def __init__(
        self, names: list[str], size: int, keys: str | None = None, relays: str = "ray"
    ) -> None:
        self.addresses = weightbus.ray.address(relays)
        self.weights = [{"w": np.zeros(size, np.float32)} for _ in names]
        self.workers = [
            Subscriber(self.addresses, {"m": weights}, name=name, keys=keys, settings=SOON).start()
            for name, weights in zip(names, self.weights, strict=True)
        ]

    def found(self) -> list[str]:
        """Return the addresses of this node, once all workers have joined."""
        assert all(worker.wait_joined(SECONDS) for worker in self.workers)
        return self.addresses

    def values(self) -> set[float]:
        """Return the least and the greatest of all weights."""
        return {float(e) for w in self.weights for e in (w["w"].min(), w["w"].max())}

    def digests(self) -> set[str]:
        """Return the digests of what they applied; empty: copied from memory, not hashed."""
        updates = [worker.update("m") for worker in self.workers]
        return {update.digest for update in updates if update is not None}

    def pid(self) -> int:
        """Return the process that has them."""
        return os.getpid()


def workers(node: Any, names: list[str], size: int, **options: Any) -> Any:
    """Start workers on a node; return their actor, once they have joined."""
    there: Any = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    made: Any = ray.remote(num_cpus=0, scheduling_strategy=there)(Workers)
    actor = made.remote(names, size, **options)
    get(actor.found.remote(), START_SECONDS)
    return actor


def get(refs: Any, seconds: float = SECONDS) -> Any:
    return ray.get(refs, timeout=seconds)
