"""weightbus: publish a model's weights once; every worker applies them in place, verified.

Users import names only from this package and the modules named below; all other modules may change.
Each name is loaded when it is first used, so that importing the package is fast and needs neither
torch nor ZeroMQ. Public classes set their `__module__` to `weightbus`, as `help()` and tracebacks
show. `weightbus.types` has the types of results; `weightbus.ray`, `weightbus.torchrl`,
`weightbus.torchrun`, `weightbus.trl` and `weightbus.vllm` have the names for users of Ray, TorchRL,
torchrun, TRL and vLLM.
"""

from importlib import import_module

from .lazy import lazy

TYPE_CHECKING = False  # not from `typing`, which takes longer than everything else here
if TYPE_CHECKING:
    from weightbus import ray as ray
    from weightbus import torchrl as torchrl
    from weightbus import torchrun as torchrun
    from weightbus import trl as trl
    from weightbus import types as types
    from weightbus import vllm as vllm

    from .bus.errors import (
        AddressError,
        ApplyError,
        ClosedError,
        DeadlineError,
        KeysError,
        ProtocolError,
        PublishError,
        RefusedError,
        TornError,
        UnknownWorkerError,
        WorkersMissingError,
    )
    from .bus.trust.keys import PublisherKeys, RelayKeys, WorkerKeys
    from .codecs.errors import LayoutError, StateError, WeightBusError
    from .python_client.applying.loading import UnchangedError
    from .python_client.applying.parts import Part
    from .python_client.applying.resident import resident
    from .python_client.files.file_target import FileTarget
    from .python_client.files.restart import load
    from .python_client.files.state_folder import StateFolderError
    from .python_client.observing.access import Http
    from .python_client.publisher import Publisher
    from .python_client.publishing.gathering import gather
    from .python_client.publishing.sharded import sharded
    from .python_client.relay import Relay
    from .python_client.settings import Settings
    from .python_client.subscriber import Subscriber

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "ApplyError",
    "ClosedError",
    "DeadlineError",
    "FileTarget",
    "Http",
    "KeysError",
    "LayoutError",
    "Part",
    "ProtocolError",
    "PublishError",
    "Publisher",
    "PublisherKeys",
    "RefusedError",
    "Relay",
    "RelayKeys",
    "Settings",
    "StateError",
    "StateFolderError",
    "Subscriber",
    "TornError",
    "UnchangedError",
    "UnknownWorkerError",
    "WeightBusError",
    "WorkerKeys",
    "WorkersMissingError",
    "gather",
    "load",
    "resident",
    "sharded",
]

# The module that defines each public name.
_HOMES = {
    "AddressError": "bus.errors",
    "ApplyError": "bus.errors",
    "ClosedError": "bus.errors",
    "DeadlineError": "bus.errors",
    "FileTarget": "python_client.files.file_target",
    "Http": "python_client.observing.access",
    "KeysError": "bus.errors",
    "LayoutError": "codecs.errors",
    "Part": "python_client.applying.parts",
    "ProtocolError": "bus.errors",
    "PublishError": "bus.errors",
    "Publisher": "python_client.publisher",
    "PublisherKeys": "bus.trust.keys",
    "RefusedError": "bus.errors",
    "Relay": "python_client.relay",
    "RelayKeys": "bus.trust.keys",
    "Settings": "python_client.settings",
    "StateError": "codecs.errors",
    "StateFolderError": "python_client.files.state_folder",
    "Subscriber": "python_client.subscriber",
    "TornError": "bus.errors",
    "UnchangedError": "python_client.applying.loading",
    "UnknownWorkerError": "bus.errors",
    "WeightBusError": "codecs.errors",
    "WorkerKeys": "bus.trust.keys",
    "WorkersMissingError": "bus.errors",
    "gather": "python_client.publishing.gathering",
    "load": "python_client.files.restart",
    "resident": "python_client.applying.resident",
    "sharded": "python_client.publishing.sharded",
}


# Public modules that not all users need.
_MODULES = ("ray", "torchrl", "torchrun", "trl", "types", "vllm")


_load, _names = lazy(globals(), __name__, _HOMES)


def __getattr__(name: str) -> object:
    return _load(name) if name in _HOMES else _module(name)


def _module(name: str) -> object:
    """Return one of the public modules."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_names(), *_MODULES})
