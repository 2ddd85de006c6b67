"""The types of results and of callbacks' arguments, for annotations; only weightbus makes them."""

from weightbus.bus.net.callbacks import WorkerEvent
from weightbus.bus.publisher.status import HeldVersion, WorkerStatus
from weightbus.bus.receipt import Receipt, Receipts, WorkerReceipt
from weightbus.lazy import lazy
from weightbus.python_client.applying.applier import Offer, Running, Staged, Update
from weightbus.python_client.applying.loading import Pairs
from weightbus.python_client.files.state_folder import StoredVersion
from weightbus.python_client.observing.relay_status import RelayStatus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from weightbus.python_client.publishing.gathering import Gathered
    from weightbus.python_client.publishing.sharded import Sharded

__all__ = [
    "Gathered",
    "HeldVersion",
    "Offer",
    "Pairs",
    "Receipt",
    "Receipts",
    "RelayStatus",
    "Running",
    "Sharded",
    "Staged",
    "StoredVersion",
    "Update",
    "WorkerEvent",
    "WorkerReceipt",
    "WorkerStatus",
]

# These types need torch, so they are loaded when they are first used.
__getattr__, __dir__ = lazy(
    globals(),
    "weightbus",
    {
        "Gathered": "python_client.publishing.gathering",
        "Sharded": "python_client.publishing.sharded",
    },
)
