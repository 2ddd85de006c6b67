"""The levels of the protocol's rules, and of the cases that are not sequences."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from weightbus.tests.vectors.parts import Json

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "protocol"
# A rule, its level, and the vectors or tests that hold it: `- **W1** [1; sequences] ...`, and of
# layouts a row of a table.
RULE = re.compile(
    r"^(?:- \*\*|\| )([WPLSEKDRCNT]\d+)(?:\*\*)? \[(\d|-); ([\w/-]+(?:, [\w/-]+)*)\] ", re.MULTILINE
)
HIGHER = {
    **dict.fromkeys(("beacon", "progress"), 2),
    **dict.fromkeys(("staged", "commit", "abort"), 3),
    "prepare": 4,
    **dict.fromkeys(("rename", "rekey", "sealed_chunk", "sealed_message")),
}

Level = int | None  # None: a feature's, which no level asks for


@cache
def pages() -> dict[str, str]:
    """Return the pages of the document, by name."""
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}


@cache
def of_rules() -> dict[str, Level]:
    """Return the level of each rule, as the pages have it."""
    found: dict[str, Level] = {}
    for text in pages().values():
        for rule, level, _ in RULE.findall(text):
            if rule in found:
                raise ValueError(f"{rule} occurs twice")
            found[rule] = None if level == "-" else int(level)
    return found


@cache
def holders() -> dict[str, set[str]]:
    """Return what holds each rule: names of vectors, and paths of tests."""
    return {
        rule: set(held.split(", "))
        for text in pages().values()
        for rule, _, held in RULE.findall(text)
    }


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
    level = HIGHER.get(kind, 1)
    if re.search(r" bad (shared|hash) \d+$", case["name"]):  # a field that others ignore
        level = 4
    if re.search(r" (bad whole \d+|whole without payload)$", case["name"]):  # a field of level 2
        level = 2
    broken = ["W21" if case["direction"] == "from_publisher" else "P5"]
    to_observer = re.match("from_publisher (roster|verified) ", case["name"])
    ruled = "error" in case["expect"] and not to_observer
    return {"level": level, "rules": broken if ruled else []}
