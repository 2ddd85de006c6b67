"""Each field of the worker's machine is written only by the module of its class."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bus" / "worker"
CHANGES = {"append", "clear", "discard", "extend", "pop", "popleft", "remove", "update"}
LENT = {"live", "running", "users"}  # of jobs and of bases of patches, which one module writes


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


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_writes_into_its_own_objects_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    theirs = [
        f"line {each.lineno}: {ast.unparse(each)}"
        for each in written(tree)
        if ast.unparse(each.value) != "self" and each.attr not in fields(tree) | LENT
    ]
    assert not theirs, "say what happens to it, by a method of its own"
