"""TorchRL's schemes over the bus: `from weightbus.torchrl import ZMQWeightSyncScheme`, for example.

The names are TorchRL's, so that its users change one import. Each is loaded when it is first used:
importing this needs neither torch nor TorchRL.
"""

from importlib import import_module

TYPE_CHECKING = False  # as in the face of the package
if TYPE_CHECKING:
    from weightbus.python_client.schemes.bus import (
        DistributedWeightSyncScheme,
        MPTransport,
        MultiProcessWeightSyncScheme,
        SharedMemWeightSyncScheme,
        ZMQWeightSyncScheme,
    )
    from weightbus.python_client.schemes.carrier import (
        WeightSyncBackend,
        register_weight_sync_backend,
    )
    from weightbus.python_client.schemes.none import NoWeightSyncScheme
    from weightbus.python_client.schemes.ray import (
        RayActorTransport,
        RayModuleTransformReceiver,
        RayModuleTransformScheme,
        RayModuleTransformSender,
        RayTransport,
        RayWeightSyncScheme,
    )
    from weightbus.python_client.schemes.receiver import WeightReceiver
    from weightbus.python_client.schemes.sender import WeightSender
    from weightbus.python_client.schemes.strategy import WeightStrategy
    from weightbus.python_client.schemes.torch_rpc import RPCTransport, RPCWeightSyncScheme
    from weightbus.python_client.schemes.updater import RayWeightUpdater, WeightUpdaterBase
    from weightbus.python_client.schemes.vintage import (
        DistributedTransport,
        InitialSyncTransport,
        SharedMemTransport,
        TransportBackend,
        WeightSyncScheme,
    )

__all__ = [
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "InitialSyncTransport",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncBackend",
    "WeightSyncScheme",
    "WeightUpdaterBase",
    "ZMQWeightSyncScheme",
    "register_weight_sync_backend",
]

# Where each of them lives.
_HOMES = {
    "DistributedTransport": "python_client.schemes.vintage",
    "DistributedWeightSyncScheme": "python_client.schemes.bus",
    "InitialSyncTransport": "python_client.schemes.vintage",
    "MPTransport": "python_client.schemes.bus",
    "MultiProcessWeightSyncScheme": "python_client.schemes.bus",
    "NoWeightSyncScheme": "python_client.schemes.none",
    "RPCTransport": "python_client.schemes.torch_rpc",
    "RPCWeightSyncScheme": "python_client.schemes.torch_rpc",
    "RayActorTransport": "python_client.schemes.ray",
    "RayModuleTransformReceiver": "python_client.schemes.ray",
    "RayModuleTransformScheme": "python_client.schemes.ray",
    "RayModuleTransformSender": "python_client.schemes.ray",
    "RayTransport": "python_client.schemes.ray",
    "RayWeightSyncScheme": "python_client.schemes.ray",
    "RayWeightUpdater": "python_client.schemes.updater",
    "SharedMemTransport": "python_client.schemes.vintage",
    "SharedMemWeightSyncScheme": "python_client.schemes.bus",
    "TransportBackend": "python_client.schemes.vintage",
    "WeightReceiver": "python_client.schemes.receiver",
    "WeightSender": "python_client.schemes.sender",
    "WeightStrategy": "python_client.schemes.strategy",
    "WeightSyncBackend": "python_client.schemes.carrier",
    "WeightSyncScheme": "python_client.schemes.vintage",
    "WeightUpdaterBase": "python_client.schemes.updater",
    "ZMQWeightSyncScheme": "python_client.schemes.bus",
    "register_weight_sync_backend": "python_client.schemes.carrier",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"weightbus.{home}"), name)
    globals()[name] = value  # found without us from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
