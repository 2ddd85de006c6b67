"""Write what is made from the description: `python -m weightbus.protocol`, or `make protocol`.

The formatter of each language breaks the lines. With `--check` nothing is written; the files that
differ in more than the form of their lines are named, and the exit status is 1.
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
FORMATTERS: Final = {  # of what is made in each language
    ".py": (sys.executable, "-m", "ruff", "format", "--quiet"),
    ".go": ("gofmt", "-w"),
    ".rs": ("rustfmt", "--edition", "2021"),
    ".ts": ("npx", "--no-install", "biome", "format", "--write"),
}


def made(folder: Path = description.FOLDER) -> dict[str, str]:
    """Return the text of each file that a description makes, by its path in the repository."""
    protocol = description.read(folder)
    found: dict[str, str] = {}
    for writer in WRITERS:
        found |= writer.files(protocol)
    return found


def stale() -> dict[str, str]:
    """Return the made text of each file that is missing, or differs from that text."""
    return {name: text for name, text in made().items() if not _same(ROOT / name, text)}


def _same(path: Path, text: str) -> bool:
    """Return whether a file has a text, however a formatter broke its lines."""
    there = path.read_text(encoding="utf-8") if path.exists() else ""
    return tokens(there) == tokens(text) if path.suffix in FORMATTERS else there == text


def tokens(text: str) -> list[str]:
    """Return the words and signs of a program, without the spaces that a formatter sets.

    Nor has the list the commas and bars that a formatter adds where an item has a line.
    """
    return re.findall(r"\w+|[^\w\s]", re.sub(r",(?=\s*[)\]}])|(?<==)\s*\|", "", text))


def formatted() -> bool:
    """Format the made files; return False if a language's formatter is missing or fails."""
    done, names = True, list(made())
    for suffix, command in FORMATTERS.items():
        paths = [str(ROOT / name) for name in names if name.endswith(suffix)]
        folder = Path(paths[0]).parent  # it, or one above, has the formatter's settings
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
        different = stale()
    except description.DescriptionError as error:
        print(error, file=sys.stderr)
        return 2
    if given.check:
        for name in different:
            print(f"{name} is not what the description makes; run `make protocol`")
        return 1 if different else 0
    for name, text in different.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    return 0 if formatted() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
