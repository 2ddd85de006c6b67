"""Rules of the protocol are cited where code keeps them: one gets from either to the other."""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from weightbus.tests.vectors.levels import of_rules

ROOT = Path(__file__).parents[2]
ROOMS = ("bus", "codecs", "python_client")
CLIENTS = {
    "node_client/src": "*.ts",
    "go_client": "*.go",
    "rust_client/src": "*.rs",
}
A_LINE_MAX = 3  # what keeps more rules than that at once has too many duties
RANGE = re.compile(r"\b([WPLSEKDRCNT])(\d{1,2}) to \1(\d{1,2})\b")
RULE = re.compile(r"\b(?!C64\b)[WPLSEKDRCNT]\d{1,2}\b")


def rules_in(text: str) -> set[str]:
    """Return the rules that a text names, those between two included."""
    ranges = {
        f"{letter}{number}"
        for letter, first, last in RANGE.findall(text)
        for number in range(int(first), int(last) + 1)
    }
    return ranges | set(RULE.findall(text))


def words_of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments and docstrings, and their numbers."""
    with tokenize.open(path) as file:
        text = file.read()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.partition("noqa:")[0]
        elif token.type == tokenize.STRING and token.string.startswith('"""'):
            yield from enumerate(token.string.splitlines(), token.start[0])


Words = list[tuple[str, int, str]]  # file, line, and what stands there


def citations(paths: Words) -> dict[str, list[str]]:
    """Return where each rule is cited."""
    found: dict[str, list[str]] = {}
    for path, number, words in paths:
        for rule in rules_in(words):
            found.setdefault(rule, []).append(f"{path}:{number}")
    return found


@cache
def python_words() -> Words:
    return [
        (path.relative_to(ROOT).as_posix(), number, words)
        for path in sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))
        for number, words in words_of_python(path)
    ]


@cache
def client_words(folder: str) -> Words:
    return [
        (path.relative_to(ROOT).as_posix(), number, comment[0])
        for path in sorted((ROOT / folder).rglob(CLIENTS[folder]))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (comment := re.search(r"//.*|^\s*/?\*.*", line)) is not None
    ]


def test_every_rule_is_cited_by_the_package() -> None:
    missing = set(of_rules()) - set(citations(python_words()))
    assert not missing, f"cite where it is kept: {sorted(missing)}"


def test_citations_name_rules_that_there_are() -> None:
    cited = citations(python_words())
    assert not {rule: places for rule, places in cited.items() if rule not in of_rules()}


@pytest.mark.parametrize("folder", CLIENTS)
def test_citations_of_a_client_name_rules_that_there_are(folder: str) -> None:
    cited = citations(client_words(folder))
    assert not {rule: places for rule, places in cited.items() if rule not in of_rules()}


@pytest.mark.parametrize("folder", ["node_client/src", "go_client"])
def test_every_rule_of_workers_and_layouts_is_cited_by_a_client(folder: str) -> None:
    missing = {rule for rule in of_rules() if rule[0] in "WL"} - set(
        citations(client_words(folder))
    )
    assert not missing, f"cite where it is kept: {sorted(missing)}"


def test_no_line_cites_many_rules() -> None:
    lines = [*python_words(), *(line for folder in CLIENTS for line in client_words(folder))]
    many = [
        f"{path}:{number}"
        for path, number, words in lines
        if len(RULE.findall(RANGE.sub(r"\1\2", words))) > A_LINE_MAX
    ]
    assert not many


def test_ranges_are_read() -> None:
    assert rules_in("by L1 to L3, W28, and S101 of ruff") == {"L1", "L2", "L3", "W28"}
