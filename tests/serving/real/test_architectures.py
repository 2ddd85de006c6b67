"""Models of the families that are served most: after a transfer they answer as transformers does.

Each is made from a small configuration, dense or of experts, tied or not. What vLLM cannot reload
rightly must be refused by name: that a model answers as neither the old weights nor the new ones,
and nobody hears of it, is what must not be.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers.core_model_loading import revert_weight_conversion
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

import weightbus
from weightbus.python_client.serving import vllm_loading
from weightbus.python_client.serving.vllm_proof import SWITCH, ReloadError
from weightbus.tests.serving.real.test_llm import SECONDS, Client

WORDS = 512
PROMPT = [5, 9, 40, 77, 13, 200, 311, 8]
NEAR = 1e-3  # of a log-probability
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

# Of each: its configuration, and what differs from SMALL.
ARCHITECTURES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": False}),
    "qwen3-tied": (transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3-moe": (transformers.Qwen3MoeConfig, {"tie_word_embeddings": False, **EXPERTS}),
    "qwen3-moe-tied": (transformers.Qwen3MoeConfig, {"tie_word_embeddings": True, **EXPERTS}),
    "mistral": (transformers.MistralConfig, {"tie_word_embeddings": False}),
    "mixtral": (
        transformers.MixtralConfig,
        {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma3-tied": (transformers.Gemma3TextConfig, {"query_pre_attn_scalar": 32}),
    "phi3": (transformers.Phi3Config, {"tie_word_embeddings": False}),
}


def trained(name: str, seed: int) -> Any:
    """Return a model as a trainer has it."""
    kind, changes = ARCHITECTURES[name]
    config = kind(**{**SMALL, **changes}, dtype="float32")
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def expected(model: Any) -> list[float]:
    """Return the log-probability of each word of the prompt but the first."""
    logits = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    return [float(logits[at, word]) for at, word in enumerate(PROMPT[1:])]


def answered(llm: LLM) -> list[float]:
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (told,) = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
    found = told.prompt_logprobs or []
    return [row[word].logprob for row, word in zip(found[1:], PROMPT[1:], strict=True) if row]


def apart(one: list[float], other: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=math.inf)


@pytest.fixture(name="publisher")
def _publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[weightbus.Publisher]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with weightbus.Publisher() as publisher:
        yield publisher
    gc.collect()
    cleanup_dist_env_and_memory()  # so that the next one can be made in this process


def served(folder: Path, model: Any, **options: Any) -> LLM:
    """Serve a model from a folder, with a tokenizer of as many words as it has."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**26,
        enable_prefix_caching=False,
        disable_log_stats=True,
        compilation_config={"custom_ops": ["none"], "mode": 0},
        weight_transfer_config={"backend": "weightbus"},
        **options,
    )


class Checkpoint(WeightSource):  # type: ignore[misc]
    """Weights under the names, and in the parts, of a checkpoint, as a function returns them."""

    def __init__(self, weights: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._weights = weights

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights().items())


def source_of(name: str, model: Any) -> WeightSource:
    """Return a model's weights under the names of its checkpoint."""
    if name == "mixtral":  # transformers has other names in memory
        return Checkpoint(lambda: revert_weight_conversion(model, model.state_dict()))
    return ModuleSource(model)


def trainer_of(llm: LLM, publisher: weightbus.Publisher, source: Any, ranks: int = 1) -> Any:
    from weightbus.vllm import TrainerInit

    return WeightTransferTrainerFactory.trainer_init(
        TrainerInit(rank=0, publisher=publisher, world_size=ranks, timeout=SECONDS),
        client=Client(llm),
        source=source,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_answers_as_transformers_does(
    name: str, tmp_path: Path, publisher: weightbus.Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    old = trained(name, 1)
    llm = served(tmp_path / "model", old)
    assert "it is not proved" not in caplog.text
    assert apart(answered(llm), expected(old)) < NEAR  # also after it was proved
    new = trained(name, 2)
    assert apart(expected(new), expected(old)) > 1.0
    trainer = trainer_of(llm, publisher, source_of(name, new))
    for seed in (2, 3):
        new.load_state_dict(trained(name, seed).state_dict())
        trainer.send_weights()
        assert apart(answered(llm), expected(new)) < NEAR, f"after the version of seed {seed}"


@pytest.mark.timeout(300)
def test_names_that_are_not_the_checkpoints_are_refused(
    tmp_path: Path, publisher: weightbus.Publisher
) -> None:
    """What transformers calls `mlp` in a Mixtral, its checkpoints call `block_sparse_moe`."""
    old = trained("mixtral", 1)
    llm = served(tmp_path / "model", old)
    trainer = trainer_of(llm, publisher, ModuleSource(trained("mixtral", 2)))
    with pytest.raises(weightbus.PublishError, match=r"MixtralForCausalLM cannot load .*mlp.gate"):
        trainer.send_weights()
    assert apart(answered(llm), expected(old)) < NEAR


@contextlib.contextmanager
def as_it_was(*_: object) -> Generator[None]:
    yield


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "lost", "words"),
    [
        ("llama-tied", {"_ties": lambda _: []}, "still compute with old weights: its head"),
        ("qwen3-moe", {"_packing_experts": as_it_was}, r"compute wrongly: model.layers.0.mlp"),
    ],
)
def test_a_model_that_does_not_compute_by_what_it_is_given_is_not_served(
    name: str,
    lost: dict[str, Any],
    words: str,
    tmp_path: Path,
    publisher: weightbus.Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With vLLM's own reload alone; to start all the same is to be asked for."""
    del publisher  # it has this process ready for the next one
    for attribute, value in lost.items():
        monkeypatch.setattr(vllm_loading, attribute, value)
    with pytest.raises(ReloadError, match=words) as refused:
        served(tmp_path / "model", trained(name, 1))
    assert "cannot be updated in this vLLM" in str(refused.value)
    monkeypatch.setenv(SWITCH, "0")
    llm = served(tmp_path / "model", trained(name, 1))
    assert apart(answered(llm), expected(trained(name, 1))) < NEAR
