"""Lets a publisher serve its part of a version that several ranks publish together.

Rank 0 announces the version, and names the other ranks as its sources. If a worker requests a chunk
that rank 0 lacks, rank 0 fetches all chunks that it lacks from the other ranks (`Obtaining`).
"""

import secrets
from collections.abc import Callable, Mapping
from weakref import WeakMethod

from msgspec.structs import replace

from ...bus.chunks import Memory
from ...bus.deadline import Deadline, result_of
from ...bus.limits import Timing
from ...bus.messages import Hello
from ...bus.net.publisher_loop import PublisherLoop
from ...bus.net.sources import SourceFetcher
from ...bus.publisher.offers import announcement
from ...bus.publisher.version import Version, VersionOffer
from ...bus.staged import SourceFetch, indexes_of
from ...bus.trust.curve import public_of
from ...bus.trust.keys import PublisherKeys, WorkerKeys
from ...bus.worker.events import SourceFetched
from ...codecs.layout import Layout
from ...codecs.state import State, Streamed
from ..settings import Settings
from .shard_patches import PartBase, PatchTerms

RANK = "publisher"  # the name with which rank 0 joins the other ranks' publishers


class PartedSource(Streamed):
    """The base class of sources whose parts are each published by one rank."""

    def offer(
        self,
        model: str,
        state: State,
        layout: Layout,
        chunk_bytes: int,
        deadline: Deadline,
        patches: PatchTerms,
    ) -> VersionOffer:
        """Return the offer of rank 0, once the other ranks have their parts in memory.

        Args:
            model: The model's id.
            state: The last result of `state`, with the precision and names of the version.
            layout: The layout of the version.
            chunk_bytes: Bytes per chunk.
            deadline: The deadline of the publish.
            patches: What rank 0 knows of the workers that may receive a patch.
        """
        raise NotImplementedError


Describe = Callable[[str, object, Settings | None], tuple[State, Layout]]


class Parts:
    """The parts of versions that this rank's publisher serves.

    Args:
        loop: The publisher's loop.
        keys: The publisher's keys; None: it has none.
        timing: The timeouts and intervals.
        chunk_bytes: Bytes per chunk.
        describe: The publisher's method that returns the state and layout of weights.
        keeps: Whether the publisher stores versions in a folder.
        check: Whether each part of a patch is decoded, and compared, before it is offered.

    Attributes:
        address: The address at which workers fetch chunks from this publisher.
        bases: By model, this rank's part of the last version, if patches may build on it.
        chunk_bytes, keeps, check: As given.
    """

    def __init__(
        self,
        loop: PublisherLoop,
        keys: PublisherKeys | None,
        timing: Timing,
        chunk_bytes: int,
        describe: Describe,
        *,
        keeps: bool,
        check: bool,
    ) -> None:
        self.address, self.chunk_bytes = loop.address, chunk_bytes
        self.keeps, self.check = keeps, check
        self.bases: dict[str, PartBase] = {}
        self._describe = WeakMethod(describe)  # weak, so that a dropped publisher is collected
        self._loop, self._timing = loop, timing
        self._keys: WorkerKeys | None = None
        if keys is not None:
            public = public_of(keys.secret)  # all ranks have the same keys
            self._keys = WorkerKeys(RANK, public, keys.secret, public)

    def describe(
        self, model: str, weights: object, settings: Settings | None
    ) -> tuple[State, Layout]:
        """Return the state and the layout that the weights would be published with.

        Raises:
            StateError: The weights cannot be published, or not with these settings.
        """
        describe = self._describe()
        assert describe is not None  # noqa: S101 - the caller has the publisher
        return describe(model, weights, settings)

    def next_key(self, model: str, deadline: Deadline) -> tuple[int, int]:
        """Return the epoch and number of the next version of a model."""
        return result_of(self._loop.next_key(model), deadline.left())

    def keep(self, offer: VersionOffer, deadline: Deadline) -> None:
        """Keep this rank's chunks of a version, from which workers and rank 0 fetch.

        Raises:
            ValueError: This publisher has published the model by itself.
        """
        result_of(self._loop.keep_part(offer), deadline.left())

    def keep_base(self, model: str, base: PartBase | None) -> None:
        """Keep the part of a version that the next patch may build on; None: keep no part."""
        self.bases.pop(model, None)
        if base is not None:
            self.bases[model] = base

    def obtaining(
        self, offer: VersionOffer, memory: Memory, names: Mapping[str, str]
    ) -> Callable[[Version], None]:
        """Return the value of `VersionOffer.obtain`: fetches the chunks that rank 0 lacks.

        Args:
            offer: The offer of the version.
            memory: The data section of the version.
            names: The name of the source at each address, for errors.
        """
        return Obtaining(self._loop, self._keys, self._timing, offer, memory, names)


class Obtaining:
    """Fetches the chunks that rank 0 lacks from the other ranks.

    Args:
        loop: The publisher's loop.
        keys: The keys with which rank 0 connects to the other ranks.
        timing: The timeouts and intervals.
        offer: The offer of the version.
        memory: The data section of the version.
        names: The name of the source at each address, for errors.
    """

    def __init__(
        self,
        loop: PublisherLoop,
        keys: WorkerKeys | None,
        timing: Timing,
        offer: VersionOffer,
        memory: Memory,
        names: Mapping[str, str],
    ) -> None:
        self._loop, self._offer, self._memory, self._names = loop, offer, memory, names
        self._sources = SourceFetcher(lambda address: (address, keys), self._obtained, timing)
        self._version: Version | None = None

    def __call__(self, version: Version) -> None:
        """Begin to fetch, in the publisher's thread."""
        self._version, offer, plan = version, self._offer, version.plan
        epoch, number = offer.key or version.key  # the key under which the sources have the version
        announce = replace(announcement(version), epoch=epoch, version=number)
        lacking = [(source.address, indexes_of(source, plan)) for source in offer.sources]
        hello = Hello(name=RANK, instance=secrets.token_hex(16), models={version.model: None})
        self._sources.fetch(SourceFetch(announce, lacking, self._memory, plan), hello)

    def _obtained(self, fetched: SourceFetched) -> None:
        """Pass fetched chunks to the publisher's thread; called in a thread of a source."""
        version, why = self._version, ""
        if fetched.over:
            why = "; ".join(fetched.faults) or "chunks of its sources are missing"
            for address, name in self._names.items():
                why = why.replace(f"the source at {address} ", f"{name} at {address} ")
        if version is not None:
            self._loop.decide(
                lambda machine, now: machine.obtained(version, fetched.chunks, why, now)
            )
