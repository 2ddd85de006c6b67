"""Every row of the matrix of failures names a test that there is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/failures.md"
SHOWN = re.compile(r"`(\w+\.py)::(\w+)` \|$")


def test_every_failure_is_shown_by_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for row in rows[1:]:
        shown = SHOWN.search(row)
        assert shown is not None, row
        tree = ast.parse(files[shown[1]].read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert shown[2] in functions, row
