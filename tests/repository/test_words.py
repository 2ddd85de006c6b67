"""The product names things as its field does: one class to a name, and no verbs of speech."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.tests.repository.cloning import names

ROOT = Path(__file__).parents[2]
PYTHON = ("bus", "codecs", "python_client")
# A message is sent and received, and a peer has a name. CONTRIBUTING.md has the terms.
WORDS = {"anybody", "nobody", "said", "somebody", "told", "whoever"}
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
PRODUCT = (
    *("bus/", "codecs/", "protocol/", "python_client/", "src/weightbus/", "rust_client/src/"),
    *("go_client/", "node_client/src/", "c_client/src/", "c_client/include/"),
    *("cpp_client/include/", "java_client/src/", "docs/guides/", "docs/protocol/", "README.md"),
)
SOURCES = {".py", ".rs", ".go", ".ts", ".h", ".hpp", ".java", ".md", ".toml", ".js", ".html"}
BESIDE = re.compile(r"_test\.go$|/testdata/|^go_client/cmd/|/Dockerfile$")
ALLOWED = {  # of the public API, which keeps its names, and of the log
    "WB_WAIT_NOBODY",
    "_NOBODY",
    "Wait::Nobody",
    "Nobody,",  # of `Wait`
    "staged, nobody }",
    '"nobody"',  # the kind of a notice
}
TESTS_OF_RUST = re.compile(r"#\[cfg\((?:all\()?test\b[^\n]*\n(?:#[^\n]*\n)*(?:pub[^\n ]* )?mod ")
TEST_NAME = re.compile(r"`[^`]*test_\w*`")  # in the table of failures

# Names of several classes, of which one is the others' face.
FACES = {
    "Segment": "what a publisher's machine knows of a segment of the memory",
    "Snapshot": "what a publisher's machine knows of a snapshot of the memory",
    "Running": "weightbus.types.Running shows a `Running` of messages, with its metadata",
    "Staged": "weightbus.types.Staged applies what a message `Staged` reports",
    "Relays": "the relays of each engine, in a face of its own",
    "PublishWeights": "the callback of each training library",
}


def classes() -> dict[str, list[str]]:
    """Return the modules that define each class of the package."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(p for shelf in PYTHON for p in (ROOT / shelf).rglob("*.py")):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.ClassDef):
                found[each.name].append(str(path.relative_to(ROOT)))
    return found


def test_a_name_stands_for_one_class() -> None:
    twins = {name: places for name, places in classes().items() if len(places) > 1}
    assert twins.keys() == FACES.keys(), {n: p for n, p in twins.items() if n not in FACES}


def found_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that have a word of speech, in a text or as a part of a name."""
    for number, line in enumerate(TESTS_OF_RUST.split(text)[0].splitlines(), 1):
        plain = TEST_NAME.sub("", line)
        for allowed in ALLOWED:
            plain = plain.replace(allowed, "")
        if WORDS.intersection(part.lower() for part in PART.findall(plain)):
            yield number, line.strip()


def test_messages_and_peers_have_the_words_of_the_field() -> None:
    files = [
        name
        for name in names()
        if name.startswith(PRODUCT) and Path(name).suffix in SOURCES and not BESIDE.search(name)
    ]
    assert len(files) > 400
    lines = [f"{f}:{n}: {line}" for f in files for n, line in found_in((ROOT / f).read_text())]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    "line", ["told = 1", "EVENTS_TOLD", "saidHelloAt", "why_nobody(", "# Whoever asks", "was_told"]
)
def test_a_word_is_found_in_a_name_and_in_a_text(line: str) -> None:
    assert list(found_in(line))


@pytest.mark.parametrize("line", ["WB_WAIT_NOBODY = 2", "`x.py::test_it_is_told`", "unsaid, sold"])
def test_a_public_name_and_a_part_of_a_word_are_none(line: str) -> None:
    assert not list(found_in(line))
