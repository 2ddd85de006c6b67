"""The failures of `tests/serving/test_failures.py`, with vLLM's own workers, reload and models.

Two processes are the ranks of one tensor parallel model, each with its own half of most layers.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import layerwise

from weightbus.tests.serving.ranks import Kind
from weightbus.tests.serving.test_failures import (
    RANKS,
    _deployed,
    _deployment,
    test_a_rank_that_fails,
    test_all_ranks_load_what_is_sent,
)
from weightbus.tests.serving.vllm import llama

__all__ = ["_deployed", "_deployment", "test_a_rank_that_fails", "test_all_ranks_load_what_is_sent"]


class RealEngine:
    """What `Served` asks of a rank, of vLLM's worker."""

    def __init__(self, folder: Path, worker: Any) -> None:
        self._folder, self.model = folder, worker.model_runner.model
        self._worker, self.rank = worker, vars(worker.weight_transfer_engine)["_rank"]
        own = self.model.load_weights

        def load_weights(pairs: Any) -> Any:
            def told() -> Any:
                for n, pair in enumerate(pairs):
                    yield pair
                    self.loaded(n)

            return own(told())

        self.model.load_weights = load_weights

    def loaded(self, n: int) -> None:
        """The `n`th tensor is loaded (or rehearsed)."""

    def reshape(self, more: int) -> None:
        self.model.model.norm.weight = torch.nn.Parameter(torch.zeros(64 + more))
        layerwise.record_metadata_for_reloading(self.model)

    def sum(self) -> str:
        return _summed(self._worker)

    def expected(self, value: float) -> str:
        """Have vLLM load it as it loads a checkpoint."""
        worker = llama.served(self._folder)
        with set_current_vllm_config(worker.vllm_config):
            worker.model_runner.model.load_weights(_weights(self._folder, value).items())
        return _summed(worker)


def _summed(worker: Any) -> str:
    hashed = hashlib.sha256()
    for name, parameter in sorted(llama.parameters(worker).items()):
        hashed.update(name.encode() + parameter.numpy().tobytes())
    return hashed.hexdigest()


def _weights(folder: Path, value: float) -> Mapping[str, torch.Tensor]:
    found: Mapping[str, torch.Tensor] = llama.trained(folder, int(value)).state_dict()
    return found


def _real(folder: Path, number: int, start: int) -> tuple[Any, Any]:
    worker = llama.served(folder, number, RANKS, folder / f"meeting-{start}")
    return worker, RealEngine(folder, worker)


@pytest.fixture(name="kind", scope="module")
def _kind(tmp_path_factory: pytest.TempPathFactory) -> Kind:
    folder = llama.config(tmp_path_factory.mktemp("llama"))
    return Kind(partial(_real, folder), partial(_weights, folder))
