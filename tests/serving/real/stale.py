"""Serve a model of two ranks, of which one does not load its head, and end.

    STALE_RANK=1 python -m weightbus.tests.serving.real.stale FOLDER

In a process of its own, since a vLLM that does not start may leave sockets that it waits for.
"""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from weightbus.python_client.serving.vllm_loading import LayerwiseLoader
from weightbus.tests.serving.real.test_architectures import served, trained

WORKER = "weightbus.tests.serving.real.stale.StaleHead"  # vLLM starts the ranks' processes


class StaleHead(CPUWorker):  # type: ignore[misc]
    """A worker of which one rank loads all but its head, which keeps its first values."""

    def load_model(self, *given: Any, **named: Any) -> None:
        if self.rank == int(os.environ["STALE_RANK"]):
            load = LayerwiseLoader.load

            def all_but_head(loader: LayerwiseLoader, pairs: Any) -> None:
                load(loader, (pair for pair in pairs if pair[0] != "lm_head.weight"))

            LayerwiseLoader.load = all_but_head  # type: ignore[assignment,method-assign]
        super().load_model(*given, **named)


if __name__ == "__main__":
    try:
        served(Path(sys.argv[1]), trained("llama", 1), tensor_parallel_size=2, worker_cls=WORKER)
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)
