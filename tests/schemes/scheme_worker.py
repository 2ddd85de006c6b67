"""A worker of a scheme in a process of its own, and the model that it and its sender have.

The worker does what it is told over a pipe, by the name of one of the functions in `COMMANDS`.
"""

from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import nn

from weightbus.torchrl import WeightSyncScheme

Model = TypeVar("Model", bound=nn.Module)


class Statistics(nn.Module):
    """A submodule with extra state that is a mapping, nested and with a dot in a key."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {
            "count": torch.zeros((), dtype=torch.int64),
            "by.name": {"mean": torch.zeros(2)},
        }

    def get_extra_state(self) -> dict[str, Any]:
        """Return what travels."""
        return self.state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take what travelled."""
        self.state = state


class Net(nn.Module):
    """Parameters, a tied one, buffers of both kinds, and extra state below the root."""

    kept: torch.Tensor
    passing: torch.Tensor

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.statistics = Statistics()


def fill(net: Model, value: float) -> Model:
    """Set everything in a net to one value, in place."""
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.fill_(value)
    statistics = getattr(net, "statistics", None)
    if isinstance(statistics, Statistics):
        statistics.state["count"].fill_(int(value))
        statistics.state["by.name"]["mean"].fill_(value)
    return net


def values(net: nn.Module) -> set[float]:
    """Return every value that is anywhere in a net: one, if it is not torn."""
    found = {float(v) for t in (*net.parameters(), *net.buffers()) for v in t.detach().unique()}
    statistics = getattr(net, "statistics", None)
    if isinstance(statistics, Statistics):
        found |= {float(statistics.state["count"])}
        found |= {float(v) for v in statistics.state["by.name"]["mean"].unique()}
    return found


def work(scheme: WeightSyncScheme, pipe: Connection, told: dict[str, Any]) -> None:
    """Be a worker until told to end, or until the parent is gone."""
    with torch.device("meta" if told.get("meta") else "cpu"):
        net = Net()
    if told.get("older"):
        scheme.init_on_worker("policy", model=net, pipe=told["older"])
    else:
        scheme.init_on_receiver(model_id=told.get("model_id", "policy"), model=net)
        scheme.connect(worker_idx=told["worker_idx"])
    pipe.send(values(net) if told.get("meta") else "connected")
    while (command := pipe.recv()) != "end":
        pipe.send(COMMANDS[command](scheme, net))
    scheme.shutdown()


COMMANDS: dict[str, Any] = {
    "values": lambda _, net: values(net),
    "wait": lambda scheme, net: scheme.receive(20.0) is not None and values(net),
    "older receive": lambda scheme, net: scheme.get_receiver().receive(20.0) and values(net),
}
