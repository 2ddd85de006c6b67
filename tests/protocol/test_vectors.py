"""What the vectors say of publishers and of torch; test_conformance has what they say else."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from weightbus.bus.chunks import ChunkPlan
from weightbus.bus.errors import ProtocolError
from weightbus.bus.headers import Buffer, encode, from_publisher, from_worker
from weightbus.bus.memory.segment import Segment
from weightbus.bus.observed import to_observer, to_publisher, to_worker
from weightbus.bus.structs import Message
from weightbus.codecs.apply import copy_into
from weightbus.codecs.checksum import digest
from weightbus.codecs.dtypes import numpy_dtype, torch_dtype
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.codecs.state import state_of
from weightbus.tests.cli.starting import python
from weightbus.tests.conformance.python_vectors import blob, plain
from weightbus.tests.conformance.vectors import cast_fault, fault_of_message

VECTORS = Path(__file__).parents[1] / "vectors"
Decoder = Callable[[Sequence[bytes]], tuple[Message, Sequence[Buffer]]]

DECODERS: dict[str, Decoder] = {"from_worker": from_worker, "from_publisher": from_publisher}
CHECKING: dict[str, Decoder] = {
    "from_worker": lambda frames: (to_publisher(frames), []),
    "from_publisher": to_worker,
}

OBSERVING: dict[str, Decoder] = {
    "from_observer": lambda frames: (to_publisher(frames), []),
    "from_publisher": lambda frames: (to_observer(frames), []),
}

Case = dict[str, Any]


def table(name: str, key: str = "cases") -> list[Case]:
    loaded = json.loads((VECTORS / name).read_text())
    assert loaded["format"] == 1
    return cast("list[Case]", loaded[key])


def named(case: Case) -> str:
    return str(case.get("name", ""))


def refused(decode: Decoder, frames: list[bytes]) -> str:
    """Return the code with which frames are refused; nothing if they are read."""
    try:
        decode(frames)
    except ProtocolError as error:
        return error.code
    return ""


def test_the_committed_files_are_what_the_generator_writes() -> None:
    python(VECTORS / "generate.py", "--check")


MESSAGES = [
    *table("messages.json"),
    *table("mapping.json"),
    *table("applying.json", "messages"),
    *table("renaming.json", "messages"),
    *table("sealing.json", "headers"),
    *table("patching.json", "headers"),
    *table("metadata.json", "messages"),
    *table("below.json"),
    *table("sources.json"),
    *table("parts.json", "messages"),
]


@pytest.mark.parametrize("case", MESSAGES, ids=named)
def test_messages(case: Case) -> None:
    judge(case, DECODERS[case["direction"]])


@pytest.mark.parametrize("case", table("checking.json"), ids=named)
def test_messages_of_those_who_can_be_verified(case: Case) -> None:
    judge(case, CHECKING[case["direction"]])
    others = refused(DECODERS[case["direction"]], [blob(f, VECTORS) for f in case["frames"]])
    assert others == "malformed", "they do not know it"


@pytest.mark.parametrize("case", table("observing.json"), ids=named)
def test_messages_of_observers(case: Case) -> None:
    judge(case, OBSERVING[case["direction"]])


def judge(case: Case, decode: Decoder) -> None:
    frames = [blob(frame, VECTORS) for frame in case["frames"]]
    expect = case["expect"]
    if code := refused(decode, frames):
        assert code == expect.get("error")
        return
    message, payloads = decode(frames)
    assert fault_of_message(case, {"ok": plain(message), "payloads": len(payloads)}) == ""
    assert [bytes(payload) for payload in payloads] == frames[1:]
    again, _ = decode([encode(message), *frames[1:]])
    assert again == message


def test_every_message_has_valid_and_malformed_cases() -> None:
    names = {named(case) for case in MESSAGES}
    assert len(names) == len(MESSAGES)
    kinds = Counter((case["direction"], named(case).split()[1]) for case in MESSAGES)
    for direction, decode in DECODERS.items():
        for kind in message_types(decode):
            assert kinds[direction, kind] >= 4, f"{direction} {kind}"


def message_types(decode: Decoder) -> set[str]:
    """Return the types of message that a decoder knows, by asking it."""
    types: set[str] = set()
    waiting: list[type[Message]] = [Message]
    while waiting:
        waiting += (subclasses := waiting.pop().__subclasses__())
        types |= {str(c.__struct_config__.tag) for c in subclasses}
    return {kind for kind in types if knows(decode, kind)}


def knows(decode: Decoder, kind: str) -> bool:
    try:
        decode([json.dumps({"wbp": 1, "type": kind}).encode()])
    except ProtocolError as error:
        return "Invalid value" not in str(error)
    return True


@pytest.mark.parametrize("case", table("versions.json"), ids=named)
def test_versions(case: Case) -> None:
    path = VECTORS / case["file"]
    file = path.read_bytes()
    assert hashlib.sha256(file).hexdigest() == case["file_sha256"]
    header, data = file[: case["layout_bytes"]], file[case["layout_bytes"] :]
    layout = Layout.parse(header)
    assert (layout.id, layout.nbytes) == (case["layout"], len(data))
    assert set(load_file(path)) == {spec.name for spec in layout.tensors}
    plan = ChunkPlan(layout.nbytes, case["chunk_bytes"])
    spans = [plan.span(index) for index in range(plan.count)]
    pieces = [data[begin:end] for begin, end in spans]
    crcs = [crc32c(piece) for piece in pieces]
    assert [(c["begin"], c["end"], c["crc"]) for c in case["chunks"]] == [
        (*span, crc) for span, crc in zip(spans, crcs, strict=True)
    ]
    assert digest(layout.id, plan.chunk_bytes, crcs) == case["digest"]
    headers = [case["announce"], *case["chunk_headers"], case["end"]]
    for text, payload in zip(headers, [[header], *([p] for p in pieces), []], strict=True):
        message, _ = from_publisher([text.encode(), *payload])
        assert json.loads(encode(message)) == json.loads(text)


@pytest.mark.parametrize("case", table("casts.json"), ids=named)
def test_casts_into_torch(case: Case) -> None:
    source = np.frombuffer(bytes.fromhex(case["in"]), numpy_dtype(case["from"]))
    tensor = torch.zeros(source.shape, dtype=torch_dtype(case["to"]))
    layout = state_of({"v": source}).layout()
    copy_into(layout, source.view(np.uint8), {"v": tensor}, cast=True)
    assert cast_fault(case, {"out": tensor.view(torch.uint8).numpy().tobytes().hex()}) == ""


def test_a_wrong_cast_is_found() -> None:
    case = {"to": "F16", "out": "007e0000"}
    assert cast_fault(case, {"out": "01fe0000"}) == ""
    assert cast_fault(case, {"out": "007c0000"}) == "value 0 became 7c00, not 7e00"
    assert cast_fault(case, {"out": "007e0080"}) == "value 1 became 8000, not 0"


@pytest.mark.parametrize(
    "case", [c for c in table("segments.json") if "ok" in c["expect"]], ids=named
)
def test_segments_are_written_so(case: Case) -> None:
    wanted = (VECTORS / case["file"]).read_bytes()
    made = Segment(case["nbytes"])
    assert made.claim()
    made.data[:] = bytearray.fromhex(case["expect"]["ok"]["data"])
    if case["version"]:
        made.release(**case["version"])
    written = Path(made.shared.path).read_bytes()
    assert written == wanted.replace(bytes.fromhex(case["token"]), bytes.fromhex(made.token))
