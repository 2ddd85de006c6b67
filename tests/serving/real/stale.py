"""A worker of vLLM with a fault on one rank. vLLM starts the ranks' processes, so it is named."""

import os
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from weightbus.python_client.serving.vllm_loading import LayerwiseLoader


class StaleHead(CPUWorker):  # type: ignore[misc]
    """A worker of which one rank loads all but its head, which keeps its first values."""

    def load_model(self, *given: Any, **named: Any) -> None:
        if self.rank == int(os.environ["STALE_RANK"]):
            load = LayerwiseLoader._load  # noqa: SLF001

            def all_but_head(loader: LayerwiseLoader, pairs: Any) -> None:
                load(loader, (pair for pair in pairs if pair[0] != "lm_head.weight"))

            LayerwiseLoader._load = all_but_head  # type: ignore[assignment,method-assign]  # noqa: SLF001
        super().load_model(*given, **named)
