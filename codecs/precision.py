"""Chooses the dtypes to which a publisher converts floats while it copies a state.

Only the state's form changes (see `state.Form`). The copy itself converts each value, as the
protocol specifies (5.2), so no second copy of the model is made.
"""

from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import cast

from .dtypes import DTYPES
from .errors import StateError
from .state import Form, State, Streamed, identity, is_module

# the dtypes that are converted, and to which they can be converted
CONVERTED = ("BF16", "F16", "F32", "F64")

_NAMES = {
    known: name
    for name in CONVERTED
    for known in (name.lower(), DTYPES[name].torch or name.lower())
}


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes that a user chose.

    Attributes:
        dtype: The dtype of all parameters; empty: use `patterns`.
        patterns: Shell patterns of names, each with a dtype; the first match counts.
    """

    dtype: str
    patterns: tuple[tuple[str, str], ...] = ()

    def form_of(self, state: State, source: object) -> Form:
        """Return the form of a state in this precision; the state's own form if nothing changes.

        Args:
            state: The state.
            source: The weights that the state was made from. A module's buffers are converted only
                by a pattern; in a mapping every float is a parameter.

        Raises:
            StateError: A pattern matches no tensor that can be converted.
        """
        names = {name: [name] for name in state.signatures}
        for alias, name in state.aliases.items():
            names[name].append(alias)
        parameters = _parameters(source)
        unused = {pattern for pattern, _ in self.patterns}
        signatures = dict(state.signatures)
        for name, leaf in state.tensors.items():
            dtype, shape = signatures[name]
            if isinstance(source, Streamed):
                is_parameter = source.is_parameter(leaf)
            else:
                key = identity(leaf)  # None for an empty tensor, which has no identity
                is_parameter = parameters is None or key in parameters or key is None
            pattern, wanted = self._wanted(names[name], is_parameter=is_parameter)
            if wanted and dtype in CONVERTED:
                signatures[name] = wanted, shape
                unused.discard(pattern)
        if unused:
            raise StateError(
                f"dtype: {', '.join(map(repr, sorted(unused)))} matches no tensor of "
                f"{', '.join(CONVERTED)} that is left by earlier patterns; give patterns of names, "
                f"as {next(iter(signatures), 'layer.weight')!r} or '*.weight'"
            )
        changed = signatures != state.signatures
        return replace(state.form, signatures=signatures, known=None) if changed else state.form

    def of(self, name: str, dtype: str) -> str:
        """Return the new dtype of a mapping's tensor with this name and dtype."""
        if dtype not in CONVERTED:
            return dtype
        if self.dtype:
            return self.dtype
        return next((to for pattern, to in self.patterns if fnmatchcase(name, pattern)), dtype)

    def _wanted(self, names: list[str], *, is_parameter: bool) -> tuple[str, str]:
        """Return (pattern that matches a tensor, new dtype of the tensor).

        The dtype is empty if the tensor is not converted. `names` are all names of the tensor.
        """
        if self.dtype:
            return "", self.dtype if is_parameter else ""
        for pattern, dtype in self.patterns:
            if any(fnmatchcase(name, pattern) for name in names):
                return pattern, dtype
        return "", ""


def _parameters(source: object) -> Container[Hashable] | None:
    """Return the identities of a module's parameters; None if all tensors count as such."""
    if not is_module(source):
        return None
    from .torch_modules import parameters_of

    return {identity(each) for each in parameters_of(source)}


def precision_of(asked: object) -> Precision | None:
    """Return the precision for a user's `dtype`: a dtype, or a mapping of patterns to dtypes.

    Return None if nothing is to be converted.

    Raises:
        ValueError: `asked` is invalid; the text says what is allowed.
    """
    if not isinstance(asked, Mapping):
        return None if asked is None else Precision(_dtype(asked))
    named = cast("Mapping[object, object]", asked)
    patterns = tuple((str(pattern), _dtype(dtype)) for pattern, dtype in named.items())
    return Precision("", patterns) if patterns else None


def _dtype(asked: object) -> str:
    name = _NAMES.get(asked) if isinstance(asked, str) else None
    if name is None:
        raise ValueError(
            f"dtype={asked!r}: give one of {', '.join(sorted(_NAMES))}, or a mapping of patterns "
            "of names to those"
        )
    return name
