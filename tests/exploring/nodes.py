"""States of a process, each kept once: what a process does in a state is computed once, too.

A process is any object that holds machines. `Nodes` runs an event on a copy of it, with the clock
at 0, brings what comes out into one form, and gives every form a number. In that form times are
told from now on, and are no further away than the longest timer can tell; memory that holds
nothing yet is zero. So two states of one number do the same for ever, and there are finitely many.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np
from msgspec import structs

from weightbus.bus.chunks import ChunkPlan
from weightbus.bus.epochs import Ages
from weightbus.bus.limits import Timing
from weightbus.bus.publisher.version import BytesInPlace, Received, Version
from weightbus.bus.staged import Patching
from weightbus.bus.worker.layouts import Expected
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.transfer import Transfer
from weightbus.bus.worker.version_store import ArrivingEntry, VersionStore
from weightbus.codecs.layout import Layout
from weightbus.python_client.relay import _PassedVersion  # pyright: ignore[reportPrivateUsage]

# What never changes once it is made.
FIXED = (
    *(type(None), bool, int, float, str, bytes, memoryview, type, FunctionType),
    *(Layout, Timing, ChunkPlan, Expected),
)
# Frozen as well, but of moments, or of memory that is used again.
MOVING = {"StagedVersion", "Terms", "_Exact", "_Backoff"}
BUILT = (tuple, frozenset, MethodType, msgspec.Struct)  # of what it consists of, all at once
# Moments in the past, and how many seconds of their age matter: as many as the longest timer that
# begins with them. 0: nothing depends on it but what people are told.
SINCE: dict[str, float] = {
    "_heard_at": 2,
    "_entered_at": 0,  # a worker has one address here
    "_joined_at": 0,
    "_answered_at": 0,  # nothing is damaged here, so nobody is deaf
    "hello_at": 1,
    "_unanswered_since": 2,
    "_pinged_at": 1,
    "_latest_requested_at": 1,
    "_requested_at": 0,  # see `_answered_ping_at`
    "requested_at": 1,
    "_reported_at": 1,
    "heard_at": 2,
    "contested_at": 2,
    "closed_at": 2,
    "since": 0,
    "_progress_at": 1,
    "renewed_at": 2,
    "started": 0,
    "started_by": 0,  # as ages: see `_forget`
    "ticket_at": 0,  # nobody has a key here
    "_urgent_at": 1,
    "at": 0,
}
# Moments at which something is due. Once they have passed it does not matter when.
UNTIL = {
    *("until", "beacon_at", "deadline", "_grace_ends", "unresponsive_after"),
    *("_again_after", "_again_after_to"),
}
LENGTHS = {
    "ping_every",
    "pause",
    "renewal_pause",
    "_pause",
    "_outbids",
    "_patience",
    "_timeout",
    "_gap",
    "_lost_after",
    "grace",
    "grace_of_gone",
    "waits",  # see `_forget`
}
# What leads to nothing but words for people, and what it is here.
TOLD: dict[str, object] = {
    "malformed": 0,
    "damaged": 0,
    "unheard_at": math.inf,
    "hints_at": math.inf,  # of what users overlook
    "detail": "",
    "why": "",
    "revision": 0,  # for observers, and a relay's reports, which have seen all after each event
    "_revision": 0,
    "removals": 0,
    "_removals": 0,
    "now": 0.0,
    "carried": 0.0,  # for who publishes by `auto`
    "waited": 0.0,  # as well
    "least": 0.0,  # as well
    "work": 0.0,  # as well
    "took": {},  # for observers
    "times": {},  # as well
    "_checks": None,  # as well
    # Patience alone decides: tokens of pings are clocks, which stand still.
    "_answered_ping_at": math.inf,
}

Form = Hashable
P = TypeVar("P")


def copied(given: Any, known: dict[int, Any]) -> Any:
    """Return a copy of a process, which shares what never changes."""
    if _is_fixed(given):
        return given
    if isinstance(given, weakref.ref):
        return None  # `_received` makes another
    copy = known.get(id(given))
    if copy is None and isinstance(given, Received):
        copy = _received(given, known)
    elif copy is None:
        copy = known[id(given)] = _empty(given)
        _fill(copy, given, known)
        if isinstance(given, BUILT):
            copy = known[id(given)] = _made(given, known)
        elif isinstance(copy, _PassedVersion) and copy.view is not None:
            copy.keep()  # the copy of the buffer, as `_received`
    return copy


def _received(given: Any, known: dict[int, Any]) -> Any:
    """Return a copy of bytes in a worker's buffer, which lie in the copy of that buffer."""
    copy = known[id(given)] = object.__new__(Received)
    chunks = copied(given._chunks, known)  # noqa: SLF001
    view = chunks.lend() if given.exists else None
    for name, value in attributes(given):
        object.__setattr__(copy, name, value)
    data = None if view is None else view.data
    changes = {"_chunks": chunks, "_view": view, "_data": data, "_views": {}}
    for name, value in changes.items():
        object.__setattr__(copy, name, value)
    return copy


def _is_fixed(given: Any) -> bool:
    if isinstance(given, msgspec.Struct):
        return given.__struct_config__.frozen and type(given).__name__ not in MOVING
    return isinstance(given, FIXED)


def _empty(given: Any) -> Any:
    if isinstance(given, np.ndarray):
        array: np.ndarray[Any, Any] = given
        return array.copy() if array.flags.writeable else array
    if isinstance(given, bytearray):
        return bytearray(given)
    if isinstance(given, deque):
        ring: deque[Any] = given
        return deque[Any](maxlen=ring.maxlen)
    if isinstance(given, BUILT):
        return None
    return cast("object", object.__new__(type(given)) if _is_object(given) else type(given)())


def _made(given: Any, known: dict[int, Any]) -> Any:
    if isinstance(given, MethodType):
        return MethodType(given.__func__, copied(given.__self__, known))
    if isinstance(given, msgspec.Struct):
        return type(given)(**{name: copied(each, known) for name, each in attributes(given)})
    each = (copied(item, known) for item in given)
    if hasattr(given, "_fields"):
        return type(given)(*each)
    return type(given)(each)


def _fill(copy: Any, given: Any, known: dict[int, Any]) -> None:
    if isinstance(given, dict):
        items: dict[Any, Any] = given
        copy.update({key: copied(value, known) for key, value in items.items()})
    elif isinstance(given, list | deque):
        copy.extend(copied(item, known) for item in cast("list[Any]", given))
    elif isinstance(given, set):
        copy.update(given)
    elif _is_object(given):
        for name, value in attributes(given):
            object.__setattr__(copy, name, copied(value, known))


def _is_object(given: Any) -> bool:
    return type(given).__module__ != "builtins" and not isinstance(
        given, np.ndarray | deque | tuple | MethodType | msgspec.Struct
    )


def attributes(given: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, however it keeps them."""
    if isinstance(given, msgspec.Struct):
        return [*structs.asdict(given).items()]
    slots = [name for kind in type(given).__mro__ for name in getattr(kind, "__slots__", ())]
    return [
        *((name, getattr(given, name)) for name in slots if hasattr(given, name)),
        *getattr(given, "__dict__", {}).items(),
    ]


def _set(given: Any, name: str, value: object) -> None:
    """Set an attribute, also of what is frozen."""
    change = structs.force_setattr if isinstance(given, msgspec.Struct) else object.__setattr__
    change(given, name, value)


class _Forming:
    """Brings a process whose clock says `now` into its form, in which it says 0."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._known: dict[int, int] = {}

    def form(self, given: Any, name: str = "") -> Form:
        """Return the form of something; change what it consists of accordingly."""
        if isinstance(given, msgspec.Struct) and _is_fixed(given):
            return (type(given).__name__, msgspec.json.encode(given))
        if isinstance(given, Layout):
            return given.id
        if isinstance(given, weakref.ref):
            return given() is not None
        if isinstance(given, Received):
            return ("Received", given.exists, self.form(given._chunks))  # noqa: SLF001 # pyright: ignore
        if isinstance(given, FIXED):
            assert not isinstance(given, float) or name in LENGTHS or math.isinf(given), name
            return given if isinstance(given, Hashable) else ()
        if isinstance(given, tuple | frozenset) and not given:
            return ()
        if id(given) in self._known:
            return ("again", self._known[id(given)])
        self._known[id(given)] = len(self._known)
        if isinstance(given, np.ndarray):
            return given.tobytes()
        if isinstance(given, bytearray):
            return bytes(given)
        if isinstance(given, MethodType):
            return (given.__name__, self.form(given.__self__))
        if isinstance(given, dict):
            items: dict[Any, Any] = given
            for key in items if name in UNTIL else ():
                items[key] = max(0.0, items[key] - self._now)
            return tuple(
                (key, value if name in UNTIL else self.form(value, name))
                for key, value in items.items()
            )
        if isinstance(given, set | frozenset):
            return tuple(sorted(cast("set[Any]", given)))
        if isinstance(given, list | deque | tuple):
            return tuple(self.form(item, name) for item in cast("list[Any]", given))
        return self._object(given)

    def _object(self, given: Any) -> Form:
        self._forget(given)
        forms: list[Form] = [type(given).__name__]
        for name, value in attributes(given):
            if name in TOLD:
                _set(given, name, copied(TOLD[name], {}))
            elif isinstance(value, float | int) and (name in SINCE or name in UNTIL):
                forms.append(self._moved(given, name, value))
            else:
                forms.append(self.form(value, name))
        return tuple(forms)

    def _moved(self, given: Any, name: str, moment: float) -> float:
        """Tell a moment from now on."""
        least = 0.0 if name in UNTIL else -SINCE[name]
        moved = max(least, moment - self._now) + 0.0
        _set(given, name, moved)
        return moved

    def _forget(self, given: Any) -> None:
        """Forget what nothing depends on: what lies in memory that waits to be filled, ages."""
        if isinstance(given, Transfer):
            chunks = given.chunks
            for index, crc in enumerate(chunks.crcs):
                begin, end = chunks.plan.span(index)
                if crc is None:
                    chunks.memory[begin:end] = 0
            given.tries *= given.patch is not None  # it is counted for patches alone
        elif isinstance(given, VersionStore):
            for buffer in given._free:  # noqa: SLF001 # pyright: ignore
                buffer[:] = 0
        elif isinstance(given, Ages):
            given._started_by = {}  # noqa: SLF001 # pyright: ignore
        elif isinstance(given, WorkerMachine):
            epoch, at, pause = given._outbids  # noqa: SLF001 # pyright: ignore
            given._outbids = epoch, max(-pause, at - self._now), pause  # noqa: SLF001 # pyright: ignore
        elif isinstance(given, ArrivingEntry) and given.transfer.patch:
            given.chunks.memory[:] = 0  # the patch arrives elsewhere, and is decoded all at once
        elif isinstance(given, Patching):
            given.buffer[:] = 0
        elif isinstance(given, Version):
            for waits in given.waits.values():
                for index, (until, ranges) in waits.items():
                    waits[index] = max(0.0, until - self._now), ranges
        elif isinstance(given, BytesInPlace):
            given._views = {}  # noqa: SLF001 # pyright: ignore


@dataclass(frozen=True, slots=True)
class Step(Generic[P]):
    """What an event leads to: the number of the state after it, and what the process did."""

    node: int
    did: tuple[tuple[Any, ...], ...]


class Nodes(Generic[P]):
    """All states of processes of one kind that were met.

    Args:
        act: Tells a process of an event, at a time; returns what it does.
        check: Looks at a process after an event; raises if something is wrong.
    """

    def __init__(
        self,
        act: Callable[[P, tuple[Any, ...], float], list[tuple[Any, ...]]],
        check: Callable[[P], None],
    ) -> None:
        self._act, self._check = act, check
        self._numbers: dict[Form, int] = {}
        self._each: list[P] = []
        self._steps: dict[tuple[int, tuple[Any, ...]], Step[P]] = {}

    def __len__(self) -> int:
        return len(self._each)

    def __getitem__(self, node: int) -> P:
        return self._each[node]

    @property
    def steps(self) -> int:
        """How many events were computed."""
        return len(self._steps)

    def of(self, process: P, now: float = 0.0) -> int:
        """Return the number of a process' state; the process is no longer the caller's."""
        form = _Forming(now).form(process)
        number = self._numbers.setdefault(form, len(self._each))
        if number == len(self._each):
            self._each.append(process)
        return number

    def step(self, node: int, event: tuple[Any, ...]) -> Step[P]:
        """Let something happen in a state."""
        step = self._steps.get((node, event))
        if step is None:
            process = cast("P", copied(self._each[node], {}))
            now = 1.0 if event[0] == "tick" else 0.0
            did = self._act(process, event, now)
            self._check(process)
            step = self._steps[node, event] = Step(self.of(process, now), tuple(did))
        return step
