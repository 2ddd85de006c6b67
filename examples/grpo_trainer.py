"""Train a tiny language model with TRL's asynchronous GRPO; other processes generate with it.

python examples/grpo_trainer.py     (pip install 'weightbus[trl]')

Two workers (examples/grpo_worker.py) answer prompts without a pause. TRL trains on their answers
and publishes the new weights after each step. The workers receive and verify new weights while they
generate, and apply them between two batches. The example downloads nothing and needs no GPU: it
makes the model from a configuration. The mean reward rises from a half to nearly one.
"""
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import argparse
import itertools
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TREE_ATTENTION

import weightbus
from weightbus.trl import WeightTransfer

WORKER = Path(__file__).with_name("grpo_worker.py")
BATCH = 32  # answers in a step of training


def main() -> None:
    """Train; print the mean reward of each step, and what TRL logged about the last update."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, weightbus.Publisher() as publisher:
        make_model(folder)
        trainer = AsyncGRPOTrainer(
            model=folder,
            args=AsyncGRPOConfig(
                output_dir=f"{folder}/out",
                max_steps=options.steps,
                per_device_train_batch_size=BATCH,
                learning_rate=1e-2,
                token_budget=0,  # no limit: the whole batch
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["0"]}),  # unused: workers choose prompts
            rollout_worker=Rollouts(folder, publisher.address, options.workers),
            weight_transfer=WeightTransfer(publisher),
        )
        AttentionInterface.register(TREE_ATTENTION, attention)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    for number, step in enumerate(steps, 1):
        print(f"step {number}: reward {step['reward']:.3f}")
    print(*(f"{name}={value:.3g}" for name, value in steps[-1].items() if "weightbus/" in name))


def make_model(folder: str) -> None:
    """Write an untrained model and its tokenizer to a folder."""
    words = {word: number for number, word in enumerate([*"0123456789", "<end>", "<pad>"])}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),  # noqa: S106 - no secret
        eos_token="<end>",  # noqa: S106
        pad_token="<pad>",  # noqa: S106
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=words["<end>"],
        eos_token_id=words["<end>"],
        pad_token_id=words["<pad>"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Rollouts:
    """TRL's source of answers (a `RolloutWorkerProtocol`): starts workers, and receives answers."""

    def __init__(self, folder: str, weights: str, count: int) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._socket = zmq.Context().socket(zmq.REP)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, str(WORKER), folder, weights, f"tcp://127.0.0.1:{port}"]
        self._commands = [[*command, "--seed", str(number)] for number in range(count)]
        self._workers: list[subprocess.Popen[bytes]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._take)

    def start(self) -> None:
        """Start the workers."""
        self._workers = [subprocess.Popen(command) for command in self._commands]  # noqa: S603
        self._thread.start()

    def stop(self) -> None:
        """End the workers."""
        self._stopping.set()
        for worker in self._workers:
            worker.kill()
            worker.wait()
        if self._workers:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """Do nothing: each group of answers has the version with which it was generated."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise an error if a worker has died. TRL calls this method when no answers arrive."""
        del stale_after_s
        dead = [worker.args for worker in self._workers if worker.poll() is not None]
        if dead:
            raise RuntimeError(f"these workers have ended: {dead}")

    def _take(self) -> None:
        for number in itertools.count():
            while not self._socket.poll(100) or self.rollout_buffer.qsize() >= BATCH:
                if self._stopping.wait(0.01):
                    return
            for sample in samples(msgspec.json.decode(self._socket.recv()), number):
                self.rollout_buffer.put(sample)
            self._socket.send(b"")


def samples(group: dict[str, Any], number: int) -> list[RolloutSample]:
    """Return the samples of a group; an advantage compares an answer with the group's mean."""
    rewards = np.array(group["rewards"])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    prompt = group["prompt"]
    return [
        RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array(prompt + answer),
            completion_mask=np.array([0] * len(prompt) + [1] * len(answer)),
            old_log_probs=np.array([0.0] * len(prompt) + log_probs, np.float32),
            advantage=float(advantage),
            model_version=group["version"],  # TRL counts updates as the bus counts versions
            group_id=number,
            metrics={"reward": float(reward)},
            enqueued_at=time.time(),
        )
        for answer, log_probs, advantage, reward in zip(
            group["answers"], group["log_probs"], advantages, rewards, strict=True
        )
    ]


# TRL 1.16 trains only on GPUs. Its functions that need a GPU are replaced here, for a CPU.


def unknown(*_: object) -> None:
    """Return None: the peak speed of this device is unknown."""


async_grpo_trainer.get_peak_flops_per_device = unknown


def attention(  # the signature is TRL's
    _module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: object,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention in which each part of an answer sees only its own path through the tree."""
    queries, keys, values = query[0], key[0][:, tree_kv_index], value[0][:, tree_kv_index]
    pieces = zip(
        itertools.pairwise(tree_cu_seqlens_q.tolist()),
        itertools.pairwise(tree_cu_seqlens_k.tolist()),
        strict=True,
    )
    seen = [
        scaled_dot_product_attention(
            queries[:, begin:end],
            keys[:, first:last],
            values[:, first:last],
            torch.ones(end - begin, last - first).tril(last - first - end + begin).bool(),
            scale=scaling,
        )
        for (begin, end), (first, last) in pieces
    ]
    return torch.cat(seen, dim=1).transpose(0, 1).unsqueeze(0), None


if __name__ == "__main__":
    main()
