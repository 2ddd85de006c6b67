"""Run the tests of what touches bytes without the helper in C: `make twins`.

What the helper does is called in a few modules only, so where it is missing differs in nothing but
them. These tests are the files that import one of those modules; all others would take the same
minutes again to walk through the same Python.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("bus", "codecs", "python_client")
DOOR = "weightbus.codecs.native"
OF_THEIR_OWN = {"languages", "operators", "training"}  # not of make test either
PATIENCE = 1800  # seconds


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, by their full names, and what it imports of them."""
    inside = path.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = ("weightbus", *inside)[: len(inside) + 2 - node.level] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            found |= {module, *(f"{module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def tests() -> list[str]:
    """Return the files."""
    callers = {DOOR}
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        if DOOR in imports(path):
            callers.add(".".join(("weightbus", *path.relative_to(ROOT).with_suffix("").parts)))
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(path.relative_to(ROOT))
        for path in files
        if path.parent.name not in OF_THEIR_OWN and imports(path) & callers
    ]


def main(words: list[str]) -> int:
    """Run pytest with these words; return its status."""
    command = [sys.executable, "-m", "pytest", *tests(), *words]
    environment = {**os.environ, "WEIGHTBUS_NATIVE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=PATIENCE)  # noqa: S603
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
