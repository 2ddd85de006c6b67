"""Trains a base model on text, and fine-tunes it by REINFORCE with a baseline.

In the text, most answers repeat their questions, and a few are the questions backwards. So the base
model gives both kinds of answers; the reward is for the second kind.
"""

# torch leaves some of its signatures unannotated.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from .answers import Answers
from .transformer import (
    EPSILON,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    LETTERS,
    MARK,
    POSITIONS,
    TOKENS,
    WIDTH,
    encode,
)

TEXT_STEPS, TEXT_BATCH, TEXT_RATE = 900, 64, 4e-3
BACKWARDS = 0.2  # the part of the text's answers that are backwards
LEARNING_RATE = 1e-3
BASELINE_DECAY = 0.9
GRADIENT_NORM_MAX = 1.0


class Block(nn.Module):
    """Attention, and a perceptron of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, EPSILON)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH, EPSILON)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (texts, positions, WIDTH) to the same shape."""
        mixed = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(-2))
        hidden: Tensor = functional.relu(self.up(self.mlp_norm(x)))
        found: Tensor = x + self.down(hidden)
        return found


class LanguageModel(nn.Module):
    """The model that is published."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(TOKENS), WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, EPSILON)
        self.head = nn.Linear(WIDTH, len(TOKENS), bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token after each position of (texts, positions)."""
        x: Tensor = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found

    def of_answers(self, questions: Tensor, answers: Tensor) -> Tensor:
        """Return the log-probabilities of all tokens at each letter of the answers."""
        mark = questions.new_full((len(questions), 1), TOKENS.index(MARK))
        read = torch.cat([questions, mark, answers[:, :-1]], 1)
        return torch.log_softmax(self(read)[:, LENGTH:], -1)


class LanguageLearner:
    """Improves the model.

    Attributes:
        policy: The model, which is published; at first, the base model.
    """

    def __init__(self, seed: int = 0) -> None:
        torch.set_num_threads(1)  # the model is tiny, and the workers want the other cores
        torch.manual_seed(seed)
        self.policy = LanguageModel()
        self._read_text()
        self._optimizer = torch.optim.Adam(self.policy.parameters(), LEARNING_RATE)
        self._baseline: Tensor | None = None  # by letter: the mean reward from there on

    def _read_text(self) -> None:
        """Train the base model: some seconds of supervised learning."""
        optimizer = torch.optim.Adam(self.policy.parameters(), TEXT_RATE)
        slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TEXT_STEPS)
        for _ in range(TEXT_STEPS):
            questions = torch.randint(len(LETTERS), (TEXT_BATCH, LENGTH))
            backwards = torch.rand(TEXT_BATCH, 1) < BACKWARDS
            answers = torch.where(backwards, questions.flip(1), questions)
            scores = self.policy.of_answers(questions, answers)
            self._step(optimizer, functional.nll_loss(scores.flatten(0, 1), answers.flatten()))
            slower.step()

    def improve(self, batches: Sequence[Answers], progress: float) -> None:
        """Update the model from answers: each letter is weighted by the reward from there on.

        Args:
            batches: At least one batch of answers.
            progress: From 0 at the start of the run to 1 at its end, where updates are smallest.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.05, 1.0 - progress)
        questions = torch.from_numpy(encode([q for b in batches for q in b.questions]))
        answers = torch.from_numpy(encode([a for b in batches for a in b.answers]))
        right = (answers == questions.flip(1)).float()
        to_go = right.flip(1).cumsum(1).flip(1)
        mean = to_go.mean(0)
        advantage = to_go - (mean if self._baseline is None else self._baseline)
        chosen = self.policy.of_answers(questions, answers).gather(2, answers.unsqueeze(2))
        self._step(self._optimizer, -(advantage * chosen.squeeze(2)).mean())
        before = mean if self._baseline is None else self._baseline
        self._baseline = BASELINE_DECAY * before + (1 - BASELINE_DECAY) * mean

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
