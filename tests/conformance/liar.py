"""The Python driver, but it lies, or its client is broken: what the suite has to find.

python tests/conformance/liar.py LIE worker tcp://...      as python_driver.py
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any, TextIO, cast

from weightbus.bus.effects import Effect
from weightbus.bus.messages import Commit
from weightbus.bus.net import copier
from weightbus.bus.staged import Patching
from weightbus.bus.worker import patches, transfer
from weightbus.bus.worker.follower import Follower
from weightbus.codecs import native
from weightbus.python_client import subscriber
from weightbus.tests.conformance import python_driver

Line = dict[str, Any]


class Agreeing(int):
    """A checksum that is equal to every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def other_bytes(line: Line) -> Iterator[Line]:
    """Hold other bytes than were published."""
    if line.get("event") == "applied":
        line["tensors"] = {name: crc ^ 1 for name, crc in line["tensors"].items()}
    yield line


def one_tensor_less(line: Line) -> Iterator[Line]:
    """Leave a tensor out."""
    if line.get("event") == "applied":
        line["tensors"].popitem()
    yield line


def another_digest(line: Line) -> Iterator[Line]:
    """Report a digest that nobody computed."""
    yield {**line, "digest": "0" * 64} if line.get("event") == "applied" else line


def no_digest(line: Line) -> Iterator[Line]:
    """Report none, on the network."""
    yield {**line, "digest": ""} if line.get("event") == "applied" else line


def ahead(line: Line) -> Iterator[Line]:
    """Claim a version that never was, too."""
    yield line
    if line.get("event") == "applied":
        yield {**line, "version": line["version"] + 1}


def twice(line: Line) -> Iterator[Line]:
    """Apply everything twice."""
    yield line
    if line.get("event") == "applied":
        yield line


def secret(line: Line) -> Iterator[Line]:
    """Tell of no version but the first."""
    if line.get("version", 1) == 1:
        yield line


def torn(line: Line) -> Iterator[Line]:
    """Show a reader parts of two versions."""
    yield line
    if line.get("event") == "applied":
        yield {"event": "torn", "model": line["model"]}


def failing(line: Line) -> Iterator[Line]:
    """Fail at something that is sound."""
    yield line
    if line.get("event") == "applied":
        number = {name: line[name] for name in ("model", "epoch", "version")}
        yield {"event": "failed", **number, "code": "apply", "text": ""}


def chatty(line: Line) -> Iterator[Line]:
    """Print what is no event."""
    yield {"hello": "I am a worker"}
    yield line


def reader_of_anything(line: Line) -> Iterator[Line]:
    """Take every malformed message and layout for a sound one."""
    if "error" in line:
        line["ok"] = {"type": "ping"}
        del line["error"]
    yield line


def forgetful(line: Line) -> Iterator[Line]:
    """Leave cases out."""
    if not str(line.get("case")).endswith(("1", "minimal", "full")):
        yield line


def repetitive(line: Line) -> Iterator[Line]:
    """Answer twice, and to cases that are none."""
    yield line
    yield {**line, "case": "another"}


def evasive(line: Line) -> Iterator[Line]:
    """Say that it cannot do what it does not declare."""
    yield {"file": line.get("file"), "case": line.get("case"), "unsupported": "not today"}


def in_floats(line: Line) -> Iterator[Line]:
    """Read every integer as a floating point number."""
    yield cast("Line", json.loads(json.dumps(line), parse_int=float))


def silent_sender(line: Line) -> Iterator[Line]:
    """Send nothing, in sequences."""
    for step in line.get("steps", []):
        step["sent"] = []
    yield line


LIES: dict[str, Callable[[Line], Iterator[Line]]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        other_bytes,
        one_tensor_less,
        another_digest,
        no_digest,
        ahead,
        twice,
        secret,
        torn,
        failing,
        chatty,
        reader_of_anything,
        forgetful,
        repetitive,
        evasive,
        in_floats,
        silent_sender,
    )
}


class Lying:
    """Standard output on which every line is another."""

    def __init__(self, out: TextIO, lie: Callable[[Line], Iterator[Line]]) -> None:
        self._out, self._lie = out, lie
        self._rest = ""

    def write(self, text: str) -> int:
        """Write what was not said."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            for other in self._lie(json.loads(line)):
                self._out.write(json.dumps(other) + "\n")
        return len(text)

    def flush(self) -> None:
        """Pass it on."""
        self._out.flush()


def blind() -> None:
    """Be a client that looks at no checksum of a chunk."""

    def agreeing(data: Any, value: int = 0) -> int:
        return Agreeing(native.crc32c(data, value))

    transfer.__dict__["crc32c"] = agreeing


def obedient() -> None:
    """Be a client that follows every commit."""

    def committed(follower: Follower, _commit: Commit) -> list[Effect]:
        held = follower.versions.in_phase["staged"]
        return follower._commit(held) if held is not None else []  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    Follower.committed = committed  # type: ignore[assignment, method-assign]


def old() -> None:
    """Be a client from before there were patches."""
    subscriber.__dict__["DELTA"] = "none"


def credulous() -> None:
    """Be a client that takes whatever a patch leads to."""

    patching = copier.patching

    def trusting(job: Patching) -> Generator[None, None, str]:
        yield from patching(job)
        return ""

    copier.__dict__["patching"] = trusting


def mute() -> None:
    """Be a client that does not say why it takes no patch."""
    patches.__dict__["Transfer"] = lambda *facts, **_words: transfer.Transfer(*facts)


def stubborn() -> None:
    """Be a client that does not end properly."""
    signal.__dict__["signal"] = lambda *_: None


def dying() -> None:
    """Be a client that dies at once."""
    os._exit(3)


BROKEN = {f.__name__: f for f in (blind, obedient, old, credulous, mute, stubborn, dying)}


def main(lie: str, *words: str) -> None:
    """Be a driver that lies."""
    if lie in BROKEN:
        BROKEN[lie]()
    else:
        sys.stdout = cast("TextIO", Lying(sys.stdout, LIES[lie]))
    python_driver.main(list(words))


if __name__ == "__main__":
    main(*sys.argv[1:])
