"""Publishes from rank 0 a model whose shards are on the ranks of a process group (`gather`).

The tensors go one by one from the ranks that have their parts into the version's memory on rank 0.
So rank 0 needs no second copy of the model, and the other ranks need no memory.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
import torch.distributed as dist

from ...bus.receipt import Receipt
from ...codecs import numpy_tensors
from ...codecs.copies import Copies
from ...codecs.errors import StateError, WeightBusError
from ...codecs.layout import NAME_SHOWN, Layout
from ...codecs.leaves import Leaf
from ...codecs.overflow import lost
from ...codecs.section import Section
from ...codecs.state import State, Streamed, signature, state_of_leaves
from ...codecs.torch_tensors import bytes_of
from ...codecs.words import printable
from .. import checks
from .options import TIMEOUT, PublishOptions
from .ranks import Ranks, Round
from .shards import Entry, PlacedShards, Shards, entries

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ..publisher import Publisher

T = TypeVar("T")

DIFFERENCES_SHOWN = 3  # tensors that a rank names if its model differs from rank 0's


def gather(
    model: object, *, timeout: float = TIMEOUT, group: "dist.ProcessGroup | None" = None
) -> "Gathered":
    """Return a source that publishes a model whose shards are on the ranks of a process group.

    Every rank runs the same line, as often as needed:

        weightbus.gather(model).publish(publisher, "policy")

    Rank 0 publishes with its publisher. The other ranks need no publisher (`None`): they send their
    parts to rank 0. First all ranks compare names, dtypes and shapes. If a rank is missing or has
    another model, each rank raises an error that names that rank, and may try again. The tensors
    arrive one by one in the version's memory on rank 0.

    Args:
        model: A module that is sharded by `fully_shard`, `FullyShardedDataParallel` or tensor
            parallelism, or is on every rank (`DistributedDataParallel`, no wrapper); or a mapping
            of names to tensors, each of which may be a `DTensor`. Plain tensors and buffers are
            taken from rank 0. Names are those of the module without wrappers.
        timeout: Seconds for all ranks to make the call, and again for the tensors to arrive. On
            rank 0 the timeout of the publish applies, too.
        group: The process group; None: all ranks. Without torch.distributed: this process alone.

    Raises:
        ValueError: `timeout` is invalid, or this rank is not in the group.
    """
    seconds = checks.seconds(timeout, "timeout", positive=True)
    is_initialized = dist.is_available() and dist.is_initialized()
    ranks = Ranks(group) if is_initialized and dist.get_world_size(group) != 1 else None
    return Gathered(model, ranks, seconds)


class Gathered(Streamed):
    """A model on the ranks of a process group; the result of `weightbus.gather`.

    On rank 0, every method of a Publisher that publishes accepts it as the weights; the other ranks
    then call `send`. `prepare` accepts it, too, and gathers nothing. You may publish it any number
    of times, each time with the model's current values.

    Args:
        model, timeout: As in `gather`.
        ranks: The ranks of the group; None: this process alone.
    """

    __module__ = "weightbus.types"

    def __init__(self, model: object, ranks: Ranks | None, timeout: float) -> None:
        self._model, self._ranks, self._timeout = model, ranks, timeout
        self._entries: Sequence[Entry] = ()
        self._parameters: set[int] = set()
        self._round_opened = False  # whether rank 0 has opened a round for the last publish

    def __repr__(self) -> str:
        ranks = 1 if self._ranks is None else len(self._ranks.members)
        return f"<{type(self._model).__name__} gathered from {ranks} ranks>"

    def publish(
        self, publisher: "Publisher | None", model: str, **options: Unpack[PublishOptions]
    ) -> Receipt | None:
        """Publish on rank 0; on other ranks, send their parts. Every rank must call this.

        Args:
            publisher: Rank 0's publisher. On other ranks it is not used, and may be None.
            model: The model's id.
            **options: Keywords of `Publisher.publish`. On other ranks they are not used.

        Returns:
            The receipt on rank 0; None on the others, which return once rank 0 has all tensors.

        Raises:
            StateError: The ranks have different models, or a model that cannot be published.
            DeadlineError: A rank did not make the call in time.
            WeightBusError: A rank has ended meanwhile, or rank 0 has failed to publish.
            PublishError, ClosedError: As in `Publisher.publish`, only on rank 0.

        After an error the ranks may call this again, once a rank whose process has ended is back.
        The exception is a failure while torch gathers tensors on GPUs: it breaks the process group.
        """
        publish = None if publisher is None else publisher.publish
        return self._on_rank_0(publish, model, options)

    def publish_async(
        self, publisher: "Publisher | None", model: str, **options: Unpack[PublishOptions]
    ) -> "Future[Receipt] | None":
        """Return a future of the receipt once rank 0 has all tensors; None on other ranks.

        Arguments and errors are those of `publish`.
        """
        publish = None if publisher is None else publisher.publish_async
        return self._on_rank_0(publish, model, options)

    def send(self) -> None:
        """Send this rank's parts to rank 0, which publishes with a method of its Publisher.

        Raises:
            StateError, DeadlineError, WeightBusError: As in `publish`; ValueError on rank 0.
        """
        ranks = self._ranks
        if ranks is None or ranks.rank == 0:
            raise ValueError("rank 0 sends nothing: there, publish the result of gather()")
        fault, found = "", dict[str, Entry]()
        try:
            found = {entry.name: entry for entry in entries(self._model)}
        except Exception as error:  # sent to the other ranks at once, as the answer to the plan
            fault = str(error) if isinstance(error, StateError) else repr(error)
        with (
            ranks.follow(lambda plan: fault or difference(plan, found), self._timeout) as round_,
            torch.no_grad(),
        ):
            me, plan = ranks.members[ranks.rank], json.loads(round_.plan)
            for name, at in plan["order"]:
                shards = found[name].tensor
                if isinstance(shards, PlacedShards) and shards.whole:
                    round_.collective(shards.gathered, name)
                elif isinstance(shards, Shards) and me in plan["owners"][at]:
                    round_.send(torch.as_tensor(bytes_of(shards.mine())), name)
            round_.barrier("the end")

    def _on_rank_0(
        self, publish: Callable[..., T] | None, model: str, options: Mapping[str, Any]
    ) -> T | None:
        """Call `publish` on rank 0; on other ranks send this rank's parts, and return None."""
        ranks = self._ranks
        if ranks is not None and ranks.rank:
            self.send()
            return None
        self._round_opened = False
        try:
            if publish is None:
                raise ValueError("rank 0 publishes: give it a Publisher, and the other ranks None")  # noqa: TRY301
            return publish(model, self, **options)
        except Exception as error:
            if ranks is not None and not self._round_opened:
                kind = "state" if isinstance(error, StateError) else "failed"
                fault = f"{kind} rank 0 did not publish: {error}"
                with contextlib.suppress(WeightBusError):
                    ranks.lead("", self._timeout, fault)
            raise

    # For the publisher, on rank 0.

    def state(self) -> State:
        """Return the names, dtypes and shapes, for the publisher; gather nothing.

        Raises:
            StateError: The model cannot be published, or this is not rank 0.
        """
        if self._ranks is not None and self._ranks.rank:
            raise StateError(
                f"a gathered model is published on rank 0, and this is rank {self._ranks.rank}: "
                "here, call publish() or send() of the result of gather()"
            )
        self._entries = entries(self._model)
        state, self._parameters = state_of_entries(self._entries, self._members())
        return state

    def is_parameter(self, leaf: Leaf) -> bool:
        """Return whether `leaf`, from the last `state`, is a parameter, not a buffer."""
        return id(leaf) in self._parameters

    def write(
        self, state: State, layout: Layout, data: numpy_tensors.Memory, left: Callable[[], float]
    ) -> dict[str, tuple[str, int]]:
        """Gather every tensor into the publisher's memory, and return the lost values.

        Args:
            state: The last result of `state`, with the precision and names of the version.
            layout: The layout of the version.
            data: The memory.
            left: Returns the seconds until the deadline.

        Raises:
            StateError, DeadlineError, WeightBusError: As in `publish`.
        """
        writing = _Writing(Section(layout, data), self._members(), left)
        names = zip(self._entries, state.form.names, strict=True)
        some = [(entry, name) for entry, name in names if name in state.signatures]  # no aliases
        if self._ranks is None:
            with torch.no_grad():
                writing.write(some, None)
            return writing.lost
        self._round_opened = True
        plan = _plan(self._entries, [entry for entry, _ in some], self._members())
        with self._ranks.lead(plan, min(self._timeout, left())) as round_, torch.no_grad():
            writing.write(some, round_)
            round_.barrier("the end", left())
        return writing.lost

    def _members(self) -> list[int]:
        """Return the global ranks of the group; an empty list without torch.distributed."""
        if self._ranks is not None:
            return self._ranks.members
        return [dist.get_rank()] if dist.is_available() and dist.is_initialized() else []


class _Writing:
    """Writes the tensors of one version into memory, on rank 0.

    Args:
        section: The version's memory.
        members: The global ranks of the group.
        left: Returns the seconds until the deadline.

    Attributes:
        lost: By name of the tensor, the dtype of the version and how many values did not fit it.
    """

    def __init__(self, section: Section, members: Sequence[int], left: Callable[[], float]) -> None:
        self._section, self._members, self._left = section, members, left
        self.lost: dict[str, tuple[str, int]] = {}

    def write(self, some: Sequence[tuple[Entry, str]], round_: Round | None) -> None:
        """Write tensors, each with its name in the version."""
        plain = [(tensor, name) for (_, tensor, *_), name in some if not isinstance(tensor, Shards)]
        leaves = [leaf for leaf, _ in plain]
        views = [self._section.like(name, leaf) for leaf, name in plain]
        Copies(views, leaves, private=True).run(views, leaves)
        for view, (leaf, name) in zip(views, plain, strict=True):
            self._count_lost(name, view, leaf)
        for entry, name in some:
            if isinstance(entry.tensor, Shards):
                self._gather(entry.tensor, name, entry.name, round_)

    def _gather(self, shards: Shards, name: str, what: str, round_: Round | None) -> None:
        whole = self._section.tensors[name]
        if isinstance(shards, PlacedShards) and shards.whole:
            call = shards.gathered
            values = call() if round_ is None else round_.collective(call, what, self._left())
            self._put(name, whole, values)
            return
        for member, part in shards.parts(whole, self._members[0]):
            if not part.numel():
                continue
            if member == self._members[0] or round_ is None:
                self._put(name, part, shards.mine())
            elif part.dtype == shards.meta.dtype and part.is_contiguous():
                round_.receive(part, member, what, self._left())
            else:
                values = torch.empty(part.shape, dtype=shards.meta.dtype)
                round_.receive(values, member, what, self._left())
                self._put(name, part, values)

    def _put(self, name: str, part: torch.Tensor, values: torch.Tensor) -> None:
        part.copy_(values)
        self._count_lost(name, part, values)

    def _count_lost(self, name: str, converted: Leaf, values: Leaf) -> None:
        if converted.dtype == values.dtype:
            return
        dtype = self._section.layout.by_name(name).dtype
        count = lost(converted, values, signature(name, values)[0], dtype)
        if count:
            self.lost[name] = dtype, count + self.lost.get(name, ("", 0))[1]


def state_of_entries(found: Sequence[Entry], members: Sequence[int]) -> tuple[State, set[int]]:
    """Return the state of a model's tensors, without values, and the ids of its parameters.

    Args:
        found: The model's tensors.
        members: The global ranks of the group; empty: there is no group.

    Raises:
        StateError: The model cannot be published.
    """
    checked = set[str]()  # meshes whose ranks are all in the group
    for name, tensor, *_ in found:
        if not isinstance(tensor, Shards):
            continue
        if (mesh := str(tensor.ranks)) in checked:
            continue
        if not members:
            raise StateError(
                f"{name}: each rank has a part of it, but torch.distributed is not initialised: "
                "call gather() on every rank, after init_process_group() and before "
                "destroy_process_group()"
            )
        others = {rank for rank, _ in tensor.parts(tensor.meta, members[0])}.difference(members)
        if others:
            raise StateError(
                f"{name}: rank {min(others)} has a part of it, but is not in the group: give "
                "gather() a group with all ranks of the model"
            )
        if not {int(rank) for rank in re.findall(r"\d+", mesh)}.difference(members):
            checked.add(mesh)
    leaves = {each.name: _leaf(each.tensor) for each in found}
    parameters = {id(leaves[each.name]) for each in found if not each.buffer}
    return state_of_leaves(leaves, {each.name: each.same for each in found}.__getitem__), parameters


def tensors_of(found: Sequence[Entry]) -> dict[str, list[object]]:
    """Return, by name, the dtype, shape and sharding of each tensor, which all ranks compare."""
    return {name: _about(tensor, name) for name, tensor, *_ in found}


def _leaf(tensor: "Leaf | Shards") -> Leaf:
    return tensor.meta if isinstance(tensor, Shards) else tensor


def _about(tensor: "Leaf | Shards", name: str) -> list[object]:
    """Return the dtype, the shape, and how the tensor is sharded (empty if it is whole)."""
    dtype, shape = signature(name, _leaf(tensor))
    return [dtype, [*shape], tensor.how if isinstance(tensor, Shards) else ""]


def _plan(found: Sequence[Entry], unique: Sequence[Entry], members: Sequence[int]) -> str:
    """Return rank 0's plan as JSON: all tensors; in which order it gathers them, and from whom."""
    senders: dict[tuple[int, ...], int] = {}
    order: list[tuple[str, int]] = []
    for name, tensor, *_ in unique:
        ranks = (
            [r for r, p in tensor.parts(tensor.meta, members[0]) if p.numel()]
            if isinstance(tensor, Shards)
            else []
        )
        others = tuple(rank for rank in ranks if rank != members[0])
        order.append((name, senders.setdefault(others, len(senders))))
    return json.dumps({"tensors": tensors_of(found), "order": order, "owners": [*senders]})


def difference(plan: str, found: Mapping[str, Entry]) -> str:
    """Return how this rank's model differs from rank 0's plan; empty if not, or without a plan."""
    if not plan:
        return ""
    lead: dict[str, list[object]] = json.loads(plan)["tensors"]
    texts = [f"it lacks {printable(name, NAME_SHOWN)}" for name in lead if name not in found]
    texts += [
        f"rank 0 lacks its {printable(name, NAME_SHOWN)}" for name in found if name not in lead
    ]
    for name, theirs in lead.items():
        mine = _about(found[name].tensor, name) if name in found else theirs
        if mine != theirs:
            texts.append(
                f"its {printable(name, NAME_SHOWN)} is {_text(mine)}, rank 0's is {_text(theirs)}"
            )
    more = len(texts) - DIFFERENCES_SHOWN
    return "; ".join([*texts[:DIFFERENCES_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _text(about: Sequence[object]) -> str:
    dtype, shape, how = about
    return f"{dtype} {shape}" + (f" in shards, {how}" if how else "")
