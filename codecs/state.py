"""A state: the named tensors of whatever a user calls a model, ready to be laid out and written.

Sources are an `nn.Module` (its `state_dict()`), a `TensorDict`, or a mapping, nested or not, of
torch tensors and numpy arrays. Nested keys are joined with dots. Names that stand for the very same
elements (tied weights) become aliases of the first of them in sorted order, as in
`safetensors.torch.save_model`; views that merely overlap travel separately.
"""

import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import numpy as np

from . import numpy_tensors
from .errors import LayoutError, StateError
from .layout import METADATA, Layout, Signature
from .section import Section

if TYPE_CHECKING:
    import torch

Leaf: TypeAlias = "torch.Tensor | numpy_tensors.Array"

DEPTH_MAX = 64  # levels of nesting; a mapping that contains itself ends here
WANTED = "an nn.Module, a TensorDict, or a mapping of names to torch tensors or numpy arrays"


@dataclass
class State:
    """Unique tensors by name, sorted, and the other names of those that are tied."""

    tensors: dict[str, Leaf]
    aliases: dict[str, str]
    signatures: dict[str, Signature]  # the dtype and shape of every tensor, aliases excluded

    @cached_property
    def _planned(self) -> Layout:
        entries = ((name, dtype, shape) for name, (dtype, shape) in self.signatures.items())
        try:
            return Layout.plan(entries, self.aliases)
        except LayoutError as error:
            raise StateError(f"this state cannot travel: {error}") from error

    def layout(self, previous: Layout | None = None) -> Layout:
        """Return the layout of this state; `previous` itself, which is much faster, if it fits."""
        if previous is not None and self.fits(previous):
            return previous
        return self._planned

    def fits(self, layout: Layout) -> bool:
        """Tell whether the layout is one of exactly these tensors and aliases."""
        return self.signatures == layout.own_signatures and self.aliases == layout.aliases


def state_of(source: object) -> State:
    """Return the state of a module, TensorDict or mapping; it shares the source's memory.

    Raises:
        StateError: Something in it cannot travel. The text names it, and says what can.
    """
    leaves = named_leaves(source)
    state = State({}, {}, {})
    kept: dict[Hashable, str] = {}
    for name in sorted(leaves):
        leaf = leaves[name]
        if not isinstance(leaf, np.ndarray) and leaf.is_meta:
            raise StateError(
                f"{name}: on the meta device, so it has no values to send; load the model first"
            )
        form = signature(name, leaf)
        same = identity(leaf)
        if same is None or (first := kept.setdefault(same, name)) == name:
            state.tensors[name] = leaf
            state.signatures[name] = form
        else:
            state.aliases[name] = first
    return state


class Writer:
    """Writes states of one layout into one buffer, again and again."""

    def __init__(self, layout: Layout, data: numpy_tensors.Memory) -> None:
        self.section = Section(layout, data)
        if not self.section.data.flags.writeable or not self.section.aligned():
            raise LayoutError(
                "a state can only be written into a writable buffer that is aligned to 8 bytes, by "
                "a layout that was planned here"
            )

    def write(self, state: State) -> None:
        """Copy every tensor's bytes to its place, bit for bit.

        Raises:
            StateError: The state has other tensors than the layout; nothing was written.
        """
        if not state.fits(self.section.layout):
            raise StateError(
                f"the state has other tensors than {self.section.layout!r}; plan its layout anew"
            )
        arrays = {n: x for n, x in state.tensors.items() if isinstance(x, np.ndarray)}
        tensors = {n: x for n, x in state.tensors.items() if not isinstance(x, np.ndarray)}
        if arrays:
            views = self.section.arrays
            numpy_tensors.copy([views[name] for name in arrays], list(arrays.values()))
        if tensors:
            from . import torch_tensors

            places = self.section.tensors
            torch_tensors.copy([places[name] for name in tensors], list(tensors.values()))


def write_into(state: State, layout: Layout, data: numpy_tensors.Memory) -> None:
    """Write a state into a buffer of `layout.nbytes` bytes once; see `Writer`."""
    Writer(layout, data).write(state)


def named_leaves(source: object, *, in_place: bool = False) -> dict[str, Leaf]:
    """Return every tensor of a source by its dotted name, tied ones under each of their names.

    With `in_place`, whatever hands out copies instead of its own memory is refused.
    """
    pairs = _of_module(source) if is_module(source) else _walk(source, "", 0, in_place)
    leaves: dict[str, Leaf] = {}
    for name, leaf in pairs:
        if name in leaves:
            raise StateError(f"{name}: two entries have this name once nested keys are joined")
        if name in ("", METADATA):
            raise StateError(f"{name!r} cannot name a tensor; rename it")
        leaves[name] = leaf
    return leaves


def signature(name: str, leaf: Leaf) -> Signature:
    """Return the dtype name and shape of a tensor; StateError if it cannot travel."""
    if isinstance(leaf, np.ndarray):
        return numpy_tensors.signature(name, leaf)
    from . import torch_tensors

    return torch_tensors.signature(name, leaf)


def identity(leaf: Leaf) -> Hashable | None:
    """Return what two leaves share exactly if they are the same elements; None if they are none."""
    if isinstance(leaf, np.ndarray):
        return numpy_tensors.identity(leaf)
    from . import torch_tensors

    return torch_tensors.identity(leaf)


def _walk(node: object, path: str, depth: int, in_place: bool) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves under a node of a nested mapping or TensorDict."""
    where = f"{path}: " if path else ""
    if in_place and (_is_scalar(node) or _is_lazy(node)):
        raise StateError(
            f"{where}a {type(node).__name__} hands out copies, so nothing can be written into it; "
            "give an array (0-d if need be), or a TensorDict made .contiguous()"
        )
    if depth and _is_scalar(node):
        yield path, np.asarray(cast("np.generic[Any]", node))
    elif depth and (isinstance(node, np.ndarray) or is_tensor(node)):
        yield path, cast("Leaf", node)
    elif not isinstance(node, Mapping) and not _is_tensordict(node):
        raise StateError(f"{where}a {type(node).__name__} cannot travel; give {WANTED}")
    elif depth >= DEPTH_MAX:
        raise StateError(f"{path[:80]}…: nested deeper than {DEPTH_MAX} levels; flatten it")
    else:
        for key, value in cast("Mapping[Any, Any]", node).items():
            if not isinstance(key, str):
                raise StateError(f"{where}the key {key!r} is not a string; names must be")
            yield from _walk(value, f"{path}.{key}" if depth else key, depth + 1, in_place)


def _of_module(module: "torch.nn.Module") -> Iterator[tuple[str, Leaf]]:
    for name, value in module.state_dict().items():
        if not is_tensor(value):
            raise StateError(
                f"{name}: extra state of type {type(value).__name__} cannot travel, only tensors "
                "can; return a tensor from get_extra_state(), or send it by another way"
            )
        yield name, value


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Tell a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")  # while nobody imported it there can be no tensor
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: object) -> "TypeGuard[torch.nn.Module]":
    """Tell a torch module that is not a TensorDict as well, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module) and not _is_tensordict(value)


def _is_tensordict(value: object) -> bool:
    tensordict = sys.modules.get("tensordict")
    return (
        tensordict is not None
        and tensordict.is_tensor_collection(value)
        and not tensordict.is_non_tensor(value)
    )


def _is_scalar(value: object) -> bool:
    return isinstance(value, np.generic)


def _is_lazy(value: object) -> bool:
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(value, tensordict.LazyStackedTensorDict)
