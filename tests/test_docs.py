"""Every code block of the README and the guides runs as it stands.

Python blocks of one page run in order in one process; of a `diff`, what remains when it is applied.
Shell blocks are checked for commands that
exist: `make` targets against the Makefile, `weightbus` lines against the command line's own parser.
"""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
TRAINING = ROOT / "docs" / "guides" / "training-loops.md"  # run by `make training`
COMPOSE = ROOT / "docker-compose.yml"
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    found = BLOCK.finditer(page.read_text())
    return [match["code"] for match in found if match["language"] in languages]


def python_of(page: Path) -> str:
    """Return the code of a page, with the new side of its differences."""
    return "\n".join(side(block, "-") for block in blocks(page, "python", "py", "diff"))


def side(block: str, without: str) -> str:
    """Return a block as it is; of a difference, the side that has not the lines so marked."""
    lines = block.splitlines()
    if any(line[:1] not in ("+", "-", " ", "") for line in lines):
        return block
    return "\n".join(line[1:] for line in lines if line[:1] != without)


def shell_lines() -> list[str]:
    code = [block for page in PAGES for block in blocks(page, "sh", "bash", "console")]
    lines = [line.removeprefix("$ ") for block in code for line in block.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", [p for p in PAGES if p != TRAINING], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    if not python_of(page):
        pytest.skip(f"{page.name} has no Python blocks")
    run_python_of(page, tmp_path)


def run_python_of(page: Path, tmp_path: Path) -> None:
    code = python_of(page)
    (tmp_path / "page.py").write_text(code)
    # Not as a script, which processes that the page spawns would run again.
    run = "exec(compile(open('page.py').read(), 'page.py', 'exec'))"
    done = subprocess.run(  # noqa: S603 - our own pages
        [sys.executable, "-c", run], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", shell_lines())
def test_shell_lines_name_what_exists(line: str) -> None:
    words = shlex.split(line, comments=True)
    match words[0]:
        case "make":
            folder, target = (words[2], words[3]) if words[1] == "-C" else (".", words[1])
            makefile = (ROOT / folder / "Makefile").read_text()
            assert target in re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
        case "weightbus":
            asked = [sys.executable, "-m", "weightbus", words[1], "--help"]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=60)  # noqa: S603
            assert done.returncode == 0, done.stderr
            options = [word.split("=")[0] for word in words if word.startswith("--")]
            assert [option for option in options if option not in done.stdout] == []
        case "docker" | "docker-compose":
            services = re.findall(r"^  (\w+):$", COMPOSE.read_text(), re.MULTILINE)
            if words[2] in ("exec", "pause", "unpause"):
                assert words[3] in services
        case "python" | "python3":
            assert (ROOT / words[1]).exists()
        case other:
            pytest.fail(f"nothing here checks {other!r}: {line}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_old_sides_of_differences_are_python(page: Path) -> None:
    for block in blocks(page, "diff"):
        ast.parse(side(block, "+"))


def test_every_block_is_checked() -> None:
    known = {"python", "py", "diff", "sh", "bash", "console", ""}
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            assert match["language"] in known, f"{page.name}: a block of {match['language']}"
