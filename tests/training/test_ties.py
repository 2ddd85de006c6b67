"""Models of transformers with tied weights: from a checkpoint, over the bus, to a file and back."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from weightbus import Publisher, Subscriber
from weightbus.python_client.files.file_target import FileTarget

SECONDS = 60.0
TOKENS = torch.tensor([[1, 7, 3, 11]])
# Another installation of transformers that is to read what was written, of 4.57 say; else this one.
OTHER = "WEIGHTBUS_TRANSFORMERS"
READ = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
torch.save(model(torch.tensor([[1, 7, 3, 11]])).logits.detach(), sys.argv[2])
"""


def qwen2(seed: int, *, tie: bool = True) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tie,
    )
    return Qwen2ForCausalLM(config).eval()


def gpt2(seed: int, *, tie: bool = True) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=tie
    )
    return GPT2LMHeadModel(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def untied(made: Any, seed: int) -> Any:
    """Return a model with the weights of a tied one, each name of which has memory of its own."""
    model = made(seed, tie=False)
    model.load_state_dict(made(seed).state_dict())
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    return model


@pytest.mark.parametrize("made", [qwen2, gpt2])
def test_a_checkpoint_goes_into_its_own_class_and_from_there_to_a_file(
    made: Any, tmp_path: Path
) -> None:
    source, target = made(0), made(1)
    saved, written = tmp_path / "saved", tmp_path / "written"
    source.save_pretrained(saved)
    written.mkdir()
    source.config.save_pretrained(written)
    assert not torch.equal(logits(target), logits(source))
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": target}) as worker,
        Subscriber(publisher.address, {"n": written / "model.safetensors"}) as file,
    ):
        worker.start()
        file.start()
        publisher.wait_for_workers(2, SECONDS)
        checkpoint = load_file(saved / "model.safetensors")
        assert "lm_head.weight" not in checkpoint
        publisher.publish("m", checkpoint, timeout=SECONDS)
        assert torch.equal(logits(target), logits(source))
        publisher.publish("n", target, timeout=SECONDS)
    read = AutoModelForCausalLM.from_pretrained(written).eval()
    assert torch.equal(logits(read), logits(source))
    if OTHER in os.environ:
        out = tmp_path / "logits"
        environment = os.environ | {"PYTHONPATH": os.environ[OTHER]}
        command = [sys.executable, "-c", READ, str(written), str(out)]
        subprocess.run(command, check=True, env=environment)  # noqa: S603
        torch.testing.assert_close(torch.load(out), logits(source))


@pytest.mark.parametrize("made", [qwen2, gpt2])
@pytest.mark.parametrize("tied_source", [True, False])
@pytest.mark.parametrize("tied_target", [True, False])
def test_modules_agree_with_ties_on_either_side(
    made: Any, *, tied_source: bool, tied_target: bool
) -> None:
    source = made(0) if tied_source else untied(made, 0)
    target = made(1) if tied_target else untied(made, 1)
    assert not torch.equal(logits(target), logits(source))
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": target}) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", source, timeout=SECONDS)
    assert torch.equal(logits(target), logits(source))


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("made", "embeddings"),
    [(qwen2, "model.embed_tokens.weight"), (gpt2, "transformer.wte.weight")],
)
def test_from_pretrained_reads_what_a_worker_wrote(
    made: Any, embeddings: str, untied: bool, tmp_path: Path
) -> None:
    model = made(0)
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
    assert torch.equal(logits(read.eval()), logits(model))
