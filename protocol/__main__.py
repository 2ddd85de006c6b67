"""Generate files from the description: `python -m weightbus.protocol`, or `make protocol`.

The formatter of each language breaks the lines. With `--check` nothing is written: the command
names the files that differ in more than line breaks, and exits with status 1 if there are any.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from . import description, document, go, python, rust, schema, typescript

ROOT = Path(__file__).resolve().parent.parent
WRITERS = (python, go, rust, typescript, document, schema)  # each has `files(protocol)`
FORMATTERS: Final = {  # by the suffix of the generated files
    ".py": (sys.executable, "-m", "ruff", "format", "--quiet"),
    ".go": ("gofmt", "-w"),
    ".rs": ("rustfmt", "--edition", "2021"),
    ".ts": ("npx", "--no-install", "biome", "format", "--write"),
}


def generate(folder: Path = description.FOLDER) -> dict[str, str]:
    """Return the text of each generated file, by its path in the repository."""
    protocol = description.read(folder)
    found: dict[str, str] = {}
    for writer in WRITERS:
        found |= writer.files(protocol)
    return found


def stale_files() -> dict[str, str]:
    """Return the new text of each generated file that is missing or differs from it."""
    return {name: text for name, text in generate().items() if not _same(ROOT / name, text)}


def _same(path: Path, text: str) -> bool:
    """Return whether a file has a text, regardless of line breaks by a formatter."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    return tokens(old) == tokens(text) if path.suffix in FORMATTERS else old == text


def tokens(text: str) -> list[str]:
    """Return the words and signs of a program, without white space.

    The list also lacks the commas and bars that a formatter adds when it breaks lines.
    """
    return re.findall(r"\w+|[^\w\s]", re.sub(r",(?=\s*[)\]}])|(?<==)\s*\|", "", text))


def format_files() -> bool:
    """Format the generated files; return False if a language's formatter is missing or fails."""
    done, names = True, list(generate())
    for suffix, command in FORMATTERS.items():
        paths = [str(ROOT / name) for name in names if name.endswith(suffix)]
        folder = Path(paths[0]).parent  # this folder, or one above it, has the formatter's settings
        try:
            subprocess.run([*command, *paths], cwd=folder, check=True)  # noqa: S603 - as it is here
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            print(f"not formatted: {error}", file=sys.stderr)
            done = False
    return done


def main(words: Sequence[str]) -> int:
    """Write or check the files; return the exit status."""
    parser = argparse.ArgumentParser(prog="weightbus.protocol", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; name what differs")
    given = parser.parse_args(words)
    try:
        different = stale_files()
    except description.DescriptionError as error:
        print(error, file=sys.stderr)
        return 2
    if given.check:
        for name in different:
            print(f"{name} differs from what the description generates; run `make protocol`")
        return 1 if different else 0
    for name, text in different.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    return 0 if format_files() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
