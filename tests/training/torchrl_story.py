"""What happens to a scheme in one of TorchRL's collectors of nodes, told to the test that asked.

Such a collector takes over its process (the default process group, the RPC agent), so each story
has a process of its own. It ends there with the story, whatever state the collector is in.
"""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tensordict import TensorDictBase
from torchrl import weight_update

from weightbus import PublishError, Settings
from weightbus.tests.training.torchrl_parts import (
    Echo,
    Seen,
    collect,
    distributed,
    fill,
    policy,
    seen_in,
)
from weightbus.torchrl import RPCWeightSyncScheme, ZMQWeightSyncScheme

QUICK = Settings(ping=0.2, lost_after=1.0)


def nodes(scheme: Any, trained: Any, port: int) -> Any:
    """Return a DistributedCollector."""
    return _collector(distributed.DistributedCollector, scheme, trained, tcp_port=port)


def rpc(scheme: Any, trained: Any, port: int) -> Any:
    """Return an RPCCollector."""
    return _collector(distributed.RPCCollector, scheme, trained, tcp_port=str(port))


def _collector(kind: Any, scheme: Any, trained: Any, **settings: Any) -> Any:
    return kind(
        [partial(Echo, 0), partial(Echo, 1)],
        trained,
        frames_per_batch=8,
        total_frames=10**9,
        launcher="mp",
        sync=True,
        weight_sync_schemes={"policy": scheme},
        **settings,
    )


def zmq_scheme(port: int) -> Any:
    """Return a scheme whose address is known before there is a sender."""
    return ZMQWeightSyncScheme(f"tcp://127.0.0.1:{port}", liveness=QUICK)


def rpc_scheme(_: int) -> Any:
    """Return a scheme that needs no address."""
    return RPCWeightSyncScheme("tensordict", timeout=20.0)


def tell(make: Any, make_scheme: Any, ports: list[int], pipe: Connection) -> None:
    """Run a collector with a scheme, and send what was seen: once of its life, once of its end."""
    warnings.simplefilter("ignore")
    scheme, trained = make_scheme(ports[1]), policy(1.0)
    collector = make(scheme, trained, ports[0])
    batches = iter(collector)
    facts, pids = life(collector, scheme, trained, batches)
    pipe.send(facts)
    if pipe.recv() == "kill":
        os.kill(pids[1], signal.SIGKILL)
        facts = {"killed": error_of(collector), "applied": scheme.receipt.in_state("applied")}
    else:
        collector.shutdown()
        threads = [t.name for t in threading.enumerate() if t.name.startswith("weightbus")]
        facts = {"initialized": scheme.initialized_on_sender, "threads": threads}
    pipe.send(facts)


def life(
    collector: Any, scheme: Any, trained: Any, batches: Iterator[TensorDictBase]
) -> tuple[dict[str, Any], dict[int, int]]:
    """Train, send, and look; return what was seen, and the process of each worker."""

    def acts(worker_0: float, worker_1: float) -> Seen:
        expected = {0: {worker_0}, 1: {worker_1}}
        return collect(batches, expected.__eq__)

    facts: dict[str, Any] = {"accepted": isinstance(scheme, weight_update.WeightSyncScheme)}
    facts["at the start"] = acts(1.0, 1.0)
    fill(trained, 2.0)
    facts["trained in place"] = [seen_in(next(batches)) for _ in range(3)][-1]
    collector.update_policy_weights_()
    facts["sent"] = acts(2.0, 2.0)
    facts["applied"] = scheme.receipt.in_state("applied")
    collector.update_policy_weights_(fill(policy(), 3.0), worker_ids=[1])
    facts["sent to 1"] = acts(2.0, 3.0)
    facts["versions"] = dict(scheme.versions())
    facts["the trainer has"] = trained.module.weight.item()
    facts["wrong"] = error_of(collector, {"module.wrong": trained.module.weight})
    last: Any = next(batches)
    facts["sent what does not fit"] = seen_in(last)
    workers, pids = (last[key].flatten().tolist() for key in ("worker", "pid"))
    return facts, dict(zip(workers, pids, strict=True))


def error_of(collector: Any, weights: Any = None) -> str:
    """Return the error of an update."""
    try:
        collector.update_policy_weights_(weights)
    except PublishError as error:
        return str(error)
    return "no error"
