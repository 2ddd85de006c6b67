"""Lazy exports of a module: each name is imported when it is first used."""

from importlib import import_module

TYPE_CHECKING = False  # without importing `typing`, which is slow
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy(
    module: dict[str, object], package: str, homes: "Mapping[str, str]"
) -> "tuple[Callable[[str], object], Callable[[], list[str]]]":
    """Return the functions `__getattr__` and `__dir__` of a module.

    Args:
        module: The module's globals.
        package: The package to which the modules in `homes` are relative.
        homes: For each exported name, the module that defines it.
    """

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        module[name] = value = getattr(import_module(f".{home}", package), name)  # cached
        return value

    def names() -> list[str]:
        return sorted({*module, *homes})

    return load, names
