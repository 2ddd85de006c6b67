"""TorchRL: having its collectors take our schemes for theirs, once somebody has imported it.

Its collectors ask `isinstance(scheme, torchrl.weight_update.WeightSyncScheme)`. Ours do not derive
from that class, since they must work without TorchRL; they are registered with it instead.
"""

import sys
from typing import Any

HOME = "torchrl.weight_update.weight_sync_schemes"


def accept(scheme: type) -> None:
    """Register a class of schemes with TorchRL's, if TorchRL is imported."""
    module: Any = sys.modules.get(HOME)
    base = getattr(module, "WeightSyncScheme", None)  # None while it is still being imported
    if base is not None and not issubclass(scheme, base):
        base.register(scheme)
