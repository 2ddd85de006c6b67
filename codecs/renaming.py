"""Renames tensors, at a publisher or at a worker.

The models of a trainer and a worker may have the same architecture but different names, for example
if one of them is wrapped. At a publisher, a renaming maps the names of the weights to the published
names. At a worker, it maps published names to the target's names, by the same rules. Each name of a
tied tensor is renamed by itself, and the names stay tied.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, cast

from .errors import StateError
from .layout import METADATA, NAME_SHOWN
from .state import Form
from .words import printable

# A prefix to remove; a mapping of names or prefixes to replacements; or a function from a name to a
# new name.
Rename: TypeAlias = str | Mapping[str, str] | Callable[[str], str] | None

DOT: Final = "."
SHOWN: Final = 3  # number of existing names that an error text shows


@dataclass(frozen=True, slots=True)
class Renaming:
    """A mapping of names to new names.

    Attributes:
        names: Whole names, each with its new name.
        beginnings: Pairs of a prefix and its replacement, longest prefix first. The longest match
            counts.
        function: A function from a name to its new name. If set, `names` and `beginnings` are not
            used.
    """

    names: tuple[tuple[str, str], ...] = ()
    beginnings: tuple[tuple[str, str], ...] = ()
    function: Callable[[str], str] | None = None

    def of(self, names: Collection[str]) -> dict[str, str]:
        """Return the new name of each name.

        Raises:
            StateError: A name or prefix to rename does not exist, two names become the same, or a
                new name is invalid.
        """
        whole = dict(self.names)

        def renamed(name: str) -> str:
            if self.function is not None:
                return self.function(name)
            if name in whole:
                return whole[name]
            for beginning, instead in self.beginnings:
                if name.startswith(beginning):
                    return instead + name.removeprefix(beginning)
            return name

        became = {name: renamed(name) for name in names}
        self._check_found(became)
        _check(became)
        return became

    def _check_found(self, names: Collection[str]) -> None:
        lacking = [f"nothing is called {name!r}" for name, _ in self.names if name not in names]
        lacking += [
            f"no name begins with {beginning!r}"
            for beginning, _ in self.beginnings
            if beginning and not any(name.startswith(beginning) for name in names)
        ]
        if lacking:
            some = ", ".join(printable(name, NAME_SHOWN) for name in sorted(names)[:SHOWN])
            raise StateError(f"rename: {lacking[0]}; there are {some or 'no names'}, ...")

    def form_of(self, form: Form) -> Form:
        """Return the form of a state under its tensors' new names.

        Raises:
            StateError: As in `of`.
        """
        became = self.of([*form.signatures, *form.aliases])
        placed = zip(form.signatures.items(), form.places, strict=True)
        rows = sorted((became[name], signature, place) for (name, signature), place in placed)
        return replace(
            form,
            signatures={name: signature for name, signature, _ in rows},
            aliases={became[alias]: became[name] for alias, name in form.aliases.items()},
            names=tuple(became[name] for name in form.names),
            places=[place for _, _, place in rows],
            known=None,
        )


def renaming_of(asked: object) -> Renaming | None:
    """Return the renaming for a user's `rename`; None if nothing is to be renamed.

    Raises:
        ValueError: A prefix or its replacement is invalid; the error text says what is allowed.
        TypeError: `asked` is of a type that is not allowed.
        StateError: A new name is invalid, or two names become the same.
    """
    if asked is None:
        return None
    if isinstance(asked, str):
        if not asked.endswith(DOT):
            raise ValueError(
                f"rename={asked!r}: give the prefix that is taken off, up to its dot, as 'module.'"
            )
        asked = {asked: ""}
    if not isinstance(asked, Mapping):
        if not callable(asked):
            raise TypeError(
                f"rename={asked!r}: give a prefix that is taken off ('module.'), a mapping of "
                "names to names, or a function from a name to a name"
            )
        return Renaming(function=cast("Callable[[str], str]", asked))
    pairs = cast("Mapping[object, object]", asked)
    names: dict[str, str] = {}
    beginnings: dict[str, str] = {}
    for key, instead in pairs.items():
        if not isinstance(key, str) or not isinstance(instead, str):
            raise TypeError(f"rename: {key!r}: {instead!r} must map a name to its new name")
        if key.endswith(DOT) or not key:
            if not instead.endswith(DOT) and instead:
                raise ValueError(
                    f"rename: {key!r} is the beginning of names, and what takes its place has to "
                    f"end with a dot or be empty: {instead + DOT!r} in place of {instead!r}"
                )
            beginnings[key] = instead
        else:
            names[key] = instead
    _check(names)
    longest_first = sorted(beginnings.items(), key=lambda each: -len(each[0]))
    return Renaming(tuple(names.items()), tuple(longest_first)) if pairs else None


def _check(became: Mapping[str, str]) -> None:
    """Check that all new names are valid and different.

    Raises:
        StateError: A name is invalid, or two names are the same.
    """
    for name, other in became.items():
        if not isinstance(other, str):  # pyright: ignore
            raise StateError(f"rename: {name!r} becomes {other!r}, which is not text")
        if not other or other == METADATA or other.startswith(DOT):
            raise StateError(f"rename: {name!r} becomes {other!r}, which cannot name a tensor")
    if len({*became.values()}) < len(became):
        many = min(name for name, count in Counter(became.values()).items() if count > 1)
        those = " and ".join(repr(name) for name in sorted(became) if became[name] == many)
        raise StateError(f"rename: {those} become one name, {many!r}; each needs one of its own")
