"""Collects the named tensors of a user's model (its state), and writes them into a buffer.

A source is an `nn.Module` (its `state_dict()`), a `TensorDict`, or a mapping, nested or not, of
torch tensors, numpy arrays, and arrays that numpy can view (`__array__`): those of JAX, TensorFlow,
Keras and Flax. Nested keys are joined with dots. If several names have the same elements (tied
weights), the name that comes first in the source is kept, and the other names become aliases.
Programs that read a checkpoint expect this first name: `model.embed_tokens.weight`, not
`lm_head.weight`. Views that overlap without being equal are sent separately.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from . import native, numpy_tensors
from .copies import Copies, devices_of, on_device, plain_memory
from .errors import LayoutError, StateError
from .layout import METADATA, Layout, Signature
from .leaves import Leaf, of_torch
from .overflow import LostValues, Narrowed
from .section import Section

if TYPE_CHECKING:
    import torch

    from .device_copies import Arriving, Second
    from .device_memory import Mirror, Pinned

DEPTH_MAX = 64  # levels of nesting; a mapping that contains itself has more
WANTED = "an nn.Module, a TensorDict, or a mapping of names to torch tensors or numpy arrays"


_INTERFACE, _DATA = attrgetter("__array_interface__"), itemgetter("data")  # for an array's address
_SHAPE = attrgetter("dtype", "shape", "strides")

Marks = tuple[Sequence[object], Sequence[object]]


class Outline(msgspec.Struct, frozen=True, eq=False):
    """A model's tensors, with marks that change if anything except the values changes.

    To analyse a model (names, dtypes, shapes, ties) takes longer than to copy its values, and many
    times longer if tensors are small. A trainer publishes the same tensors repeatedly. So the
    result of the analysis is stored together with the marks, and is valid while the marks are equal
    (==). The tensors are not stored with the marks, since this would keep their memory alive.

    Attributes:
        marks: Names and structure; and the address, shape, strides and dtype of every tensor.
        leaves: The tensors, in the order of the marks.
    """

    marks: Marks
    leaves: Sequence[Leaf]


@dataclass
class Form:
    """The part of a state that is the same for every version: everything except values.

    Attributes:
        signatures: The dtype and shape of every tensor, aliases excluded, sorted by name.
        aliases: The other names of tied tensors, each with the kept name.
        names: All names, including aliases, in the order of the source.
        places: The index of each tensor among the leaves of the state.
        outline: The marks that show whether the form is still valid; None: it must be made anew for
            each version.
        known: The last layout that fits; None if no layout was made or compared yet.
        large: Indexes of leaves whose storage sizes are checked; see `torch_tensors.LARGE_BYTES`.
    """

    signatures: dict[str, Signature]
    aliases: dict[str, str]
    names: tuple[str, ...]
    places: list[int]
    outline: Marks | None
    known: Layout | None = None
    large: Sequence[int] = ()

    @cached_property
    def planned(self) -> Layout:
        """The layout of a state of this form."""
        entries = ((name, dtype, shape) for name, (dtype, shape) in self.signatures.items())
        try:
            return Layout.plan(entries, self.aliases, names=self.names)
        except LayoutError as error:
            raise StateError(f"this state cannot travel: {error}") from error

    @cached_property
    def in_order(self) -> bool:
        """Whether the tensors are the first leaves of the state, in this order."""
        return self.places == [*range(len(self.places))]

    def fits(self, layout: Layout) -> bool:
        """Return whether the layout has exactly these tensors and aliases."""
        return self.signatures == layout.own_signatures and self.aliases == layout.aliases


class State(msgspec.Struct, eq=False):
    """A form and its tensors (`leaves`), among which a tied tensor may occur more than once."""

    form: Form
    leaves: Sequence[Leaf]

    @property
    def values(self) -> Sequence[Leaf]:
        """The unique tensors, sorted by name."""
        if self.form.in_order and len(self.leaves) == len(self.form.places):
            return self.leaves
        return [self.leaves[place] for place in self.form.places]

    @property
    def tensors(self) -> dict[str, Leaf]:
        """The unique tensors by name, sorted."""
        return dict(zip(self.form.signatures, self.values, strict=True))

    @property
    def aliases(self) -> dict[str, str]:
        """The other names of tied tensors."""
        return self.form.aliases

    @property
    def signatures(self) -> dict[str, Signature]:
        """The dtype and shape of every tensor, aliases excluded."""
        return self.form.signatures

    def layout(self, previous: Layout | None = None) -> Layout:
        """Return the layout of this state: `previous` if it fits, since this is much faster."""
        if previous is None or previous is self.form.known:
            return previous or self.form.planned
        same = self.fits(previous) and self.form.names == previous.names()
        self.form.known = previous if same else self.form.planned
        return self.form.known

    def fits(self, layout: Layout) -> bool:
        """Return whether the layout has exactly these tensors and aliases."""
        return self.form.fits(layout)


class Streamed:
    """The base class of sources whose tensors arrive one at a time, while they are written.

    Their states have shapes and dtypes, but for some tensors no values.
    """

    def state(self) -> State:
        """Return the state. Tensors without values are on the meta device."""
        raise NotImplementedError

    def is_parameter(self, leaf: Leaf) -> bool:
        """Return whether a tensor of the last state is a parameter, not a buffer."""
        raise NotImplementedError

    def write(
        self, state: State, layout: Layout, data: numpy_tensors.Memory, left: Callable[[], float]
    ) -> dict[str, tuple[str, int]]:
        """Write every tensor into a buffer, and return the lost values.

        Args:
            state: The last result of `state`; its form may be in another precision, or renamed.
            layout: The layout of that form.
            data: The buffer.
            left: Returns the seconds that are left until the deadline.
        """
        raise NotImplementedError


def state_of(source: object, form: Form | None = None) -> State:
    """Return the state of a module, TensorDict or mapping, which shares the source's memory.

    Args:
        source: The weights.
        form: The form of the previous state; if it is still valid, most of the work is skipped.

    Raises:
        StateError: A part of `source` cannot be published; the text names it and what to give.
    """
    if isinstance(source, Streamed):
        return source.state()
    outline, leaves = outline_at_once(source), None
    if outline is None and not is_module(source):
        leaves = named_leaves(source)
        outline = outline_of(tuple(leaves), list(leaves.values()))
    if (
        form is not None
        and outline is not None
        and outline.marks == form.outline
        and (not form.large or in_memory([outline.leaves[place] for place in form.large]))
    ):
        return State(form, outline.leaves)
    if leaves is None:
        leaves = named_leaves(source)
    for name in sorted(leaves):
        leaf = leaves[name]
        if not isinstance(leaf, np.ndarray) and leaf.is_meta:
            raise StateError(
                f"{name}: on the meta device, so it has no values to send; load the model first"
            )
    return state_of_leaves(leaves, lambda name: identity(leaves[name]), outline)


def state_of_leaves(
    leaves: Mapping[str, Leaf],
    identity_of: Callable[[str], Hashable | None],
    outline: Outline | None = None,
) -> State:
    """Return the state of named tensors.

    Args:
        leaves: The tensors, in the order of the source.
        identity_of: Returns, for a name, a key that is equal for all names of one tensor; None if
            the tensor has no elements.
        outline: The outline of the source, if there is one.

    Raises:
        StateError: A tensor cannot be published.
    """
    unique: dict[str, Leaf] = {}
    aliases: dict[str, str] = {}
    signatures = {name: signature(name, leaves[name]) for name in sorted(leaves)}
    identities = {name: identity_of(name) for name in leaves}
    kept: dict[Hashable | None, str] = {}
    for name, key in identities.items():
        kept.setdefault(key, name)
    for name in sorted(leaves):
        key = identities[name]
        if key is None or (first := kept[key]) == name:
            unique[name] = leaves[name]
        else:
            aliases[name] = first
            del signatures[name]
    places = _places(unique, leaves, outline) if outline is not None else None
    if outline is None or places is None:
        places = [*range(len(unique))]
        return State(Form(signatures, aliases, tuple(leaves), places, None), [*unique.values()])
    large = of_torch().large(outline.leaves) if "torch" in sys.modules else ()
    form = Form(signatures, aliases, tuple(leaves), places, outline.marks, large=large)
    return State(form, outline.leaves)


def in_memory(leaves: Iterable[Leaf]) -> bool:
    """Return whether all elements of these torch tensors are still in memory."""
    return all(of_torch().memory_fault(leaf) is None for leaf in leaves)


def outline_at_once(source: object) -> Outline | None:
    """Return the outline of a source if it can be made without an analysis, else None."""
    if type(source) is dict:
        flat = cast("dict[str, Any]", source)
        return outline_of(tuple(flat), list(flat.values()))
    if is_module(source):
        from . import torch_modules

        return torch_modules.outline(source)
    return None


def outline_of(key: Sequence[object], leaves: Sequence[Leaf]) -> Outline | None:
    """Return an outline of tensors; None if such tensors must be analysed each time."""
    kinds = set(map(type, leaves))
    if kinds <= {np.ndarray}:
        arrays = [*map(_DATA, map(_INTERFACE, leaves))], [*map(_SHAPE, leaves)]
        return Outline((key, arrays), leaves)
    if "torch" not in sys.modules:  # no leaf is a torch tensor, and torch must not be imported
        return None
    tensors = of_torch().marks(leaves) if kinds <= of_torch().PLAIN else None
    return None if tensors is None else Outline((key, tensors), leaves)


def _places(
    unique: Mapping[str, Leaf], leaves: Mapping[str, Leaf], outline: Outline
) -> list[int] | None:
    """Return the index of each tensor in the outline; None if a tensor is not in the outline."""
    names, _ = outline.marks
    if len(names) == len(leaves) and [*names] == [*leaves]:
        order = {name: place for place, name in enumerate(leaves)}
        return [order[name] for name in unique]
    # A module's outline has its own parameters; its `state_dict()` may return other tensors.
    found = {identity(leaf): place for place, leaf in enumerate(outline.leaves)}
    found.pop(None, None)
    places = [found.get(identity(leaf)) for leaf in unique.values()]
    return None if None in places else cast("list[int]", places)


class Writer:
    """Writes successive states of one layout into one buffer.

    Args:
        layout: The layout.
        data: The buffer. It is pinned when a state is on a device for the first time.
        second: Whether a state on one device is first copied to a second copy on that device.
    """

    def __init__(self, layout: Layout, data: numpy_tensors.Memory, *, second: bool = False) -> None:
        self.section = Section(layout, data)
        if not self.section.data.flags.writeable or not self.section.aligned():
            raise LayoutError(
                "a state can only be written into a writable buffer that is aligned to 8 bytes, by "
                "a layout that was planned here"
            )
        self._form: Form | None = None
        self._views: list[Leaf] = []
        self._copies = Copies((), ())
        self._pieces: _Pieces | None = None
        self._second = second
        self._narrowed: Narrowed | None = None
        self._late = False  # whether the last state was written only to the second copy
        self._mirror: Mirror | None = None
        self._pinned: Pinned | None = None

    @property
    def note(self) -> bytes:
        """What processes of this host need to map the second copy; empty: they cannot map it."""
        return b"" if self._mirror is None else self._mirror.note

    def ready(self, state: State) -> None:
        """Do the work that is needed only once, before the first state is written.

        Raises:
            MemoryError: A device is out of memory.
            StateError: The state has other tensors than the layout; nothing was written.
        """
        self._pair(state)

    def begin(
        self,
        state: State,
        check: Callable[[], None] = lambda: None,
        chunk_bytes: int = 0,
        *,
        late: bool = False,
    ) -> "NDArray[np.uint32] | Arriving":
        """Begin to write a state; tensors in this process's memory are copied before it returns.

        Args:
            state: The state.
            check: Called between steps; may raise to stop.
            chunk_bytes: The size of the chunks whose CRC-32C is returned; 0: return none.
            late: If there is a `note` and `chunk_bytes` is 0, make only the second copy. Then the
                buffer does not have the state until `cross` has returned.

        Returns:
            The CRC-32C of each chunk, or an empty array. For a state on devices, the copies in
            progress instead; the caller may already write to the state's tensors.

        Raises:
            StateError, MemoryError: As in `ready`.
        """
        if state.form is not self._form:
            self._pair(state)
        devices, self._late = self._copies.devices, False
        if devices is None:
            if chunk_bytes:
                pieces = self._pieces or self._in_pieces(state)
                return pieces.gather(state.values, chunk_bytes, check)
            self._copies.run(self._views, state.values, check)
            return np.empty(0, np.uint32)
        if late and self.note and not chunk_bytes:
            self._late = True
            return devices.copy(state.values)
        return self._copies.begin(self._views, state.values, check) or np.empty(0, np.uint32)

    def cross(self, check: Callable[[], None]) -> None:
        """Copy the second copy to the buffer, and wait. `check` is called repeatedly; may raise."""
        if self._copies.devices is not None:
            self._copies.devices.cross().wait(check)

    def write(self, state: State, check: Callable[[], None] = lambda: None) -> None:
        """Write the bytes of every tensor into the buffer, bit for bit.

        `check` is called between steps. If it raises, the buffer is half written.

        Raises:
            StateError, MemoryError: As in `ready`.
        """
        self._pair(state)
        self._copies.run(self._views, state.values, check)

    def count_lost(self, state: State) -> LostValues:
        """Return, by tensor, how many finite values of `state` were lost when it was written."""
        if self._narrowed is None:
            return {}
        if self._late and self._mirror is not None:
            return self._narrowed.found_on(self._mirror.flat, state.tensors)
        return self._narrowed.found(self.section.data, state.tensors)

    def _in_pieces(self, state: State) -> "_Pieces":
        self._pieces = _Pieces(self.section, self._views, state)
        return self._pieces

    def _pair(self, state: State) -> None:
        """Prepare the copies for a state, unless its form is that of the previous state."""
        if state.form is self._form:
            return
        if not state.fits(self.section.layout):
            raise StateError(
                f"the state has other tensors than {self.section.layout!r}; plan its layout anew"
            )
        self._form, self._copies = None, Copies((), ())  # stays so if an exception follows
        self._views = [self.section.like(name, leaf) for name, leaf in state.tensors.items()]
        second = self._second_copy(state)
        self._copies = Copies(self._views, state.values, private=True, second=second)
        self._pieces = None
        self._narrowed = self._converted(state)
        # Without an outline, a moved tensor is not detected, so the next state is prepared anew.
        self._form = state.form if state.form.outline is not None else None

    def _converted(self, state: State) -> Narrowed | None:
        """Return the tensors whose conversion may lose values, since their dtype has less range."""
        pairs = zip(self._views, state.tensors.items(), strict=True)
        some = [(name, leaf) for view, (name, leaf) in pairs if view.dtype != leaf.dtype]
        layout = self.section.layout
        specs = ((layout.by_name(name), signature(name, leaf)[0]) for name, leaf in some)
        return Narrowed.of((spec, was, spec.dtype) for spec, was in specs)

    def _second_copy(self, state: State) -> "Second | None":
        """Pin the buffer for a state on devices; return the second copy to use, if any."""
        devices, data = devices_of(state.values), self.section.data
        if not devices:
            self._mirror = None
            return None
        from . import device_memory

        if self._pinned is None:
            self._pinned = device_memory.pinned(data, next(iter(devices)))
        on_one_device = len(devices) == 1 and all(map(on_device, state.values)) and data.nbytes
        if not (self._second and on_one_device):
            self._mirror = None
            return None
        (device,) = devices
        if self._mirror is None or self._mirror.flat.device != device:
            self._mirror = None  # free the old copy before the next one is allocated
            self._mirror = device_memory.Mirror(device, data.nbytes)
        return self._mirror.flat, data.__array_interface__["data"][0]


class _Pieces:
    """The tensors of a state in the order of the data section, for `native.gather`.

    Tensors that are not plain memory are first copied to their offsets in the section.
    """

    def __init__(self, section: Section, views: Sequence[Leaf], state: State) -> None:
        self._section, self._views = section, views
        order = {name: index for index, name in enumerate(state.form.signatures)}
        begin: int = section.data.__array_interface__["data"][0]
        values, self._others = state.values, list[int]()
        pieces: list[tuple[int, int, int]] = []
        for spec in section.layout.tensors:
            index = order[spec.name]
            plain = plain_memory(views[index], values[index])
            if plain is None:
                self._others.append(index)
            to = begin + spec.begin
            pieces.append((to, to if plain is None else plain[1], spec.nbytes))
        places = np.array(pieces, np.uint64).reshape(-1, 3).T.copy()
        _, self._from, self._sizes = native.joined(*places)
        self._copies = Copies(self._of(views), self._of(values), private=True)

    def _of(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        return [leaves[index] for index in self._others]

    def gather(
        self, values: Sequence[Leaf], chunk_bytes: int, check: Callable[[], None]
    ) -> NDArray[np.uint32]:
        if self._others:
            self._copies.run(self._of(self._views), self._of(values), check)
        return native.gather(self._section.data, self._from, self._sizes, chunk_bytes)


def write_into(state: State, layout: Layout, data: numpy_tensors.Memory) -> None:
    """Write a state into a buffer of `layout.nbytes` bytes; see `Writer.write`."""
    Writer(layout, data).write(state)


def named_leaves(source: object, *, in_place: bool = False) -> dict[str, Leaf]:
    """Return every tensor of a source by its dotted name. Tied tensors have several names.

    With `in_place`, containers that return copies instead of their memory are refused.

    Raises:
        StateError: A part of `source` cannot be published, or written to with `in_place`.
    """
    pairs: Iterator[tuple[str, Leaf]] = _walk(source, "", 0, in_place)
    if is_module(source):
        from . import torch_modules

        pairs = torch_modules.leaves_of(source)
    leaves: dict[str, Leaf] = {}
    for name, leaf in pairs:
        if name in leaves:
            raise StateError(f"{name}: two entries have this name once nested keys are joined")
        if name in ("", METADATA):
            raise StateError(f"{name!r} cannot name a tensor; rename it")
        leaves[name] = leaf
    return leaves


def signature(name: str, leaf: Leaf) -> Signature:
    """Return the dtype name and shape of a tensor; StateError if it cannot be published."""
    if isinstance(leaf, np.ndarray):
        return numpy_tensors.signature(name, leaf)
    from . import torch_tensors

    return torch_tensors.signature(name, leaf)


def identity(leaf: Leaf) -> Hashable | None:
    """Return a key that is equal for leaves with the same elements; None for an empty leaf."""
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
    foreign = depth > 0 and _is_foreign(node)
    if foreign and in_place:
        raise StateError(
            f"{where}a {type(node).__name__} is not written into; give np.array(x) of it and make "
            "new ones of that after each version, or give a function that loads them"
        )
    if depth and _is_scalar(node):
        yield path, np.asarray(cast("np.generic[Any]", node))
    elif depth and (isinstance(node, np.ndarray) or is_tensor(node)):
        yield path, cast("Leaf", node)
    elif foreign:
        yield path, _viewed(node, where)
    elif depth and is_module(node):
        text = (
            f"{where}a {type(node).__name__} in a mapping cannot travel; give it by "
            "itself, or give an nn.ModuleDict, or a mapping of their state_dict()s"
        )
        raise StateError(text)
    elif not isinstance(node, Mapping) and not is_tensordict(node):
        listed = isinstance(node, list | tuple)
        named = ". By number they are {str(n): x for n, x in enumerate(...)}" if listed else ""
        raise StateError(f"{where}a {type(node).__name__} cannot travel; give {WANTED}{named}")
    elif depth >= DEPTH_MAX:
        raise StateError(f"{path[:80]}…: nested deeper than {DEPTH_MAX} levels; flatten it")
    else:
        for key, value in cast("Mapping[Any, Any]", node).items():
            if not isinstance(key, str):
                raise StateError(f"{where}the key {key!r} is not a string; names must be")
            yield from _walk(value, f"{path}.{key}" if depth else key, depth + 1, in_place)


def _imported(module: str, name: str) -> Any:
    """Return a class of a module; None if the module is not (completely) imported.

    In that case, no object of the class exists.
    """
    return getattr(sys.modules.get(module), name, None)


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Return whether `value` is a torch tensor, without importing torch."""
    tensor = _imported("torch", "Tensor")
    return tensor is not None and isinstance(value, tensor)


def is_module(value: object) -> "TypeGuard[torch.nn.Module]":
    """Return whether `value` is a torch module and not a TensorDict, without importing torch."""
    module = _imported("torch.nn", "Module")
    return module is not None and isinstance(value, module) and not is_tensordict(value)


def is_tensordict(value: object) -> bool:
    """Return whether `value` is a TensorDict or tensor collection, without importing tensordict."""
    is_collection = _imported("tensordict", "is_tensor_collection")
    is_other = _imported("tensordict", "is_non_tensor")
    return bool(is_collection and is_other and is_collection(value) and not is_other(value))


def _is_foreign(value: object) -> bool:
    """Return whether `value` is another framework's array that numpy can view."""
    if (
        isinstance(value, (np.ndarray, np.generic, Mapping))
        or is_tensor(value)
        or is_module(value)
        or is_tensordict(value)
    ):
        return False
    return all(hasattr(value, name) for name in ("__array__", "dtype", "shape"))


def _viewed(value: object, where: str) -> numpy_tensors.Array:
    """Return another framework's array as a numpy array, without a copy if it is in host memory.

    Raises:
        StateError: Numpy cannot view the array; the text says what to do.
    """
    try:
        array = np.asarray(value)
    except Exception as error:  # the framework's: deleted, on other hosts, or of another dtype
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise StateError(
            f"{where}a {type(value).__name__} that numpy cannot view ({reason}); give np.asarray(x)"
            " of what holds its values"
        ) from error
    if array.dtype == object:
        raise StateError(f"{where}a {type(value).__name__} of objects cannot travel; give {WANTED}")
    return array


def _is_scalar(value: object) -> bool:
    return isinstance(value, np.generic)


def _is_lazy(value: object) -> bool:
    lazy = _imported("tensordict", "LazyStackedTensorDict")
    return lazy is not None and isinstance(value, lazy)
