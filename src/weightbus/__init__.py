"""weightbus: publish a model's weights once; every worker applies them in place, verified.

This is the face: users import from here, and everything else may move. Each name is loaded when it
is first used, so that importing the package costs nothing and needs neither torch nor ZeroMQ.
Public classes say in their body that they are of here, which `help()` and tracebacks then show.
`weightbus.types` names what calls return; `weightbus.ray`, `weightbus.torchrl`,
`weightbus.torchrun`, `weightbus.trl` and `weightbus.vllm` have what users of Ray, TorchRL,
torchrun, TRL and vLLM import.
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

# Where each public name lives.
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


# Faces of their own, for fewer users.
_FACES = ("ray", "torchrl", "torchrun", "trl", "types", "vllm")


_load, _names = lazy(globals(), __name__, _HOMES)


def __getattr__(name: str) -> object:
    return _load(name) if name in _HOMES else _face(name)


def _face(name: str) -> object:
    """Return a module with names that fewer users need."""
    if name in _FACES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_names(), *_FACES})
