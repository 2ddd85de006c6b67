"""The JSON Schema of the messages takes what the vectors take, and refuses what they refuse."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError, validators

from weightbus.protocol.__main__ import ROOT
from weightbus.protocol.schema import PATH
from weightbus.tests.conformance.python_vectors import blob

VECTORS = ROOT / "tests" / "vectors"
SCHEMA: dict[str, Any] = json.loads((ROOT / PATH).read_text())
Case = dict[str, Any]

# Headers that the schema takes, although the message is malformed: cases whose names end so. (What
# is no JSON in UTF-8 is no header, and a receiver may read a number like 1.0, or a field twice.)
BEYOND = (
    "one payload too many",
    "without payload",
    "whole, two payloads",
    "a header of 65537 bytes",
)


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases of messages, which have frames, and what to call them."""
    for path in sorted(VECTORS.glob("*.json")):
        for key, part in json.loads(path.read_text()).items():
            for case in part if key != "format" else []:
                if case.get("frames"):
                    yield f"{path.stem}: {case['name']}", case


def search(_: Any, pattern: str, text: Any, __: Any) -> Iterator[ValidationError]:
    """Search for a pattern of ECMA-262, where `$` matches before no line feed."""
    if isinstance(text, str) and not re.search(pattern.replace("$", r"\Z"), text):
        yield ValidationError(f"{text!r} does not match {pattern}")


Validator = validators.extend(Draft202012Validator, {"pattern": search})
SIDES = {
    side: Validator({**SCHEMA, "oneOf": SCHEMA["$defs"][side]["oneOf"]})
    for side in ("from_worker", "from_publisher", "from_observer")
}


def test_the_schema_is_one() -> None:
    Validator.check_schema(SCHEMA)


CASES = dict(cases())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_schema_takes_what_a_reader_takes(case: Case) -> None:
    try:
        header = json.loads(blob(case["frames"][0], VECTORS).decode())
    except (ValueError, RecursionError):
        assert "error" in case["expect"]
        return
    valid = SIDES[case["direction"]].is_valid(header)
    if case["name"].removesuffix(", from a publisher").endswith(BEYOND):
        assert valid
        assert "error" in case["expect"]
    else:
        assert ("ok" if valid else "error") in case["expect"]
