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

from weightbus.bus.errors import ProtocolError
from weightbus.bus.limits import STAGING_BYTES_MAX
from weightbus.bus.memory.segment import HEADER_BYTES, Views
from weightbus.bus.messages import (
    Announce,
    Chunk,
    Commit,
    End,
    Hello,
    Ping,
    Shared,
    Welcome,
    encode,
    from_publisher,
    from_worker,
)
from weightbus.bus.net.zmtp import Stream, ZmtpError
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import Publication
from weightbus.bus.staged import StaleError
from weightbus.bus.worker.machine import Identity, WorkerMachine
from weightbus.codecs.delta.patch import Patch
from weightbus.codecs.errors import LayoutError, PatchError
from weightbus.codecs.layout import Layout
from weightbus.python_client.checkpoints.checkpoint import open_checkpoint
from weightbus.python_client.checkpoints.shards import CheckpointError
from weightbus.python_client.state_folder import TABLE, StateFolder
from weightbus.tests.conformance.python_vectors import blob
from weightbus.tests.performing import done
from weightbus.tests.virtual_shell import perform, version_of

VECTORS = Path(__file__).with_name("vectors")
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
            Patch(layout, body).apply(base, base.copy())


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
        view = Views().open(
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


def worker(case: Case) -> None:
    """A worker's machine in a session; a frame of two bytes says where the next come from."""
    machine = WorkerMachine(
        Identity("w0", "0" * 32), ["policy"], lambda _m, _l: "", min(NBYTES_MAX, STAGING_BYTES_MAX)
    )
    clock, pushed, count = _Clock(), False, 1
    effects = machine.receive([encode(_WELCOME)], clock.now)
    frames = frames_of(case)
    while frames:
        done(machine, effects, clock.now)
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
        slot = machine.slots["policy"]
        assert slot.running is None, "it runs what its user has never applied"


def publisher(case: Case) -> None:
    """A publisher's machine with a worker and a version; odd frames come from a stranger."""
    machine, clock = PublisherMachine(7, "tcp://p:1"), _Clock()
    version = version_of(1, np.arange(10, dtype=np.uint8), 4, 7)
    effects = machine.receive(b"w", [encode(_HELLO)], clock.now)
    call = Publication(1, version, None, None, "applied", "auto", 0.0, 60.0)
    effects += machine.publish(call, clock.now)
    for index, frame in enumerate(frames_of(case)):
        perform(machine, effects, clock.now)
        if clock.move(frame):
            effects = machine.tick(clock.now)
        else:
            effects = machine.receive(b"ws"[index % 2 : index % 2 + 1], [frame], clock.now)
    assert len(list(machine.roster)) <= 2 + FRAMES_MAX
    for peer in machine.roster:
        running = peer.running.get("a")
        assert running is None or running.epoch != 7 or running.digest in ("", version.digest)


_HELLO = Hello(name="w0", instance="0" * 32, models={"a": None})
_WELCOME = Welcome(epoch=7, data="tcp://p:1", ping_ms=1000, lost_ms=5000, models={})

TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        *(messages, layouts, zmtp, patches, checkpoints, indexes, state_folders, segments),
        *(worker, publisher),
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
        crc = version.crc(index) or 0
        chunk = Chunk(**of, index=index, crc=crc)
        told += [b"\x01\x01", encode(chunk), data[begin:end].tobytes()]
    told += [b"\x00\x00", encode(End(**of, digest=version.digest))]
    told += [encode(Commit(**of, digest=version.digest)), b"\x14"]
    said = [encode(_HELLO), encode(Ping(subscribed=True)), b"\x05"]
    return joined(*told), joined(*said)


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
        case "publisher":
            return [said, *(joined(*frames) for frames in headers)]
        case _:
            greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
            ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
            return [b"", greeting + ready + b"\x01\x0apolicy/ctl\x00\x02{}\x04\x08\x04PING\0\0"]


def _a_table() -> bytes:
    with _folder() as folder:
        with StateFolder(folder) as kept:
            kept.begin(7)
        return (folder / TABLE).read_bytes()
