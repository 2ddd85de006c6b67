"""Real Llamas without a GPU: transformers' as it is trained, vLLM's as it is served.

vLLM's has its own layers (`qkv_proj` and `gate_up_proj` are several of the checkpoint's tensors),
and is sliced over the ranks of a gloo group. Only its attention cannot run here, and is not run.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.parallel import ParallelConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.gpu_worker import Worker

ATTENTION = "vllm.model_executor.layers.attention.attention"


def config(folder: Path, *, tied: bool = False, layers: int = 2) -> Path:
    """Write the configuration of a small Llama, and return where."""
    made = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    made.save_pretrained(folder)
    return folder


def trained(folder: Path, seed: int) -> Any:
    """Return the model as a trainer has it."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))


def group(rank: int, world: int, meeting: Path) -> None:
    """Have this process be a rank of a tensor parallel group."""
    parallel_state.init_distributed_environment(
        world_size=world,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"file://{meeting}",
        backend="gloo",
    )
    parallel_state.initialize_model_parallel(world, 1)


def served(folder: Path, rank: int = 0, world: int = 1, meeting: Path | None = None) -> Any:
    """Return a worker of vLLM's own class that serves such a model, without values.

    It has what its methods of a weight transfer use; its engine is made by vLLM's factory.
    """
    load_general_plugins()
    parallel = ParallelConfig(tensor_parallel_size=world)
    parallel.rank = rank
    given = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
        ),
        parallel_config=parallel,
        device_config=DeviceConfig(device="cpu"),
        weight_transfer_config=WeightTransferConfig(backend="weightbus"),
    )
    with set_current_vllm_config(given):
        if not parallel_state.model_parallel_is_initialized():
            group(rank, world, folder / "meeting" if meeting is None else meeting)
        attention: Any = importlib.import_module(ATTENTION)
        attention.get_attn_backend = lambda *_, **__: CPUAttentionBackend
        model = initialize_model(vllm_config=given)
    layerwise.record_metadata_for_reloading(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    worker = object.__new__(Worker)
    worker.vllm_config, worker.parallel_config = given, given.parallel_config
    worker.rank, worker.device = rank, torch.device("cpu")
    worker._weight_update_active = worker._weight_update_is_draft = False
    worker.model_runner = SimpleNamespace(
        get_model=lambda: model, reset_lora_state=lambda: None, model=model
    )
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        given.weight_transfer_config, given, worker.device, model
    )
    return worker


def loaded(folder: Path, weights: Any) -> dict[str, torch.Tensor]:
    """Return the parameters of a model that vLLM has loaded as a checkpoint."""
    worker = served(folder)
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.model.load_weights(weights)
    return parameters(worker)


def parameters(worker: Any) -> dict[str, torch.Tensor]:
    """Return copies of a worker's parameters."""
    return {n: p.detach().clone() for n, p in worker.model_runner.model.named_parameters()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two models are alike, bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8)) for n in one
    )
