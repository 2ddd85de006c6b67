"""Other names for tensors, at either side of the bus: what they are called from here on.

A trainer's model and a worker's may have one architecture and other names, since something wraps
one of them. A renaming says what takes the place of what. At a publisher it goes from the names of
the weights to those that are published, at a worker from these to the names of the target, and it
is the same there as here. Tied names are renamed each by itself, and stay tied.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, cast

from .errors import StateError
from .layout import METADATA, NAME_SHOWN
from .state import Form
from .words import printable

# A beginning that is taken off; names, or beginnings of names, with what takes their place; or a
# function that is given a name and returns another one.
Rename: TypeAlias = str | Mapping[str, str] | Callable[[str], str] | None

DOT: Final = "."
SHOWN: Final = 3  # names, of those that there are


@dataclass(frozen=True, slots=True)
class Renaming:
    """What becomes of names.

    Attributes:
        names: Whole names, with what they become.
        beginnings: Beginnings of names, with what takes their place: the longest counts.
        function: What is asked for every name instead.
    """

    names: tuple[tuple[str, str], ...] = ()
    beginnings: tuple[tuple[str, str], ...] = ()
    function: Callable[[str], str] | None = None

    def of(self, names: Collection[str]) -> dict[str, str]:
        """Return what each name becomes.

        Raises:
            StateError: Something that is to be renamed is not there, two names become one, or what
                a name becomes cannot be one.
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
        """Return the form of a state under the names that its tensors become.

        Raises:
            StateError: As of `of`.
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
    """Return what a user asks for; None if for nothing.

    Raises:
        ValueError: It makes no sense; the text says what does.
        TypeError: Nor is it of a kind that does.
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
    told = cast("Mapping[object, object]", asked)
    names: dict[str, str] = {}
    beginnings: dict[str, str] = {}
    for key, instead in told.items():
        if not isinstance(key, str) or not isinstance(instead, str):
            raise TypeError(f"rename: {key!r}: {instead!r} does not say what name becomes of what")
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
    return Renaming(tuple(names.items()), tuple(longest_first)) if told else None


def _check(became: Mapping[str, str]) -> None:
    """Check that names become names, each another one."""
    for name, other in became.items():
        if not isinstance(other, str):  # pyright: ignore
            raise StateError(f"rename: {name!r} becomes {other!r}, which is no text")
        if not other or other == METADATA or other.startswith(DOT):
            raise StateError(f"rename: {name!r} becomes {other!r}, which cannot name a tensor")
    if len({*became.values()}) < len(became):
        many = min(name for name, count in Counter(became.values()).items() if count > 1)
        those = " and ".join(repr(name) for name in sorted(became) if became[name] == many)
        raise StateError(f"rename: {those} become one name, {many!r}; each needs one of its own")
