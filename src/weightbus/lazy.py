"""Lazy exports of a module: each name is imported when it is first used."""

from importlib import import_module

TYPE_CHECKING = False  # without importing `typing`, which is slow
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy(
    face: dict[str, object], package: str, homes: "Mapping[str, str]"
) -> "tuple[Callable[[str], object], Callable[[], list[str]]]":
    """Return the functions `__getattr__` and `__dir__` of a module.

    Args:
        face: The module's globals.
        package: The package that `homes` is relative to.
        homes: The module that defines each exported name, by that name.
    """

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {face['__name__']!r} has no attribute {name!r}")
        face[name] = value = getattr(import_module(f".{home}", package), name)  # cached
        return value

    def names() -> list[str]:
        return sorted({*face, *homes})

    return load, names
