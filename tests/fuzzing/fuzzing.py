"""What takes bytes of others, one function each: it may raise what it documents, and nothing else.

A case is bytes. Some stand for several frames: each is two bytes of length, and then the frame.
`seeds` are the golden vectors and what the machines of the simulation said to each other, in the
same form. `test_fuzzing.py` runs a few, `fuzz.py` as many as there is time for.
"""

import fcntl
import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightbus.bus.effects import Decode, Effect, Ready
from weightbus.bus.errors import ProtocolError
from weightbus.bus.headers import encode, from_publisher, from_worker
from weightbus.bus.limits import STAGING_BYTES_MAX
from weightbus.bus.memory.segment import HEADER_BYTES, MappedSegments
from weightbus.bus.messages import (
    DELTA,
    Announce,
    Applied,
    Chunk,
    Commit,
    End,
    Fetch,
    Hello,
    PatchId,
    Ping,
    Progress,
    Running,
    Shared,
    Welcome,
)
from weightbus.bus.net.copier import decoded
from weightbus.bus.net.zmtp import Stream, ZmtpError
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.offers import announcement, chunk_of, end_of
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import Chunked, OfferedPatch, Version, VersionOffer
from weightbus.bus.staged import StagedVersion, StaleError
from weightbus.bus.worker.events import Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs.delta.encoding import encode as encode_patch
from weightbus.codecs.delta.patch import Delta
from weightbus.codecs.errors import LayoutError, PatchError
from weightbus.codecs.layout import Layout
from weightbus.python_client.checkpoints.checkpoint import open_checkpoint
from weightbus.python_client.checkpoints.shards import CheckpointError
from weightbus.python_client.files.state_folder import TABLE, StateFolder
from weightbus.tests.conformance.python_vectors import blob
from weightbus.tests.simulation.performing import done
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, hash_all, perform, version_of

VECTORS = Path(__file__).parents[1] / "vectors"
MEMORY = Path("/dev/shm")  # noqa: S108 - where files are that are read again at once
FRAMES_MAX = 64  # of a case
NBYTES_MAX = 2**20  # of a version that the worker takes, and of what a patch is for
TOKEN = "00112233445566778899aabbccddeeff"  # noqa: S105 - of the vector of segments

Case = bytes
Target = Callable[[Case], None]


def joined(*frames: bytes) -> Case:
    """Return frames as one case."""
    return b"".join(len(f).to_bytes(2, "little") + f for f in frames if len(f) < 2**16)


def frames_of(case: Case) -> list[bytes]:
    """Return the frames of a case; the last may be short."""
    frames: list[bytes] = []
    at = 0
    while at + 2 <= len(case) and len(frames) < FRAMES_MAX:
        length = int.from_bytes(case[at : at + 2], "little")
        frames.append(case[at + 2 : at + 2 + length])
        at += 2 + length
    return frames


# Decoders.


def messages(case: Case) -> None:
    """Headers and payloads, from either side; whatever is one can be written again."""
    for decode in (from_worker, from_publisher):
        with suppress(ProtocolError):
            message, payloads = decode(frames_of(case))
            assert decode([encode(message), *payloads])[0] == message


def layouts(case: Case) -> None:
    """A layout, which can be sent on as it is."""
    with suppress(LayoutError):
        layout = Layout.parse(case)
        assert Layout.parse(layout.header).id == layout.id


def zmtp(case: Case) -> None:
    """A connection for published messages; bytes come in pieces of several sizes."""
    stream = Stream(lambda _frames, _size: None)
    step, at = 1 + (case[0] if case else 0), 0
    with suppress(ZmtpError):
        while at < len(case):
            room = stream.room()
            count = min(len(room), step, len(case) - at)
            room[:count] = case[at : at + count]
            at += count
            stream.received(count)
            while stream.held:
                stream.received(0)
    stream.close()


def patches(case: Case) -> None:
    """A patch, for the layout in the frame before it."""
    header, body, *_ = [*frames_of(case), b"", b""]
    with suppress(LayoutError, PatchError):
        layout = Layout.parse(header)
        if layout.nbytes <= NBYTES_MAX:
            base = np.zeros(layout.nbytes, np.uint8)
            Delta(layout, body).apply(base, base.copy())


@contextmanager
def _folder() -> Generator[Path]:
    folder = MEMORY / f"weightbus-fuzz-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def checkpoints(case: Case) -> None:
    """A safetensors file."""
    with _folder() as folder:
        path = folder / "model.safetensors"
        path.write_bytes(case)
        with suppress(CheckpointError):
            opened = open_checkpoint(path)
            assert opened.nbytes <= len(case)
            opened.arrays()


def indexes(case: Case) -> None:
    """The index of a checkpoint in shards, of which one is there."""
    with _folder() as folder:
        (folder / "a.safetensors").write_bytes((VECTORS / "files/example.safetensors").read_bytes())
        path = folder / "model.safetensors.index.json"
        path.write_bytes(case)
        with suppress(CheckpointError, OSError):
            open_checkpoint(path).arrays()


def state_folders(case: Case) -> None:
    """The table of a state folder: a damaged one is put aside, and a new one begun."""
    with _folder() as folder:
        (folder / TABLE).write_bytes(case)
        with StateFolder(folder) as kept:
            for model in kept.models():
                for stored in kept.versions(model):
                    with suppress(OSError):  # what this package calls a StateFolderError is one
                        kept.open(stored)


def segments(case: Case) -> None:
    """Memory that another process shares."""
    memory = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
    try:
        os.write(memory, case)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        view = MappedSegments().open(
            Shared(f"/proc/{os.getpid()}/fd/{memory}", TOKEN), len(case) - HEADER_BYTES
        )
        with suppress(StaleError):
            if view is not None:
                with view.reading("policy", 7, 3):
                    view.data.tobytes()
    finally:
        os.close(memory)


# Machines.


class _Clock:
    """Time that the frames of a case move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def move(self, frame: bytes) -> bool:
        """Take a frame of one byte as so many tenths of a second; return whether it is one."""
        if len(frame) != 1:
            return False
        self.now += frame[0] / 10
        return True


def _machine(*features: str) -> WorkerMachine:
    """A worker's machine that is about to be in a session."""
    nbytes = min(NBYTES_MAX, STAGING_BYTES_MAX)
    identity = Hello(name="w0", instance="0" * 32, models={}, features=[*features])
    return WorkerMachine(identity, ["policy"], lambda _m, _l: "", nbytes)


def _done(machine: WorkerMachine, effects: list[Effect], now: float) -> list[StagedVersion]:
    """Do what a worker's shell does, and decode patches; return what is ready to be applied."""
    ready: list[StagedVersion] = []
    for effect in done(machine, effects, now):
        match effect:
            case Decode(job):
                ready += _done(machine, machine.happened(decoded(job), now), now)
            case Ready(staged):
                ready.append(staged)
            case _:
                pass
    return ready


def _told(machine: WorkerMachine, frames: list[bytes]) -> None:
    """Tell a worker's machine; a frame of two bytes says where the next come from."""
    clock, pushed, count = _Clock(), False, 1
    effects: list[Effect] = []
    while frames:
        _done(machine, effects, clock.now)
        frame = frames.pop(0)
        if clock.move(frame):
            effects = machine.tick(clock.now) + machine.connected(clock.now)
        elif len(frame) == 2:
            pushed, count = bool(frame[0] & 1), 1 + frame[1] % 3
            effects = []
        else:
            parts = [frame, *(frames.pop(0) for _ in range(min(count - 1, len(frames))))]
            if pushed:
                effects = machine.receive_published([b"policy/ctl", *parts], clock.now)
            else:
                effects = machine.receive(parts, clock.now)


def worker(case: Case) -> None:
    """A worker's machine in a session."""
    machine = _machine()
    _done(machine, machine.receive([encode(_WELCOME)], 0.0), 0.0)
    _told(machine, frames_of(case))
    assert machine.followers["policy"].running is None, "it runs what its user has never applied"


def patched_worker(case: Case) -> None:
    """A worker's machine that runs a version, on which patches come."""
    machine, version = _machine(DELTA), _version(1)
    _done(machine, machine.receive([encode(_WELCOME)], 0.0), 0.0)
    for number, frames in enumerate(_messages(version, version)):
        for staged in _done(machine, machine.receive(frames, 0.0), 0.0):
            for what in ("taken", "applied"):
                report = Report("policy", staged.key, what, bytes=staged.private_bytes)
                _done(machine, machine.happened(report, 0.0), 0.0)
        assert number or not machine.followers["policy"].running
    follower, running = machine.followers["policy"], Running(7, 1, version.digest)
    assert follower.running == running
    _told(machine, frames_of(case))
    assert follower.running == running, "it runs what its user has never applied"
    base = follower.versions.base
    assert base is None or base.data.tobytes() == _weights(1).tobytes(), "it writes to its base"


def publisher(case: Case) -> None:
    """A publisher's machine with a worker and a version, and a patch; odd frames: a stranger's."""
    machine, clock = PublisherMachine(PublisherState(7, "tcp://p:1")), _Clock()
    offer = _patched(1, Running(6, 9, _version(9).digest))
    effects = machine.receive(b"w", [encode(_HELLO)], clock.now)
    call, more = machine.publish(1, offer, PublishTerms(timeout=60.0), 0.0, clock.now)
    effects += more
    for index, frame in enumerate(frames_of(case)):
        perform(machine, effects, clock.now)
        if clock.move(frame):
            effects = machine.tick(clock.now)
        else:
            effects = machine.receive(b"ws"[index % 2 : index % 2 + 1], [frame], clock.now)
    assert len(list(machine.state.roster)) <= 2 + FRAMES_MAX
    for peer in machine.state.roster:
        running = peer.running.get("policy")
        assert running is None or running.epoch != 7 or running.digest in ("", call.version.digest)


def _weights(number: int) -> NDArray[np.uint8]:
    """Return the bytes of a version, of which a patch is smaller: few differ from the next."""
    data = np.resize(np.arange(251, dtype=np.uint8), _LAYOUT.nbytes).copy()
    data[: 20 * number : 20] ^= 1
    return data


def _offer(number: int) -> VersionOffer:
    offer = VersionOffer.of("policy", _LAYOUT, 64, PlainSnapshot(_weights(number)))
    hash_all(offer)
    offer.keep = True
    return offer


def _version(number: int) -> Version:
    return Version(_offer(number), 7, number)


def _patched(number: int, base: Running) -> VersionOffer:
    """Return a version, with the patch that leads to it from what somebody runs."""
    offer = _offer(number)
    digests = base.digest, offer.chunks.digest
    pair = _weights(base.version), _weights(number)
    data = encode_patch(_LAYOUT, *pair, digests=digests, chunk_bytes=64)
    offer.patches = (OfferedPatch(DELTA, base, data),)
    return offer


def _messages(version: Version, by: Chunked) -> list[list[bytes]]:
    """Return what a publisher says of a version that is sent in this way."""
    messages = [[encode(announcement(version)), version.layout.header]]
    for index in range(by.plan.count):
        chunk, payload = chunk_of(by, index)
        messages.append([encode(chunk), bytes(payload)])
    return [*messages, [encode(end_of(by))]]


_LAYOUT = Layout.plan([("w", "BF16", (200,))])
_HELLO = Hello(
    name="w0",
    instance="0" * 32,
    models={"policy": Running(6, 9, _version(9).digest)},
    features=[DELTA],
)
_WELCOME = Welcome(epoch=7, data="tcp://p:1", ping_ms=1000, lost_ms=5000, models={})

TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        *(messages, layouts, zmtp, patches, checkpoints, indexes, state_folders, segments),
        *(worker, patched_worker, publisher),
    )
}


# Where they begin.


def _cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text())["cases"]
    return cases


@cache
def _exchanges() -> tuple[Case, Case]:
    """What a worker is told of one version in pieces, and what a publisher is told of it."""
    data = np.arange(10, dtype=np.uint8)
    version = version_of(3, data, 4, 7)
    of: dict[str, Any] = {"model": "policy", "epoch": 7, "version": 3}
    layout = version.layout
    announce = Announce(
        **of,
        layout=layout.id,
        layout_bytes=len(layout.header),
        nbytes=10,
        chunk_bytes=4,
        commit="together",
        acknowledge="staged",
        encoding="raw",
    )
    told = [b"\x00\x01", encode(announce), layout.header, b"\x01"]
    for index in range(version.plan.count):
        begin, end = version.plan.span(index)
        crc = version.chunks.crcs[index] or 0
        chunk = Chunk(**of, index=index, crc=crc)
        told += [b"\x01\x01", encode(chunk), data[begin:end].tobytes()]
    told += [b"\x00\x00", encode(End(**of, digest=version.digest))]
    told += [encode(Commit(**of, digest=version.digest)), b"\x14"]
    said = [encode(_HELLO), encode(Ping(subscribed=True)), b"\x05"]
    return joined(*told), joined(*said)


def _patch_exchanges() -> tuple[Case, Case, Case]:
    """What a worker is told of patches: fetched; pushed. And what a publisher is told of one."""
    version = Version(_patched(2, Running(7, 1, _version(1).digest)), 7, 2)
    fetched: list[bytes] = []
    pushed = [b"\x01\x01"]
    for frames in _messages(version, version.patches[0]):
        fetched += [b"\x00" + bytes([len(frames) - 1]), *frames]
        pushed += [b"\x01" + bytes([len(frames) - 1]), *frames]
    on = PatchId(DELTA, 6, 9)
    of: dict[str, Any] = {"model": "policy", "epoch": 7, "version": 1, "patch": on}
    said = [
        *(Fetch(**of, count=1), Fetch(**of), Progress(**of, chunks=1)),
        Applied(**of, digest=_version(1).digest),
        Fetch(model="policy", epoch=7, version=1, unpatched="no memory"),
    ]
    words = [frame for message in said for frame in (encode(message), encode(Ping()))]
    return joined(*fetched), joined(*pushed), joined(*words)


def seeds(name: str) -> list[Case]:
    """Return where a target begins."""
    headers = [[blob(frame, VECTORS) for frame in case["frames"]] for case in _cases("messages")]
    told, said = _exchanges()
    match name:
        case "messages":
            return [joined(*frames) for frames in headers]
        case "layouts":
            return [blob(case["header"], VECTORS) for case in _cases("layouts")]
        case "patches":
            return [
                joined(blob(case["layout"], VECTORS), blob(case["patch"], VECTORS))
                for case in _cases("deltas")
            ]
        case "checkpoints":
            return [path.read_bytes() for path in (VECTORS / "files").glob("*.safetensors")]
        case "indexes":
            return [b'{"metadata":{},"weight_map":{"w":"a.safetensors"}}']
        case "state_folders":
            return [_a_table()]
        case "segments":
            return [blob(case, VECTORS) for case in _cases("segments")]
        case "worker":
            return [told, *(joined(*frames) for frames in headers)]
        case "patched_worker":
            return [told, *_patch_exchanges()[:2]]
        case "publisher":
            return [said, _patch_exchanges()[2], *(joined(*frames) for frames in headers)]
        case _:
            greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
            ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
            return [b"", greeting + ready + b"\x01\x0apolicy/ctl\x00\x02{}\x04\x08\x04PING\0\0"]


def _a_table() -> bytes:
    with _folder() as folder:
        with StateFolder(folder) as kept:
            kept.begin(7)
        return (folder / TABLE).read_bytes()
