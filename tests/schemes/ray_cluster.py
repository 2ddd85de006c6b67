"""A small Ray cluster for the tests, and the classes whose instances live in its actors."""

import asyncio
import os
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import ray
import torch
from torch import nn

SECONDS = 60.0  # what anything here may take on a busy machine
START_SECONDS = 200.0  # and what the start of an actor may
# What Ray says of a killed actor: if it has not heard of the death within a second, then of a
# broken connection.
DEAD = "(died|is unavailable)"


@contextmanager
def cluster() -> Generator[None]:
    """Run Ray on this machine, and leave no process of it behind."""
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home directory
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            configure_logging=False,
        )
        started = set(psutil.Process().children(recursive=True)) - before
        try:
            yield
        finally:
            started |= set(psutil.Process().children(recursive=True)) - before
            ray.shutdown()
    _, alive = psutil.wait_procs(started, timeout=SECONDS)
    assert not alive, "Ray left processes behind"


def model(value: float = 0.0, *, features: int = 4) -> nn.Module:
    """Return a small network, every parameter of which has one value."""
    network = nn.Sequential(nn.Linear(features, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.fill_(value)
    return network


def values(network: nn.Module) -> set[float]:
    """Return the distinct values of all parameters and floating buffers."""
    floating = (t for t in network.state_dict().values() if t.is_floating_point())
    return {v for tensor in floating for v in tensor.flatten().tolist()}


class Rollout:
    """A user's own worker: it knows neither weightbus nor TorchRL."""

    def __init__(self, features: int = 4) -> None:
        self.policy = model(features=features)
        self.kinds: list[str] = []  # of weights that it was given, in order

    def reset(self) -> None:
        self.policy.load_state_dict(model().state_dict())
        self.kinds.clear()

    def pid(self) -> int:
        return os.getpid()

    def values(self) -> set[float]:
        return values(self.policy)

    def received(self) -> list[str]:
        return self.kinds


class Updatable(Rollout):
    """One that takes weights by the documented method."""

    def update_policy_weights_(self, policy_or_weights: Any) -> None:
        self.kinds.append(type(policy_or_weights).__name__)
        flat = (
            policy_or_weights
            if isinstance(policy_or_weights, dict)
            else policy_or_weights.flatten_keys(".").to_dict()
        )
        self.policy.load_state_dict(flat)


LATER = 0.2  # seconds that a method's effect comes after its return


class Promising(Updatable):
    """One whose method returns a promise of its effect; weights go to it by name alone."""

    def promise(self, kind: str, other: Any = None) -> None:
        self.kind, self.other = kind, other

    def update_policy_weights_(self, *, policy_weights: Any) -> Any:  # type: ignore[override]  # pyright: ignore
        return getattr(self, self.kind)(policy_weights)

    async def coroutine(self, weights: Any) -> None:
        await asyncio.sleep(LATER)
        super().update_policy_weights_(weights)

    def future(self, weights: Any) -> "Future[None]":
        done: Future[None] = Future()

        def apply() -> None:
            try:
                super(Promising, self).update_policy_weights_(weights)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        threading.Timer(LATER, apply).start()
        return done

    def references(self, weights: Any) -> list[Any]:
        return [self.other.update_policy_weights_.remote(weights)]


class Async(Updatable):
    """An actor with an event loop."""

    async def update_policy_weights_(self, policy_or_weights: Any) -> None:  # type: ignore[override]  # pyright: ignore
        await asyncio.sleep(LATER)
        super().update_policy_weights_(policy_or_weights)


class Receiver(Rollout):
    """One whose weights come by a scheme."""

    def __init__(self, features: int = 4) -> None:
        super().__init__(features)
        self.schemes: dict[str, Any] = {}

    def reset(self) -> None:
        for scheme in self.schemes.values():
            scheme.shutdown()
        self.schemes.clear()
        self.policy = model()
        super().reset()

    def become(self, scheme: Any, model_id: str = "policy", **kwargs: Any) -> None:
        """Become a receiver, but do not connect yet."""
        own = self._models()[model_id]
        scheme.init_on_receiver(model_id=model_id, model=own, **kwargs)
        self.schemes[model_id] = scheme

    def connect(self, model_id: str = "policy") -> None:
        self.schemes[model_id].connect()

    def _models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    def poll(self) -> bool:
        return self.schemes["policy"].receive(timeout=0.0) is not None

    def become_worker(self, scheme: Any) -> None:
        """Become a receiver in the older way."""
        scheme.init_on_worker("policy", model=self.policy)
        self.schemes["policy"] = scheme

    def train(self) -> None:
        """Overwrite the policy in place."""
        self.policy.load_state_dict(model(7.0).state_dict())


class Host(Rollout):
    """What TorchRL's ModuleTransform is: it hosts a module."""

    @property
    def module(self) -> nn.Module:
        return self.policy

    def _update_weights_tensordict(self, params: Any) -> None:
        self.kinds.append(type(params).__name__)
        params.to_module(self.policy)

    def _update_weights_state_dict(self, state_dict: Any) -> None:
        self.kinds.append(type(state_dict).__name__)
        self.policy.load_state_dict(state_dict)


class HookedHost(Host):
    """One that takes a scheme, as TorchRL's does."""

    def _init_weight_sync_scheme(self, scheme: Any, model_id: str) -> None:
        scheme.init_on_receiver(model_id=model_id, context=self)
        scheme.connect()
        self.scheme = scheme


def start(cls: type, **options: Any) -> Any:
    """Start an actor of a class; see `start_all`."""
    return start_all(cls, **options)[0]


def start_all(*classes: type, **options: Any) -> list[Any]:
    """Start an actor of each class, and wait for them.

    Each is a process that imports PyTorch. What a test gives its calls is not to be spent on that.
    """
    actors: list[Any] = [ray.remote(num_cpus=0, **options)(cls).remote() for cls in classes]
    ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=START_SECONDS)
    return actors
