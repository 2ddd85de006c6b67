"""The protocol's pages are right where nothing makes them: sentences, transcripts, links, rules."""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weightbus.bus import limits
from weightbus.bus.errors import ProtocolError
from weightbus.bus.headers import from_publisher, from_worker
from weightbus.bus.limits import Timing
from weightbus.bus.memory import segment
from weightbus.bus.publisher import offers
from weightbus.bus.token_bucket import Rate
from weightbus.bus.worker import follower, transfer
from weightbus.bus.worker import layouts as acceptance
from weightbus.codecs import checksum
from weightbus.codecs.dtypes import DTYPES
from weightbus.protocol import description
from weightbus.protocol.document import FIELDS, LIMITS, TIMES
from weightbus.tests.vectors import levels, transcripts

ROOT = Path(__file__).parents[2]
STUB = (ROOT / "docs" / "PROTOCOL.md").read_text()
PAGES = levels.pages()
CHOSEN = (ROOT / "docs" / "LIMITS.md").read_text()  # what the protocol leaves to each side
DOCUMENT = "\n".join(PAGES.values())
WORKER_PAGES = ("index", "worker")  # what a worker of levels 1 to 3 needs
WORKER_BYTES_MAX, BYTES_MAX = 63_000, 146_250
PROTOCOL = description.read()

Row = tuple[str, ...]


def sections(title: str) -> dict[str, str]:
    """Return the sections of this title, by page, each up to the next heading of its rank."""
    found: dict[str, str] = {}
    for page, text in PAGES.items():
        match = re.search(rf"^(#+) {re.escape(title)}\n", text, re.MULTILINE)
        if match is not None:
            rest = text[match.end() :]
            end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
            found[page] = rest[: end.start()] if end else rest
    return found


def section(title: str) -> str:
    """Return the only section of this title."""
    (text,) = sections(title).values()
    return text


def tables(text: str) -> Iterator[tuple[Row, list[Row]]]:
    """Yield the tables of a text: their heads, and their rows of cells."""
    for block in re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE):
        rows = [
            tuple(c.strip() for c in line.strip().strip("|").split("|"))
            for line in block.splitlines()
        ]
        yield rows[0], rows[2:]


def table(title: str, number: int = 0) -> list[Row]:
    return list(tables(section(title)))[number][1]


def tables_of(*head: str) -> dict[str, list[Row]]:
    """Return the rows of all tables with this head, by page."""
    found: dict[str, list[Row]] = {}
    for page, text in {**PAGES, "limits": CHOSEN}.items():
        for first, rows in tables(text):
            if first == head:
                found.setdefault(page, []).extend(rows)
    return found


def rows_of(*head: str) -> list[Row]:
    return [row for rows in tables_of(*head).values() for row in rows]


def once(names: Iterable[str]) -> set[str]:
    """Return names, none of which may stand twice."""
    counted = Counter(names)
    assert not [name for name, count in counted.items() if count > 1], "occurs twice"
    return set(counted)


def unquoted(cell: str) -> str:
    return cell.strip("`")


# Messages.


def test_every_message_has_a_section_and_every_section_a_message() -> None:
    assert once(re.findall(r"^### `(\w+)`$", DOCUMENT, re.MULTILINE)) == set(PROTOCOL.messages)


@pytest.mark.parametrize("kind", PROTOCOL.messages)
def test_a_section_says_what_no_table_does(kind: str) -> None:
    message = PROTOCOL.messages[kind]
    payloads = {(0, 1): "Payload: none, or one", (1, 1): "Payload: exactly one", (0, 0): ""}
    words = payloads[message.payloads]
    text = section(f"`{kind}`")
    assert text.strip().startswith(words)
    assert ("Payload:" in text) == bool(words)
    assert ("No fields." in text) == (not message.fields)


# Transcripts.

LINES = re.findall(
    r"^ *[\d.]+ (?:\w )?(-->|<--|<== [\w/]+) (\{.*\})(?: \+ \d+ bytes)?$", DOCUMENT, re.MULTILINE
)


@pytest.mark.parametrize("page", PAGES)
def test_transcripts_are_what_is_played(page: str) -> None:
    text = PAGES[page]
    assert transcripts.written(text) == text, "run tests/vectors/transcripts.py"


def test_every_scene_stands_on_one_page_and_every_message_in_a_scene() -> None:
    shown = re.findall(r"<!-- transcript: (\w+) -->", DOCUMENT)
    assert once(shown) == set(transcripts.SCENES)
    assert {json.loads(fields)["type"] for _, fields in LINES} == set(PROTOCOL.messages)


def test_the_session_of_level_1_is_valid() -> None:
    block = re.search(r"<!-- transcript: pull -->\n```\n(.*?)```", PAGES["index"], re.DOTALL)
    assert block is not None
    lines = re.findall(r"^[\d.]+ (-->|<--) (\{.*\})(?: \+ \d+ bytes)?$", block[1], re.MULTILINE)
    for arrow, fields in lines:
        whole = re.sub(r'("instance":"\w{4})\.{3}', rf"\g<1>{'0' * 28}", fields)
        header = re.sub(r"\.{3}", "0" * 60, whole)
        payload = [b""] if '"chunk"' in fields else []
        (from_worker if arrow == "-->" else from_publisher)([header.encode(), *payload])
    assert {json.loads(fields)["type"] for _, fields in lines} >= {
        *("hello", "welcome", "ping", "pong", "fetch", "announce", "end", "chunk", "applied")
    }


# Limits, timers, dtypes.


def number(cell: str) -> int:
    """Return a number as the document writes it: 65536, 2^20, 2^53-1."""
    match = re.fullmatch(r"(?:2\^)?(\d+)(-1)?", cell)
    assert match is not None, cell
    value = 2 ** int(match[1]) if cell.startswith("2^") else int(match[1])
    return value - 1 if match[2] else value


def test_the_limits_that_each_side_chooses_are_those_of_the_code() -> None:
    code = {n: v for n, v in vars(limits).items() if n.isupper() and isinstance(v, int)}
    code["CHUNK_BYTES_DEFAULT"] = checksum.CHUNK_BYTES_DEFAULT
    rows = [row for head, rows in tables(CHOSEN) if head == LIMITS for row in rows]
    once(row[0] for row in rows)
    assert {
        unquoted(row[0]): number(row[1]) for row in rows if unquoted(row[0]) not in PROTOCOL.limits
    } == {name: value for name, value in code.items() if name not in PROTOCOL.limits}
    assert all(row[2] for row in rows), "a limit without a meaning"


def test_the_rates_are_those_of_the_code() -> None:
    code = {n: tuple(v) for n, v in vars(limits).items() if isinstance(v, Rate)}
    rows = rows_of(*RATES)
    once(row[0] for row in rows)
    assert {unquoted(row[0]): (number(row[1]), number(row[2])) for row in rows} == code
    assert all(row[3] for row in rows), "a rate without a meaning"


def test_limits_that_are_named_are_defined() -> None:
    known = {unquoted(row[0]) for row in (*rows_of(*LIMITS), *rows_of(*RATES))}
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+|ROWS|CHECKS|COMMANDS|ACCEPTS)`", DOCUMENT))
    assert {name for name in named if not name.startswith(("ZMQ_", "HANDSHAKE_FAILED"))} <= {
        *known,
        *PROTOCOL.limits,
    }


RATES = "rate", "at once", "a second", "of what, and what happens beyond it"
WORDS = {2: "two", 3: "three", 5: "five"}


def sentences() -> str:
    """Return the pages without what has numbers of its own.

    That is: code, tables of fields, limits, rates and times, and limits that a sentence defines.
    """
    text = re.sub(r"^ *```.*?^ *```$", "", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"[\d,]+(?: s)? \(`[A-Z_]+`\)", "", text)
    numbered = {FIELDS, ("message", *FIELDS), LIMITS, RATES, TIMES, ("what", "value")}
    numbered |= {("type in the tables", "the value in JSON"), ("offset", "bytes", "what")}
    kept: list[str] = []
    for part in re.split(r"((?:^ *\|.*\n)+)", text, flags=re.MULTILINE):
        head = next(tables(part), ((), []))[0] if part.lstrip().startswith("|") else ()
        if head not in numbered:
            kept.append(part)
    return "".join(kept)


def test_the_number_of_a_limit_stands_in_one_place() -> None:
    text = sentences()
    for row in rows_of(*LIMITS):
        name, cell, meaning = unquoted(row[0]), row[1], row[2]
        value = number(cell)
        if value >= 1000 and not cell.startswith("2^53"):
            forms = {cell, str(value), f"{value:,}"}
            there = [
                f for f in forms if re.search(rf"(?<![\w^.,]){re.escape(f)}(?![\w,.]\d)", text)
            ]
            assert not there or name in SAID_OTHERWISE, f"{there} of {name} stands elsewhere, too"
        unit = meaning.split()[0].rstrip(":,;")
        if unit in ("bytes", "characters"):  # of which many things have so many
            continue
        written = rf"\b(?:{value}|{WORDS.get(value, value)}) {re.escape(unit)}\b"
        assert not re.search(written, text), f"{written} of {name} stands elsewhere, too"


# The same number, of something else: nesting, a header's bytes at 4096 in a segment.
SAID_OTHERWISE = {"TEXT_MAX", "METADATA_BYTES_MAX", "CHECK_NAMES_MAX", "VERSIONS_TIMED"}


def test_the_number_of_a_time_stands_in_one_place() -> None:
    text = sentences()
    for name, seconds, *_ in rows_of(*TIMES):
        found = re.findall(rf"(?<![\w.]){re.escape(seconds)} (?:s|seconds?)\b.*", text)
        assert not found, f"{name} stands elsewhere, too: {found}"


def test_numbers_in_the_rules_are_those_of_the_code() -> None:
    texts = {page: " ".join(text.split()) for page, text in PAGES.items()}
    assert follower.RESTARTS_MAX == 3
    assert (
        "On the third mismatch it instead sends `failed` with `digest-mismatch`" in texts["index"]
    )
    assert transfer.DAMAGED_MAX == 16
    assert "After 16 damaged chunks" in texts["index"]
    assert f"at most {PROTOCOL.limits['OBSERVERS_MAX'].value} in all" in texts["observing"]
    assert f"no request for {limits.OBSERVER_SECONDS:g} s" in texts["observing"]
    assert f"within {limits.STRANGER_SECONDS:g} s" in texts["keys"]
    assert f"n is at most {PROTOCOL.limits['LAYOUT_BYTES_MAX'].value:,}" in texts["worker"]


def test_the_header_of_a_segment_is_that_of_the_code() -> None:
    rows = table("A segment")
    sizes = [number(row[1]) for row in rows[:-1]]
    assert [number(row[0]) for row in rows] == [sum(sizes[:i]) for i in range(len(rows))]
    assert sum(sizes) == segment.HEADER_BYTES
    assert f"`{segment.MAGIC.hex(' ')}`" in rows[0][2]
    assert number(rows[5][1]) == segment.MODEL_BYTES
    text = " ".join(PAGES["shared-memory"].split())
    assert f"Bytes 24 to {segment.STAMP_END - 1} are the *stamp*" in text
    assert f"exactly {segment.HEADER_BYTES} + `nbytes` bytes" in text


def rules_of(page: str) -> dict[str, str]:
    """Return the rules of a page, with the tables within them."""
    found = re.split(r"^- \*\*([WPLSEKDRCNT]\d+)\*\* ", PAGES[page], flags=re.MULTILINE)
    rules = dict(zip(found[1::2], found[2::2], strict=True))
    return {rule: re.split(r"\n(?=#|- )", text)[0] for rule, text in rules.items()}


def test_every_time_is_used_by_rules_of_its_side() -> None:
    side = {"index": "worker", "worker": "worker", "publisher": "publisher"}
    times = {timer.name: timer.side for timer in PROTOCOL.timers.values()}
    used: dict[str, set[str]] = {name: set() for name in times}
    for page in side:
        for text in rules_of(page).values():
            for name in times:
                if f"`{name}`" in text:
                    used[name].add(side[page])
    assert used == {n: {"both": {"worker", "publisher"}}.get(s, {s}) for n, s in times.items()}


def test_the_timers_are_those_of_the_code() -> None:
    assert {timer.name: timer.default for timer in PROTOCOL.timers.values()} == vars(Timing())


def test_the_dtypes_are_those_of_the_code() -> None:
    assert [
        (unquoted(name), int(bits)) for bits, names in table("Dtypes") for name in names.split(", ")
    ] == [(name, row.bits) for name, row in DTYPES.items()]


def test_the_worked_example_is_the_vector_example() -> None:
    cases = json.loads((ROOT / "tests" / "vectors" / "versions.json").read_text())["cases"]
    example = next(case for case in cases if case["name"] == "example")
    text = section("The bytes of a version")
    for value in [example["layout"], example["digest"], *(c["crc"] for c in example["chunks"])]:
        assert str(value) in text
    header = (ROOT / "tests" / "vectors" / example["file"]).read_bytes()[: example["layout_bytes"]]
    assert f"`{header[8:].decode()}`" in text
    assert f"layout, {len(header)} bytes | `{header[:8].hex(' ')}`" in text


# Codes.


@cache
def calls(name: str) -> list[ast.Call]:
    """Return every call of a function or method of this name in the protocol's code."""
    return [
        node
        for path in (ROOT / "bus").rglob("*.py")
        if f"{name}(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    ]


def constants(nodes: list[ast.expr]) -> set[str]:
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def returned_codes(module: ModuleType) -> set[str]:
    """Return the codes that a module's functions return as a pair of code and words."""
    assert module.__file__ is not None
    codes: set[str] = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            codes |= constants(node.value.elts[:1])
    return codes - {""}


def refuse_codes() -> set[str]:
    made = [*calls("Refuse"), *calls("ProtocolError")]
    codes = constants([k.value for call in made for k in call.keywords if k.arg == "code"])
    codes |= constants([call.args[3] for call in calls("refuse_hello")])
    return codes | {ProtocolError("").code} | returned_codes(offers)


def failed_codes() -> set[str]:
    passed = [c.args[1] for c in (*calls("_decline"), *calls("fail")) if len(c.args) > 2]
    return constants(passed) | returned_codes(acceptance)


def test_the_codes_of_refuse_are_those_of_the_code() -> None:
    codes = refuse_codes()
    assert len(codes) > 5
    assert {*PROTOCOL.codes["refuse"]} == {*codes, "any other"}


def checked_codes() -> set[str]:
    checks = ROOT / "bus" / "publisher" / "verifying.py"
    checking = ROOT / "python_client" / "observing" / "checking.py"
    found = constants([c.args[2] for c in calls("_unverified")])
    found |= constants([c.args[1] for c in calls("unchecked")])
    found |= set(re.findall(r'unchecked\(check, "([\w-]+)"', checking.read_text()))
    return found | set(re.findall(r'return "([\w-]+)", f?"', checks.read_text()))


def test_the_codes_of_verified_are_those_of_the_code() -> None:
    codes = checked_codes()
    assert len(codes) > 5
    assert {*PROTOCOL.codes["verified"]} == codes


def test_the_codes_of_failed_are_those_of_the_code() -> None:
    assert {*PROTOCOL.codes["failed"]} == failed_codes()


# The document itself.


def anchors(text: str) -> set[str]:
    """Return what links into a page may name."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


def links() -> Iterator[tuple[Path, str]]:
    """Yield the links of the pages, and of the page that leads there."""
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)]+)\)", text):
            yield ROOT / "docs" / "protocol" / f"{page}.md", link
    for name, text in (("PROTOCOL.md", STUB), ("LIMITS.md", CHOSEN)):
        for link in re.findall(r"\]\(([^)]+)\)", text):
            yield ROOT / "docs" / name, link


def test_links_lead_somewhere() -> None:
    for page, link in links():
        path, _, anchor = link.partition("#")
        if link.startswith("https:"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page.name}: {link}"


def test_links_into_the_former_page_still_lead_somewhere() -> None:
    there = anchors(STUB)
    assert {"8-the-worker", "51-what-is-a-layout", "hello", "the-object-running"} <= there
    assert len(there) > 70


def test_rules_are_numbered_without_gaps_and_referred_to_rightly() -> None:
    known = set(levels.of_rules())  # which raises if one occurs twice
    for letter in "WPLSEKDRCNT":
        numbers = sorted(int(rule[1:]) for rule in known if rule[0] == letter)
        assert numbers == [*range(1, len(numbers) + 1)]
        assert numbers
    starts = re.findall(r"^(?:- \*\*|\| )([WPLSEKDRCNT]\d+)\b", DOCUMENT, re.MULTILINE)
    assert once(starts) == known, "a rule without its level, or twice"
    assert set(re.findall(r"\b[WPLSEKDRCNT]\d+\b", DOCUMENT)) - {"F4", "C64"} == known


def test_a_worker_reads_little() -> None:
    sizes = {page: len(text.encode()) for page, text in PAGES.items()}
    assert sum(sizes[page] for page in WORKER_PAGES) <= WORKER_BYTES_MAX
    assert sum(sizes.values()) <= BYTES_MAX


# Levels.


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every case of the vectors, and what to call it."""
    for path in sorted((ROOT / "tests" / "vectors").glob("*.json")):
        tables = {k: v for k, v in json.loads(path.read_text()).items() if k != "format"}
        for part in tables.values():
            for number, case in enumerate(part):
                yield f"{path.name}: {case.get('name', number)}", case


def rank(level: int | None) -> float:
    """Order levels; what is of a feature alone comes after all of them."""
    return math.inf if level is None else level


def test_every_rule_has_a_level() -> None:
    assert set(levels.of_rules().values()) == {1, 2, 3, 4, None}


def test_every_rule_names_what_holds_it() -> None:
    """All vectors whose cases are about it, and tests that exist; at least one of these."""
    vectors: dict[str, set[str]] = {}
    for name, case in cases():
        for rule in case.get("rules", []):
            vectors.setdefault(rule, set()).add(name.partition(".")[0])
    for rule, held in levels.holders().items():
        if rule[0] == "L":
            assert held == {"layouts"}
            continue
        assert held, rule
        tests = {path for path in held if "/" in path}
        assert held - tests == vectors.get(rule, set()), rule
        for folder, _, name in (path.rpartition("/") for path in tests):
            assert (ROOT / "tests" / folder / f"test_{name}.py").exists(), rule


def test_every_case_has_a_level_that_its_rules_allow() -> None:
    known = levels.of_rules()
    for name, case in cases():
        assert case["level"] in (1, 2, 3, 4, None), name
        for rule in case.get("rules", []):
            assert rank(known[rule]) <= rank(case["level"]), f"{name} is about {rule}"


def test_every_rule_of_a_worker_has_a_case() -> None:
    """What no message and no silence shows has none: how a bye is said, on which connection; what
    the weights are by now."""
    cited = {rule for _, case in cases() for rule in case.get("rules", [])}
    assert {r for r in levels.of_rules() if r[0] == "W"} - cited == {"W22", "W34", "W35", "W37"}
