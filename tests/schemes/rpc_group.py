"""A torch RPC group for the tests: this process as the trainer, and spawned workers.

Workers build their receivers when they are told to, by a call of RPC.
"""

import asyncio
import multiprocessing
import threading
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc

from weightbus.tests.net.ports import lasting_ports
from weightbus.tests.schemes.ray_cluster import SECONDS, model, values

models: dict[str, nn.Module] = {}
_schemes: dict[str, Any] = {}
_over = threading.Event()


class Group:
    """Workers of a group, by name: worker1, worker2, ..."""

    def __init__(self, processes: dict[str, BaseProcess]) -> None:
        self._all = processes
        self.processes, self.names = [*processes.values()], [*processes]

    def some(self, *names: str) -> "Group":
        """Return a few of them, in this order."""
        return Group({name: self._all[name] for name in names})

    def call(self, worker: int, function: Any, *args: Any) -> Any:
        """Call a function in a worker."""
        return rpc.rpc_sync(self.names[worker], function, args=args, timeout=SECONDS)

    def pid(self, worker: int) -> int:
        pid = self.processes[worker].pid
        assert pid is not None
        return pid

    def values(self, model_id: str = "policy") -> list[set[float]]:
        return [self.call(i, values_of, model_id) for i in range(len(self.names))]


@contextmanager
def group(workers: int) -> Generator[Group]:
    """Run a group, and leave no process of it behind; once in a process."""
    (port,) = lasting_ports(1)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_work, args=(i + 1, workers + 1, port), daemon=True)
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        _join("trainer", 0, workers + 1, port)
        yield Group({f"worker{i + 1}": process for i, process in enumerate(processes)})
        rpc.shutdown(graceful=False)
    finally:
        for process in processes:
            process.kill()
            process.join(SECONDS)
            assert not process.is_alive()


def _join(name: str, rank: int, size: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        rpc_timeout=SECONDS,
        # Over shared memory each process would have a thread that never sleeps.
        _transports=["uv"],  # nothing public chooses
    )
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def _work(rank: int, size: int, port: int) -> None:
    _join(f"worker{rank}", rank, size, port)
    _over.wait()  # it is killed


# What runs in the workers.


def build(features: int = 4, *, meta: bool = False) -> None:
    """Build models anew, and forget the receivers."""
    for scheme in _schemes.values():
        scheme.shutdown()
    _schemes.clear()
    models["policy"], models["second"] = model(features=features), model()
    if meta:
        models["policy"] = model().to("meta")


def become(scheme: Any, worker: int | None, model_id: str = "policy") -> None:
    """Become a receiver, but do not connect yet."""
    scheme.init_on_receiver(model_id=model_id, model=models[model_id], worker_idx=worker)
    _schemes[model_id] = scheme


class Refusing:
    """What the worker's policy is found in: it takes no weights that are twos."""

    def __init__(self) -> None:
        self.policy = models["policy"]

    def update_policy_weights_(self, *, model_id: str, policy_or_weights: Any) -> None:
        if 2.0 in (float(value) for value in policy_or_weights["0", "bias"]):
            raise KeyError(f"no twos in {model_id}")


def become_refusing(scheme: Any, worker: int) -> None:
    """Become a connected receiver in a context that may refuse what was written."""
    models["context"] = context = Refusing()  # type: ignore[assignment]  # pyright: ignore
    scheme.init_on_receiver(model_id="policy", context=context, worker_idx=worker)
    _schemes["policy"] = scheme
    connect()


def become_worker(scheme: Any) -> None:
    """Become a receiver in the older way, which polls."""
    scheme.init_on_worker("policy", model=models["policy"])
    _schemes["policy"] = scheme


def become_large(scheme: Any, worker: int) -> None:
    """Become a connected receiver of a model of 4 MB."""
    models["policy"] = nn.Linear(1000, 1000)
    become(scheme, worker)
    connect()


def extremes() -> tuple[float, float]:
    """Return the least and the largest of the policy's weights."""
    weight = models["policy"].get_parameter("weight")
    return float(weight.min()), float(weight.max())


def build_hollow() -> None:
    """Have a policy on the meta device."""
    build(meta=True)


def connect(model_id: str = "policy") -> None:
    _schemes[model_id].connect()


def poll(timeout: float) -> bool:
    return bool(_schemes["policy"].get_receiver().receive(timeout))


def train(value: float) -> None:
    models["policy"].load_state_dict(model(value).state_dict())


def values_of(model_id: str) -> set[float]:
    return values(models[model_id])


def read_for(seconds: float, started: str) -> None:
    """Hold the weights still for a while, and say so in a file."""
    with _schemes["policy"].reading():
        before = values_of("policy")
        Path(started).touch()
        _over.wait(seconds)
        assert values_of("policy") == before


class Collector:
    """A user's own collector, to which the trainer holds a reference."""

    def __init__(self) -> None:
        self.policy = model()
        self.kinds: list[str] = []

    def update_policy_weights_(self, policy_or_weights: Any) -> None:
        self.kinds.append(type(policy_or_weights).__name__)
        self.policy.load_state_dict(policy_or_weights.flatten_keys(".").to_dict())

    def state(self) -> tuple[set[float], list[str]]:
        return values(self.policy), self.kinds


class Coroutine(Collector):
    """One whose method returns a coroutine."""

    async def update_policy_weights_(self, policy_or_weights: Any) -> None:  # type: ignore[override]  # pyright: ignore
        await asyncio.sleep(0.1)
        super().update_policy_weights_(policy_or_weights)


class Forward(Collector):
    """One whose method returns a future of torch's."""

    def update_policy_weights_(self, policy_or_weights: Any) -> Any:
        done: Any = torch.futures.Future()

        def apply() -> None:
            try:
                super(Forward, self).update_policy_weights_(policy_or_weights)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        threading.Timer(0.1, apply).start()
        return done
