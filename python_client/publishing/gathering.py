"""`gather`: the source for a publish of a model whose shards are on the ranks of a process group.

The tensors go one by one from the ranks that have their parts into the version's own memory at rank
0. So rank 0 needs no second copy of the model, and the others need nothing.
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
from ...codecs.state import State, Streamed, described, signature
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

DIFFERENCES_SHOWN = 3  # tensors that a rank names, if its model is another one


def gather(
    model: object, *, timeout: float = TIMEOUT, group: "dist.ProcessGroup | None" = None
) -> "Gathered":
    """Return a source that publishes a model whose shards are on the ranks of a process group.

    Every rank runs the same line, as often as it likes:

        weightbus.gather(model).publish(publisher, "policy")

    Rank 0 publishes with its publisher; the others, which need none (`None`), send their parts and
    publish nothing. Nothing is gathered before that call. Then all ranks first compare names,
    dtypes and shapes; if a rank is missing or has another model, each rank raises an error that
    names it, and may try again. The tensors arrive one by one in the version's memory on rank 0.

    Args:
        model: A module that is sharded by `fully_shard`, `FullyShardedDataParallel` or tensor
            parallelism, or is on every rank (`DistributedDataParallel`, no wrapper); or a mapping
            of names to tensors, each of which may be a `DTensor`. Plain tensors and buffers are
            those of rank 0. Names are those of the module without wrappers.
        timeout: Seconds for all ranks to make the call, and again for the tensors to arrive. On
            rank 0 the timeout of the publish applies, too.
        group: The process group; None: all ranks. Without one, the model is published as it is.

    Raises:
        ValueError: `timeout` is invalid, or this rank is not in the group.
    """
    seconds = checks.seconds(timeout, "timeout", positive=True)
    is_there = dist.is_available() and dist.is_initialized()
    ranks = Ranks(group) if is_there and dist.get_world_size(group) != 1 else None
    return Gathered(model, ranks, seconds)


class Gathered(Streamed):
    """A model on the ranks of a process group. `weightbus.gather` makes it.

    On rank 0 it is also a source for every call that publishes, such as `publish_async` and
    `prepare`; meanwhile the other ranks call `send`, but for `prepare`, which gathers nothing. It
    may be published any number of times, each time with the values that the model then has.

    Args:
        model, timeout: As in `gather`.
        ranks: The ranks of the group; None: this process alone.
    """

    __module__ = "weightbus.types"

    def __init__(self, model: object, ranks: Ranks | None, timeout: float) -> None:
        self._model, self._ranks, self._timeout = model, ranks, timeout
        self._entries: Sequence[Entry] = ()
        self._parameters: set[int] = set()
        self._met = False  # whether the ranks have met for the last publish

    def __repr__(self) -> str:
        ranks = 1 if self._ranks is None else len(self._ranks.members)
        return f"<{type(self._model).__name__} gathered from {ranks} ranks>"

    def publish(
        self, publisher: "Publisher | None", model: str, **options: Unpack[PublishOptions]
    ) -> Receipt | None:
        """Publish from rank 0, and take part on the others. Every rank must call this.

        Args:
            publisher: Rank 0's publisher. On other ranks it is not used, and may be None.
            model: The model's id.
            **options: Keywords of `Publisher.publish`. On other ranks they are not used.

        Returns:
            The receipt on rank 0; None on the others, which return once rank 0 has all tensors.

        Raises:
            StateError: The ranks have different models, or one that cannot be published.
            DeadlineError: A rank did not make the call in time.
            WeightBusError: A rank has ended meanwhile, or rank 0 has failed to publish.
            PublishError, ClosedError: As in `Publisher.publish`, on rank 0 alone.

        After an error the ranks may call this again; a rank whose process has ended must be back. A
        failure while torch gathers tensors on GPUs is the exception: it breaks their process group.
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
        """Send this rank's parts to rank 0, which publishes with another call than `publish` here.

        Raises:
            StateError, DeadlineError, WeightBusError: As in `publish`.
        """
        ranks = self._ranks
        if ranks is None or ranks.rank == 0:
            raise ValueError("rank 0 sends nothing: publish what gather() returned there")
        fault, found = "", dict[str, Entry]()
        try:
            found = {entry.name: entry for entry in entries(self._model)}
        except Exception as error:  # the others are to hear of it at once
            fault = str(error) if isinstance(error, StateError) else repr(error)
        with (
            ranks.follow(lambda plan: fault or difference(plan, found), self._timeout) as round_,
            torch.no_grad(),
        ):
            me, plan = ranks.members[ranks.rank], json.loads(round_.plan)
            for name, at in plan["order"]:
                shards = found[name].held
                if isinstance(shards, PlacedShards) and shards.whole:
                    round_.together(shards.gathered, name)
                elif isinstance(shards, Shards) and me in plan["owners"][at]:
                    round_.send(torch.as_tensor(bytes_of(shards.mine())), name)
            round_.meet("the end")

    def _on_rank_0(
        self, publish: Callable[..., T] | None, model: str, options: Mapping[str, Any]
    ) -> T | None:
        """Call `publish` on rank 0; on other ranks send this rank's parts, and return None."""
        ranks = self._ranks
        if ranks is not None and ranks.rank:
            self.send()
            return None
        self._met = False
        try:
            if publish is None:
                raise ValueError("rank 0 publishes: give it a Publisher, and the other ranks None")  # noqa: TRY301
            return publish(model, self, **options)
        except Exception as error:
            if ranks is not None and not self._met:
                kind = "state" if isinstance(error, StateError) else "failed"
                fault = f"{kind} rank 0 did not publish: {error}"
                with contextlib.suppress(WeightBusError):
                    ranks.lead("", self._timeout, fault)
            raise

    # For the publisher, on rank 0.

    def state(self) -> State:
        """Return names, dtypes and shapes, for the publisher; nothing is gathered.

        Raises:
            StateError: The model cannot be published, or not from this rank.
        """
        if self._ranks is not None and self._ranks.rank:
            raise StateError(
                f"a model that is gathered on rank 0, and this is rank {self._ranks.rank}: publish "
                "there, and call publish() or send() of what gather() returned here"
            )
        self._entries = entries(self._model)
        state, self._parameters = state_of_entries(self._entries, self._members())
        return state

    def is_parameter(self, leaf: Leaf) -> bool:
        """Return whether `leaf`, of the last `state`, is a parameter, and no buffer."""
        return id(leaf) in self._parameters

    def write(
        self, state: State, layout: Layout, data: numpy_tensors.Memory, left: Callable[[], float]
    ) -> dict[str, tuple[str, int]]:
        """Gather every tensor into the publisher's memory, and return the lost values.

        Args:
            state: The last result of `state`; its form may be in another precision, or renamed.
            layout: The layout of that form.
            data: The memory.
            left: Returns the seconds that are left.

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
        self._met = True
        plan = _plan(self._entries, [entry for entry, _ in some], self._members())
        with self._ranks.lead(plan, min(self._timeout, left())) as round_, torch.no_grad():
            writing.write(some, round_)
            round_.meet("the end", left())
        return writing.lost

    def _members(self) -> list[int]:
        """Return the global ranks of the group; none without torch.distributed."""
        if self._ranks is not None:
            return self._ranks.members
        return [dist.get_rank()] if dist.is_available() and dist.is_initialized() else []


class _Writing:
    """Writes one version on rank 0.

    Args:
        section: The version's memory.
        members: The global ranks of the group.
        left: Returns the seconds that are left.

    Attributes:
        lost: The lost values so far.
    """

    def __init__(self, section: Section, members: Sequence[int], left: Callable[[], float]) -> None:
        self._section, self._members, self._left = section, members, left
        self.lost: dict[str, tuple[str, int]] = {}

    def write(self, some: Sequence[tuple[Entry, str]], round_: Round | None) -> None:
        """Write tensors, each with its name in the version."""
        plain = [(held, name) for (_, held, *_), name in some if not isinstance(held, Shards)]
        leaves = [leaf for leaf, _ in plain]
        views = [self._section.like(name, leaf) for leaf, name in plain]
        Copies(views, leaves, private=True).run(views, leaves)
        for view, (leaf, name) in zip(views, plain, strict=True):
            self._count(name, view, leaf)
        for entry, name in some:
            if isinstance(entry.held, Shards):
                self._gather(entry.held, name, entry.name, round_)

    def _gather(self, shards: Shards, name: str, what: str, round_: Round | None) -> None:
        whole = self._section.tensors[name]
        if isinstance(shards, PlacedShards) and shards.whole:
            call = shards.gathered
            values = call() if round_ is None else round_.together(call, what, self._left())
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
        self._count(name, part, values)

    def _count(self, name: str, became: Leaf, values: Leaf) -> None:
        if became.dtype == values.dtype:
            return
        destination = self._section.layout.by_name(name).dtype
        count = lost(became, values, signature(name, values)[0], destination)
        if count:
            self.lost[name] = destination, count + self.lost.get(name, ("", 0))[1]


def state_of_entries(found: Sequence[Entry], members: Sequence[int]) -> tuple[State, set[int]]:
    """Return the state of a model's tensors, without values, and the ids of its parameters.

    Args:
        found: The model's tensors.
        members: The global ranks of the group; empty: there is none.

    Raises:
        StateError: The model cannot be published.
    """
    checked = set[str]()  # meshes whose ranks are all in the group
    for name, held, *_ in found:
        if not isinstance(held, Shards):
            continue
        if (mesh := str(held.ranks)) in checked:
            continue
        if not members:
            raise StateError(
                f"{name}: each rank holds a part of it, and torch.distributed is not "
                "initialised: call gather() on every rank, between init_process_group() and "
                "destroy_process_group()"
            )
        others = {rank for rank, _ in held.parts(held.meta, members[0])}.difference(members)
        if others:
            raise StateError(
                f"{name}: rank {min(others)} holds a part of it, and is not in the group: give "
                "gather() a group with all ranks of the model"
            )
        if not {int(rank) for rank in re.findall(r"\d+", mesh)}.difference(members):
            checked.add(mesh)
    leaves = {each.name: _leaf(each.held) for each in found}
    parameters = {id(leaves[each.name]) for each in found if not each.buffer}
    return described(leaves, {each.name: each.same for each in found}.__getitem__), parameters


def tensors_of(found: Sequence[Entry]) -> dict[str, list[object]]:
    """Return what all ranks must have alike: dtype, shape and shards of each tensor."""
    return {name: _about(held, name) for name, held, *_ in found}


def _leaf(held: "Leaf | Shards") -> Leaf:
    return held.meta if isinstance(held, Shards) else held


def _about(held: "Leaf | Shards", name: str) -> list[object]:
    """Return what all ranks must have alike: dtype, shape, and how the tensor is sharded."""
    dtype, shape = signature(name, _leaf(held))
    return [dtype, [*shape], held.how if isinstance(held, Shards) else ""]


def _plan(found: Sequence[Entry], unique: Sequence[Entry], members: Sequence[int]) -> str:
    """Return what rank 0 will gather: all names; and in which order, with the ranks that send."""
    senders: dict[tuple[int, ...], int] = {}
    order: list[tuple[str, int]] = []
    for name, held, *_ in unique:
        ranks = (
            [r for r, p in held.parts(held.meta, members[0]) if p.numel()]
            if isinstance(held, Shards)
            else []
        )
        others = tuple(rank for rank in ranks if rank != members[0])
        order.append((name, senders.setdefault(others, len(senders))))
    return json.dumps({"tensors": tensors_of(found), "order": order, "owners": [*senders]})


def difference(plan: str, found: Mapping[str, Entry]) -> str:
    """Return how this rank's model differs from rank 0's; empty: it does not, or rank 0 failed."""
    if not plan:
        return ""
    theirs: dict[str, list[object]] = json.loads(plan)["tensors"]
    texts = [f"it lacks {printable(name, NAME_SHOWN)}" for name in theirs if name not in found]
    texts += [
        f"rank 0 lacks its {printable(name, NAME_SHOWN)}" for name in found if name not in theirs
    ]
    for name, there in theirs.items():
        here = _about(found[name].held, name) if name in found else there
        if here != there:
            texts.append(
                f"its {printable(name, NAME_SHOWN)} is {_text(here)}, rank 0's is {_text(there)}"
            )
    more = len(texts) - DIFFERENCES_SHOWN
    return "; ".join([*texts[:DIFFERENCES_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _text(about: Sequence[object]) -> str:
    dtype, shape, how = about
    return f"{dtype} {shape}" + (f" in shards, {how}" if how else "")
