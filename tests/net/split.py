"""Weights of which each of several publishers has every n-th chunk."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightbus import Publisher
from weightbus.bus.chunks import Chunks, Memory, plan_of
from weightbus.bus.deadline import Deadline
from weightbus.bus.messages import Source
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.codecs.checksum import digest_of
from weightbus.codecs.layout import Layout
from weightbus.codecs.leaves import Leaf
from weightbus.codecs.native import crc32c
from weightbus.codecs.state import State, state_of
from weightbus.python_client.publishing.parts import PartedSource
from weightbus.python_client.publishing.shard_patches import PatchTerms


class Split(PartedSource):
    """Weights of which each publisher has every n-th chunk.

    Args:
        publishers: The first one publishes; the others are its sources.
        weights: Arrays, none of which is another's memory.
        addresses: Where workers reach each publisher; None: where it listens.

    Attributes:
        obtained: How often the first publisher got chunks from its sources.
    """

    def __init__(
        self,
        publishers: Sequence[Publisher],
        weights: Mapping[str, NDArray[Any]],
        addresses: Sequence[str] | None = None,
    ) -> None:
        self.publishers, self.weights, self.obtained = publishers, dict(weights), 0
        self.addresses = addresses or [each.address for each in publishers]

    def state(self) -> State:
        return state_of(self.weights)

    def is_parameter(self, leaf: Leaf) -> bool:
        return any(leaf is array for array in self.weights.values())

    def offer(
        self,
        model: str,
        state: State,
        layout: Layout,
        chunk_bytes: int,
        deadline: Deadline,
        patches: PatchTerms,
    ) -> VersionOffer:
        assert not patches.wanted
        assert state.signatures.keys() == self.weights.keys()
        count = len(self.publishers)
        plan = plan_of(layout.nbytes, chunk_bytes)
        parts = [self.weights[tensor.name].tobytes() for tensor in layout.tensors]
        data = np.frombuffer(b"".join(parts), np.uint8)
        digest = digest_of(layout.id, data, chunk_bytes)
        key = self.publishers[0].parts.next_key(model, deadline)
        memories = list[Memory]()
        offers, sources, names = list[VersionOffer](), list[Source](), dict[str, str]()
        for rank, publisher in enumerate(self.publishers):
            memory, crcs = np.zeros(layout.nbytes, np.uint8), list[int | None]([None] * plan.count)
            ranges = list[int]()
            for index in range(rank, plan.count, count):
                begin, end = plan.span(index)
                memory[begin:end] = data[begin:end]
                crcs[index] = crc32c(data[begin:end])
                ranges += [index, 1]
            here = len(ranges) // 2
            chunks: Chunks[Memory] = Chunks(plan, memory, crcs, layout.id, here, False, digest)
            offers.append(VersionOffer.received(model, layout, chunks, key))
            if rank:
                publisher.parts.keep(offers[-1], deadline)
                sources.append(Source(address=self.addresses[rank], chunks=ranges))
                names[self.addresses[rank]] = f"rank {rank}"
            memories.append(memory)
        offer = offers[0]
        offer.sources = tuple(sources)
        obtain = self.publishers[0].parts.obtaining(offer, memories[0], names)

        def counted(version: Version) -> None:
            self.obtained += 1
            obtain(version)

        offer.obtain = counted
        return offer
