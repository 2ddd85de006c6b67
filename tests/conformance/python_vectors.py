"""What the Python client makes of the golden vectors: `python_driver.py vectors DIR`."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightbus.bus.chunks import ChunkPlan
from weightbus.bus.errors import ProtocolError
from weightbus.bus.headers import WBP, encode, from_publisher
from weightbus.bus.memory.segment import MappedSegments
from weightbus.bus.messages import Shared, ToPublisher
from weightbus.bus.observed import to_worker
from weightbus.bus.staged import StaleError
from weightbus.bus.structs import Message
from weightbus.bus.worker.keyring import Keyring
from weightbus.bus.worker.tables import COMING, LACKS, MODES, SESSIONS, TRANSITIONS
from weightbus.codecs.apply import copy_into
from weightbus.codecs.checksum import digest, digest_of
from weightbus.codecs.delta.patch import Delta
from weightbus.codecs.dtypes import numpy_dtype
from weightbus.codecs.errors import LayoutError, PatchError
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.codecs.sealing import GroupKey, Opening, Subject, nonce_of
from weightbus.codecs.state import state_of
from weightbus.tests.conformance.python_sequences import play

Case = dict[str, Any]
Result = dict[str, Any] | None  # none: the case is no concern of a worker


def blob(value: dict[str, str], folder: Path) -> bytes:
    """Return bytes as the vectors write them."""
    match value:
        case {"text": text}:
            return text.encode()
        case {"hex": digits}:
            return bytes.fromhex(digits)
        case _:
            return (folder / value["file"]).read_bytes()


def results(folder: Path) -> Iterator[Case]:
    """Yield one line for each case."""
    for path in sorted(folder.glob("*.json")):
        lists = {k: v for k, v in json.loads(path.read_text()).items() if k != "format"}
        for key, cases in lists.items():
            run = RUNS.get(f"{path.name} {key}")
            for index, case in enumerate(cast("list[Case]", cases) if run else []):
                name = str(case.get("name", index))
                result = run(case, folder) if run else None
                if result is not None:
                    shown = name if len(lists) == 1 else f"{key}/{name}"
                    yield {"file": path.name, "case": shown, **result}


def _message(case: Case, folder: Path) -> Result:
    expect = case["expect"]
    if case["direction"] == "from_worker":
        if "ok" not in expect:
            return None
        # As values of Python, the way a caller of the codec has them.
        message = msgspec.convert({"wbp": WBP, **expect["ok"]}, cast("Any", ToPublisher))
        return {"header": encode(message).decode()}
    try:
        message, payloads = to_worker([blob(frame, folder) for frame in case["frames"]])
    except ProtocolError as error:
        return {"error": error.code}
    return {"ok": plain(message), "payloads": len(payloads)}


def plain(message: Message) -> Case:
    """Return a message as the vectors write it: its type, and every field but `wbp`."""
    fields = {f: getattr(message, f) for f in message.__struct_fields__ if f != "wbp"}
    return {"type": message.__struct_config__.tag, **msgspec.to_builtins(fields)}


def _layout(case: Case, folder: Path) -> Result:
    try:
        layout = Layout.parse(blob(case["header"], folder))
    except LayoutError:
        return {"error": "layout-invalid"}
    tensors = [
        {"name": s.name, "dtype": s.dtype, "shape": [*s.shape], "begin": s.begin, "end": s.end}
        for s in layout.tensors
    ]
    return {
        "ok": {
            "id": layout.id,
            "nbytes": layout.nbytes,
            "tensors": tensors,
            "aliases": dict(layout.aliases),
            "metadata": dict(layout.metadata),
            "order": [name for name in layout.names() if name not in layout.aliases],
        }
    }


def _chunks(case: Case, _folder: Path) -> Result:
    try:
        plan = ChunkPlan(case["nbytes"], case["chunk_bytes"])
    except ValueError:
        return {"error": "chunk-bytes"}
    return {"ok": {"count": plan.count, "spans": [list(plan.span(i)) for i in range(plan.count)]}}


def _crc(case: Case, _folder: Path) -> Result:
    return {"crc": crc32c(bytes.fromhex(case["hex"]))}


def _digest(case: Case, _folder: Path) -> Result:
    return {"digest": digest(case["layout"], case["chunk_bytes"], case["crcs"])}


def _version(case: Case, folder: Path) -> Result:
    file = (folder / case["file"]).read_bytes()
    layout = Layout.parse(file[: case["layout_bytes"]])
    data = file[case["layout_bytes"] :]
    plan = ChunkPlan(layout.nbytes, case["chunk_bytes"])
    spans = [plan.span(index) for index in range(plan.count)]
    crcs = [crc32c(data[begin:end]) for begin, end in spans]
    return {"digest": digest(layout.id, plan.chunk_bytes, crcs)}


@contextlib.contextmanager
def _memory(data: bytes) -> Generator[str]:
    """Put bytes where a publisher puts its segments; give the path."""
    fd = os.memfd_create("vector", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def segment(case: Case, folder: Path) -> Result:
    """Return what a worker finds in a segment."""
    with _memory((folder / case["file"]).read_bytes()) as path:
        view = MappedSegments().open(Shared(path, case["token"]), case["nbytes"])
        if view is None:
            return {"error": "segment"}
        try:
            with view.reading(**case["version"]) if case["version"] else contextlib.nullcontext():
                return {"ok": {"data": view.data.tobytes().hex()}}
        except StaleError:
            return {"error": "stale"}


def base_of(case: Case) -> NDArray[np.uint8]:
    """Return the data section that a patch is for."""
    return np.frombuffer(b"".join(bytes.fromhex(h) * n for h, n in case["base"]), np.uint8)


def _delta(case: Case, folder: Path) -> Result:
    layout = Layout.parse(blob(case["layout"], folder))
    try:
        made = Delta(layout, blob(case["patch"], folder)).apply(base_of(case))
    except PatchError:
        return {"error": "patch"}
    return {"ok": {"digest": digest_of(layout.id, made, 2**12)}}


def _cast(case: Case, _folder: Path) -> Result:
    source = np.frombuffer(bytes.fromhex(case["in"]), numpy_dtype(case["from"]))
    target = np.empty(source.shape, numpy_dtype(case["to"]))
    copy_into(state_of({"v": source}).layout(), source.view(np.uint8), {"v": target}, cast=True)
    return {"out": target.tobytes().hex()}


def _subject(case: Case) -> Subject:
    named: dict[str, Any] = {**case["version"], "base": tuple(case["version"]["base"])}
    return Subject(**named)


def _group_key(case: Case, _folder: Path) -> Result:
    key = GroupKey(bytes.fromhex(case["group"]))
    return {"ok": {"id": key.id, "messages": key.message_key.hex()}}


def _key_of_version(case: Case, _folder: Path) -> Result:
    subject = _subject(case)
    key = GroupKey(bytes.fromhex(case["group"])).version_key(subject)
    return {"ok": {"names": subject.names.hex(), "key": key.hex()}}


def _sealed(case: Case, _folder: Path) -> Result:
    sealed, tag = bytes.fromhex(case["sealed"]), bytes.fromhex(case["tag"])
    subject, at = _subject(case), (case["purpose"], case["index"])
    key, nonce = GroupKey(bytes.fromhex(case["group"])).version_key(subject), nonce_of(*at)
    associated, plain = subject.associated(*at, len(sealed)), bytearray(len(sealed))
    crc = Opening(key, nonce, associated, tag).decrypt(sealed, plain)
    if crc is None:
        return {"error": "sealed"}
    told: dict[str, bytes | bytearray]
    told = {"plain": plain, "nonce": nonce, "associated": associated}
    return {"ok": {"crc": crc, **{name: value.hex() for name, value in told.items()}}}


def _counted(case: Case, _folder: Path) -> Result:
    keyring = Keyring()
    keyring.begin(case["keys"])
    counts: list[Case | None] = []
    for said in case["messages"]:
        payload = [b""] if '"announce"' in said["header"] else []
        message, _ = from_publisher([said["header"].encode(), *payload])
        found = keyring.published(message, [])
        counts.append(None if found is None else plain(found))
    return {"counts": counts}


def _sequence(case: Case, folder: Path) -> Result:
    return {"steps": play(case, lambda frame: blob(frame, folder))}


TABLES: dict[str, Any] = {
    "version": TRANSITIONS,
    "announced": LACKS,
    "arriving": COMING,
    "model": MODES,
    "worker": SESSIONS,
}


def _phase(case: Case, _folder: Path) -> Result:
    table: dict[str, dict[str, str]] = TABLES[case["of"]]
    return {"next": table[case["state"]].get(case["event"])}


RUNS: dict[str, Callable[[Case, Path], Result]] = {
    "messages.json cases": _message,
    "mapping.json cases": _message,
    "sources.json cases": _message,
    "checking.json cases": _message,
    "renaming.json messages": _message,
    "renaming.json sequences": _sequence,
    "companions.json sequences": _sequence,
    "layouts.json cases": _layout,
    "chunks.json cases": _chunks,
    "checksums.json crc32c": _crc,
    "checksums.json digests": _digest,
    "casts.json cases": _cast,
    "deltas.json cases": _delta,
    "versions.json cases": _version,
    "segments.json cases": segment,
    "phases.json cases": _phase,
    "sequences.json cases": _sequence,
    "sealing.json keys": _group_key,
    "sealing.json versions": _key_of_version,
    "sealing.json payloads": _sealed,
    "sealing.json messages": _counted,
    "sealing.json headers": _message,
    "patching.json headers": _message,
    "metadata.json messages": _message,
    "applying.json messages": _message,
    "applying.json sequences": _sequence,
}
