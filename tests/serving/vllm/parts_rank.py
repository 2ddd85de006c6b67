"""A rank of two that records models of several architectures, and loads their parts.

    python -m weightbus.tests.serving.vllm.parts_rank RANK FOLDER NAME...

Prints for each model a line of JSON with what it needs. That it loads the same from parts as from
whole tensors is checked here.
"""

import importlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import set_current_vllm_config

from weightbus.codecs.dtypes import name_of_torch
from weightbus.codecs.layout import Signature
from weightbus.python_client.applying.loading import UnchangedError
from weightbus.python_client.serving.recording import Recording, record
from weightbus.python_client.serving.vllm_loading import LayerwiseLoader
from weightbus.tests.serving.vllm import llama

RANKS = 2
EXPERTS = "vllm.model_executor.layers.fused_moe"
Weights = dict[str, torch.Tensor]
SMALL: dict[str, Any] = {
    "vocab_size": 500,  # so that vLLM pads it
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 2,
    "dtype": "float32",
}
# Experts come first, since vLLM makes their group with the others, if the first model has any.
ARCHITECTURES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": False}),
    "gemma3": (transformers.Gemma3TextConfig, {"query_pre_attn_scalar": 32}),
    "phi3": (transformers.Phi3Config, {"tie_word_embeddings": False}),
}


def choose_kernels() -> None:
    """Have vLLM choose Triton's kernels for experts: they are made without a GPU, and not run."""
    experts: Any = importlib.import_module(f"{EXPERTS}.oracle.unquantized")
    method: Any = importlib.import_module(f"{EXPERTS}.unquantized_fused_moe_method")
    triton = experts.UnquantizedMoeBackend.TRITON
    kernel = experts.backend_to_kernel_cls(triton)[0]
    method.select_unquantized_moe_backend = lambda *_, **__: (triton, kernel)


def checkpoint(name: str, folder: Path) -> Weights:
    """Write a model's configuration; return weights of it, under the names of its checkpoints."""
    kind, changes = ARCHITECTURES[name]
    config = kind(**{**SMALL, **changes})
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    found = revert_weight_conversion(model, dict(model.named_parameters()))
    return {name: torch.rand(tensor.shape) for name, tensor in found.items()}


def cut(recording: Recording, weights: Weights) -> Weights:
    return {
        name: weights[name][tuple(slice(*ends) for ends in box)].contiguous()
        for name, box in recording.part.items()
    }


def record_one(name: str, folder: Path, rank: int) -> dict[str, Any]:
    """Record a model and check what it loads; return what it needs."""
    here = folder / f"{name}-{rank}"
    weights = checkpoint(name, here)
    tensors = {n: (name_of_torch(t.dtype), tuple(t.shape)) for n, t in weights.items()}
    worker = llama.served(here, rank, RANKS, folder / "meeting")
    with set_current_vllm_config(worker.vllm_config):
        return _checked(worker, weights, tensors)


def _checked(worker: Any, weights: Weights, tensors: dict[str, Signature]) -> dict[str, Any]:
    model, given = worker.model_runner.model, worker.vllm_config

    def loaded(load: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> Weights:
        _spoil(model)
        load(pairs)
        return llama.parameters(worker)

    wanted = loaded(model.load_weights, weights.items())
    start = time.perf_counter()
    recording = record(model, model.load_weights, tensors)
    seconds = time.perf_counter() - start
    assert recording.why_whole == "", recording.why_whole
    assert llama.equal(llama.parameters(worker), wanted), "recording has changed the model"
    local = cut(recording, weights)
    assert llama.equal(loaded(model.load_weights, recording.pairs(local.items())), wanted)
    if not recording.ordinary:
        assert llama.equal(loaded(lambda parts: _replay(recording, parts), local.items()), wanted)

    # By the reload that the engine uses.
    loader = LayerwiseLoader(model, given.model_config, given, worker.device)
    wanted = loaded(loader.load, weights.items())
    assert loader.rehearse(tensors) == ""
    assert llama.equal(llama.parameters(worker), wanted), "a rehearsal has changed the model"
    with pytest.raises(UnchangedError):
        loader.load(_failing(weights))
    assert llama.equal(llama.parameters(worker), wanted), "a failed load has changed the model"
    layered = loader.record(tensors)
    assert layered.why_whole == "", layered.why_whole
    assert llama.equal(llama.parameters(worker), wanted), "recording has changed the model"
    assert layered.part == recording.part
    assert llama.equal(loaded(loader.load, layered.pairs(local.items())), wanted)
    needed, every = recording.bits
    return {
        "part": recording.part,
        "shapes": {name: shape for name, (_, shape) in tensors.items()},
        "ordinary": sorted(recording.ordinary),
        "share": needed / every,
        "seconds": seconds,
    }


def _spoil(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)


def _failing(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield biases, which are less than a layer, and then fail."""
    for name, tensor in weights.items():
        if name.endswith("bias"):
            yield name, tensor + 1
    raise OSError


def _replay(recording: Recording, parts: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, part in parts:
        recording.apply(name, part)


if __name__ == "__main__":
    choose_kernels()
    for asked in sys.argv[3:]:
        print(json.dumps({asked: record_one(asked, Path(sys.argv[2]), int(sys.argv[1]))}))
