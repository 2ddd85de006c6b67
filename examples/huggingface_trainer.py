"""Train a tiny GPT-2 to count with Hugging Face's Trainer, and publish it every 20 steps.

python examples/huggingface_trainer.py tcp://127.0.0.1:5555     (then examples/generation_worker.py)
"""

import argparse
import logging
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import weightbus
from weightbus.python_client.training.huggingface import PublishWeights

CONFIG = GPT2Config(vocab_size=10, n_positions=16, n_embd=32, n_layer=2, n_head=2)


def main() -> None:
    """Wait for a worker, train, and log the result of each published version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("weightbus.training").setLevel(
        logging.INFO
    )  # logs the result of each version
    rows = [(torch.arange(12) + start) % 10 for start in range(10)] * 20  # 0 1 2 ... 9 0 1 ...
    with weightbus.Publisher(options.address) as publisher, tempfile.TemporaryDirectory() as folder:
        print("publishing at", publisher.address, flush=True)
        publisher.wait_for_workers(1, timeout=120)
        Trainer(
            model=GPT2LMHeadModel(CONFIG),
            args=TrainingArguments(
                folder,
                max_steps=options.steps,
                learning_rate=3e-3,
                report_to=[],
                save_strategy="no",
                use_cpu=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[PublishWeights(publisher, every=20)],
        ).train()


if __name__ == "__main__":
    main()
