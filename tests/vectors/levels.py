"""The levels of the protocol's rules, and of the cases that are not sequences."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from weightbus.tests.vectors.parts import Json

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "PROTOCOL.md"
HIGHER = {
    **dict.fromkeys(("beacon", "progress"), 2),
    **dict.fromkeys(("staged", "commit", "abort"), 3),
    "prepare": 4,
    **dict.fromkeys(("rename", "rekey", "sealed_chunk", "sealed_message")),
}

Level = int | None  # None: a feature's, which no level asks for


@cache
def of_rules() -> dict[str, Level]:
    """Return the level of each rule, as section 16 of the document has it."""
    found: dict[str, Level] = {}
    for level, *cells in re.findall(
        r"^\| (?:level (\d)|none) \|[^|]*\|([^|]*)\|([^|]*)\|$", DOCUMENT.read_text(), re.MULTILINE
    ):
        for letter, first, last in re.findall(r"([WPLSEKD])(\d+)(?: to \1(\d+))?", " ".join(cells)):
            for number in range(int(first), int(last or first) + 1):
                rule = f"{letter}{number}"
                if rule in found:
                    raise ValueError(f"{rule} is of two levels")
                found[rule] = int(level) if level else None
    return found


def highest(rules: Sequence[str]) -> Level:
    """Return the level at which somebody keeps all of these rules."""
    levels = of_rules()
    found = [levels[rule] for rule in rules]
    return None if None in found else max((level for level in found if level), default=1)


def of_message(case: Json) -> Json:
    """Return what a case of a message says of itself: its level, and the rule for a broken one."""
    try:
        kind = str(json.loads(case["frames"][0])["type"])
    except (ValueError, LookupError, TypeError, RecursionError):
        kind = ""
    broken = [{"from_worker": "P5", "from_publisher": "W21"}[case["direction"]]]
    return {"level": HIGHER.get(kind, 1), "rules": broken if "error" in case["expect"] else []}
