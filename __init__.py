"""weightbus: publish a model's weights once; every worker applies them in place, verified.

This is the face: users import from here, and everything else may move. Each name is loaded when it
is first used, so that importing the package costs nothing and needs neither torch nor ZeroMQ.
"""

from importlib import import_module

TYPE_CHECKING = False  # not from `typing`, which takes longer than everything else here
if TYPE_CHECKING:
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
    from .bus.limits import Timing
    from .bus.net.listeners import WorkerEvent
    from .bus.publisher.status import WorkerStatus
    from .bus.receipt import Receipt, WorkerReceipt
    from .bus.trust.keys import PublisherKeys, WorkerKeys
    from .codecs.errors import LayoutError, StateError, WeightBusError
    from .python_client.applying import Offer, Update
    from .python_client.loading import Pairs, UnchangedError
    from .python_client.observing.access import Http
    from .python_client.publisher import Publisher
    from .python_client.resident import resident
    from .python_client.schemes.bus import (
        DistributedWeightSyncScheme,
        MPTransport,
        MultiProcessWeightSyncScheme,
        SharedMemWeightSyncScheme,
        ZMQWeightSyncScheme,
    )
    from .python_client.schemes.carrier import WeightSyncBackend, register_weight_sync_backend
    from .python_client.schemes.none import NoWeightSyncScheme
    from .python_client.schemes.ray import (
        RayActorTransport,
        RayModuleTransformReceiver,
        RayModuleTransformScheme,
        RayModuleTransformSender,
        RayTransport,
        RayWeightSyncScheme,
    )
    from .python_client.schemes.scheme import WeightSyncScheme
    from .python_client.schemes.strategy import WeightStrategy
    from .python_client.schemes.torch_rpc import RPCTransport, RPCWeightSyncScheme
    from .python_client.schemes.updater import RayWeightUpdater, WeightUpdaterBase
    from .python_client.schemes.vintage import (
        DistributedTransport,
        InitialSyncTransport,
        SharedMemTransport,
        TransportBackend,
        WeightReceiver,
        WeightSender,
    )
    from .python_client.state_folder import StateFolderError, StoredVersion
    from .python_client.subscriber import Subscriber

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "ApplyError",
    "ClosedError",
    "DeadlineError",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "Http",
    "InitialSyncTransport",
    "KeysError",
    "LayoutError",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "Offer",
    "Pairs",
    "ProtocolError",
    "PublishError",
    "Publisher",
    "PublisherKeys",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "Receipt",
    "RefusedError",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "StateError",
    "StateFolderError",
    "StoredVersion",
    "Subscriber",
    "Timing",
    "TornError",
    "TransportBackend",
    "UnchangedError",
    "UnknownWorkerError",
    "Update",
    "WeightBusError",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncBackend",
    "WeightSyncScheme",
    "WeightUpdaterBase",
    "WorkerEvent",
    "WorkerKeys",
    "WorkerReceipt",
    "WorkerStatus",
    "WorkersMissingError",
    "ZMQWeightSyncScheme",
    "__version__",
    "register_weight_sync_backend",
    "resident",
]

# Where each public name lives.
_HOMES = {
    "AddressError": "bus.errors",
    "ApplyError": "bus.errors",
    "ClosedError": "bus.errors",
    "DeadlineError": "bus.errors",
    "DistributedTransport": "python_client.schemes.vintage",
    "DistributedWeightSyncScheme": "python_client.schemes.bus",
    "Http": "python_client.observing.access",
    "InitialSyncTransport": "python_client.schemes.vintage",
    "KeysError": "bus.errors",
    "LayoutError": "codecs.errors",
    "MPTransport": "python_client.schemes.bus",
    "MultiProcessWeightSyncScheme": "python_client.schemes.bus",
    "NoWeightSyncScheme": "python_client.schemes.none",
    "Offer": "python_client.applying",
    "Pairs": "python_client.loading",
    "ProtocolError": "bus.errors",
    "PublishError": "bus.errors",
    "Publisher": "python_client.publisher",
    "PublisherKeys": "bus.trust.keys",
    "RPCTransport": "python_client.schemes.torch_rpc",
    "RPCWeightSyncScheme": "python_client.schemes.torch_rpc",
    "RayActorTransport": "python_client.schemes.ray",
    "RayModuleTransformReceiver": "python_client.schemes.ray",
    "RayModuleTransformScheme": "python_client.schemes.ray",
    "RayModuleTransformSender": "python_client.schemes.ray",
    "RayTransport": "python_client.schemes.ray",
    "RayWeightSyncScheme": "python_client.schemes.ray",
    "RayWeightUpdater": "python_client.schemes.updater",
    "Receipt": "bus.receipt",
    "RefusedError": "bus.errors",
    "SharedMemTransport": "python_client.schemes.vintage",
    "SharedMemWeightSyncScheme": "python_client.schemes.bus",
    "StateError": "codecs.errors",
    "StateFolderError": "python_client.state_folder",
    "StoredVersion": "python_client.state_folder",
    "Subscriber": "python_client.subscriber",
    "Timing": "bus.limits",
    "TornError": "bus.errors",
    "TransportBackend": "python_client.schemes.vintage",
    "UnchangedError": "python_client.loading",
    "UnknownWorkerError": "bus.errors",
    "Update": "python_client.applying",
    "WeightBusError": "codecs.errors",
    "WeightReceiver": "python_client.schemes.vintage",
    "WeightSender": "python_client.schemes.vintage",
    "WeightStrategy": "python_client.schemes.strategy",
    "WeightSyncBackend": "python_client.schemes.carrier",
    "WeightSyncScheme": "python_client.schemes.scheme",
    "WeightUpdaterBase": "python_client.schemes.updater",
    "WorkerEvent": "bus.net.listeners",
    "WorkerKeys": "bus.trust.keys",
    "WorkerReceipt": "bus.receipt",
    "WorkerStatus": "bus.publisher.status",
    "WorkersMissingError": "bus.errors",
    "ZMQWeightSyncScheme": "python_client.schemes.bus",
    "register_weight_sync_backend": "python_client.schemes.carrier",
    "resident": "python_client.resident",
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
