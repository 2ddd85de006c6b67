"""Write what is made from the description: `python -m weightbus.protocol`, or `make protocol`.

With `--check` nothing is written; the files that differ are named, and the exit status is 1.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import description, document, go, python, rust, schema, typescript

ROOT = Path(__file__).resolve().parent.parent
WRITERS = (python, go, rust, typescript, document, schema)  # each has `files(protocol)`


def made(folder: Path = description.FOLDER) -> dict[str, str]:
    """Return the text of each file that a description makes, by its path in the repository."""
    protocol = description.read(folder)
    found: dict[str, str] = {}
    for writer in WRITERS:
        found |= writer.files(protocol)
    return found


def stale() -> dict[str, str]:
    """Return the made text of each file that is missing, or differs from that text."""
    return {name: text for name, text in made().items() if _text(ROOT / name) != text}


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
