"""Relays on the nodes of a Ray cluster: `weightbus.ray.relays(publisher)`, for example.

Each name is loaded when it is first used: importing this module needs neither Ray nor ZeroMQ.
"""

from weightbus.lazy import lazy

TYPE_CHECKING = False  # as in the __init__.py of the package
if TYPE_CHECKING:
    from weightbus.python_client.engines.ray_relays import NodeRelay, Relays, address, relays

__all__ = ["NodeRelay", "Relays", "address", "relays"]

__getattr__, __dir__ = lazy(
    globals(),
    "weightbus.python_client.engines",
    {
        "NodeRelay": "ray_relays",
        "Relays": "ray_relays",
        "address": "ray_relays",
        "relays": "ray_relays",
    },
)
