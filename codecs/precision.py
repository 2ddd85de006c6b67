"""The precision that a version travels in: what a state's floats become while they are copied.

Only the form is another one. Whoever writes a state of it converts value by value on the way, as
the protocol has it (5.2), so there is never a second copy of the model.
"""

from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import cast

from .dtypes import DTYPES
from .errors import StateError
from .leaves import Leaf
from .state import Form, State, identity, is_module

CONVERTED = ("BF16", "F16", "F32", "F64")  # among these

_NAMES = {
    known: name
    for name in CONVERTED
    for known in (name.lower(), DTYPES[name].torch or name.lower())
}


@dataclass(frozen=True, slots=True)
class Precision:
    """What is converted.

    Attributes:
        dtype: What parameters become; empty: patterns say what becomes what.
        patterns: Shell patterns of names, each with a dtype; the first that matches counts.
    """

    dtype: str
    patterns: tuple[tuple[str, str], ...] = ()

    def form_of(self, state: State, source: object) -> Form:
        """Return the form of a state in this precision; its own if nothing changes.

        Args:
            state: It.
            source: What it is the state of. A module knows its buffers, which have to be named;
                of a mapping every float is a parameter.

        Raises:
            StateError: A pattern matches nothing that can be converted.
        """
        names = {name: [name] for name in state.signatures}
        for alias, name in state.aliases.items():
            names[name].append(alias)
        parameters = _parameters(source)
        unused = {pattern for pattern, _ in self.patterns}
        signatures = dict(state.signatures)
        for name, leaf in state.tensors.items():
            dtype, shape = signatures[name]
            pattern, wanted = self._wanted(names[name], leaf, parameters)
            if wanted and dtype in CONVERTED:
                signatures[name] = wanted, shape
                unused.discard(pattern)
        if unused:
            raise StateError(
                f"dtype: {', '.join(map(repr, sorted(unused)))} matches no tensor of "
                f"{', '.join(CONVERTED)} that nothing before it does; give patterns of names, as "
                f"{next(iter(signatures), 'layer.weight')!r} or '*.weight'"
            )
        changed = signatures != state.signatures
        return replace(state.form, signatures=signatures, known=None) if changed else state.form

    def of(self, name: str, dtype: str) -> str:
        """Return what a tensor of a mapping becomes, by its name and its dtype."""
        if dtype not in CONVERTED:
            return dtype
        if self.dtype:
            return self.dtype
        return next((to for pattern, to in self.patterns if fnmatchcase(name, pattern)), dtype)

    def _wanted(
        self, names: list[str], leaf: Leaf, parameters: Container[Hashable] | None
    ) -> tuple[str, str]:
        """Return what a tensor of these names becomes, and by which pattern; empty: what it is."""
        if self.dtype:
            same = identity(leaf)  # nobody can tell by its memory whose a tensor without any is
            mine = parameters is None or same in parameters or same is None
            return "", self.dtype if mine else ""
        for pattern, dtype in self.patterns:
            if any(fnmatchcase(name, pattern) for name in names):
                return pattern, dtype
        return "", ""


def _parameters(source: object) -> Container[Hashable] | None:
    """Return who is a parameter of a module; None: it is no module, and all are."""
    if not is_module(source):
        return None
    from .torch_modules import parameters_of

    return {identity(each) for each in parameters_of(source)}


def precision_of(asked: object) -> Precision | None:
    """Return what a user asks for: a dtype, or patterns of names with dtypes; None if of nothing.

    Raises:
        ValueError: It makes no sense; the text says what does.
    """
    if not isinstance(asked, Mapping):
        return None if asked is None else Precision(_dtype(asked))
    told = cast("Mapping[object, object]", asked)
    patterns = tuple((str(pattern), _dtype(dtype)) for pattern, dtype in told.items())
    return Precision("", patterns) if patterns else None


def _dtype(asked: object) -> str:
    name = _NAMES.get(asked) if isinstance(asked, str) else None
    if name is None:
        raise ValueError(
            f"dtype={asked!r}: give one of {', '.join(sorted(_NAMES))}, or a mapping of patterns "
            "of names to those"
        )
    return name
