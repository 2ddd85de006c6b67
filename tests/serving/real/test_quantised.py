"""A model whose checkpoint is quantised (int8 weights and activations) is not served on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

import weightbus
from weightbus.python_client.serving.vllm_proof import ReloadError
from weightbus.tests.serving.real.test_architectures import _publisher, served, trained

__all__ = ["_publisher"]  # the fixture

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


class Saved:
    """A model as its checkpoint's quantised tensors, for `served`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def save_pretrained(self, folder: Path) -> None:
        self._model.config.quantization_config = CONFIG
        self._model.save_pretrained(folder, state_dict=quantised(self._model))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen3", "llama-tied"])
def test_a_model_of_int8_weights_is_refused_as_the_engine_starts(
    name: str, tmp_path: Path, publisher: weightbus.Publisher
) -> None:
    """Its layers read scales that vLLM's reload has freed, so they answer wrongly after it."""
    del publisher  # it has this process ready for the next one
    with pytest.raises(ReloadError, match="cannot be updated in this vLLM") as refused:
        served(tmp_path / "model", Saved(trained(name, 1)))
    assert "qkv_proj" in str(refused.value)
