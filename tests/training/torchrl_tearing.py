"""How often a collector's forward pass sees a part of an update, and what keeping it out costs.

`python -m weightbus.tests.training.torchrl_tearing` prints it for every collector, or for
those that are named: `async-torchrlshared` is one with TorchRL's own scheme.

The policy is 8 MB of weights that all have one value, a new one with each update. A forward pass
looks at some of every layer on its way, and acts by the lowest and the highest value that it saw:
where they differ, it was a mixture.
"""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import argparse
import importlib
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded

from weightbus.tests.net.ports import lasting_ports
from weightbus.tests.training.torchrl_parts import Echo, collectors, distributed, fill

LAYERS, WIDTH = 8, 512  # 8 MiB
FRAMES = 40  # in a batch of one worker


class Watched(nn.Module):
    """Says the lowest and the highest weight that it met."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return both, in the place of an action."""
        met: list[torch.Tensor] = []
        inside = observation.expand(*observation.shape[:-1], WIDTH)
        for layer in cast("Sequence[nn.Linear]", self.layers):
            met += [layer.weight[0, 0].clone(), layer.weight[-1, -1].clone()]
            inside = layer(inside)
            met += [layer.weight[0, 0].clone(), layer.weight[-1, -1].clone()]
        seen = torch.stack(met)
        return torch.stack([seen.min(), seen.max()]).expand(*observation.shape[:-1], 2)


class Watching(Echo):
    """Takes the two values for an action."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__(worker)
        self.action_spec = Bounded(-1e6, 1e6, torch.Size([2]))


def watched() -> Any:
    """Return a policy of one value."""
    policy = TensorDictModule(Watched(), in_keys=["observation"], out_keys=["action"])
    fill(policy, 1.0)
    return policy.requires_grad_(False)


@dataclass
class Seen:
    """What came of some updates while a collector ran."""

    updates: int = 0
    frames: int = 0
    torn: int = 0
    newest: float = 0.0
    seconds: float = 0.0

    def take(self, batch: TensorDictBase) -> None:
        """Count the frames of a batch."""
        lowest, highest = batch["action"].reshape(-1, 2).unbind(-1)
        self.frames += lowest.numel()
        self.torn += int((lowest != highest).sum())
        self.newest = max(self.newest, float(highest.max()))

    def __str__(self) -> str:
        return (
            f"{self.updates} updates, {self.frames} frames, {self.torn} torn "
            f"({self.torn / max(1, self.updates):.3f} an update), "
            f"{self.frames / self.seconds:.0f} frames/s"
        )


def watch(collector: Any, trained: Any, updates: int, *, last: float = 0.0) -> Seen:
    """Update a running collector so many times, from a thread of its own, and look at its frames.

    The frames of the `last` update are waited for as well.
    """
    seen, failed = Seen(), list[BaseException]()
    started = time.perf_counter()

    def update() -> None:
        try:
            for number in range(updates):
                collector.update_policy_weights_(fill(trained, 2.0 + number))
                seen.updates += 1
        except BaseException as error:
            failed.append(error)

    updating = threading.Thread(target=update, name="updating")
    updating.start()
    batches, newest = iter(collector), 1.0 + updates
    deadline = time.monotonic() + last
    for batch in batches:
        seen.take(batch)
        if failed or (not updating.is_alive() and seen.newest >= newest):
            break
        if not updating.is_alive() and time.monotonic() > deadline:
            break
    updating.join()
    seen.seconds = time.perf_counter() - started
    if failed:
        raise failed[0]
    return seen


WORKERS = [partial(Watching, 0), partial(Watching, 1)]


@contextmanager
def of_processes(make: Callable[..., Any], scheme: Any) -> Generator[tuple[Any, Any]]:
    """Run a collector of two processes; yield it and what is trained."""
    trained = watched()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = make(
            WORKERS,
            policy=trained,
            frames_per_batch=2 * FRAMES,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme},
        )
    try:
        yield collector, trained
    finally:
        collector.shutdown(timeout=20.0)
        scheme.shutdown()


@contextmanager
def of_nodes(kind: Any, scheme: Any, **settings: Any) -> Generator[tuple[Any, Any]]:
    """Run a collector of two nodes, which takes the whole process for itself."""
    trained = watched()
    warnings.simplefilter("ignore")
    collector = kind(
        WORKERS,
        trained,
        frames_per_batch=2 * FRAMES,
        total_frames=10**9,
        sync=False,
        weight_sync_schemes={"policy": scheme},
        **settings,
    )
    try:
        yield collector, trained
    finally:
        collector.shutdown(**({"shutdown_ray": False} if "remote_configs" in settings else {}))


def tell(name: str, updates: int, ports: list[int], pipe: Connection) -> None:
    """Send what was seen of one of the collectors, from a process of its own."""
    torch.set_num_threads(1)
    pipe.send(asdict(story(name, updates, ports)))


def story(name: str, updates: int, ports: Sequence[int] = ()) -> Seen:
    """Make one of the collectors, of nodes at two free `ports`, update it, and say what was seen.

    The name says what it is and what carries its weights: "sync-process"; "async-torchrlprocess"
    is TorchRL's own.
    """
    kind, _, carrier = name.partition("-")
    theirs = carrier.startswith("torchrl")  # beside ours, TorchRL's own
    own: Any = importlib.import_module("torchrl.weight_update" if theirs else "weightbus.torchrl")
    carrier = carrier.removeprefix("torchrl")
    scheme: Any = {
        "process": lambda: own.MultiProcessWeightSyncScheme(),
        "shared": lambda: own.SharedMemWeightSyncScheme(),
        "zmq": lambda: own.ZMQWeightSyncScheme(),
        "rpc": lambda: own.RPCWeightSyncScheme("tensordict"),
        "ray": lambda: own.RayWeightSyncScheme(),
    }[carrier]()
    if kind == "ray":
        from weightbus.tests.schemes.ray_cluster import cluster

        with cluster():
            settings: Any = {"remote_configs": {"num_cpus": 0.5}}
            with of_nodes(distributed.RayCollector, scheme, **settings) as (made, trained):
                made.update_policy_weights_()
                return watch(made, trained, updates, last=20.0)
    if kind in ("rpc", "nodes"):
        port, address = ports
        if carrier == "zmq":
            scheme = own.ZMQWeightSyncScheme(f"tcp://127.0.0.1:{address}")
        cls = distributed.RPCCollector if kind == "rpc" else distributed.DistributedCollector
        tcp: Any = str(port) if kind == "rpc" else port
        with of_nodes(cls, scheme, launcher="mp", tcp_port=tcp) as (made, trained):
            return watch(made, trained, updates, last=20.0)
    make = {
        "sync": collectors.MultiSyncCollector,
        "async": collectors.MultiAsyncCollector,
    }[kind]
    with of_processes(make, scheme) as (made, trained):
        return watch(made, trained, updates, last=20.0)


STORIES = [
    *(f"{kind}-{by}" for by in ("process", "shared", "zmq") for kind in ("sync", "async")),
    *("nodes-zmq", "rpc-rpc", "rpc-zmq", "ray-ray", "ray-zmq"),
]


def main() -> None:
    """Print what is seen of each, or of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=STORIES)
    parser.add_argument("--updates", type=int, default=2000)
    given = parser.parse_args()
    if len(given.names) == 1:
        torch.set_num_threads(1)
        ports = lasting_ports(2)
        print(f"{given.names[0]:20} {story(given.names[0], given.updates, ports)}", flush=True)
        os._exit(0)  # whatever state TorchRL has left it in
    for name in given.names:  # some take the whole process for themselves
        own = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "weightbus.tests.training.torchrl_tearing",
            name,
        ]
        subprocess.run([*own, "--updates", str(given.updates)], timeout=1800, check=False)  # noqa: S603


if __name__ == "__main__":
    main()
