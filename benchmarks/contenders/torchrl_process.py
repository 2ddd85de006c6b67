"""TorchRL's MultiProcessWeightSyncScheme, with isolation: weights through a queue to each worker.

Multiprocessing's queues carry handles of the tensors' shared memory; the first `send` moves tensors
to shared memory if they are not there yet. So the trainer's parameters are in shared memory from
the start, and each worker copies from them into its own model (see `torchrl_peer.py`). The cost is
at the trainer: it must not take its next step before all workers have acknowledged, which `send`
waits for.
"""

from typing import TYPE_CHECKING, Any

from ..torchrl_peer import TorchRL, tensordict_of, work

if TYPE_CHECKING:
    from tensordict import TensorDict

NEEDS: tuple[str, ...] = ("torchrl",)
LIMIT = "fill_copy"

__all__ = ["LIMIT", "NEEDS", "create", "work"]


class TorchRLProcess(TorchRL):
    """The publisher's side."""

    title = "shared: TorchRL MultiProcess"
    module = "torchrl_process"

    def scheme(self) -> Any:
        from torchrl.weight_update import MultiProcessWeightSyncScheme  # pyright: ignore[reportMissingTypeStubs]

        return MultiProcessWeightSyncScheme()

    def weights(self) -> "TensorDict":
        self._shared = tensordict_of(self.model).share_memory_()
        self.model.arrays = {name: t.numpy() for name, t in self._shared.items()}
        return self._shared

    def sent(self) -> "TensorDict":
        return self._shared


def create() -> TorchRLProcess:
    """Return the publisher's side."""
    return TorchRLProcess()
