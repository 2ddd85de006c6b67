"""The strategy of a scheme names the tensors of a model, extracts them, and applies them.

    tensordict   every parameter and every buffer, also buffers that are not persistent
    state_dict   the entries of state_dict(), with PEFT adapters merged

Both include the extra state of submodules (codecs/torch_modules.py). Tied tensors are sent once. A
model may also be a TensorDict, or a mapping of names to tensors or arrays; then these names are
used. Any other object (a random policy, for example) has no weights.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ...codecs.apply import Reader, check, differing
from ...codecs.errors import StateError
from ...codecs.layout import Layout, trimmed
from ...codecs.leaves import Leaf
from ...codecs.state import is_module, is_tensor, named_leaves, signature, state_of, write_into
from ...codecs.ties import Ties
from .model import log

if TYPE_CHECKING:
    import torch

    from ...codecs.torch_modules import ModuleParts

Format = Literal["tensordict", "state_dict"]

# The key of extra state in TorchRL's TensorDicts, and its name in torch's state_dicts.
EXTRA_KEY, EXTRA_NAME = "__extra_state__", "_extra_state"


class DestinationError(StateError, KeyError):
    """The weights do not fit the receiving model. The model is unchanged."""


class WeightStrategy:
    """Extracts weights from models, and applies weights to models.

    Args:
        extract_as: "tensordict" or "state_dict".

    An instance is equal to the string `extract_as`, because older programs compare
    `scheme.strategy` with strings.
    """

    def __init__(self, extract_as: Format = "tensordict") -> None:
        if extract_as not in ("tensordict", "state_dict"):
            raise ValueError(f"extract_as must be 'tensordict' or 'state_dict', got {extract_as}")
        self.extract_as: Format = extract_as

    def __repr__(self) -> str:
        return f"WeightStrategy({self.extract_as!r})"

    def __str__(self) -> str:
        return self.extract_as

    def __eq__(self, other: object) -> bool:
        mine = other.extract_as if isinstance(other, WeightStrategy) else other
        return self.extract_as == mine

    def __hash__(self) -> int:
        return hash(self.extract_as)

    def extract_weights(self, source: Any) -> Any:
        """Return the weights of a `source`, as a TensorDict or dict that shares its memory."""
        tensors = self.tensors_of(source)
        return tensors if self.extract_as == "state_dict" else nested(tensors)

    def apply_weights(
        self, destination: Any, weights: Any, inplace: bool = True, *, strict: bool = True
    ) -> None:
        """Apply weights to a model, completely or not at all.

        Args:
            destination: An `nn.Module`, a TensorDict, or a mapping of tensors or arrays.
            weights: The result of `extract_weights`, or a module; None: nothing happens.
            inplace: Whether to write into the existing tensors; otherwise a module gets new ones.
            strict: Whether both sides must have the same names.

        Raises:
            DestinationError: The weights do not fit; the model is unchanged.
            ValueError: `weights` is neither a module, a TensorDict nor a dict; or a dict is to be
                updated with `inplace=False`.
        """
        if weights is None:
            return
        if not is_module(weights) and not has_names(weights):
            raise ValueError(
                f"Unsupported weights type: {type(weights)}. Must be dict or TensorDictBase."
            )
        if not inplace and isinstance(destination, dict):
            raise ValueError("Cannot update state_dict out of place")
        state = state_of(self.tensors_of(weights))
        layout = state.layout()
        # copy, since weights and destination may share memory
        data = np.empty(layout.nbytes, np.uint8)
        write_into(state, layout, data)
        self.write(Reader(layout, data), destination, strict=strict, cast=True, inplace=inplace)

    # Used by schemes.

    def in_form(self, weights: Any) -> Any:
        """Return `weights` in the strategy's form: for "tensordict", a dict becomes a TensorDict.

        A dict stays a dict if no TensorDict can hold its entries: if they are arrays, or if one
        name is a prefix of another name.
        """
        if self.extract_as == "state_dict" or not isinstance(weights, dict):
            return weights
        given = cast("dict[str, Any]", weights)
        try:
            leaves = named_leaves(given)
        except StateError:  # the error is reported when the weights are sent
            return given
        prefixes = {name[:at] for name in leaves for at, sign in enumerate(name) if sign == "."}
        arrays = any(isinstance(leaf, np.ndarray) for leaf in leaves.values())
        return given if arrays or not prefixes.isdisjoint(leaves) else nested(leaves)

    def tensors_of(self, source: object) -> dict[str, Leaf]:
        """Return the tensors of a `source` by dotted name; they share the source's memory."""
        if is_module(source):
            from ...codecs.torch_modules import contents_of

            contents = contents_of(source, self.extract_as)
            return contents if self.extract_as == "tensordict" else named_leaves(contents)
        if not has_names(source):
            log.warning("a %s has no weights that could be sent", type(source).__name__)
            return {}
        leaves = named_leaves(source)
        if any(EXTRA_KEY in name for name in leaves):
            leaves = {name.replace(EXTRA_KEY, EXTRA_NAME): leaf for name, leaf in leaves.items()}
        return leaves

    def tensors_as_td(self, model: object) -> Any:
        """Return the parameters and buffers of a `model` as a TensorDict, without extra state.

        TorchRL's collectors copy the TensorDict into their own parameters and buffers, by name.
        """
        if not is_module(model):
            return nested(self.tensors_of(model))
        from ...codecs.torch_modules import parts_by

        return nested(parts_by(model, "tensordict").tensors)

    def faults(self, layout: Layout, model: object, *, strict: bool, cast: bool) -> list[str]:
        """Return the reasons why a version does not fit a model; an empty list if it fits.

        Args:
            layout: The layout of a version.
            model: The model to write to.
            strict: Whether both sides must have the same names.
            cast: Whether dtypes may be converted.
        """
        if not is_module(model):
            if layout.signatures and not has_names(model):
                return [
                    f"this worker's model is a {type(model).__name__}, which has no weights to "
                    "update (non-empty weights are associated with a non-dict, non-td, non-Module "
                    "destination): give its collector a policy with weights, or send no weights"
                ]
            return check(layout, _collection(model), strict=strict, cast=cast)
        from ...codecs.torch_modules import parts_by

        parts = parts_by(model, self.extract_as)
        return _module_faults(layout, parts, strict=strict, cast=cast)

    def write(
        self, reader: Reader, model: object, *, strict: bool, cast: bool, inplace: bool = True
    ) -> None:
        """Copy a version into a model.

        Args:
            reader: Reads the version.
            model, strict, cast: As in `faults`.
            inplace: Whether to write into the existing tensors; otherwise a module gets new ones.

        Raises:
            DestinationError: The version does not fit; the model is unchanged.
        """
        layout = reader.section.layout
        if lines := self.faults(layout, model, strict=strict, cast=cast):
            raise DestinationError("Error updating destination: " + "\n".join(trimmed(lines)))
        if not is_module(model):
            reader.copy_into(_collection(model), strict=strict, cast=cast)
            return
        from ...codecs import torch_modules

        if self.on_meta(model):
            reader.begun = True
            torch_modules.materialise(model)
        elif not inplace:
            torch_modules.replace_tensors(model)
        parts = torch_modules.parts_by(model, self.extract_as)
        published = reader.section.tensors
        extra = {
            name: published[layout.by_name(name).name]
            for name in layout.names()
            if parts.part_of(name) is not None
        }
        # Set the extra state before any tensor is written: this runs the user's code, which may
        # raise an exception.
        torch_modules.put_extra(parts, extra)
        reader.copy_into(parts.tensors, strict=False, cast=cast)
        if (loading := parts.loading) is None:
            return
        if self.extract_as == "tensordict" or not loading.makers:
            loading.finish(strict=strict)
        else:
            loading.load(reader.values(parts.tensors), strict=strict)

    def on_meta(self, model: object) -> bool:
        """Return whether a model has tensors on the meta device, which the first version fills."""
        if not is_module(model):
            return False
        from ...codecs.torch_modules import on_meta

        return on_meta(model)


def strategy_named(name: Format) -> WeightStrategy:
    if name not in ("tensordict", "state_dict"):
        raise ValueError(f"Unknown strategy: {name}. Must be 'tensordict' or 'state_dict'.")
    return WeightStrategy(name)


def nested(tensors: "Mapping[str, Leaf] | Mapping[str, torch.Tensor]") -> Any:
    """Return tensors, by dotted name, as a nested TensorDict; without tensordict, as a dict."""
    try:
        from tensordict import TensorDict
    except ImportError:
        return dict(tensors)
    tree: dict[str, Any] = {}
    for name, leaf in tensors.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(EXTRA_KEY if key == EXTRA_NAME else key, {})
        node[EXTRA_KEY if last == EXTRA_NAME else last] = leaf
    return TensorDict(tree, batch_size=[])


def _module_faults(layout: Layout, parts: "ModuleParts", *, strict: bool, cast: bool) -> list[str]:
    # Return the reasons why a version does not fit a module, whose tensors are `parts`.
    from ...codecs.torch_modules import extra_of
    from ...codecs.torch_tensors import target_fault

    published = {n: s for n, s in layout.signatures.items() if parts.part_of(n) is None}
    lines, ties = list(parts.faults), Ties(layout, parts.tensors)
    for name in ties.arrived:
        published.pop(name, None)
    expected: dict[str, Any] = {}
    for name, tensor in parts.tensors.items():
        if name in ties.filled:
            continue
        if name not in published and tensor.is_meta:
            lines.append(f"{name}: on the meta device, and no values for it were published")
            if name in parts.optional:
                lines[-1] += '; give both schemes strategy="tensordict", which has every buffer'
        elif name not in published and (name in parts.optional or not strict):
            continue
        else:
            try:
                expected[name] = signature(name, tensor)
            except StateError as error:
                published.pop(name, None)
                lines.append(str(error))
                continue
            if not tensor.is_meta and (fault := target_fault(name, tensor)):
                lines.append(fault)
    sent = {parts.part_of(name) for name in layout.names()}
    lines += [
        f"{name}: extra state here, not published"
        for name, part in parts.extra.items()
        if strict and name not in sent and extra_of({name: part})
    ]
    return differing(lines + ties.faults(), published, expected, strict=strict, cast=cast)


def _collection(model: object) -> object:
    """Return the model if it is a mapping or a TensorDict, otherwise an empty mapping."""
    empty: dict[str, Leaf] = {}
    return model if has_names(model) else empty


def check_weights(given: object, model_id: str) -> None:
    """Raise TypeError unless `given` is a module, a mapping or a TensorDict."""
    if not is_module(given) and not has_names(given):
        raise TypeError(
            f"a {type(given).__name__} has no weights of {model_id!r}: give an nn.Module, a "
            "TensorDict, or a dict of tensors by name, such as model.state_dict()"
        )


def has_names(value: object) -> bool:
    """Return whether a value is a mapping or a TensorDict."""
    return isinstance(value, Mapping) or (
        hasattr(value, "batch_size") and hasattr(value, "items") and not is_tensor(value)
    )
