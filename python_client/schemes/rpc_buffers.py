"""Buffers for versions that travel by torch RPC: in pieces, which are joined where they arrive.

RPC receives every tensor into new memory. The allocator returns large blocks to the system, so
that each version of one large tensor would cost as many page faults as it has pages, which takes
several times as long as its copy; pieces of a few MiB are reused instead.
"""

import threading
from dataclasses import dataclass

import numpy as np
import torch

from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes
from ...codecs.state import State, Writer

PIECE_BYTES = 2 * 2**20  # of 1, 2, 4 and 8 MiB the fastest, if not by much
KEPT_MAX = 2  # buffers kept for reuse: one for the next version while one is on its way


@dataclass(eq=False)
class Parcel:
    """A version in pieces, which RPCs read while they are on their way."""

    layout: Layout
    pieces: list[torch.Tensor]
    outbox: "Outbox"

    @property
    def nbytes(self) -> int:
        """Bytes of the version's tensors."""
        return self.layout.nbytes

    def done(self, *, clean: bool) -> None:
        """Give the pieces back, unless an RPC that was given up may still be sending them."""
        if clean:
            self.outbox.take_back(self)


class Outbox:
    """Makes parcels, in the memory of those that have arrived."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._free: list[Parcel] = []

    def pack(self, state: State) -> Parcel:
        """Return a snapshot of a state, in memory that no RPC is reading."""
        with self._lock:
            layout = state.layout(None if self._writer is None else self._writer.section.layout)
            if self._writer is None or layout is not self._writer.section.layout:
                self._writer = Writer(layout, np.empty(layout.nbytes, np.uint8))
                self._free = []
            self._writer.write(state)
            flat = torch.as_tensor(self._writer.section.data)
            begins = range(0, layout.nbytes, PIECE_BYTES)
            parts = [flat[begin : begin + PIECE_BYTES] for begin in begins]
            if not self._free:
                # Each in memory of its own: of views, RPC makes copies again for every worker.
                return Parcel(layout, [part.clone() for part in parts], self)
            parcel = self._free.pop()
            for piece, part in zip(parcel.pieces, parts, strict=True):
                piece.copy_(part)
            return parcel

    def take_back(self, parcel: Parcel) -> None:
        """Keep a parcel's memory for another."""
        with self._lock:
            current = self._writer is not None and parcel.layout is self._writer.section.layout
            if current and len(self._free) < KEPT_MAX:
                self._free.append(parcel)


class Staging:
    """Joins pieces, in memory that is kept from one version to the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Bytes] = []

    def join(self, pieces: list[torch.Tensor]) -> Bytes:
        """Return the pieces as one read-only array, in memory that nobody uses."""
        size = sum(piece.numel() for piece in pieces)
        with self._lock:
            place = next((i for i, free in enumerate(self._free) if free.size == size), None)
            data = np.empty(size, np.uint8) if place is None else self._free.pop(place)
        if pieces:  # by numpy: torch would start a team of threads for each thread of RPC's
            np.concatenate([piece.numpy() for piece in pieces], out=data)
        joined = data.view()
        joined.flags.writeable = False  # so that whoever wants to keep a part makes a copy
        return joined

    def free(self, joined: Bytes) -> None:
        """Take memory back that nobody uses any more."""
        data = joined.base
        with self._lock:
            if isinstance(data, np.ndarray):
                self._free = [*self._free[1 - KEPT_MAX :], data]
