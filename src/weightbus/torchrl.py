"""TorchRL's schemes over the bus: `from weightbus.torchrl import ZMQWeightSyncScheme`, for example.

The names are TorchRL's, so that users of TorchRL change only an import. Each name is loaded when it
is first used: importing this module needs neither torch nor TorchRL.
"""

from weightbus.lazy import lazy

TYPE_CHECKING = False  # as in the __init__.py of the package
if TYPE_CHECKING:
    from weightbus.python_client.schemes.bus import (
        DistributedWeightSyncScheme,
        MPTransport,
        MultiProcessWeightSyncScheme,
        SharedMemWeightSyncScheme,
        ZMQWeightSyncScheme,
    )
    from weightbus.python_client.schemes.legacy_api import (
        DistributedTransport,
        SharedMemTransport,
        WeightReceiver,
        WeightSender,
        WeightSyncScheme,
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
    from weightbus.python_client.schemes.strategy import WeightStrategy
    from weightbus.python_client.schemes.torch_rpc import RPCTransport, RPCWeightSyncScheme
    from weightbus.python_client.schemes.transport import (
        WeightSyncBackend,
        register_weight_sync_backend,
    )
    from weightbus.python_client.schemes.weight_updaters import RayWeightUpdater, WeightUpdaterBase
    from weightbus.python_client.schemes.worker_transports import (
        InitialSyncTransport,
        TransportBackend,
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

__getattr__, __dir__ = lazy(
    globals(),
    "weightbus.python_client.schemes",
    {
        "DistributedTransport": "legacy_api",
        "DistributedWeightSyncScheme": "bus",
        "InitialSyncTransport": "worker_transports",
        "MPTransport": "bus",
        "MultiProcessWeightSyncScheme": "bus",
        "NoWeightSyncScheme": "none",
        "RPCTransport": "torch_rpc",
        "RPCWeightSyncScheme": "torch_rpc",
        "RayActorTransport": "ray",
        "RayModuleTransformReceiver": "ray",
        "RayModuleTransformScheme": "ray",
        "RayModuleTransformSender": "ray",
        "RayTransport": "ray",
        "RayWeightSyncScheme": "ray",
        "RayWeightUpdater": "weight_updaters",
        "SharedMemTransport": "legacy_api",
        "SharedMemWeightSyncScheme": "bus",
        "TransportBackend": "worker_transports",
        "WeightReceiver": "legacy_api",
        "WeightSender": "legacy_api",
        "WeightStrategy": "strategy",
        "WeightSyncBackend": "transport",
        "WeightSyncScheme": "legacy_api",
        "WeightUpdaterBase": "weight_updaters",
        "ZMQWeightSyncScheme": "bus",
        "register_weight_sync_backend": "transport",
    },
)
