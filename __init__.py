"""weightbus: publish a model's weights once; every worker applies them in place, verified.

This is the face: users import from here, and everything else may move. Each name is loaded when it
is first used, so that importing the package costs nothing and needs neither torch nor ZeroMQ.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bus.errors import (
        AddressError,
        ApplyError,
        ClosedError,
        ProtocolError,
        PublishError,
        RefusedError,
        UnknownWorkerError,
        WorkersMissingError,
    )
    from .bus.limits import Timing
    from .bus.receipt import Receipt, WorkerReceipt
    from .bus.status import WorkerStatus
    from .codecs.errors import LayoutError, StateError, WeightBusError
    from .python_client.publisher import Publisher
    from .python_client.subscriber import Subscriber, Update

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "ApplyError",
    "ClosedError",
    "LayoutError",
    "ProtocolError",
    "PublishError",
    "Publisher",
    "Receipt",
    "RefusedError",
    "StateError",
    "Subscriber",
    "Timing",
    "UnknownWorkerError",
    "Update",
    "WeightBusError",
    "WorkerReceipt",
    "WorkerStatus",
    "WorkersMissingError",
    "__version__",
]

# Where each public name lives.
_HOMES = {
    "AddressError": "bus.errors",
    "ApplyError": "bus.errors",
    "ClosedError": "bus.errors",
    "LayoutError": "codecs.errors",
    "ProtocolError": "bus.errors",
    "PublishError": "bus.errors",
    "Publisher": "python_client.publisher",
    "Receipt": "bus.receipt",
    "RefusedError": "bus.errors",
    "StateError": "codecs.errors",
    "Subscriber": "python_client.subscriber",
    "Timing": "bus.limits",
    "UnknownWorkerError": "bus.errors",
    "Update": "python_client.subscriber",
    "WeightBusError": "codecs.errors",
    "WorkerReceipt": "bus.receipt",
    "WorkerStatus": "bus.status",
    "WorkersMissingError": "bus.errors",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value  # found without us from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
