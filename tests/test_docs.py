"""Every code block of the README and the guides runs as it stands.

Python blocks of one page run in order in one process. Shell blocks are checked for commands that
exist: `make` targets against the Makefile, `weightbus` lines against the command line's own parser.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    found = BLOCK.finditer(page.read_text())
    return [match["code"] for match in found if match["language"] in languages]


def shell_lines() -> list[str]:
    code = [block for page in PAGES for block in blocks(page, "sh", "bash", "console")]
    lines = [line.removeprefix("$ ") for block in code for line in block.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    code = blocks(page, "python", "py")
    if not code:
        pytest.skip(f"{page.name} has no Python blocks")
    script = tmp_path / "page.py"
    script.write_text("\n".join(code))
    done = subprocess.run(  # noqa: S603 - our own pages
        [sys.executable, script], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", shell_lines())
def test_shell_lines_name_what_exists(line: str) -> None:
    words = shlex.split(line, comments=True)
    match words[0]:
        case "make":
            targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert words[1] in targets
        case "weightbus":
            asked = [sys.executable, "-m", "weightbus", words[1], "--help"]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=60)  # noqa: S603
            assert done.returncode == 0, done.stderr
            options = [word.split("=")[0] for word in words if word.startswith("--")]
            assert [option for option in options if option not in done.stdout] == []
        case "docker" | "docker-compose":
            assert (ROOT / "docker-compose.yml").exists()
        case "python" | "python3":
            assert (ROOT / words[1]).exists()
        case other:
            pytest.fail(f"nothing here checks {other!r}: {line}")


def test_every_block_is_checked() -> None:
    known = {"python", "py", "sh", "bash", "console", ""}
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            assert match["language"] in known, f"{page.name}: a block of {match['language']}"
