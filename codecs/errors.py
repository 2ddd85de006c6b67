"""The errors of the package's lowest layer, and the root of all its errors.

WeightBusError
├── LayoutError   bytes that are no layout, or tensors that cannot be laid out
│   └── LimitError    well-formed, but over a limit
│       └── TensorsError  of tensors
├── PatchError    bytes that are no patch, or one of other weights than these
├── SealError     nothing can be sealed or opened here
├── StateError    a model, dict or TensorDict that cannot travel or cannot be written to
└── (the rest stands in `bus/errors.py`)
"""

from .words import printable


class WeightBusError(Exception):
    """The root of every error that this package raises on purpose.

    Its text may contain names and text from peers, and appears on terminals and in logs: everything
    except its line breaks is escaped.
    """

    __module__ = "weightbus"

    def __str__(self) -> str:
        text = str(self.args[0]) if self.args else ""
        return "\n".join(map(printable, text.split("\n")))


class LayoutError(WeightBusError, ValueError):
    """A layout that is malformed, over a limit, or cannot be made from the given tensors."""

    __module__ = "weightbus"


class LimitError(LayoutError):
    """A layout that is well-formed, but over a limit, which is named: others may read it."""


class TensorsError(LimitError):
    """A layout of more tensors than are taken here."""


class PatchError(WeightBusError, ValueError):
    """A patch that is malformed, or does not lead from these weights to those that it says."""


class SealError(WeightBusError):
    """Nothing can be sealed or opened here: the package that does it is not installed."""


class StateError(WeightBusError, ValueError):
    """Weights that cannot be published, or a target that cannot take them; names the tensor and the
    reason.
    """

    __module__ = "weightbus"
