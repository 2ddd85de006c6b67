"""An optional field costs one line of the description: everything else that has it is made."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from weightbus.bus.headers import encode, from_publisher, from_worker
from weightbus.protocol import __main__ as protocol
from weightbus.protocol import description
from weightbus.tests.conformance.python_vectors import blob

# What changes with a field of `applied` and one of `announce`: the messages of each language, the
# page with both messages, and the schema.
CHANGED = {
    "bus/messages.py",
    "docs/protocol/index.md",
    "docs/protocol/messages.schema.json",
    "go_client/internal/wbp/messages.go",
    "node_client/src/messages.ts",
    "rust_client/src/protocol/messages.rs",
}
LINES = {
    "applied": 'waited_us = { type = "integer", default = 5, meaning = "the time to wait" }\n',
    "announce": 'trainer_step = { type = "name or null", meaning = "the step of the trainer" }\n',
}
VECTORS = protocol.ROOT / "tests" / "vectors"
NEWER = "weightbus.bus.newer_messages"
# The message, the field, its default, another value, and one that it may not have.
FIELDS = [
    ("from_worker applied", "waited_us", 5, 70_000, -1),
    ("from_publisher announce", "trainer_step", None, "s-12", ""),
]
READERS: dict[str, Callable[..., object]] = {
    "from_worker": from_worker,
    "from_publisher": from_publisher,
}


def made_with(folder: Path, lines: Mapping[str, str]) -> dict[str, str]:
    """Return what is made from the description with these fields of messages added."""
    for path in description.FOLDER.glob("*.toml"):
        shutil.copy(path, folder)
    path = folder / "messages.toml"
    text = path.read_text()
    for message, line in lines.items():
        before, head, after = text.partition(f"[message.{message}.fields]\n")
        assert head
        text = before + head + line + after
    path.write_text(text)
    return protocol.generate(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return made_with(tmp_path_factory.mktemp("protocol"), LINES)


@pytest.fixture
def newer(made: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the messages of a Python that has the fields."""
    module = ModuleType(NEWER)
    module.__package__ = NEWER.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, NEWER, module)
    exec(compile(made["bus/messages.py"], NEWER, "exec"), module.__dict__)  # noqa: S102 - made here
    return module


@cache
def header_of(message: str) -> dict[str, Any]:
    """Return a header that has no field but those that it must have."""
    cases = json.loads((VECTORS / "messages.json").read_text())["cases"]
    (case,) = (case for case in cases if case["name"] == f"{message} minimal")
    header: dict[str, Any] = json.loads(blob(case["frames"][0], VECTORS))
    return header


def test_a_field_changes_the_messages_of_each_language_the_page_and_the_schema(
    made: dict[str, str],
) -> None:
    before = protocol.generate()
    assert {name for name, text in made.items() if text != before.get(name)} == CHANGED
    for name in CHANGED:
        for field in ("waited_us", "trainer_step"):
            rows = [set(re.findall(rf"\b{field}\b", text)) for text in (made[name], before[name])]
            assert rows == [{field}, set()], f"{field} in {name}"


@pytest.mark.parametrize(("message", "field", "default", "value", "wrong"), FIELDS)
def test_python_reads_and_writes_an_added_field(
    newer: ModuleType, message: str, field: str, default: object, value: object, wrong: object
) -> None:
    side = message.split()[0]
    union = newer.WorkerMessage if side == "from_worker" else newer.PublisherMessage
    header = header_of(message)
    without, given, bad = (
        json.dumps({**header, **more}).encode() for more in ({}, {field: value}, {field: wrong})
    )
    read = msgspec.json.decode(given, type=union)
    assert getattr(read, field) == value
    assert json.loads(encode(read)) == {**header, field: value}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(bad, type=union)

    of_earlier = msgspec.json.decode(without, type=union)
    assert getattr(of_earlier, field) == default
    assert json.loads(encode(of_earlier)) == header
    assert READERS[side]([given]) == READERS[side]([without]), "an earlier reader ignores it"


def test_go_sends_no_zero_in_place_of_a_default(made: dict[str, str], tmp_path: Path) -> None:
    text = made["go_client/internal/wbp/messages.go"]
    assert re.search(r'WaitedUS +\*int64 +`json:"waited_us,omitempty"`', text)
    with pytest.raises(description.DescriptionError, match=r"ping\.waited_us: Go's zero value"):
        made_with(tmp_path, {"ping": LINES["applied"]})
