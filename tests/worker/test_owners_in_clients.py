"""The worker's machine has the same modules and names in Rust, Go and TypeScript as in Python.

As in Python, each field is written only by the file of its type; the same holds for the state of a
publisher in Rust. Compilers ensure most of that in Rust, where fields are private to a file, and in
TypeScript, where other files can only read fields; in Go the machine is one package. These tests
parse the sources as their formatters leave them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "bus" / "worker"
BESIDE = ("staging", "patching", "ages")  # files for `bus/staged.py` and `bus/epochs.py`
STEMS = {path.stem for path in WORKER.glob("*.py")} | set(BESIDE)
STAGED = {"StagedVersion", "Base", "Patching"}
EVENTS = "events"  # clients have no such file: their machine has a method for each event
TABLES = "tables"  # made in each language, where that language has what is made
OF_PYTHON = ("addresses", "session")  # fields of the machine, or missing, in other languages
OTHERWISE = {
    ("layouts", "Expected"): "one says how large versions are, and the rest of it is known",
    **dict.fromkeys(
        [("version_store", f"{phase}Entry") for phase in ("Announced", "Arriving", "Whole")],
        "a `VersionEntry` has the fields of all phases there",
    ),
    ("version_store", "RunningEntry"): "the same",
    ("version_store", "InPhase"): "what has a type for each phase here",
}
# The targets of assignments: `a.b, c.d(e)[f] += ...`, each with a dot.
PATH = r"[\w#](?:[\w#.?!]|\([^()]*\)(?=[.?!\[])|\[[^\[\]]*\])*"
ASSIGNED = re.compile(rf"({PATH}(?:, {PATH})*)\)? ?(?:[-+*/|&^%]|<<|>>|\?\?|&&|\|\|)?=(?![=>])")
STEPPED = re.compile(rf"({PATH})(?:\+\+|--)|(?:\+\+|--)({PATH})")
FIELD = re.compile(r"^(.*[^.?!])[?!]?\.(#?\w+)[?!]?(?:\[[^\[\]]*\])*$")


@dataclass(frozen=True)
class Language:
    """Where the machine of one language is, and how its sources are parsed.

    Attributes:
        folder, suffix: The folder and the suffix of the files.
        own: The name of a method's own object.
        types: Matches the name of each type.
        bodies: Matches the lines between the braces of each type with fields.
        declared: Matches the names of fields on such a line.
        changes: Matches changes of an object in place, other than assignments.
        open: Matches fields that change and that other files could write.
    """

    folder: str
    suffix: str
    own: str
    types: str
    bodies: str
    declared: str
    changes: str
    open: str = ""

    @cached_property
    def files(self) -> dict[str, str]:
        """The code of each file of the machine, without comments, string literals and tests."""
        paths = sorted((ROOT / self.folder).glob(f"*{self.suffix}"))
        if self.suffix == ".go":  # one package
            paths = [path for path in paths if not path.stem.endswith("_test")]
        else:
            paths = [path for path in paths if path.stem in STEMS]
        return {path.stem: self.plain(path.read_text()) for path in paths}

    @cached_property
    def of_machine(self) -> set[str]:
        """The fields of the machine's types."""
        return {x for stem in STEMS & set(self.files) for x in self.fields(self.files[stem])}

    def plain(self, text: str) -> str:
        """Return a source without comments, literals and tests; a chain of calls is one line."""
        text = text.split("#[cfg(test)]")[0]
        text = re.sub(r'"(?:\\.|[^"\\\n])*"|`[^`]*`', '""', text)
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
        return re.sub(r"\n\s*\.(?=\w)", ".", text)

    def names(self, stem: str) -> set[str]:
        """Return the types of a file in lower case, since types of Go may not be exported."""
        return {name.lower() for name in re.findall(self.types, self.files.get(stem, ""))}

    def fields(self, text: str) -> set[str]:
        """Return the fields of the types of a file."""
        lines = [line for body in blocks(self.bodies, text) for line in body.splitlines()]
        found = [name for line in lines for name in re.findall(self.declared, line)]
        return {each for names in found for each in re.split(r", ", names)}

    def foreign(self, text: str) -> list[tuple[str, str]]:
        """Return (target, field) for each field that a file writes and does not declare."""
        own = self.fields(text)
        return [(target, name) for target, name in self.written(text) if name not in own]

    def written(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (target, field) for each change of a field that is not the object's own."""
        targets = [each for some in ASSIGNED.findall(text) for each in re.split(r", ", some)]
        targets += [one or other for one, other in STEPPED.findall(text)]
        for target in [*targets, *re.findall(self.changes, text)]:
            found = FIELD.match(target)
            if found is not None and found[1] != self.own:
                yield target, found[2]


def blocks(pattern: str, text: str) -> list[Any]:
    """Return the matches of a pattern that spans several lines."""
    return re.findall(pattern, text, re.DOTALL | re.MULTILINE)


def _calls(*names: str) -> str:
    return rf"([\w.#!?]+)\.(?:{'|'.join(names)})\("


LANGUAGES = {
    "Rust": Language(
        folder="rust_client/src",
        suffix=".rs",
        own="self",
        types=r"\b(?:struct|enum|trait) (\w+)",
        bodies=r"^(?:pub(?:\(\w+\))? )?struct \w+[^;{]*\{\n(.*?)^\}",
        declared=r"^ {4}(?:pub(?:\(\w+\))? )?(\w+):",
        changes=_calls(
            *("push", "push_back", "push_front", "pop", "insert", "remove", "clear", "extend"),
            *("retain", "truncate", "drain", "take", "replace", "fill", "append", "as_mut"),
        ),
        open=r"^ {4}pub(?:\(\w+\))? (\w+):",
    ),
    "Go": Language(
        folder="go_client/internal/wbp",
        suffix=".go",
        own="-",  # each method gives its object a name
        types=r"(?m)^(?:type )?\t?(\w+) +(?:struct|interface|map)\b",
        bodies=r"\bstruct ?\{(.*?)\}",
        declared=r"^\s*((?:\w+, )*\w+)(?:\s|$)",
        changes=r"\b(?:delete|clear)\(([\w.]+)",
    ),
    "TypeScript": Language(
        folder="node_client/src",
        suffix=".ts",
        own="this",
        types=r"\b(?:class|interface|type) (\w+)",
        bodies=r"^(?:export )?(?:class|interface) \w+[^{]*\{\n(.*?)^\}",
        declared=r"^ {2,4}(?:(?:public|private|readonly) )*(#?\w+)[!?]?(?:[:;]| = )",
        changes=_calls(
            *("push", "pop", "shift", "unshift", "splice", "set", "delete", "add", "clear"),
            *("fill", "sort"),
        ),
        open=r"^ {2}(?!readonly |get |set |#|\*|return|\})(\w+)[!?]?(?:[:;]| = )"
        r"|^ {2}readonly (\w+)(?:: (?:Map|Set)<|: \w+\[\]| = new (?:Map|Set)\b| = \[)"
        r"|^ {4}public (\w+):",
    ),
}


def classes(path: Path) -> Iterator[str]:
    """Yield the classes of a Python module."""
    for each in ast.parse(path.read_text()).body:
        if isinstance(each, ast.ClassDef) and not each.name.startswith("_"):
            yield each.name


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("path", sorted(WORKER.glob("*.py")), ids=lambda path: path.stem)
def test_it_is_cut_as_in_python(language: str, path: Path) -> None:
    if path.stem in (EVENTS, TABLES, *OF_PYTHON):
        return
    one = LANGUAGES[language]
    assert path.stem in one.files
    lacking = {name for name in classes(path) if name.lower() not in one.names(path.stem)}
    assert lacking <= {name for stem, name in OTHERWISE if stem == path.stem}


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_it_hands_out_is_called_as_in_python(language: str) -> None:
    one = LANGUAGES[language]
    names = set[str]().union(*map(one.names, one.files))
    assert set(classes(ROOT / "bus" / "staged.py")) >= STAGED
    assert {name for name in STAGED if name.lower() not in names} == set()


FILES = [(language, stem) for language, one in LANGUAGES.items() for stem in one.files]


@pytest.mark.parametrize(("language", "stem"), FILES)
def test_a_file_writes_into_its_own_objects_alone(language: str, stem: str) -> None:
    one = LANGUAGES[language]
    found = one.foreign(one.files[stem])
    theirs = [target for target, name in found if name in one.of_machine]
    assert not theirs, "say what happens to it, by a method of its own"


@pytest.mark.parametrize(
    ("language", "stem"), [(each, stem) for each, stem in FILES if LANGUAGES[each].open]
)
def test_nobody_else_can_write_what_changes(language: str, stem: str) -> None:
    one = LANGUAGES[language]
    text = one.files[stem] if stem not in BESIDE else ""
    if language == "Rust":  # a record that never changes may have public fields
        implemented = blocks(r"^impl (\w+) \{\n(.*?)^\}", text)
        changing = {name for name, body in implemented if "&mut self" in body}
        types = r"^pub(?:\(\w+\))? struct (\w+)[^;{]*\{\n(.*?)^\}"
    else:  # in the form in which the type is exported
        types = r"^export class (\w+)[^{]*\{\n(.*?)^\}"
        changing = {name for name, _ in blocks(types, text)}
    for name, body in blocks(types, text):
        found = re.findall(one.open, body, re.MULTILINE)
        assert name not in changing or not found, name


PUBLISHER = ROOT / "rust_client" / "src" / "publisher"
RECORDS = {
    "roster",
    "link",
    "store",
    "offer",
    "publication",
    "push",
    "calls",
    "subscriber",
    "state",
}
MESSAGES = {"announce", "doing"}  # are made where they are written


PYTHON = ROOT / "bus" / "publisher"
NOT_IN_RUST = {
    "reporting": "relays are Python programs",
    "faults": "there is no exception to guard against: fuzzing looks for panics",
    "offers": "a machine makes messages itself, since it has no hashing to put off",
    "publisher_view": "callers ask the machine's thread",
    "state": "it is the machine; `state.rs` keeps a folder",
    "version": "`content.rs` has the bytes, `store.rs` what becomes of them, `offer.rs` patches",
}
RECORDS_OF_PYTHON = ("publication", "push", "roster", "store", "status", "observers", "verifying")


def test_a_publisher_in_rust_is_cut_as_in_python() -> None:
    modules = {path.stem for path in PYTHON.glob("*.py")} - {TABLES}
    assert modules - {path.stem for path in PUBLISHER.glob("*.rs")} == set(NOT_IN_RUST) - {"state"}
    text = "\n".join(path.read_text() for path in PUBLISHER.glob("*.rs"))
    there = set(re.findall(LANGUAGES["Rust"].types, text))
    records = {name for stem in RECORDS_OF_PYTHON for name in classes(PYTHON / f"{stem}.py")}
    assert records - there == {"HeldVersion", "Group"}, "which relays have, and publish_many"


@pytest.mark.parametrize("path", sorted(PUBLISHER.glob("*.rs")), ids=lambda path: path.stem)
def test_what_a_publisher_in_rust_remembers_is_written_by_its_file_alone(path: Path) -> None:
    rust = LANGUAGES["Rust"]
    texts = {each.stem: rust.plain(each.read_text()) for each in PUBLISHER.glob("*.rs")}
    remembered = {field for stem in RECORDS for field in rust.fields(texts[stem])}
    found = [each for each in rust.foreign(texts[path.stem]) if each[1] in remembered]
    theirs = [target for target, _ in found if target.partition(".")[0] not in MESSAGES]
    assert not theirs, "say what happens to it, by a method of its own"


FOREIGN = {
    "Rust": [
        "held.transfer = None;",
        "self.versions.mode = Mode::Following;",
        "(held.key, held.digest) = (key, digest);",
        "self.planner.pause += 1;",
        "self.versions.rejected.clear();",
        "if let Some(held) = found { held.local = true; }",
        "self.versions\n    .rejected\n    .push_front(key);",
        "let taken = held.staged.take();",
        "transfer.states[index] = State::Here;",
    ],
    "Go": [
        "v.transfer = t",
        "s.versions.mode = following",
        "v.segment, v.phase = segment, ready",
        "if s.planner.pause++; s.planner.pause < 3 {",
        "t.states[index] = here",
        "delete(s.acceptance.accepted, id)",
        "s.versions.rejected = append(s.versions.rejected, key)",
        "t.took -= now",
        "if v.shared = ok; !ok {",
    ],
    "TypeScript": [
        "held.transfer = transfer;",
        "this.versions.mode = mode;",
        'if (held !== null) held.lacks = "layout";',
        "this.planner.pause += 1;",
        "this.versions.live.push(held);",
        "held.announce.patches[0] = other;",
        "arriving.transfer.here++;",
        "held.metadata ??= other;",
        "for (const held of some) held.phase = after;",
    ],
}


OWN = {
    "Rust": [
        "self.mode = mode.unwrap_or(self.mode);",
        "let same = held.key == key;",
        "Some(held) if held.key <= newest => None,",
    ],
    "Go": [
        "type held struct {\n\tphase State\n}\nv.phase = ready",
        "type held struct {\n\tKey\n}\nv.Key = key",
        'if v.phase == ready || v.lacks != "x" {',
        "begun := v.transfer",
    ],
    "TypeScript": [
        "this.#mode = mode ?? this.#mode;",
        "const due = some.filter((held) => held.phase === phase);",
        "const same = ours.layout === theirs.layout && ours.nbytes >= 0;",
    ],
}


@pytest.mark.parametrize("lines", [FOREIGN, OWN], ids=["foreign", "own"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_who_writes_a_foreign_field_is_seen(language: str, lines: dict[str, list[str]]) -> None:
    one = LANGUAGES[language]
    seen = [line for line in lines[language] if one.foreign(one.plain(line))]
    assert seen == (lines[language] if lines is FOREIGN else [])
