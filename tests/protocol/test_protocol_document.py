"""The document of the protocol says what the code does: messages, bounds, limits, codes."""

import ast
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest

from weightbus.bus import limits, messages, observed
from weightbus.bus.errors import ProtocolError
from weightbus.bus.limits import Timing
from weightbus.bus.memory import segment
from weightbus.bus.messages import (
    PAYLOADS,
    Message,
    Patch,
    PatchId,
    Running,
    Shared,
    Whole,
    from_publisher,
    from_worker,
)
from weightbus.bus.publisher import offers
from weightbus.bus.token_bucket import Rate
from weightbus.bus.worker import follower
from weightbus.bus.worker import layouts as acceptance
from weightbus.codecs import checksum, layout
from weightbus.codecs.dtypes import DTYPES
from weightbus.tests.vectors import levels

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "PROTOCOL.md").read_text()
WORKER: tuple[type[Message], ...] = get_args(messages.WorkerMessage)
PUBLISHER: tuple[type[Message], ...] = get_args(messages.PublisherMessage)
OBSERVED = (
    observed.ModelRow,
    observed.Published,
    observed.WorkerRow,
    observed.Doing,
    observed.Happened,
    observed.Difference,
)
OBSERVERS: dict[type[Message], str] = {
    observed.Observe: "observer",
    observed.RosterPage: "publisher",
    observed.Check: "publisher",
    observed.Checked: "worker",
    observed.Verify: "observer",
    observed.Verified: "publisher",
}
TYPES = {str(t.__struct_config__.tag): t for t in (*WORKER, *PUBLISHER, *OBSERVERS)}

Row = tuple[str, ...]


def section(title: str) -> str:
    """Return the text of a section, up to the next heading of its rank or a higher one."""
    match = re.search(rf"^(#+) {re.escape(title)}\n", DOCUMENT, re.MULTILINE)
    assert match is not None, f"there is no section {title!r}"
    rest = DOCUMENT[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def tables(text: str) -> Iterator[list[Row]]:
    """Yield the tables of a text as rows of cells, their heads left out."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [tuple(c.strip() for c in line.strip("|").split("|")) for line in block.splitlines()]
        yield rows[2:]


def table(title: str, number: int = 0) -> list[Row]:
    return list(tables(section(title)))[number]


def unquoted(cell: str) -> str:
    return cell.strip("`")


# Messages.


def shown(number: int) -> str:
    """Return a number as the document writes it."""
    for power in range(16, 64):
        if number in (2**power, 2**power - 1):
            return f"2^{power}" + ("-1" if number % 2 else "")
    return str(number)


def described(kind: msgspec.inspect.Type) -> tuple[str, str]:
    """Return JSON type and bounds of a field as the document writes them."""
    match kind:
        case msgspec.inspect.IntType(ge=int(least), le=most, lt=above):
            greatest = most if above is None else above - 1
            assert greatest is not None
            return "integer", f"{shown(least)} to {shown(greatest)}"
        case msgspec.inspect.StrType(pattern=messages.NAME_PATTERN):
            return "string", "name"
        case msgspec.inspect.StrType(pattern=str(pattern)):
            digits = re.fullmatch(r"\^(\()?\[0-9a-f\]\{(\d+)\}(?(1)\)\?)\\Z", pattern)
            assert digits is not None, pattern
            return "string", f"{digits[2]} hex digits" + (" or empty" if digits[1] else "")
        case msgspec.inspect.StrType(max_length=int(longest)):
            return "string", f"at most {longest} characters"
        case msgspec.inspect.BytesType(max_length=longest):
            return "string", f"base64 of at most {longest} bytes"
        case msgspec.inspect.BoolType():
            return "boolean", "true, false"
        case msgspec.inspect.LiteralType(values=values):
            return "string", ", ".join(f"`{value}`" for value in values)
        case msgspec.inspect.UnionType(types=(inner, msgspec.inspect.NoneType())):
            json_type, bounds = described(inner)
            return f"{json_type} or null", bounds
        case msgspec.inspect.StructType(cls=cls):
            return "object", cls.__name__.lower()
        case msgspec.inspect.ListType(item_type=item, max_length=longest):
            json_type, bounds = described(item)
            null = " or null" if json_type.endswith(" or null") else ""
            return "array", f"at most {longest}: {bounds}{null}"
        case msgspec.inspect.DictType(key_type=key, value_type=value, max_length=longest):
            json_type, bounds = described(value)
            entry = bounds + (" or null" if json_type.endswith(" or null") else "")
            return "object", f"at most {longest}: {described(key)[1]} → {entry}"
        case other:
            raise AssertionError(f"say here how the document writes {other}")


def default_of(field: msgspec.inspect.Field) -> str:
    if field.required:
        return "required"
    default: Any = field.default
    if default is msgspec.NODEFAULT:
        assert callable(field.default_factory)
        default = field.default_factory()
    return f"`{json.dumps(default)}`"


def fields_of(kind: type[msgspec.Struct]) -> list[Row]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return [
        (f"`{field.encode_name}`", *described(field.type), default_of(field))
        for field in info.fields
        if field.name != "wbp"
    ]


def test_the_overview_lists_every_message_and_who_sends_it() -> None:
    senders = {t: "worker" for t in TYPES if TYPES[t] in WORKER}
    senders |= {t: "publisher" for t in TYPES if TYPES[t] in PUBLISHER}
    senders |= {t: OBSERVERS[TYPES[t]] for t in TYPES if TYPES[t] in OBSERVERS}
    senders |= {t: "either" for t in TYPES if TYPES[t] in WORKER and TYPES[t] in PUBLISHER}
    rows = table("6. Messages")
    assert {row[0]: row[1] for row in rows} == {
        f"[`{kind}`](#{kind})": sender for kind, sender in senders.items()
    }
    assert all(
        row[2] == {"worker": "publisher", "publisher": "worker"}.get(row[1], row[2])
        for row in rows
        if row[0] not in ("[`roster`](#roster)", "[`verified`](#verified)")
    )


def test_every_message_has_a_section_and_every_section_a_message() -> None:
    assert re.findall(r"^### `(\w+)`$", DOCUMENT, re.MULTILINE) == list(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_the_table_of_a_message_is_what_the_code_checks(kind: str) -> None:
    fields = fields_of(TYPES[kind])
    if not fields:
        assert "No fields." in section(f"`{kind}`")
        return
    assert [row[:4] for row in table(f"`{kind}`")] == fields


@pytest.mark.parametrize("kind", [Running, Shared, Whole, PatchId, Patch, *OBSERVED])
def test_the_table_of_an_object_is_what_the_code_checks(kind: type[msgspec.Struct]) -> None:
    title = f"The object `{kind.__name__.lower()}`"
    assert [row[:4] for row in table(title)] == fields_of(kind)


@pytest.mark.parametrize("kind", TYPES)
def test_payload_frames_are_told(kind: str) -> None:
    payloads = {(0, 1): "Payload: none, or one", (1, 1): "Payload: exactly one", (0, 0): ""}
    words = payloads[PAYLOADS.get(TYPES[kind], (0, 0))]
    text = section(f"`{kind}`")
    assert text.strip().startswith(words)
    assert ("Payload:" in text) == bool(words)


EXAMPLES = re.findall(r"^```json\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: json.loads(e)["type"])
def test_examples_are_valid(example: str) -> None:
    header = json.loads(example)
    kind = TYPES[header["type"]]
    if OBSERVERS.get(kind) == "publisher" and kind is not observed.Check:
        message: Message = observed.to_observer([example.encode()])
    elif kind is observed.Check:
        message, _ = observed.to_worker([example.encode()])
    elif kind in OBSERVERS:
        message = observed.to_publisher([example.encode()])
    else:
        decode = from_worker if kind in WORKER else from_publisher
        message, _ = decode([example.encode(), *[b""] * PAYLOADS.get(kind, (0, 0))[0]])
    assert set(header) <= {"type", *kind.__struct_fields__}, "an example of a field that is none"
    assert type(message) is kind


def test_the_session_on_the_first_page_is_valid() -> None:
    page = section("0. The first page: a worker that only pulls")
    lines = re.findall(r"^(-->|<--) \{(.*)\}(?: \+ \d+ bytes)?$", page, re.MULTILINE)
    for arrow, fields in lines:
        whole = re.sub(r'("instance":"\w{4})\.{3}', rf"\g<1>{'0' * 28}", fields)
        header = '{"wbp":1,' + re.sub(r"\.{3}", "0" * 60, whole) + "}"
        payload = [b""] if '"chunk"' in fields else []
        (from_worker if arrow == "-->" else from_publisher)([header.encode(), *payload])
    told = {re.search(r'"type":"(\w+)"', fields)[1] for _, fields in lines}  # type: ignore[index]
    assert told >= {
        "hello",
        "welcome",
        "ping",
        "pong",
        "fetch",
        "announce",
        "end",
        "chunk",
        "applied",
    }


def test_every_message_has_an_example() -> None:
    assert {json.loads(example)["type"] for example in EXAMPLES} == set(TYPES)


# Limits, timers, dtypes.


def number(cell: str) -> int:
    """Return a number as the document writes it: 65536, 2^20, 2^53-1."""
    match = re.fullmatch(r"(?:2\^)?(\d+)(-1)?", cell)
    assert match is not None, cell
    value = 2 ** int(match[1]) if cell.startswith("2^") else int(match[1])
    return value - 1 if match[2] else value


def test_the_limits_are_those_of_the_code() -> None:
    code = {n: v for n, v in vars(limits).items() if n.isupper() and isinstance(v, int)}
    code |= {n: v for n, v in vars(checksum).items() if n.startswith("CHUNK_BYTES")}
    code |= {n: getattr(layout, n) for n in ("TENSORS_MAX", "RANK_MAX", "NAME_BYTES_MAX")}
    rows = table("12. Limits", 0) + table("12. Limits", 1)
    assert {unquoted(row[0]): number(row[1]) for row in rows} == code
    assert all(row[2] for row in rows), "a limit without a reason"


def test_the_rates_are_those_of_the_code() -> None:
    code = {n: tuple(v) for n, v in vars(limits).items() if isinstance(v, Rate)}
    rows = table("12. Limits", 2)
    assert {unquoted(row[0]): (number(row[1]), number(row[2])) for row in rows} == code
    assert all(row[3] for row in rows), "a rate without a meaning"


def test_numbers_in_the_rules_are_those_of_the_code() -> None:
    worker, publisher = section("8. The worker"), section("9. The publisher")
    assert f"At most {limits.WINDOW_CHUNKS} chunks may be outstanding" in worker
    assert f"at most {limits.PUSH_CHUNKS} chunks ahead" in " ".join(publisher.split())
    assert f"after every {limits.PROGRESS_CHUNKS} pushed chunks" in " ".join(worker.split())
    assert follower.RESTARTS_MAX == 3
    assert "three times in all" in " ".join(worker.split())
    assert f"at most {limits.HEADER_BYTES_MAX} bytes" in section("4. Headers")
    rules = section("5.1 What is a layout")
    assert f"n at most {layout.HEADER_BYTES_MAX:,}" in rules
    assert f"at most {layout.TENSORS_MAX:,} tensors" in rules
    assert f"at most {layout.RANK_MAX} dimensions" in rules
    assert f"1 to {layout.NAME_BYTES_MAX} bytes" in rules


def test_the_header_of_a_segment_is_that_of_the_code() -> None:
    rows = table("10.1 A segment")
    sizes = [number(row[1]) for row in rows[:-1]]
    assert [number(row[0]) for row in rows] == [sum(sizes[:i]) for i in range(len(rows))]
    assert sum(sizes) == segment.HEADER_BYTES
    assert f"`{segment.MAGIC.hex(' ')}`" in rows[0][2]
    assert number(rows[5][1]) == segment.MODEL_BYTES
    text = " ".join(section("10. The shared road").split())
    assert f"Bytes 24 to {segment.STAMP_END - 1} are the *stamp*" in text
    assert f"exactly {segment.HEADER_BYTES} + `nbytes` bytes" in text
    assert f"the Python implementation keeps {segment.VIEWS_MAX}" in text


def test_the_timers_are_those_of_the_code() -> None:
    rows = table("11. Timers and liveness", 0)
    assert {unquoted(row[0]): float(row[1]) for row in rows} == vars(Timing())


def test_every_time_has_timers_and_every_timer_a_rule() -> None:
    times = {unquoted(row[0]): row[2] for row in table("11. Timers and liveness", 0)}
    rows = table("11. Timers and liveness", 1)
    runs = {name: {row[2] for row in rows if f"`{name}`" in row[1]} for name in times}
    sides = {name: {"both": {"worker", "publisher"}}.get(s, {s}) for name, s in times.items()}
    assert runs == sides, "who has a timer of this length"
    assert {n for row in rows for n in re.findall(r"`(\w+)`", row[1])} == {*times}
    assert len({row[0] for row in rows}) == len(rows)
    for name, _, _, *cells in rows:
        assert len(cells) == 3, name
        assert all(cells), name
        assert re.search(r"\([WPS]\d+[,)]", cells[2]), f"{name}: by which rule?"


def test_the_dtypes_are_those_of_the_code() -> None:
    rows = table("5.2 Dtypes")
    columns = [[(row[i], row[i + 1]) for row in rows] for i in (0, 3, 6)]
    cells = [cell for column in columns for cell in column if cell[0]]
    assert [(unquoted(name), int(bits)) for name, bits in cells] == [
        (name, row.bits) for name, row in DTYPES.items()
    ]


def test_the_worked_example_is_the_vector_example() -> None:
    cases = json.loads((ROOT / "tests" / "vectors" / "versions.json").read_text())["cases"]
    example = next(case for case in cases if case["name"] == "example")
    text = section("5.6 Digest")
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
    codes |= constants([call.args[3] for call in calls("_turn_away")])
    return codes | {ProtocolError("").code} | returned_codes(offers)


def failed_codes() -> set[str]:
    passed = [c.args[1] for c in (*calls("_decline"), *calls("fail")) if len(c.args) > 2]
    return constants(passed) | returned_codes(acceptance)


def test_the_codes_of_refuse_are_those_of_the_code() -> None:
    codes = refuse_codes()
    assert len(codes) > 5
    assert {unquoted(row[0]) for row in table("13. Codes", 0)} == codes


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
    assert {unquoted(row[0]) for row in table("13. Codes", 2)} == codes


def test_the_codes_of_failed_are_those_of_the_code() -> None:
    rows = table("13. Codes", 1)
    assert {unquoted(row[0]) for row in rows} == failed_codes()
    assert {unquoted(row[0]) for row in rows if row[1] == "yes"} == follower.TRANSIENT


# The document itself.


def test_links_within_the_document_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.*)$", DOCUMENT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", DOCUMENT)) <= anchors
    for path in re.findall(r"\]\((\.\.?/[^)#]*)", DOCUMENT):
        assert (ROOT / "docs" / path).exists(), path


def test_rules_are_numbered_in_order_and_referred_to_rightly() -> None:
    for letter in "WPLSEKD":
        defined = re.findall(rf"^(?:- \*\*|\| )({letter}\d+)(?:\*\*| \|)", DOCUMENT, re.MULTILINE)
        assert defined == [f"{letter}{n + 1}" for n in range(len(defined))]
        assert defined
        assert set(re.findall(rf"\b{letter}\d+\b", DOCUMENT)) == set(defined)


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
    rules = re.findall(r"^(?:- \*\*|\| )([WPLSEKD]\d+)(?:\*\*| \|)", DOCUMENT, re.MULTILINE)
    assert set(levels.of_rules()) == {*rules}


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
    assert {r for r in levels.of_rules() if r[0] == "W"} - cited == {"W22", "W34", "W35"}
