"""TorchRL's SharedMemWeightSyncScheme, with isolation: a shared buffer between the two sides.

`send` copies the trainer's weights into the buffer, notifies each worker through a queue, and waits
for the acknowledgements; each worker copies from the buffer into its own model (see
`torchrl_peer.py`).
"""

from typing import TYPE_CHECKING, Any

from ..torchrl_peer import TorchRL, tensordict_of, work

if TYPE_CHECKING:
    from tensordict import TensorDict

NEEDS: tuple[str, ...] = ("torchrl",)
LIMIT = "fill_copy"

__all__ = ["LIMIT", "NEEDS", "create", "work"]


class TorchRLShared(TorchRL):
    """The publisher's side."""

    title = "shared: TorchRL SharedMem"
    module = "torchrl_shared"

    def scheme(self) -> Any:
        from torchrl.weight_update import SharedMemWeightSyncScheme  # pyright: ignore[reportMissingTypeStubs]

        return SharedMemWeightSyncScheme()

    def weights(self) -> "TensorDict":
        return tensordict_of(self.model).clone().share_memory_()

    def sent(self) -> "TensorDict":
        return tensordict_of(self.model)


def create() -> TorchRLShared:
    """Return the publisher's side."""
    return TorchRLShared()
