"""Count with the newest weights of examples/huggingface_trainer.py, until no more versions arrive.

python examples/generation_worker.py tcp://127.0.0.1:5555
"""

import argparse
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from weightbus.python_client.training.generation import GenerationWorker

CONFIG = GPT2Config(vocab_size=10, n_positions=16, n_embd=32, n_layer=2, n_head=2)


def main() -> None:
    """Generate with every version that arrives; end when none has arrived for `--seconds`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=20.0, help="to wait for another version")
    parser.add_argument("--versions", type=int, default=sys.maxsize, help="end after so many")
    options = parser.parse_args()
    model, prompt = GPT2LMHeadModel(CONFIG).eval(), torch.tensor([[3, 4]])
    with GenerationWorker(options.address, model) as worker:
        while worker.version < options.versions and worker.wait_for_version(options.seconds):
            tokens = worker.generate(
                prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
            )
            print(f"version {worker.version}:", *tokens[0].tolist(), flush=True)


if __name__ == "__main__":
    main()
