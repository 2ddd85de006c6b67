"""What a publisher's shell does for its machine, without threads: for tests that drive machines."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weightbus.bus.headers import Buffer
from weightbus.bus.publisher.effects import (
    Compare,
    Effect,
    Hash,
    MakeReclaimable,
    Release,
    Stamp,
)
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.offers import chunk_of, encode_effect, hash_chunk
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.bus.sealer import Sealer
from weightbus.codecs.layout import Layout


def perform(
    machine: PublisherMachine, effects: Sequence[Effect], now: float, sealer: Sealer | None = None
) -> list[Effect]:
    """Do what concerns memory; return the rest, with the bytes that chunks consist of."""
    rest: list[Effect] = []
    for each in effects:
        match effect := encode_effect(each, sealer):
            case Stamp(version):
                if not version.snapshot.stamp(version.model, *version.key):
                    machine.unshared(version)
            case Hash(version):
                hash_all(version)
                rest += perform(machine, machine.hashed(version, now), now, sealer)
            case Compare(comparison):
                deque(comparison.steps(), maxlen=0)
                rest += perform(machine, machine.compared(comparison, now), now, sealer)
            case MakeReclaimable(version):
                version.snapshot.make_reclaimable()
            case Release(version):
                version.snapshot.release()
            case _:
                rest.append(effect)
    return rest


def hash_all(version: Version | VersionOffer) -> str:
    """Hash what nobody has hashed yet of a version that is held; return the digest."""
    for index in version.chunks.unhashed():
        hash_chunk(version, index)
    return version.chunks.digest


class PlainSnapshot:
    """The bytes of a version, in nobody's memory; whoever asks for them must hold them.

    Args:
        data: They.
        thief: Whether somebody takes them as soon as they are made reclaimable.
    """

    def __init__(self, data: NDArray[np.uint8] | bytes, *, thief: bool = False) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.phase, self.thief = "held", thief
        self.stamps: list[tuple[str, int, int]] = []

    @property
    def exists(self) -> bool:
        return self.phase != "over"

    def take_back(self) -> bool:
        assert self.phase != "held", "it was not made reclaimable"
        self.phase = "over" if self.phase == "over" else "held"
        return self.exists

    def make_reclaimable(self) -> None:
        assert self.phase == "held", f"what is {self.phase} is made reclaimable"
        self.phase = "over" if self.thief else "reclaimable"

    def release(self) -> None:
        self.phase = "over"

    def stamp(self, model: str, epoch: int, version: int) -> bool:
        assert self.phase == "held", f"what is {self.phase} is stamped"
        self.stamps.append((model, epoch, version))
        return True

    def chunk(self, begin: int, end: int) -> Buffer:
        return self.bytes(begin, end)

    def bytes(self, begin: int, end: int) -> memoryview:
        assert self.phase == "held", f"bytes were asked for of what is {self.phase}"
        return self.data.data[begin:end]

    def keep(self) -> NDArray[np.uint8] | None:
        return self.data if self.exists else None

    def let_go(self) -> None:
        pass


def version_of(number: int, data: NDArray[np.uint8], chunk_bytes: int, epoch: int) -> Version:
    """Return a version of model a, one tensor of bytes, all of it hashed."""
    layout = Layout.plan([("w", "U8", (data.nbytes,))])
    offer = VersionOffer.of("a", layout, chunk_bytes, PlainSnapshot(data))
    hash_all(offer)
    return Version(offer, epoch, number)


def chunk(version: Version, index: int) -> tuple[int, Buffer]:
    """Return a chunk's CRC-32C and its bytes."""
    message, payload = chunk_of(version, index)
    return message.crc, payload
