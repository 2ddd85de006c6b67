"""Relays in scripts that torchrun starts: `with weightbus.torchrun.relays(...) as bus: ...`.

Importing this module does not need torch, but `relays` does.
"""

from weightbus.lazy import lazy

TYPE_CHECKING = False  # as in the __init__.py of the package
if TYPE_CHECKING:
    from weightbus.python_client.engines.torchrun_relays import Relays, relays

__all__ = ["Relays", "relays"]

__getattr__, __dir__ = lazy(
    globals(),
    "weightbus.python_client.engines",
    {"Relays": "torchrun_relays", "relays": "torchrun_relays"},
)
