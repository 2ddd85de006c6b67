"""An environment whose rollouts show which weights each worker ran, and the models that run there.

Observations are ones, and a policy is one weight: so an action is the weight that acted. Where the
environment has a model of its own, the reward is that model's weight.
"""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import Compose, Transform

with warnings.catch_warnings():  # TorchRL warns of its own classes when it is imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl import collectors as collectors
    from torchrl.collectors import distributed as distributed
    from torchrl.modules import MultiAgentMLP

SECONDS = 60.0  # in which weights that are applied must show; collectors keep some older batches,
# and one that does not wait for its workers may bring those of one alone for a while


class Echo(EnvBase):  # type: ignore[misc]
    """Says in which worker and process it is."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__()
        one = torch.Size([1])
        number = Unbounded(one, dtype=torch.int64)
        self.observation_spec = Composite(observation=Unbounded(one), worker=number, pid=number)
        self.action_spec = Bounded(-1000.0, 1000.0, one)
        self.reward_spec = Unbounded(one)
        self._seen = {
            "observation": torch.ones(1),
            "worker": torch.tensor([worker]),
            "pid": torch.tensor([os.getpid()]),
        }

    def _reset(self, *_: Any, **__: Any) -> TensorDictBase:
        return TensorDict({key: value.clone() for key, value in self._seen.items()})

    def _step(self, *_: Any, **__: Any) -> TensorDictBase:
        ended = {"reward": torch.zeros(1), "done": torch.zeros(1, dtype=torch.bool)}
        return self._reset().update(ended)

    def _set_seed(self, seed: int | None) -> None:
        """There is no chance in it."""


class Valued(Transform):  # type: ignore[misc]
    """Rewards with what its model says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = one_weight(0.0)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        del tensordict
        with torch.no_grad():
            return next_tensordict.set("reward", self.net(next_tensordict["observation"]))


def valued_echo(worker: int = 0) -> Any:
    """Return an environment with a model in it, `env.transform[0]`."""
    return TransformedEnv(Echo(worker), cast("Any", Compose)(Valued()))


def one_weight(value: float) -> nn.Linear:
    """Return a model of one weight."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net


def policy(value: float = 0.0) -> Any:
    """Return a policy that always does `value`."""
    return TensorDictModule(one_weight(value), in_keys=["observation"], out_keys=["action"])


def fill(model: nn.Module, value: float) -> Any:
    """Set all weights of a model in place; return them as collectors take them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return TensorDict.from_module(model)


class Agents(nn.Module):
    """Three agents, each with weights of its own in one TensorDictParams; it answers as they do."""

    def __init__(self) -> None:
        super().__init__()
        alone = {"centralized": False, "share_params": False, "depth": 0}
        self.net = MultiAgentMLP(1, 1, 3, **alone)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.unsqueeze(-1).expand(*x.shape[:-1], 3, 1)).mean(-2)


def agents() -> Any:
    """Return a policy of several agents."""
    return TensorDictModule(Agents(), in_keys=["observation"], out_keys=["action"])


Seen = dict[int, set[float]]


def seen_in(batch: Any, key: Any = "action") -> Seen:
    """Return the values of one key in a batch, by worker."""
    workers, values = batch["worker"].flatten().tolist(), batch[key].flatten().tolist()
    return {w: {v for at, v in zip(workers, values, strict=True) if at == w} for w in workers}


def collect(
    batches: Iterator[TensorDictBase], until: Callable[[Seen], bool], key: Any = "action"
) -> Seen:
    """Collect until the newest values of each worker are as they should be; return them."""
    newest: Seen = {}
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        newest |= seen_in(next(batches), key)
        if until(newest):
            break
    return newest


def collects(
    batches: Iterator[TensorDictBase], expected: dict[int, float], key: Any = "action"
) -> None:
    """Check that each worker comes to act by a weight, and stays with it."""
    wanted = {worker: {value} for worker, value in expected.items()}
    found = collect(batches, wanted.__eq__, key)
    assert found == wanted, f"{found}, not {wanted}"
    after = [seen_in(next(batches), key) for _ in range(4)]
    assert all(seen[worker] == wanted[worker] for seen in after for worker in seen), after
