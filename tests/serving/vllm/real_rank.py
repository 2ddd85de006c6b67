"""A rank of a stand-in server that is vLLM's own worker, of a real Llama; see `ranks`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import layerwise

from weightbus.tests.serving.ranks import RANKS
from weightbus.tests.serving.vllm import llama


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
        return summed(self._worker)

    def expected(self, value: float) -> str:
        """Have vLLM load it as it loads a checkpoint."""
        worker = llama.served(self._folder)
        with set_current_vllm_config(worker.vllm_config):
            worker.model_runner.model.load_weights(weights(self._folder, value).items())
        return summed(worker)


def summed(worker: Any) -> str:
    hashed = hashlib.sha256()
    for name, parameter in sorted(llama.parameters(worker).items()):
        hashed.update(name.encode() + parameter.numpy().tobytes())
    return hashed.hexdigest()


def weights(folder: Path, value: float) -> Mapping[str, torch.Tensor]:
    found: Mapping[str, torch.Tensor] = llama.trained(folder, int(value)).state_dict()
    return found


def real(folder: Path, number: int, start: int) -> tuple[Any, Any]:
    worker = llama.served(folder, number, RANKS, folder / f"meeting-{start}")
    return worker, RealEngine(folder, worker)
