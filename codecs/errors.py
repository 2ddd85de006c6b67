"""The errors of the package's lowest layer, and the root of all its errors.

WeightBusError
├── LayoutError   bytes that are no layout, or tensors that cannot be laid out
│   └── LimitError    well-formed, but over a limit
├── PatchError    bytes that are no patch, or one of other weights than these
├── SealError     nothing can be sealed or opened here
├── StateError    a model, dict or TensorDict that cannot travel or cannot be written to
└── (the rest stands in `bus/errors.py`)
"""

from .words import printable


class WeightBusError(Exception):
    """The root of every error that this package raises on purpose.

    Its text may repeat names and words of others, and ends on terminals and in logs: all but its
    line breaks is shown printable.
    """

    def __str__(self) -> str:
        text = str(self.args[0]) if self.args else ""
        return "\n".join(map(printable, text.split("\n")))


class LayoutError(WeightBusError, ValueError):
    """A layout that is malformed, over a limit, or cannot be made from the given tensors."""


class LimitError(LayoutError):
    """A layout that is well-formed, but over a limit, which is named: others may read it."""


class PatchError(WeightBusError, ValueError):
    """A patch that is malformed, or does not lead from these weights to those that it says."""


class SealError(WeightBusError):
    """Nothing can be sealed or opened here: the package that does it is not installed."""


class StateError(WeightBusError, ValueError):
    """A state that cannot travel, or a target that cannot take one; says which name, and why."""
