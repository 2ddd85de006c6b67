"""torch.distributed.rpc between processes of one host: workers read the publisher's memory."""

from .torch_rpc import TorchRpc

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "fill_copy"


def create() -> TorchRpc:
    """Return the publisher's side."""
    return TorchRpc("shared: torch.distributed.rpc", local=True)
