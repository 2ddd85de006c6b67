"""The strategy of a scheme: by which names a model's weights travel, and how they are applied.

    tensordict   every parameter and every buffer, also those that are not persistent
    state_dict   what state_dict() holds (adapters of PEFT merged)

Both carry the extra state of every submodule that has some, as `<path>._extra_state` or, where it
is a mapping, as `<path>._extra_state.<key>`. Tied tensors travel once. A model may also be a
TensorDict or a mapping of names to tensors or arrays; then its own names count.
"""

from collections.abc import Sequence
from typing import Literal, cast

from ...codecs.apply import Reader
from ...codecs.layout import Layout
from ...codecs.state import Leaf

Format = Literal["tensordict", "state_dict"]


class WeightStrategy:
    """How weights are taken out of a model, and put into one.

    Args:
        extract_as: "tensordict" or "state_dict".

    It equals its own name, as older code that compares `scheme.strategy` expects.
    """

    def __init__(self, extract_as: Format = "tensordict") -> None:
        if extract_as not in ("tensordict", "state_dict"):
            raise ValueError(f"extract_as must be 'tensordict' or 'state_dict', got {extract_as}")
        self.extract_as: Format = extract_as
