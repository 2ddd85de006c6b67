"""The language model in a worker: a transformer in numpy.

A text is a question of a few letters, a mark, and an answer of the same length. The names and
shapes of the weights are those of the trainer's `nn.Module` (learner.py).

The weights are float32, but workers compute in double precision. Workers that add in another order,
or in another language, then differ by some 1e-15, while the logits of the two best letters of a
greedy answer differ by at least 1e-6. So all workers write the same letters with the same version.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

LETTERS = "abcdefgh"
MARK = ">"  # between question and answer
TOKENS = LETTERS + MARK
LENGTH = 6  # letters of a question, and of its answer
POSITIONS = 2 * LENGTH  # inputs of a text: the last letter is only predicted, never an input
WIDTH, HEADS, LAYERS, HIDDEN = 32, 2, 2, 64
EPSILON = 1e-5  # of the norms

# Questions that every worker answers greedily with each version, so that they can be compared.
ASKED = ("abcdef", "hgfedc", "bbbagh", "cafeda")

Weights = dict[str, NDArray[np.float32]]
Double = NDArray[np.float64]
Indices = NDArray[np.int64]
Pick = Callable[[Double], Indices]


def numpy_weights() -> Weights:
    """Return arrays for the weights, by name."""
    block = {
        "attention_norm": (WIDTH,),
        "qkv": (3 * WIDTH, WIDTH),
        "projection": (WIDTH, WIDTH),
        "mlp_norm": (WIDTH,),
        "up": (HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (len(TOKENS), WIDTH),
        "positions": (POSITIONS, WIDTH),
        **{f"blocks.{n}.{name}": shape for n in range(LAYERS) for name, shape in block.items()},
        "norm": (WIDTH,),
        "head": (len(TOKENS), WIDTH),
    }
    return {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}


class Transformer:
    """One version of the model, with a copy of its weights in double precision.

    Args:
        weights: The weights by name, which are copied.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def logits(self, tokens: Indices) -> Double:
        """Return the logits of the next token, (texts, TOKENS), after texts (texts, positions)."""
        count = tokens.shape[1]
        x = self._weights["embedding.weight"][tokens] + self._weights["positions.weight"][:count]
        for number in range(LAYERS):
            x = x + self._attention(f"blocks.{number}", x)
            x = x + self._mlp(f"blocks.{number}", x)
        found: Double = self._norm("norm", x[:, -1]) @ self._weights["head.weight"].T
        return found

    def answers(self, questions: Sequence[str], pick: Pick) -> list[str]:
        """Write an answer to each question; `pick` chooses each letter from the logits."""
        tokens = encode([question + MARK for question in questions])
        for _ in range(LENGTH):
            tokens = np.concatenate([tokens, pick(self.logits(tokens))[:, None]], axis=1)
        return decode(tokens[:, LENGTH + 1 :])

    def _attention(self, block: str, x: Double) -> Double:
        texts, count, _ = x.shape
        mixed = self._norm(f"{block}.attention_norm", x) @ self._weights[f"{block}.qkv.weight"].T
        parts = mixed.reshape(texts, count, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.transpose(2, 0, 3, 1, 4)
        scores = query @ key.swapaxes(-1, -2) / math.sqrt(WIDTH // HEADS)
        scores = scores + np.triu(np.full((count, count), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares = shares / shares.sum(-1, keepdims=True)
        seen = (shares @ value).transpose(0, 2, 1, 3).reshape(texts, count, WIDTH)
        found: Double = seen @ self._weights[f"{block}.projection.weight"].T
        return found

    def _mlp(self, block: str, x: Double) -> Double:
        hidden = self._norm(f"{block}.mlp_norm", x) @ self._weights[f"{block}.up.weight"].T
        found: Double = np.maximum(hidden, 0.0) @ self._weights[f"{block}.down.weight"].T
        return found

    def _norm(self, name: str, x: Double) -> Double:
        mean = np.square(x).mean(-1, keepdims=True)
        found: Double = x / np.sqrt(mean + EPSILON) * self._weights[f"{name}.weight"]
        return found


def greedy(logits: Double) -> Indices:
    """Pick the most likely token of each text; of equally likely tokens, the first."""
    found: Indices = logits.argmax(-1)
    return found


def sampling(luck: np.random.Generator) -> Pick:
    """Return a function that picks a token of each text at random, by probability."""
    return lambda logits: (logits + luck.gumbel(size=logits.shape)).argmax(-1)


def encode(texts: Sequence[str]) -> Indices:
    """Return texts of equal length as tokens, (texts, positions).

    Raises:
        ValueError: A text has a character that the model does not know.
    """
    return np.array([[TOKENS.index(letter) for letter in text] for text in texts], np.int64)


def decode(tokens: Indices) -> list[str]:
    """Return tokens as texts."""
    return ["".join(TOKENS[token] for token in row) for row in tokens.tolist()]


def reward(question: str, answer: str) -> float:
    """Return the fraction of letters of an answer that match the question backwards."""
    right = sum(a == b for a, b in zip(question[::-1], answer, strict=True))
    return right / len(question)
