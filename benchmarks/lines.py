"""Count the lines of the product and of the tests: `python benchmarks/lines.py [COMMIT ...]`.

The product is what users run: it has no conformance drivers, fuzzing, examples or generated code,
but it has the description from which the protocol's code is generated. Vendored code and the tests
in Python are counted separately. Blank lines and comments count. Without a commit, the program
counts the files on the disk that git knows; with commits, it prints a column for each, and the
ratio of the last to the first. The modules of the package are all Python files except tests,
benchmarks, examples, documents and clients.

`lines.json` has the lines of each subject, which is a folder of the product or of the tests
(`--write`). A test fails if a subject has more lines than the file says, so that a reviewer sees
which changes add lines.
"""

import argparse
import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
HERE = ""  # instead of a commit
KEPT = Path(__file__).with_name("lines.json")
PYTHON, VENDORED, TESTS = "Python", "vendored", "tests in Python"
DESCRIPTION = "the protocol's description"
PACKAGE = {  # parts of the files in the Python package, by suffix
    ".py": PYTHON,
    **dict.fromkeys((".c", ".h"), "Python's helper in C"),
    **dict.fromkeys((".html", ".css", ".js"), "Python's page"),
}
CLIENTS = {
    "c_client": "C",
    "cpp_client": "C++",
    "rust_client": "Rust",
    "go_client": "Go",
    "java_client": "Java",
    "node_client": "TypeScript",
}
CORE = ("C", "C++", "Java", "Rust")  # one implementation of the protocol, and its bindings
ALL = (*dict.fromkeys(PACKAGE.values()), DESCRIPTION, *CLIENTS.values(), VENDORED)
ROWS = {**{part: [part] for part in ALL}, ", ".join(CORE): CORE, "all": ALL, TESTS: [TESTS]}
SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".rs", ".go", ".java", ".ts"}
ASIDE = {"tests", "benchmarks", "examples", "docs"}  # of the first folders
BESIDE = {"tests", "examples", "driver", "conformance", "fuzz", "testdata"}  # of a client's
UNIT_TESTS = b"#[cfg(test)]\nmod tests {"  # the end of a file in Rust
GENERATED = {"c_client/include/weightbus.h"}  # by cbindgen
MADE, MADE_LINES = b"Made by `make protocol`", 5  # within the first lines of a generated file


def main(words: Sequence[str]) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commits", nargs="*", metavar="COMMIT")
    parser.add_argument("--write", action="store_true", help=f"keep the lines in {KEPT.name}")
    given = parser.parse_args(words)
    if given.write:
        KEPT.write_text(json.dumps(dict(sorted(by_subject().items())), indent=2) + "\n")
    shown: list[str] = given.commits or [HERE]
    try:
        counts = [counted(commit) for commit in shown]
    except subprocess.CalledProcessError:  # git has printed the reason
        return 2
    table = Table(title="lines", title_justify="left")
    table.add_column("")
    for commit in shown:
        table.add_column(commit or "here", justify="right")
    if len(shown) > 1:
        table.add_column("last over first", justify="right")
    for title, parts in ROWS.items():
        sums = [sum(count[part] for part in parts) for count in counts]
        ratio = [f"{sums[-1] / sums[0]:.2f}" if sums[0] else "new"] if len(shown) > 1 else []
        table.add_row(title, *(f"{lines:,}" for lines in sums), *ratio)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0


def counted(commit: str) -> Counter[str]:
    """Return the lines of each part at a commit."""
    lines: Counter[str] = Counter()
    for _, part, count in sized(commit):
        lines[part] += count
    return lines


def by_subject() -> Counter[str]:
    """Return the current lines of each subject of the product and of the tests in Python."""
    lines: Counter[str] = Counter()
    for name, _, count in sized(HERE):
        folders = PurePath(name).parts[:-1]
        depth = 1 if folders[:1] and folders[0] in CLIENTS else 2
        lines["/".join(folders[:depth])] += count
    return lines


def sized(commit: str) -> Iterator[tuple[str, str, int]]:
    """Yield each file that belongs to a part: its name, the part, its lines."""
    for name, text in tracked(commit):
        part = part_of(name)
        if part and (part == DESCRIPTION or not is_made(text)):
            yield name, part, text.partition(UNIT_TESTS)[0].count(b"\n")


def is_made(text: bytes) -> bool:
    """Return whether a file is generated from the protocol's description."""
    return any(MADE in line for line in text.split(b"\n", MADE_LINES)[:MADE_LINES])


def tracked(commit: str) -> Iterator[tuple[str, bytes]]:
    """Yield each file with its text, also new files that are not added yet, but no links."""
    if commit:
        with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit))) as archive:
            for member in archive:
                if file := archive.extractfile(member) if member.isfile() else None:
                    yield member.name, file.read()
        return
    for name in git("ls-files", "-z", "-co", "--exclude-standard").decode().split("\0"):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            yield name, path.read_bytes()


def part_of(name: str) -> str | None:
    """Return the part of a file; None if it is neither product nor test."""
    path = PurePath(name)
    first = path.parts[0] if len(path.parts) > 1 else ""
    if "vendor" in path.parts:
        return VENDORED if path.suffix in {*SUFFIXES, ".s"} else None
    if first in CLIENTS:
        test = path.stem == "build" or path.stem.endswith(("_test", ".test"))
        beside = BESIDE.intersection(path.parts[:-1])
        source = path.suffix in SUFFIXES and not (test or beside or name in GENERATED)
        return CLIENTS[first] if source else None
    if first == "protocol":
        return DESCRIPTION if path.suffix in {".toml", ".py"} else None
    if first == "tests":
        return TESTS if path.suffix == ".py" else None
    if first in ASIDE or first.startswith(".") or path.name == "setup.py":
        return None
    return PACKAGE.get(path.suffix)


def git(*words: str) -> bytes:
    """Return the output of git."""
    return subprocess.run(  # noqa: S603 - git, in our own repository
        ["git", "-C", str(ROOT), *words],  # noqa: S607
        stdout=subprocess.PIPE,
        check=True,
    ).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
