"""A small model, and a `vllm serve` of it on this processor, with all of its processes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import transformers
from tokenizers import Tokenizer, models

from weightbus.tests.compose.waiting import wait_for

WORDS = 512
START_SECONDS = 480.0  # three processes, one after the other, import all of vLLM
LIMIT = 600  # seconds for a test, which may be the one that starts it
KILL_SECONDS = 30.0
LORA_RANK = 8
PROMPT = [5, 9, 40, 77]
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def config(**sizes: Any) -> transformers.Qwen3Config:
    """Return a configuration with weights so large that each seed answers in words of its own."""
    given = {**SMALL, "initializer_range": 0.2, **sizes}
    return transformers.Qwen3Config(
        **given,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        bos_token_id=0,
        eos_token_id=1,
    )


def trained(seed: int, **sizes: Any) -> transformers.Qwen3ForCausalLM:
    """Return a model as a trainer has it."""
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(config(**sizes)).eval()


def saved(folder: Path, model: transformers.PreTrainedModel) -> Path:
    """Save a model, with a tokenizer of as many words as it has."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def answer_of(model: transformers.PreTrainedModel, length: int = 16) -> list[int]:
    """Return what transformers answers to the prompt."""
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(length):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(PROMPT) :].tolist()


def chosen(model: transformers.PreTrainedModel, answer: list[int]) -> list[bool]:
    """Return which words of an answer to the prompt are those that transformers would choose.

    The model reads all that is before a word. Rounding may decide where two are as good.
    """
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1]
    said = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return (logits.max(-1).values - said < 0.01).tolist()


def answers(url: str) -> bool:
    """True if a server with a live engine answers there."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200
    return False


class Served:
    """A `vllm serve` with weightbus's engine, in a process group of its own.

    Args:
        folder: Its model.
        log: Where its words go.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(2**27), "--enforce-eager"),
            *("--enable-lora", "--max-lora-rank", str(LORA_RANK)),
            *("--compilation-config", '{"custom_ops": ["none"], "mode": 0}'),
            *("--weight-transfer-config", '{"backend": "weightbus"}'),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    def start(self) -> None:
        """Start it, and return when it answers."""
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - of ours
                self._command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self._up, "vllm serve answers", START_SECONDS)

    def _up(self) -> bool:
        assert self._process is not None, "it was never started"
        assert self._process.poll() is None, self.said()
        return answers(self.url)

    def signal(self, number: int) -> None:
        """Send all of its processes a signal."""
        assert self._process is not None, "it was never started"
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill all of its processes at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(KILL_SECONDS)
            self._process = None

    def kill_rank(self) -> None:
        """Kill the process that has the weights, and wait until the server reports an error."""
        assert self._process is not None, "it was never started"
        children = psutil.Process(self._process.pid).children(recursive=True)
        rank = next(child for child in children if "Worker" in child.name())
        rank.kill()
        wait_for(lambda: not answers(self.url), "vllm serve misses its rank", KILL_SECONDS)

    def close(self) -> None:
        """Kill it, and ask it no more."""
        self.kill()
        self._client.close()

    def said(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-5000:]

    def get(self, path: str) -> dict[str, Any]:
        """Ask one of its routes."""
        return self._client.get(path).raise_for_status().json()

    def answer(self, length: int = 16, model: str = "policy") -> list[int]:
        """Return what it answers to the prompt."""
        return [token for tokens in self.stream(length, model) for token in tokens]

    def stream(self, length: int, model: str = "policy") -> Generator[list[int]]:
        """Iterate over what it answers, as it comes."""
        asked = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with self._client.stream("POST", "/v1/completions", json=asked) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                said = line.removeprefix("data: ")
                if line and said != "[DONE]":
                    yield json.loads(said)["choices"][0]["token_ids"]
