"""A model whose checkpoint is quantised (int8 weights and activations) is sent what that has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import ModuleSource

import weightbus
from weightbus.tests.serving.real.test_architectures import (
    Checkpoint,
    _publisher,
    answered,
    apart,
    expected,
    served,
    trained,
    trainer_of,
)

__all__ = ["_publisher"]  # the fixture

CLOSE = 0.05  # of a log-probability: where an activation is rounded decides float32's last bits
MOST = 127.0  # of int8
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def linears(model: Any) -> dict[str, torch.nn.Linear]:
    found = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: layer for name, layer in found.items() if name != "lm_head"}


def rounded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values, and the scale of each row."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-10) / MOST
    return (values / scale).round().to(torch.int8), scale


@torch.no_grad()
def quantised(model: Any) -> dict[str, torch.Tensor]:
    """Return what the checkpoint of a quantised model has."""
    weights = dict(model.state_dict())
    for name, layer in linears(model).items():
        weights[f"{name}.weight"], weights[f"{name}.weight_scale"] = rounded(layer.weight)
    return weights


@torch.no_grad()
def computing_in_int8(model: Any) -> Any:
    """Have a model of transformers compute with the values that int8 has."""
    for layer in linears(model).values():
        values, scale = rounded(layer.weight)
        layer.weight.copy_(values * scale)
        layer.register_forward_pre_hook(lambda _, given: _product(*rounded(given[0])))
    return model


def _product(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values * scale


class Saved:
    """A model as its checkpoint's quantised tensors, for `served`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def save_pretrained(self, folder: Path) -> None:
        self._model.config.quantization_config = CONFIG
        self._model.save_pretrained(folder, state_dict=quantised(self._model))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen3", "llama-tied"])
def test_int8_weights_are_answered_by_and_plain_ones_are_refused(
    name: str, tmp_path: Path, publisher: weightbus.Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    llm = served(tmp_path / "model", Saved(trained(name, 1)))
    assert "it is not proved" not in caplog.text
    first = expected(computing_in_int8(trained(name, 1)))
    assert apart(answered(llm), first) < CLOSE

    plain = trainer_of(llm, publisher, ModuleSource(trained(name, 2)))
    with pytest.raises(weightbus.PublishError, match=r"float32 is published where .* int8"):
        plain.send_weights()
    assert apart(answered(llm), first) < CLOSE

    weights: dict[str, torch.Tensor] = {}
    trainer = trainer_of(llm, publisher, Checkpoint(lambda: weights or quantised(trained(name, 2))))
    for seed in (2, 3):
        weights.update(quantised(trained(name, seed)))
        trainer.send_weights()
        wanted = expected(computing_in_int8(trained(name, seed)))
        print(f"DIFFERENCE {name} {seed} {apart(answered(llm), wanted)}")
        assert apart(wanted, first) > 1.0
        assert apart(answered(llm), wanted) < CLOSE, f"after the version of seed {seed}"
