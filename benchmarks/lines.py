"""Count the lines of every client: `python benchmarks/lines.py [COMMIT ...]`.

What a user's program is made of: no tests, no conformance drivers, no fuzzing, no examples, nothing
generated. Blank lines and comments count. Without a commit: what git knows of this checkout as it
stands on the disk; with some, a column for each, and the last one over the first.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
HERE = ""  # in place of a commit
CLIENTS = {
    "c_client": "C",
    "cpp_client": "C++",
    "rust_client": "Rust",
    "go_client": "Go",
    "java_client": "Java",
    "node_client": "TypeScript",
}
CORE = ("C", "C++", "Java", "Rust")  # one implementation of the protocol, and what lies over it
SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".rs", ".go", ".java", ".ts"}
BESIDE = {"tests", "examples", "driver", "conformance", "fuzz", "testdata"}  # folders
UNIT_TESTS = b"#[cfg(test)]\nmod tests {"  # the end of a file in Rust
GENERATED = {"c_client/include/weightbus.h"}  # by cbindgen


def main(commits: Sequence[str]) -> int:
    """Print the table; return the exit status."""
    shown = commits or [HERE]
    counts = [counted(commit) for commit in shown]
    table = Table(title="lines of each client", title_justify="left")
    table.add_column("")
    for commit in shown:
        table.add_column(commit or "here", justify="right")
    if len(shown) > 1:
        table.add_column("last over first", justify="right")
    for title, parts in {**{c: [c] for c in CLIENTS.values()}, ", ".join(CORE): CORE}.items():
        sums = [sum(count[part] for part in parts) for count in counts]
        ratio = [f"{sums[-1] / sums[0]:.2f}" if sums[0] else "new"] if len(shown) > 1 else []
        table.add_row(title, *(f"{lines:,}" for lines in sums), *ratio)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0


def counted(commit: str) -> Counter[str]:
    """Return the lines of each client at a commit."""
    lines: Counter[str] = Counter()
    for name in filter(is_source, tracked(commit)):
        text = git("show", f"{commit}:{name}") if commit else (ROOT / name).read_bytes()
        lines[CLIENTS[PurePath(name).parts[0]]] += text.partition(UNIT_TESTS)[0].count(b"\n")
    return lines


def tracked(commit: str) -> Iterator[str]:
    """Yield the clients' files, those that are new and not yet added included."""
    folders = [folder for folder in CLIENTS if commit or (ROOT / folder).is_dir()]
    listed = (
        git("ls-tree", "-r", "-z", "--name-only", commit, "--", *folders)
        if commit
        else git("ls-files", "-z", "-co", "--exclude-standard", "--", *folders)
    )
    for name in listed.decode().split("\0"):
        if name and (commit or (ROOT / name).is_file()):
            yield name


def is_source(name: str) -> bool:
    """Return whether a file is part of what a user's program is made of."""
    path = PurePath(name)
    test = path.stem == "build" or path.stem.endswith(("_test", ".test"))
    beside = BESIDE.intersection(path.parts[:-1])
    return path.suffix in SUFFIXES and not (test or beside or name in GENERATED)


def git(*words: str) -> bytes:
    """Return what git writes."""
    return subprocess.run(  # noqa: S603 - git, in our own repository
        ["git", "-C", str(ROOT), *words],  # noqa: S607
        stdout=subprocess.PIPE,
        check=True,
    ).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
