"""Publishes a sharded model from all ranks at once: every rank sends its own shards (`sharded`).

No rank has the whole model. Each rank writes its shards into memory for the version, and sends
other ranks the bytes that belong to their chunks (`placement.py`). It then computes the checksums
of its own chunks. Rank 0 collects the checksums, announces the version, and names the other ranks
as its sources. Workers then fetch from all ranks at once. A worker that accepts patches may get a
patch from rank 0 instead, for which each rank has encoded its blocks (`shard_patches.py`).
"""

import contextlib
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

import msgspec
import torch
import torch.distributed as dist

from ...bus.chunks import Chunks, Memory, plan_of
from ...bus.deadline import Deadline
from ...bus.memory.pages import memory_of
from ...bus.messages import Source
from ...bus.net.endpoints import for_other_hosts
from ...bus.publisher.version import VersionOffer
from ...bus.receipt import Receipt
from ...codecs.checksum import digest
from ...codecs.errors import StateError, WeightBusError
from ...codecs.layout import NAME_SHOWN, Layout
from ...codecs.leaves import Leaf
from ...codecs.metadata import checked
from ...codecs.native import crc32c
from ...codecs.overflow import lost
from ...codecs.section import Section
from ...codecs.state import State, signature
from ...codecs.words import printable
from .. import checks
from .gathering import Gathered, difference, state_of_entries, tensors_of
from .options import TIMEOUT, PublishOptions
from .parts import PartedSource
from .placement import Foreign, hash_of, placement_of, uncovered
from .ranks import MARGIN_SECONDS, Ranks, Round, own_host
from .shard_patches import PartBase, PartReport, PatchOrder, PatchParts, PatchTerms
from .shards import Entry, PlacedShards, Shards, entries

if TYPE_CHECKING:
    from ..publisher import Publisher

BATCH_BYTES = 2**25  # bytes that ranks exchange at a time
METADATA_SHOWN = 80  # characters of each rank's metadata in an error


def sharded(
    model: object,
    *,
    timeout: float = TIMEOUT,
    group: "dist.ProcessGroup | None" = None,
    advertise: str | None = None,
) -> "Sharded":
    """Return a source that publishes a sharded model from all ranks at once.

    Every rank has a Publisher, and runs the same line, as often as needed:

        weightbus.sharded(model).publish(publisher, "policy")

    Workers connect to rank 0, and fetch each chunk from the rank that has it, over as many links as
    there are ranks. A worker that cannot do so gets the version from rank 0, which then fetches the
    other ranks' chunks. In contrast to `gather`, no rank needs memory for the whole model, only for
    its own part of the version. With `Settings(encoding="delta")` or `"auto"`, on every rank,
    workers that accept patches get a patch on the version before, of which each rank has encoded
    its own part.

    Args:
        model: As in `gather`: a module that is sharded by `fully_shard`,
            `FullyShardedDataParallel` or tensor parallelism, or a mapping of names to tensors, each
            of which may be a `DTensor`. A `DTensor` that is replicated is sent by one rank, a plain
            tensor by rank 0.
        timeout: Seconds for all ranks to make the call, and again for the exchange between ranks.
            On rank 0 the timeout of the publish applies, too.
        group: The process group; None: all ranks. Without torch.distributed: this process alone.
        advertise: The address at which workers reach this rank's publisher. None: the publisher's
            address; if it means all addresses of this host (such as 0.0.0.0), the one from which
            this host reaches the host of the store of torch.distributed (MASTER_ADDR).

    Raises:
        ValueError: `timeout` is invalid, or this rank is not in the group.
    """
    seconds = checks.seconds(timeout, "timeout", positive=True)
    is_initialized = dist.is_available() and dist.is_initialized()
    ranks = Ranks(group) if is_initialized and dist.get_world_size(group) != 1 else None
    return Sharded(model, ranks, seconds, advertise)


class _Report(msgspec.Struct, frozen=True):
    """The report of another rank to rank 0 on its part of a version.

    Attributes:
        address: Where workers fetch the rank's chunks.
        crcs: The CRC-32C of each of these chunks.
        lost: By name of the tensor, the dtype of the version and how many values do not fit it.
        patch: The rank's report for a patch; None: the version has no patch.
    """

    address: str
    crcs: list[int]
    lost: dict[str, tuple[str, int]]
    patch: PartReport | None


class _Name(msgspec.Struct, frozen=True):
    """Rank 0's message to the other ranks: the version's key and digest, and a patch to encode."""

    epoch: int
    version: int
    digest: str
    patch: PatchOrder | None


class Sharded(PartedSource):
    """A model of which each rank publishes its shards; the result of `weightbus.sharded`.

    You may publish it any number of times, each time with the model's current values.

    Args:
        model, timeout, advertise: As in `sharded`.
        ranks: The ranks of the group; None: this process alone.
    """

    __module__ = "weightbus.types"

    def __init__(
        self, model: object, ranks: Ranks | None, timeout: float, advertise: str | None
    ) -> None:
        self._model, self._ranks, self._timeout = model, ranks, timeout
        self._advertise = advertise
        self._entries: Sequence[Entry] = ()
        self._parameters: set[int] = set()
        self._publisher: Publisher | None = None
        self._round_opened = False  # whether rank 0 has opened a round for the last publish
        self._metadata: dict[str, str] | None = None
        self._round = 0  # the number of the round in which the ranks agreed; 0: they did not

    def __repr__(self) -> str:
        ranks = 1 if self._ranks is None else len(self._ranks.members)
        return f"<{type(self._model).__name__} sharded over {ranks} ranks>"

    def publish(
        self, publisher: "Publisher", model: str, **options: Unpack[PublishOptions]
    ) -> Receipt | None:
        """Publish the shards of this rank. Every rank must call this.

        Args:
            publisher: This rank's publisher. All ranks have the same keys, or none has keys. On
                ranks other than 0, it publishes nothing else under this model's id.
            model: The model's id.
            **options: Keywords of `Publisher.publish`, the same on every rank. With metadata, such
                as `{"step": str(step)}`, ranks that are at different steps raise StateError.

        Returns:
            The receipt on rank 0; None on the others, which return once rank 0 has the receipt.

        Raises:
            StateError: The ranks have different models, or a model that cannot be published.
            DeadlineError: A rank did not make the call in time.
            WeightBusError: A rank has ended meanwhile; or, on other ranks, rank 0 has failed to
                publish.
            PublishError, ClosedError: As in `Publisher.publish`, on rank 0.
            ValueError: A publisher has a folder for versions (`state`), or has published the model
                by itself.

        After an error, all ranks may call this again.
        """
        ranks = self._ranks
        if ranks is None:
            return publisher.publish(model, Gathered(self._model, None, self._timeout), **options)
        if publisher.parts.keeps:
            raise ValueError(
                "this publisher keeps versions in a folder (state=), but with sharded() no rank "
                "has a whole version: leave state= out, or use gather()"
            )
        self._publisher, self._round_opened, self._round = publisher, False, 0
        metadata = options.get("metadata")
        self._metadata = None if metadata is None else dict(metadata)
        if ranks.rank:
            self._follow(publisher, ranks, model, options)
            return None
        try:
            receipt = publisher.publish(model, self, **options)
        except Exception as error:
            kind = "state" if isinstance(error, StateError) else "failed"
            fault = f"{kind} rank 0 did not publish: {error}"
            with contextlib.suppress(WeightBusError):
                if self._round:
                    ranks.set_outcome(self._round, fault)
                elif not self._round_opened:
                    ranks.lead("", self._timeout, fault)
            raise
        ranks.set_outcome(self._round, "")
        return receipt

    # On rank 0, for the publisher.

    def state(self) -> State:
        """Return the names, dtypes and shapes; move no values.

        Raises:
            StateError: The model cannot be published.
        """
        if self._publisher is None:
            raise StateError(
                "all ranks publish this model together: on every rank, call sharded(model)"
                ".publish(publisher, id)"
            )
        members = [] if self._ranks is None else self._ranks.members
        self._entries = entries(self._model)
        state, self._parameters = state_of_entries(self._entries, members)
        return state

    def is_parameter(self, leaf: Leaf) -> bool:
        """Return whether `leaf`, from the last `state`, is a parameter, not a buffer."""
        return id(leaf) in self._parameters

    def offer(
        self,
        model: str,
        state: State,
        layout: Layout,
        chunk_bytes: int,
        deadline: Deadline,
        patches: PatchTerms,
    ) -> VersionOffer:
        """Stage this rank's chunks, and return an offer that names the other ranks as sources.

        Arguments are those of `PartedSource.offer`.

        Raises:
            StateError, DeadlineError, WeightBusError: As in `publish`.
        """
        ranks, publisher = self._ranks, self._publisher
        assert ranks is not None and publisher is not None  # noqa: PT018, S101 - `publish` set them
        parts, left, others = publisher.parts, deadline.left, range(1, len(ranks.members))
        placed = _Places(self._entries, state, layout, chunk_bytes, ranks)
        plan = _plan(placed, model, self._metadata, ranks.share, patches=patches.wanted)
        seconds, self._round_opened = min(self._timeout, left()), True
        with ranks.lead(plan, seconds) as round_, torch.no_grad():
            self._round = round_.number
            staged = _stage(placed, ranks, round_, left, patches=patches.wanted)
            crcs, sources, names = list[int | None](staged.crcs), list[Source](), dict[str, str]()
            reports = [staged.build_on(parts.bases.get(model))]
            for rank in others:
                text = round_.receive_bytes(rank, "the checksums", left())
                report = msgspec.json.decode(text, type=_Report)
                indexes = staged.placement.of(rank)
                for index, crc in zip(indexes, report.crcs, strict=True):
                    crcs[index] = crc
                staged.add_lost(report.lost)
                reports.append(report.patch)
                if indexes:
                    ranges = staged.placement.ranges(rank)
                    sources.append(Source(address=report.address, chunks=ranges))
                    names[report.address] = f"rank {rank}"
            whole = digest(layout.id, chunk_bytes, cast("list[int]", crcs))
            key, patch, order = parts.next_key(model, deadline), staged.patch, None
            if patch is not None:
                order = patch.decide(reports, patches, min(left(), round_.left()))
            name = msgspec.json.encode(_Name(*key, whole, order))
            for rank in others:
                round_.send_bytes(rank, name, "the name", left())
            offer = _offer(model, layout, staged, whole, key)
            offer.chunks.set_checksums(cast("list[int]", crcs))
            offer.sources = tuple(sources)
            if sources:
                offer.obtain = parts.obtaining(offer, staged.memory, names)
            if staged.lost:
                offer.count_lost = staged.lost.copy
            offer.keep = patch is not None
            if patch is not None and order is not None:
                to = model, order, whole, patches.candidates
                offer.patches = patch.collect(*to, round_, left, check=parts.check)
            round_.end("the end", left())
        parts.keep_base(model, None if patch is None else patch.as_base(whole))
        return offer

    # On the other ranks.

    def _follow(
        self, publisher: "Publisher", ranks: Ranks, model: str, options: PublishOptions
    ) -> None:
        """Keep this rank's chunks for workers, and wait for the result of rank 0."""
        seconds = max(self._timeout, options.get("timeout", TIMEOUT)) + MARGIN_SECONDS
        deadline = Deadline(time.monotonic() + seconds, "rank 0 has not published in time")
        fault, parts, placed = "", publisher.parts, None
        try:
            state, layout = parts.describe(model, self, options.get("settings"))
            checked(self._metadata or {})
            placed = _Places(self._entries, state, layout, parts.chunk_bytes, ranks)
        except Exception as error:  # `answer` sends it to the other ranks at once
            fault = str(error) if isinstance(error, StateError) else repr(error)

        def answer(plan: str) -> str:
            if not plan or fault or placed is None:
                return fault
            try:
                why = _call_difference(plan, model, self._metadata)
                return why or _part_difference(plan, placed, ranks.read_shared)
            except StateError as error:
                return str(error)

        with ranks.follow(answer, self._timeout) as round_, torch.no_grad():
            assert placed is not None  # noqa: S101 - otherwise there is no round
            patches = json.loads(round_.plan)["patches"]
            staged = _stage(placed, ranks, round_, deadline.left, patches=patches)
            report = _Report(
                self._advertise or for_other_hosts(parts.address, _own_host),
                [crc for crc in staged.crcs if crc is not None],
                staged.lost,
                staged.build_on(parts.bases.get(model)),
            )
            round_.send_bytes(0, msgspec.json.encode(report), "the checksums")
            name = msgspec.json.decode(round_.receive_bytes(0, "the name"), type=_Name)
            key = name.epoch, name.version
            parts.keep(_offer(model, placed.layout, staged, name.digest, key), deadline)
            patch = staged.patch
            if patch is not None and name.patch is not None:
                patch.send(model, name.patch, round_, check=parts.check)
            round_.end("the end")
        parts.keep_base(model, None if patch is None else patch.as_base(name.digest))
        ranks.wait_for_outcome(round_.number, deadline)


class _Spread(NamedTuple):
    """A tensor whose parts are not intervals of the data section, so one rank gathers and sends it.

    Attributes:
        shards, name: The tensor, and its name in the version.
        owner: The index of the rank that gathers it.
        leader: The global rank whose copies are used where several ranks have copies.
    """

    shards: Shards
    name: str
    owner: int
    leader: int


class _Places:
    """Which rank has which tensors and chunks of a version; every rank computes the same.

    Args:
        found: The model's tensors.
        state, layout: The state and layout of the version.
        chunk_bytes: Bytes per chunk.
        ranks: The ranks.

    Attributes:
        found, layout: As given.
        plan: The chunks.
        tensors: As text, the dtype, shape and sharding of each tensor, equal on all ranks.
        owners: As text, the ranks that have the parts of each tensor.
        unique: The tensors that are sent, each with its name in the version.
        spread: The tensors that one rank gathers.
        leaders: By name of each other sharded tensor, the global rank whose copies are used.
        placement: Which rank sends which chunk.

    Raises:
        StateError: The shards of a tensor overlap, or leave a part of it out.
    """

    def __init__(
        self, found: Sequence[Entry], state: State, layout: Layout, chunk_bytes: int, ranks: Ranks
    ) -> None:
        self.found, self.layout, self._ranks = found, layout, ranks
        self.plan = plan_of(layout.nbytes, chunk_bytes)
        names = zip(found, state.form.names, strict=True)
        self.unique = [(entry, name) for entry, name in names if name in state.signatures]
        self.unique.sort(key=lambda each: layout.by_name(each[1]).begin)
        self.tensors, self.owners = _tensors_text(found), _owners_text(found)
        self.place()

    def place(self) -> None:
        """Compute the placement, with the ranks that the shards now name."""
        layout, members = self.layout, self._ranks.members
        intervals, self.spread = list[tuple[int, int, int]](), list[_Spread]()
        self.leaders, loads = dict[str, int](), [0] * len(members)
        for entry, name in self.unique:
            spec, tensor = layout.by_name(name), entry.tensor
            least = min(range(len(loads)), key=loads.__getitem__)  # the least loaded rank
            if not isinstance(tensor, Shards):
                parts = [(spec.begin, spec.end, 0)]
            elif (cut := _intervals(tensor, spec.begin, spec.end, self._ranks, least)) is not None:
                parts, self.leaders[name] = cut, members[least]
            else:
                least = least if not isinstance(tensor, PlacedShards) or tensor.in_order else 0
                parts = [(spec.begin, spec.end, least)]
                self.spread.append(_Spread(tensor, name, least, members[least]))
            if fault := uncovered(parts, spec.begin, spec.end):
                raise StateError(f"{printable(name, NAME_SHOWN)}: {fault}")
            for begin, end, rank in parts:
                loads[rank] += end - begin
            intervals += parts
        self.placement = placement_of(intervals, self.plan, len(members))


class _Staged:
    """This rank's part of a version.

    Args:
        placed: Which rank has which tensors and chunks.

    Attributes:
        memory: The data section; only the bytes of this rank are written.
        section: The tensors in `memory`.
        crcs: The CRC-32C of each chunk that this rank sends; None: another rank sends the chunk.
        plan, placement: Those of `placed`.
        patch: This rank's part of the patch; None: the version has no patch.
        lost: By name of the tensor, the dtype of the version and how many values do not fit it.
    """

    def __init__(self, placed: _Places) -> None:
        self.plan, self.placement = placed.plan, placed.placement
        self.memory = memory_of(placed.layout.nbytes)
        self.section = Section(placed.layout, self.memory)
        self.crcs: list[int | None] = [None] * self.plan.count
        self.lost: dict[str, tuple[str, int]] = {}
        self.patch: PatchParts | None = None

    def build_on(self, base: PartBase | None) -> PartReport | None:
        """Set this rank's part of the last version as the patch's base; return its report."""
        return None if self.patch is None else self.patch.build_on(base)

    def put(self, name: str, part: torch.Tensor, values: torch.Tensor) -> None:
        """Write values of a tensor into a part of it, in the dtype of the version."""
        part.copy_(values)
        self.count_lost(name, part, values)

    def count_lost(self, name: str, converted: torch.Tensor, values: torch.Tensor) -> None:
        """Count the values that do not fit the dtype of the version."""
        if converted.dtype != values.dtype:
            dtype = self.section.layout.by_name(name).dtype
            count = lost(converted, values, signature(name, values)[0], dtype)
            self.add_lost({name: (dtype, count)} if count else {})

    def add_lost(self, more: Mapping[str, Sequence[Any]]) -> None:
        """Add counts of lost values, such as another rank's."""
        for name, (dtype, count) in more.items():
            self.lost[name] = dtype, count + self.lost.get(name, ("", 0))[1]

    def hash(self, rank: int) -> None:
        """Compute the checksums of the chunks that this rank sends."""
        for index in self.placement.of(rank):
            begin, end = self.plan.span(index)
            self.crcs[index] = crc32c(self.memory[begin:end])


def _stage(
    placed: _Places, ranks: Ranks, round_: Round, left: Callable[[], float], *, patches: bool
) -> _Staged:
    """Write this rank's shards into memory, and exchange bytes so that its chunks are whole.

    `patches`: whether to exchange the bytes of a patch's blocks, too.
    """
    me, staged, members = ranks.rank, _Staged(placed), ranks.members
    for entry, name in placed.unique:
        tensor, whole = entry.tensor, staged.section.tensors[name]
        if not isinstance(tensor, Shards):
            if me == 0:
                staged.put(name, whole, torch.as_tensor(tensor))
        elif name in placed.leaders:
            for member, part in tensor.parts(whole, placed.leaders[name]):
                if member == members[me] and part.numel():
                    staged.put(name, part, tensor.mine())
    for batch in _batches(placed.spread, placed.layout):
        _gather(batch, staged, ranks, round_, left)
    _exchange(staged.placement.foreign, staged, ranks, round_, left)
    staged.hash(me)
    if patches:
        about = staged.placement, staged.memory, me, len(members)
        staged.patch = PatchParts(placed.layout, staged.plan, *about)
        _exchange(staged.patch.placement.foreign, staged, ranks, round_, left)
    return staged


def _exchange(
    foreign: Foreign, staged: _Staged, ranks: Ranks, round_: Round, left: Callable[[], float]
) -> None:
    """Exchange the `foreign` bytes of the data section with the other ranks."""
    me, others = ranks.rank, [r for r in range(len(ranks.members)) if r != ranks.rank]
    data = torch.as_tensor(staged.memory)
    for some in foreign.batches(BATCH_BYTES):
        give = {r: some.between(me, r) for r in others}
        take = {r: some.between(r, me) for r in others}
        out = {r: torch.cat([data[b:e] for b, e in spans]) for r, spans in give.items() if spans}
        into = {r: _empty(sum(e - b for b, e in s)) for r, s in take.items() if s}
        round_.exchange(out, into, "the chunks of several ranks", left())
        for rank, received in into.items():
            at = 0
            for begin, end in take[rank]:
                data[begin:end] = received[at : at + end - begin]
                at += end - begin


def _intervals(
    tensor: Shards, begin: int, end: int, ranks: Ranks, leader: int
) -> list[tuple[int, int, int]] | None:
    """Return a tensor's parts as intervals of the data section; None if they are not intervals."""
    if not tensor.straight or (isinstance(tensor, PlacedShards) and tensor.whole):
        return None
    count = tensor.meta.numel()
    width, rest = divmod(end - begin, count) if count else (0, 0)
    if rest:  # several elements share a byte
        return None
    found = list[tuple[int, int, int]]()
    for member, part in tensor.parts(tensor.meta, ranks.members[leader]):
        if not part.is_contiguous():
            return None
        if part.numel():
            first = begin + int(part.storage_offset()) * width
            found.append((first, first + part.numel() * width, ranks.members.index(member)))
    return found


def _batches(spread: Sequence[_Spread], layout: Layout) -> Iterator[list[_Spread]]:
    """Yield batches of tensors, which are gathered together, of about `BATCH_BYTES` each."""
    batch, nbytes = list[_Spread](), 0
    for each in spread:
        batch.append(each)
        spec = layout.by_name(each.name)
        nbytes += spec.end - spec.begin
        if nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _gather(
    batch: Sequence[_Spread],
    staged: _Staged,
    ranks: Ranks,
    round_: Round,
    left: Callable[[], float],
) -> None:
    """Gather each tensor on the rank that sends it."""
    me, here = ranks.rank, ranks.members[ranks.rank]
    out, sizes = defaultdict[int, list[torch.Tensor]](list), defaultdict[int, int](int)
    for shards, name, owner, leader in batch:
        whole = staged.section.tensors[name]
        if isinstance(shards, PlacedShards) and shards.whole:
            values = round_.collective(shards.gathered, name, left())
            if owner == me:
                staged.put(name, whole, values)
            continue
        for member, part in shards.parts(shards.meta, leader):
            if member == here and owner != me and part.numel():
                values, converted = shards.mine(), torch.empty(part.shape, dtype=whole.dtype)
                staged.put(name, converted, values)
                out[owner].append(converted.reshape(-1).view(torch.uint8))
            elif owner == me and member != here:
                sizes[ranks.members.index(member)] += part.numel() * whole.element_size()
    into = {rank: _empty(size) for rank, size in sizes.items() if size}
    packed = {rank: torch.cat(flats) for rank, flats in out.items()}
    round_.exchange(packed, into, "the tensors that are not cut by rows", left())
    at = dict.fromkeys(into, 0)
    for shards, name, owner, leader in batch:
        if owner != me or (isinstance(shards, PlacedShards) and shards.whole):
            continue
        whole = staged.section.tensors[name]
        for member, part in shards.parts(whole, leader):
            rank, nbytes = ranks.members.index(member), part.numel() * whole.element_size()
            if member == here:
                staged.put(name, part, shards.mine()) if nbytes else None
            elif nbytes:
                received = into[rank][at[rank] : at[rank] + nbytes].clone()
                part.copy_(received.view(whole.dtype).reshape(part.shape))
                at[rank] += nbytes


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _offer(
    model: str, layout: Layout, staged: _Staged, whole: str, key: tuple[int, int]
) -> VersionOffer:
    """Return the offer of the chunks that this rank has."""
    crcs = staged.crcs
    here = sum(crc is not None for crc in crcs)
    chunks: Chunks[Memory] = Chunks(
        staged.plan, staged.memory, crcs, layout.id, here, here == len(crcs), whole
    )
    return VersionOffer.received(model, layout, chunks, key)


def _plan(
    placed: _Places, model: str, metadata: object, share: Callable[[str], str], *, patches: bool
) -> str:
    """Return rank 0's plan, a JSON text with which the other ranks compare their parts.

    `share` puts a text into the store and returns its hash: the plan has only hashes of the long
    texts, which do not change between calls. With data parallelism, other ranks may have copies of
    the parts; they send nothing of these. `patches`: whether workers accept patches, now or later.
    """
    form = {"layout": placed.layout.id, "chunk_bytes": placed.plan.chunk_bytes}
    shared = {"tensors": share(placed.tensors), "ranks": share(placed.owners)}
    about = {"model": model, "metadata": metadata, "placement": placed.placement.hash()}
    return json.dumps(form | shared | about | {"patches": patches})


def _tensors_text(found: Sequence[Entry]) -> str:
    """Return, as JSON, the dtype, shape and sharding of each tensor."""
    return json.dumps({"tensors": tensors_of(found)})


def _owners_text(found: Sequence[Entry]) -> str:
    """Return, as JSON, the ranks that have the parts of each tensor."""
    ranks, used = dict[str, int](), dict[str, int]()
    for name, tensor, *_ in found:
        if isinstance(tensor, Shards):
            used[name] = ranks.setdefault(json.dumps(tensor.ranks), len(ranks))
    return json.dumps({"ranks": [*ranks], "used": used})


def _call_difference(plan: str, model: str, metadata: object) -> str:
    """Return why this rank's call is for another version than rank 0's; empty if not."""
    lead = json.loads(plan)
    if lead["model"] != model:
        return f"it publishes the model {printable(model)}, rank 0 {printable(lead['model'])}"
    if metadata not in (None, lead["metadata"]):
        theirs, mine = (
            printable(json.dumps(each), METADATA_SHOWN) for each in (lead["metadata"], metadata)
        )
        return (
            f"its metadata is {mine}, rank 0's {theirs}: call publish for the same version, with "
            "the same metadata, or without metadata on ranks other than 0"
        )
    return ""


def _part_difference(plan: str, placed: _Places, read_shared: Callable[[str], str]) -> str:
    """Return how this rank's part of the version differs from rank 0's; empty if it does not.

    Afterwards, the parts of each tensor are those of the ranks that rank 0 names.
    """
    lead, found = json.loads(plan), placed.found
    if hash_of(placed.tensors) != lead["tensors"]:
        return difference(read_shared(lead["tensors"]), {entry.name: entry for entry in found})
    mine, theirs = placed.plan.chunk_bytes, lead["chunk_bytes"]
    if mine != theirs:
        return f"its publisher's chunks have {mine} bytes, rank 0's {theirs} (chunk_bytes)"
    if lead["layout"] != placed.layout.id:
        return "its settings (dtype, rename) give the version another layout than rank 0's"
    if hash_of(placed.owners) != lead["ranks"]:
        owners = json.loads(read_shared(lead["ranks"]))
        ranks = [json.loads(text) for text in owners["ranks"]]
        for name, tensor, *_ in found:
            if isinstance(tensor, Shards):
                tensor.of_ranks(ranks[owners["used"][name]])
        placed.place()
    if lead["placement"] != placed.placement.hash():
        return "it finds the parts of the version on other ranks than rank 0 does"
    return ""


def _own_host() -> str:
    """Return the host part of this rank's address for workers; the host's name if MASTER_ADDR is
    not set, as with a store in a file.
    """
    master = os.environ.get("MASTER_ADDR")
    return own_host(master, 1) if master else socket.gethostname()
