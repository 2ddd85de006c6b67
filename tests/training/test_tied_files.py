"""Tied models of Hugging Face transformers, through the bus into a file, and out of it again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from weightbus import Publisher, Subscriber
from weightbus.python_client.files.file_target import FileTarget

SECONDS = 60.0
SMALL: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Any] = {
    "transformer.wte.weight": transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, **SMALL)
    ),
    "model.embed_tokens.weight": transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            **SMALL,
        )
    ),
}


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("embeddings", MODELS)
def test_from_pretrained_reads_what_a_worker_wrote(
    tmp_path: Path, embeddings: str, untied: bool
) -> None:
    model = MODELS[embeddings].eval()
    model.config.save_pretrained(tmp_path)
    target = FileTarget(tmp_path / "model.safetensors", untied=untied)
    with Publisher() as publisher, Subscriber(publisher.address, {"m": target}) as worker:
        worker.start()
        assert worker.wait_joined(SECONDS)
        publisher.publish("m", model, timeout=SECONDS)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
    assert metadata["format"] == "pt", "transformers 4 reads no file without it"
    assert embeddings in names
    assert ("lm_head.weight" in names) == untied
    read, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not [*told["missing_keys"], *told["unexpected_keys"]]
    words = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(read.eval()(words).logits, model(words).logits)
