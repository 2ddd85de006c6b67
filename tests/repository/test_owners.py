"""Each field of the machines' objects is written only by the module of its class."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

BUS = Path(__file__).parents[2] / "bus"
MODULES = sorted(path for side in ("publisher", "worker") for path in (BUS / side).glob("*.py"))
# Methods that change a container in place.
CHANGES = {
    *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend"),
    *("extendleft", "insert", "pop", "popitem", "popleft", "remove", "setdefault", "sort"),
    "update",
}


def fields(tree: ast.AST) -> set[str]:
    """Return the fields of the classes of a module."""
    declared = {
        line.target.id
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        for line in each.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    return declared | {each.attr for each in written(tree) if ast.unparse(each.value) == "self"}


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield each attribute that is assigned, deleted, or changed in place."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load):
            yield each
        elif isinstance(each, ast.Subscript) and not isinstance(each.ctx, ast.Load):
            yield from (x for x in [each.value] if isinstance(x, ast.Attribute))
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            of = each.func.value
            if each.func.attr in CHANGES and isinstance(of, ast.Attribute):
                yield of


@cache
def modules_of(folder: Path) -> Counter[str]:
    """Return in how many modules of a folder each field is declared."""
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    return Counter(field for tree in trees for field in fields(tree))


def foreign(source: str, folder: Path) -> list[str]:
    """Return where a module of a folder writes a field of another module's object.

    Objects have no types here. A field that several modules declare is another module's if it is
    reached through another object, as in `self.version.sums`.
    """
    tree = ast.parse(source)
    own, modules = fields(tree), modules_of(folder)
    return [
        f"line {each.lineno}: {ast.unparse(each)}"
        for each in written(tree)
        if ast.unparse(each.value) != "self"
        if each.attr not in own
        or (modules[each.attr] > 1 and isinstance(each.value, ast.Attribute))
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_module_writes_into_its_own_objects_alone(path: Path) -> None:
    theirs = foreign(path.read_text(), path.parent)
    assert not theirs, "write a method of the object's class that says what happens to it"


@pytest.mark.parametrize(
    "line",
    [
        "peer.heard_at = now",
        "peer.heard_at += 1",
        "peer.heard_at, now = now, 0",
        "del peer.heard_at",
        "for peer.heard_at in range(3): pass",
        "state.calls[1] = call",
        "del state.calls[1]",
        "state.calls.pop(1)",
        "state.calls.setdefault(1, call)",
        "version.end_awaiters.add('w')",
        "version.end_awaiters.difference_update({'w'})",
        "self._state.roster.revision += 1",  # other modules have a `revision`, too
    ],
)
def test_a_write_is_found(line: str) -> None:
    module = "class Observed:\n    revision: int = 0\n\n"
    assert foreign(module + line, BUS / "publisher")


@pytest.mark.parametrize("line", ["peer.heard(now)", "at = peer.heard_at", "found.revision = 1"])
def test_a_read_a_call_and_an_own_field_are_none(line: str) -> None:
    module = "class Observed:\n    revision: int = 0\n\n"
    assert not foreign(module + line, BUS / "publisher")
