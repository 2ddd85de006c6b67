"""Which scheme goes with which of TorchRL's collectors: the guide's table says what happens.

Each kind of collector calls schemes in an order and with arguments of its own. Here the same calls
are made without it. (Collectors themselves, one cell of each column:
`tests/training/test_schemes_torchrl*.py`.)
"""

import pickle  # as collectors do it with a scheme that they hand to a worker
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightbus import torchrl
from weightbus.tests.schemes.ray_cluster import model, values

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "migrating-from-torchrl.md"
ROW = re.compile(r"^\| `(\w+Scheme)` \|(.*)\|$", re.MULTILINE)
SECONDS = 20.0


class Context:
    """What a collector is to a scheme."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy


def copies(scheme: Any) -> list[Any]:
    return [pickle.loads(pickle.dumps(scheme)) for _ in range(2)]  # noqa: S301


def received(receivers: list[Any], nets: list[nn.Module], first: int = 0, **given: Any) -> None:
    """Have receivers do what collectors have them do where they are workers."""
    for worker, (receiver, net) in enumerate(zip(receivers, nets, strict=True), start=first):
        context = given.get("context", Context)(net)
        receiver.kept = context  # schemes hold it weakly
        receiver.init_on_receiver(model_id="policy", context=context, worker_idx=worker)
        receiver.connect()


def of_processes(scheme: Any, ours: Any, nets: list[nn.Module]) -> list[Any]:
    ours.num_workers, ours.policy_device = 2, [torch.device("cpu")] * 2
    scheme.init_on_sender(model_id="policy", context=ours, ctx=None)
    receivers = copies(scheme)
    scheme.connect()
    for worker, receiver in enumerate(receivers):
        nets[worker].to("meta")
        receiver.init_on_receiver(model=nets[worker], model_id="policy", worker_idx=worker)
        receiver.connect(worker_idx=worker)
    return receivers


def alone(scheme: Any, ours: Any, nets: list[nn.Module]) -> list[Any]:
    scheme.init_on_sender(model_id="policy", context=ours)
    scheme.connect()
    receivers = copies(scheme)
    received(receivers, nets)
    for receiver in receivers:
        receiver.receive(SECONDS)  # so that both have joined
    return receivers


def of_nodes(scheme: Any, ours: Any, nets: list[nn.Module]) -> list[Any]:
    ours.num_workers = 2
    scheme.init_on_sender(num_workers=2, context=ours, model_id="policy")
    receivers = copies(scheme)
    received(receivers, nets, first=1)
    scheme.connect()
    return receivers


def of_actors(scheme: Any, ours: Any, nets: list[nn.Module]) -> list[Any]:
    ours.num_workers = 2
    actors = [SimpleNamespace(), SimpleNamespace()]
    scheme.init_on_sender(
        model_id="policy", remote_collectors=actors, model=ours.policy, context=ours
    )
    receivers = copies(scheme)
    received(receivers, nets)
    scheme.connect()
    return receivers


def of_rpc(scheme: Any, ours: Any, nets: list[nn.Module]) -> list[Any]:
    ours.num_workers = 2
    early, receivers = copies(scheme), copies(scheme)
    received(early, nets)
    for receiver in early:
        receiver.shutdown()
    received(receivers, nets)
    scheme.init_on_sender(model_id="policy", num_workers=2, context=ours)
    scheme.connect()
    return receivers


COLUMNS: list[Callable[..., list[Any]]] = [of_processes, alone, of_nodes, of_actors, of_rpc]
# These need what carries them, and run in collectors of their own.
ELSEWHERE = {("RPCWeightSyncScheme", of_rpc), ("RayWeightSyncScheme", of_actors)}


def goes(scheme: Any, calls: Callable[..., list[Any]]) -> bool:
    """Make a collector's calls, and tell whether they are all answered, and weights arrive."""
    ours, nets = Context(model(1.0)), [model(), model()]
    receivers: list[Any] = []
    try:
        receivers = calls(scheme, ours, nets)
        scheme.send(model(2.0), timeout=SECONDS)
    except (ValueError, RuntimeError):
        return False
    finally:
        for each in (*receivers, scheme):
            each.shutdown()
    nothing = isinstance(scheme, torchrl.NoWeightSyncScheme)
    assert [values(net) for net in nets] == [{0.0 if nothing else 2.0}] * 2
    return True


CELLS = {
    (row, calls): cell.strip()
    for row, cells in ROW.findall(GUIDE.read_text())
    for calls, cell in zip(COLUMNS, cells.split("|"), strict=True)
}


def test_every_scheme_is_in_the_table() -> None:
    schemes = {n for n in torchrl.__all__ if n.endswith("WeightSyncScheme") and len(n) > 16}
    assert {row for row, _ in CELLS} == schemes


@pytest.mark.parametrize(("row", "calls"), CELLS, ids=lambda part: getattr(part, "__name__", part))
def test_a_scheme_goes_with_a_collector_as_the_guide_says(
    row: str, calls: Any, tmp_path: Path
) -> None:
    kind, cell = getattr(torchrl, row), CELLS[row, calls]
    if (row, calls) in ELSEWHERE:
        assert cell == "yes"
    elif cell == "with an address":
        assert not goes(kind(), calls)
        assert goes(kind(address=f"ipc://{tmp_path}/bus"), calls)
    elif cell == "with a `policy_factory`":
        assert not goes(kind(), calls), "its workers' policies are on the meta device"
    else:
        assert {"yes": True, "no": False}[cell] == goes(kind(), calls)
