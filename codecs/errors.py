"""Defines the errors of `codecs`, and the base class of all errors of the package.

WeightBusError
├── LayoutError   malformed layout, or tensors that cannot be laid out
│   └── LimitError    well-formed, but over a limit
│       └── TensorsError  too many tensors
├── PatchError    malformed patch, or a patch for other weights
├── SealError     sealing is not available
├── StateError    a model, dict or TensorDict that cannot be published or written to
└── (the others are in `bus/errors.py`)
"""

from .words import printable


class WeightBusError(Exception):
    """The base class of every error that this package raises on purpose.

    An error's text may contain names and text from peers, and appears on terminals and in logs. So
    unprintable characters except line breaks are escaped.
    """

    __module__ = "weightbus"

    def __str__(self) -> str:
        text = str(self.args[0]) if self.args else ""
        return "\n".join(map(printable, text.split("\n")))


class LayoutError(WeightBusError, ValueError):
    """A layout that is malformed, over a limit, or cannot be made from the given tensors."""

    __module__ = "weightbus"


class LimitError(LayoutError):
    """A well-formed layout that exceeds a limit; the text names the limit."""


class TensorsError(LimitError):
    """A layout with more tensors than this process accepts."""


class PatchError(WeightBusError, ValueError):
    """A patch that is malformed, or does not turn its base into its target."""


class SealError(WeightBusError):
    """Sealing is not available, since the package `cryptography` is not installed."""


class StateError(WeightBusError, ValueError):
    """Weights that cannot be published, or a target that cannot take them; the text names the
    tensor and the reason.
    """

    __module__ = "weightbus"
