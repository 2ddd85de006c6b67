"""The proof at an engine's start, on a rank of two that share each layer.

Only that rank is there: a group in its process joins what it computes with the other's part, which
is new after each load, as if the other rank loaded everything.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state

from weightbus.python_client.serving import vllm_proof
from weightbus.python_client.serving.vllm_proof import ReloadError, prove

RANKS, WORDS, WIDE = 2, 64, 4


class Group:
    """vLLM's `GroupCoordinator` of two ranks, in the process of one."""

    world_size = RANKS

    def __init__(self, rank: int) -> None:
        self.rank_in_group, self.other = rank, 0.0

    def all_reduce(self, given: torch.Tensor) -> torch.Tensor:
        return given + self.other

    def all_gather(self, given: torch.Tensor, dim: int = -1) -> torch.Tensor:
        both = [torch.full_like(given, self.other)] * RANKS
        both[self.rank_in_group] = given
        return torch.cat(both, dim)


class Rows(torch.nn.Module):
    """The half of an embedding's rows that a rank has; the ranks' outputs are added."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self.weight = torch.nn.Parameter(torch.rand(WORDS // RANKS, WIDE))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = len(self.weight)
        at = ids - self._group.rank_in_group * rows
        mine = (at >= 0) & (at < rows)
        return self._group.all_reduce(self.weight[at.clamp(0, rows - 1)] * mine[:, None])


class Columns(torch.nn.Module):
    """A rank's columns of a layer; the ranks' outputs are added."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self.weight = torch.nn.Parameter(torch.rand(WIDE, WIDE))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(hidden @ self.weight)


class Model(torch.nn.Module):
    """One rank's part of a model.

    Args:
        group: Of the rank.
        stale: The parameter that no load reaches, or "".
    """

    def __init__(self, group: Group, stale: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self._group, self._stale = group, stale
        self.embed, self.down = Rows(group), Columns(group)
        self.head = torch.nn.Parameter(torch.rand(WIDE, WORDS // RANKS))
        self.own = {name: tensor.detach().clone() for name, tensor in self.named_parameters()}

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        del positions
        hidden: torch.Tensor = self.down(self.embed(input_ids))
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(hidden @ self.head)

    @torch.no_grad()
    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load into this rank, and into the other one."""
        own = dict(self.named_parameters())
        self._group.other = 0.0
        for name, tensor in pairs:
            self._group.other += float(tensor.sum())
            if name != self._stale:
                own[name].copy_(tensor)


def proved(monkeypatch: pytest.MonkeyPatch, model: Model, group: Group) -> None:
    """Prove a model, which is loaded from its own checkpoint."""
    monkeypatch.setattr(parallel_state, "_TP", group)
    monkeypatch.setattr(vllm_proof, "_checkpoint", lambda *_: iter(model.own.items()))
    monkeypatch.setattr(vllm_proof, "set_forward_context", lambda *_, **__: nullcontext())
    config: Any = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: WORDS))
    model.load(model.own.items())
    prove(model, config, torch.device("cpu"), model.load)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    ("stale", "part"), [("embed.weight", "embed"), ("down.weight", "down"), ("head", "its head")]
)
def test_what_one_rank_alone_does_not_load_is_refused_by_its_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, stale: str, part: str
) -> None:
    group = Group(rank)
    words = f"rank {rank} of 2, these parts of it still compute with old weights: {part}[.,]"
    with pytest.raises(ReloadError, match=words):
        proved(monkeypatch, Model(group, stale), group)


@pytest.mark.parametrize("rank", range(RANKS))
def test_ranks_that_load_all_are_served_and_joined_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    group = Group(rank)
    proved(monkeypatch, Model(group), group)
    assert "it is not proved" not in caplog.text
    assert bool(group.all_reduce(torch.zeros(1)).any())  # the other rank's part


def test_a_rank_that_has_nothing_to_add_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose experts no token chooses, or whose rows only pad the vocabulary."""
    group = Group(rank=1)
    model = Model(group)
    monkeypatch.setattr(
        model.embed, "forward", lambda ids: group.all_reduce(torch.zeros(len(ids), WIDE))
    )
    proved(monkeypatch, model, group)
    assert "it is not proved" not in caplog.text
