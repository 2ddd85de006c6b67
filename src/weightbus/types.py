"""What calls return, and what hooks are given: nobody makes one, but annotations name them."""

from weightbus.bus.net.callbacks import WorkerEvent
from weightbus.bus.publisher.status import WorkerStatus
from weightbus.bus.receipt import Receipt, WorkerReceipt
from weightbus.python_client.applying.applier import Offer, Running, Staged, Update
from weightbus.python_client.applying.loading import Pairs
from weightbus.python_client.files.state_folder import StoredVersion

__all__ = [
    "Offer",
    "Pairs",
    "Receipt",
    "Running",
    "Staged",
    "StoredVersion",
    "Update",
    "WorkerEvent",
    "WorkerReceipt",
    "WorkerStatus",
]
