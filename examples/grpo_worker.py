"""Generate and reward answers with the newest weights of examples/grpo_trainer.py.

python examples/grpo_worker.py FOLDER WEIGHTS ANSWERS

The worker subscribes to the weights at one address, and sends groups of answers, as JSON, to the
other address. A worker in another language would do the same.
"""

import argparse
import random

import msgspec
import torch
import zmq
from transformers import AutoModelForCausalLM

from weightbus.python_client.training.generation import GenerationWorker

DIGITS = 10  # tokens 0 to 9
LENGTH = 8  # tokens of an answer
ANSWERS = 8  # answers of a group


def worth(answer: list[int]) -> float:
    """Return the reward of an answer: the larger its digits the better, 1 at most."""
    return sum(token for token in answer if token < DIGITS) / (len(answer) * (DIGITS - 1))


def main() -> None:
    """Answer until the trainer ends this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the model lies that training starts from")
    parser.add_argument("weights", help="where its newest weights are published")
    parser.add_argument("answers", help="where answers go")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.folder).eval()
    trainer = zmq.Context().socket(zmq.REQ)
    trainer.connect(options.answers)
    with GenerationWorker(options.weights, model, name=f"worker-{options.seed}") as worker:
        worker.wait_for_version(timeout=60)
        while True:
            prompt = [draw.randrange(DIGITS)]
            made = worker.generate(  # applies the newest weights first
                torch.tensor([prompt] * ANSWERS),
                max_new_tokens=LENGTH,
                min_new_tokens=LENGTH,
                do_sample=True,
                return_dict_in_generate=True,
                output_logits=True,
            )
            answers = made.sequences[:, len(prompt) :]
            chances = torch.stack(made.logits, dim=1).log_softmax(-1)
            group = {
                "version": worker.version,
                "prompt": prompt,
                "answers": answers.tolist(),
                "log_probs": chances.gather(2, answers.unsqueeze(2)).squeeze(2).tolist(),
                "rewards": [worth(answer) for answer in answers.tolist()],
            }
            trainer.send(msgspec.json.encode(group))
            trainer.recv()  # returns once the trainer has room for more answers


if __name__ == "__main__":
    main()
