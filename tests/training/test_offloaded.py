"""A model that accelerate has spread computes with the version that was applied, or refuses it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate
import torch
from accelerate.utils.modeling import get_state_dict_offloaded_model
from torch import nn

from weightbus import Publisher, Settings, StateError
from weightbus.codecs.apply import copy_into
from weightbus.codecs.state import state_of
from weightbus.tests.codecs.made_of_weights import Folded, Transposed
from weightbus.tests.codecs.test_codecs_apply import published
from weightbus.torchrl import WeightStrategy

SECONDS = 30.0
CPU = torch.device("cpu")


def net(*, tied: bool = True) -> nn.Module:
    """Return a model with a buffer, and perhaps with two tied layers."""
    inner = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), inner, *[inner] * tied).eval()


def trained(*, tied: bool = True) -> nn.Module:
    model = net(tied=tied)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value += torch.rand_like(value)
    return model


def on_cpu(model: Any, _: Path) -> Any:
    accelerate.cpu_offload(model, execution_device=CPU)
    return model


def with_buffers(model: Any, _: Path) -> Any:
    accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=True)
    return model


def with_hook(model: Any, _: Path) -> Any:
    return accelerate.cpu_offload_with_hook(model, execution_device=CPU)[0]


def on_disk(model: Any, folder: Path) -> Any:
    accelerate.disk_offload(model, str(folder), execution_device=CPU)
    return model


def by_map(model: Any, folder: Path) -> Any:
    devices: Any = {"0": "cpu", "1": "cpu", "2": "disk"}
    return accelerate.dispatch_model(
        model, devices, main_device=CPU, offload_dir=str(folder), force_hooks=True
    )


def load(source: Any, worker: Any, how: str) -> None:
    if how == "Subscriber":
        copy_into(*published(source), worker)
    else:
        strategy: Any = WeightStrategy(how)  # type: ignore[arg-type]
        strategy.apply_weights(worker, strategy.extract_weights(source))


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 6).reshape(2, 3))


WAYS = ["Subscriber", "tensordict", "state_dict"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("spread", [on_cpu, with_buffers, with_hook])
def test_what_is_in_memory_is_written_and_published(
    spread: Callable[..., Any], how: str, tmp_path: Path
) -> None:
    worker = spread(net(), tmp_path)
    for _ in range(2):
        source = trained()
        load(source, worker, how)
        assert torch.equal(answer(worker), answer(source))
        assert torch.equal(answer(worker), answer(source)), "in the pass after"
    other = net()
    load(worker, other, how)
    assert torch.equal(answer(other), answer(worker))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("spread", [on_disk, by_map])
def test_what_is_on_disk_is_refused_with_the_way_out(
    spread: Callable[..., Any], how: str, tmp_path: Path
) -> None:
    worker = spread(net(tied=False), tmp_path)
    before = answer(worker)
    with pytest.raises(StateError, match=r"2\.weight: offloaded by accelerate.*offloads the model"):
        load(trained(tied=False), worker, how)
    assert torch.equal(answer(worker), before)
    with pytest.raises(StateError, match=r"offloaded by.*get_state_dict_offloaded_model"):
        load(worker, net(tied=False), how)
    way_out = get_state_dict_offloaded_model(worker)
    other = net(tied=False)
    load(way_out, other, how)
    assert torch.equal(answer(other), before)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("part", [Folded, Transposed])
def test_one_that_would_make_something_of_them_is_refused(how: str, part: Any) -> None:
    source, worker = nn.Sequential(part()), nn.Sequential(part())
    on_cpu(worker, Path())
    with pytest.raises(StateError, match="makes something of its weights when they are loaded"):
        load(source, worker, how)


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes', whose weight is packed and has its scales as an attribute."""

    def __init__(self) -> None:
        super().__init__(3, 2, bias=False)
        self.weight = nn.Parameter(torch.ones(3, 1, dtype=torch.uint8), requires_grad=False)


Linear4bit.__module__ = "bitsandbytes.nn.modules"


@pytest.mark.parametrize("how", WAYS)
def test_what_bitsandbytes_has_quantised_is_refused(how: str) -> None:
    for source in (nn.Sequential(nn.Linear(3, 2)), nn.Sequential(Linear4bit())):
        with pytest.raises(StateError, match=r"0: quantised by bitsandbytes"):
            load(source, nn.Sequential(Linear4bit()), how)


def test_parameters_gathered_by_fsdp2_are_refused_as_a_target() -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh

        worker: Any = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
        worker.unshard()
        with pytest.raises(StateError, match=r"fully_shard.*set_model_state_dict"):
            load(nn.Linear(3, 2), worker, "Subscriber")
    finally:
        destroy_process_group()


def test_parameters_of_an_offloaded_model_are_published_in_another_precision() -> None:
    source = nn.Linear(3, 2)
    half = {name: value.bfloat16() for name, value in source.state_dict().items()}
    on_cpu(source, Path())
    settings = Settings(dtype="bf16")
    with Publisher("tcp://127.0.0.1:0", settings=settings) as publisher:
        receipt = publisher.publish("m", source, timeout=SECONDS)
    assert receipt.nbytes == state_of(half).layout().nbytes
