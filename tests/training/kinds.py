"""Kinds of modules that people run, of torch, TensorDict, TorchRL and transformers.

Each is small, and stands with what it is given in a pass.
"""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import EnsembleModule, TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn.utils import parametrizations, prune

with warnings.catch_warnings():  # they warn of their own classes when they are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.modules import (
        MLP,
        LSTMModule,
        MultiAgentConvNet,
        MultiAgentMLP,
        NoisyLinear,
        QMixer,
    )
    from transformers import (
        BertConfig,
        BertModel,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

Made = Callable[[], Any]
Given = Callable[[Any], Any]


def ramp(*shape: int) -> torch.Tensor:
    """Return different numbers."""
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


class Stateless(nn.Module):
    """Calls a module that has no tensors with those of a TensorDictParams, beside a usual part."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.first = nn.Linear(3, 3)
        self.params = TensorDictParams(TensorDict.from_module(inner))
        vars(self)["inner"] = inner.to("meta")  # its own are not the model's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.params.to_module(vars(self)["inner"]):
            return vars(self)["inner"](self.first(x))


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(3, 4), "weight", 0.5)


def in_training_for_int8() -> nn.Module:
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = nn.Sequential(nn.Linear(3, 2)).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
    return model


def agents(make: Any, *args: Any, **kwargs: Any) -> Any:
    return make(*args, centralized=False, **kwargs)


def steps(model: Any) -> torch.Tensor:
    given = {
        "o": ramp(2, 3),
        "recurrent_state_h": torch.zeros(2, 1, 4),
        "recurrent_state_c": torch.zeros(2, 1, 4),
        "is_init": torch.zeros(2, 1, dtype=torch.bool),
    }
    return model(TensorDict(given, [2]))["h"]


def rows(model: Any) -> torch.Tensor:
    return model(ramp(2, 3))


def named(key: str) -> Given:
    return lambda model: model(TensorDict({"a": ramp(2, 3)}))[key]


def linear(into: str = "b", key: str = "a", width: int = 3) -> Any:
    return TensorDictModule(nn.Linear(width, 2), [key], [into])


SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 11,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11}
TOKENS = torch.arange(4)[None]

KINDS: dict[str, tuple[Made, Given]] = {
    "Linear": (lambda: nn.Linear(3, 2), rows),
    "Conv2d, BatchNorm2d": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
        lambda m: m(ramp(2, 1, 4, 4)),
    ),
    "InstanceNorm1d": (
        lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        lambda m: m(ramp(2, 2, 4)),
    ),
    "LSTM": (lambda: nn.LSTM(3, 4), lambda m: m(ramp(2, 1, 3))[0]),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=3, add_bias_kv=True),
        lambda m: m(ramp(2, 1, 4), ramp(2, 1, 3), ramp(2, 1, 3))[0],
    ),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
        lambda m: m(ramp(2, 1, 4)),
    ),
    "EmbeddingBag": (
        lambda: nn.EmbeddingBag(5, 3),
        lambda m: m(torch.tensor([[0, 1], [2, 3]])),
    ),
    "ParameterDict": (
        lambda: nn.ParameterDict({"a": nn.ParameterList([torch.rand(3, 2)])}),
        lambda m: ramp(2, 3) @ m["a"][0],
    ),
    "LazyLinear": (lambda: nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()), rows),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 2)), rows),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), rows),
    "weight_norm, older": (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), rows),
    "spectral_norm, older": (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), rows),
    "pruned": (pruned, rows),
    "AveragedModel": (lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(3, 2)), rows),
    "compiled": (lambda: torch.compile(nn.Linear(3, 2), backend="eager"), rows),
    "script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))), rows),
    "quantisation-aware": (in_training_for_int8, rows),
    "TensorDictSequential": (
        lambda: TensorDictSequential(linear(), linear("c", "b", 2)),
        named("c"),
    ),
    "EnsembleModule": (lambda: EnsembleModule(linear(), 3), named("b")),
    "TensorDictParams": (Stateless, rows),
    "MultiAgentMLP": (
        lambda: agents(MultiAgentMLP, 1, 1, 3, share_params=False, depth=1, num_cells=8),
        lambda m: m(torch.ones(3, 1)),
    ),
    "MultiAgentMLP, shared": (
        lambda: agents(MultiAgentMLP, 1, 1, 3, share_params=True, depth=1, num_cells=8),
        lambda m: m(torch.ones(3, 1)),
    ),
    "MultiAgentMLP, lazy": (
        lambda: agents(MultiAgentMLP, None, 1, 3, share_params=False, depth=1, num_cells=8),
        lambda m: m(torch.ones(3, 1)),
    ),
    "MultiAgentConvNet": (
        lambda: agents(
            MultiAgentConvNet, 2, share_params=False, in_features=1, num_cells=[2], kernel_sizes=2
        ),
        lambda m: m(ramp(2, 1, 4, 4)),
    ),
    "MLP": (
        lambda: MLP(
            3, 2, num_cells=[4], norm_class=nn.LayerNorm, norm_kwargs=[{"normalized_shape": 4}]
        ),
        rows,
    ),
    "NoisyLinear": (lambda: NoisyLinear(3, 2), rows),
    "LSTMModule": (
        lambda: LSTMModule(input_size=3, hidden_size=4, in_key="o", out_key="h"),
        steps,
    ),
    "QMixer": (
        lambda: QMixer(state_shape=(3,), mixing_embed_dim=4, n_agents=2, device="cpu"),
        lambda m: m(ramp(2, 1), ramp(3)),
    ),
    "GPT2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), lambda m: m(TOKENS).logits),
    "Llama, tied": (
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
        lambda m: m(TOKENS).logits,
    ),
    "BERT": (lambda: BertModel(BertConfig(**SMALL)), lambda m: m(TOKENS).last_hidden_state),
}
