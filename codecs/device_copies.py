"""Copies many tensors to or from a CUDA device, at the speed of the link.

Theory of operation: each copy takes microseconds to start, so small tensors are transferred
together. Adjacent small tensors of a data section form a *batch*: a few kernels on the device
gather (or scatter) them, and one copy transfers the batch through a staging buffer on the device
(the *stage*). The stage has two halves: one is filled while the other is transferred. Large tensors
are transferred alone.

    out   tensors ──gather (on the device)──> half of the stage ──copy (over the link)──> memory
    in    memory ──copy (over the link)──> half of the stage ──scatter (on the device)──> tensors

All copies run on two streams of this module, after all earlier work of the caller's stream. Later
work of that stream waits on the device for the end of the copies, so the caller may write to the
tensors at once. The host waits only in `Arriving.wait`.

With a *mirror* (a second copy on the device), copies out of the device fill the mirror first. The
caller's stream then waits only for that, and the mirror can be transferred at any later time.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final, Literal, cast

import torch

from .copies import on_device
from .device_memory import pieces

Direction = Literal["in", "out"]
Way = Literal["in", "out", "within"]
# (bytes of the second copy, address of the memory that it mirrors)
Second = tuple[torch.Tensor, int]
Pair = tuple[torch.Tensor, torch.Tensor]
Index = tuple[int | slice, ...]  # index of a part of a tensor; empty: the whole tensor

HALF_BYTES: Final = 2**25  # half of the stage, the largest transfer: 0.6 ms on PCIe 5
ALONE_BYTES: Final = 2**20  # tensors from this size on are transferred alone
ALIGNED: Final = 16  # a batch has the same address modulo 16 in the stage as in memory
PIECE_BYTES: Final = HALF_BYTES - ALIGNED
# Dtypes of which torch copies many tensors in one call (`_foreach_copy_`).
TOGETHER: Final = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
PAUSE_SHARE: Final = 0.01  # polling interval, as a fraction of the time waited so far
PAUSES: Final = 2e-5, 1e-3  # seconds: the shortest and longest polling interval


class Lane:
    """The streams and the stage of one device and direction, shared by the whole process.

    Attributes:
        near: The stream of copies within the device.
        link: The stream of transfers.
        free: For each half of the stage, the event that marks that its content was consumed.
        full: For each half of the stage, the event that marks that its content is complete.
        lock: Held while work is queued on these streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.near, self.link = (cast("Any", torch.cuda.Stream)(device) for _ in range(2))
        self.free, self.full = ([self.event(), self.event()] for _ in range(2))
        self.lock = threading.Lock()
        self._stage: torch.Tensor | None = None

    def event(self) -> Any:
        """Return a new CUDA event."""
        return cast("Any", torch.cuda.Event)()

    def event_after(self, stream: Any) -> Any:
        """Return an event that is reached when the work now queued on a stream is done."""
        event = self.event()
        event.record(stream)
        return event

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Return a context manager that makes a stream the current one."""
        return cast("AbstractContextManager[None]", torch.cuda.stream(stream))

    def current(self) -> Any:
        """Return the caller's stream."""
        return torch.cuda.current_stream(self.device)

    def capturing(self) -> bool:
        """Return whether the caller's stream is being captured into a CUDA graph."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def stage(self, half: int) -> torch.Tensor:
        """Return the staging buffer on the device; each half has at least `half` bytes.

        Raises:
            MemoryError: The device is out of memory.
        """
        if self._stage is None or self._stage.numel() < 2 * half:
            self.near.wait_stream(self.link)  # the allocator may reuse the old stage's memory
            try:
                with self.on(self.near):
                    self._stage = torch.empty(2 * half, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError as error:
                raise MemoryError(f"no {2 * half} bytes on {self.device} to copy by way of") from (
                    error
                )
            self.link.wait_stream(self.near)
        return self._stage


_making = threading.Lock()


@cache
def _lane(device: torch.device, _direction: Direction) -> Lane:
    return Lane(device)


def lane_of(device: torch.device, direction: Direction) -> Lane:
    """Return the lane of a device and direction; the first call makes it."""
    with _making:
        return _lane(device, direction)


class Arriving:
    """Copies that may still be in progress.

    Args:
        done: Events that are reached when the copies end.
        held: Objects to keep alive until the copies are complete.
    """

    def __init__(self, done: Sequence[Any], held: object) -> None:
        self._done, self._held = done, held

    @property
    def done(self) -> bool:
        """True if all copies are complete."""
        return all(event.query() for event in self._done)

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all copies are complete. `check` is called repeatedly; it may raise.

        An exception from `check` ends the waiting but no copy: wait again before you reuse the
        memory.
        """
        begun = time.monotonic()
        while not self.done:
            check()
            waited = time.monotonic() - begun
            time.sleep(min(max(PAUSE_SHARE * waited, PAUSES[0]), PAUSES[1]))
        self._held = None


class _CopyGroup:
    """Copies within a device: small plain tensors of one dtype in one call, others singly."""

    def __init__(self) -> None:
        self._alike: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        self._others: list[tuple[int, Index, torch.Tensor]] = []

    def add(self, place: int, index: Index, tensor: torch.Tensor, ours: torch.Tensor) -> None:
        """Add a pair: part `index` of the user's tensor number `place`, and `ours` in the stage."""
        together = not index and ours.dtype in TOGETHER and tensor.nbytes < ALONE_BYTES
        if together and _plain(tensor, ours):
            self._alike.setdefault(ours.dtype, []).append((place, ours))
        else:
            self._others.append((place, index, ours))

    def run(self, tensors: Sequence[torch.Tensor], direction: Direction) -> None:
        """Queue the copies on the current stream."""
        for pairs in self._alike.values():
            theirs, ours = [tensors[place] for place, _ in pairs], [each for _, each in pairs]
            to, from_ = (ours, theirs) if direction == "out" else (theirs, ours)
            torch._foreach_copy_(to, from_)  # pyright: ignore
        for place, index, our in self._others:
            tensor = tensors[place][index] if index else tensors[place]
            one, other = (our, tensor) if direction == "out" else (tensor, our)
            one.copy_(other, non_blocking=True)


def _plain(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a tensor can be copied to another as bytes."""
    return one.dtype == other.dtype and all(
        tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        for tensor in (one, other)
    )


def _pieces(host: torch.Tensor, index: Index = ()) -> Iterator[Index]:
    """Yield the indexes of a tensor's parts, in element order. Each part fits into half a stage."""
    part = host[index] if index else host
    if part.nbytes <= PIECE_BYTES or not part.ndim:
        yield index
        return
    row = part.nbytes // len(part)
    if row > PIECE_BYTES:
        for number in range(len(part)):
            yield from _pieces(host, (*index, number))
        return
    rows = PIECE_BYTES // row
    for begin in range(0, len(part), rows):
        yield (*index, slice(begin, begin + rows))


class _Batch:
    """Adjacent memory that is transferred in one copy, through a half of the stage."""

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin  # addresses
        self.members: list[tuple[int, Index]] = []
        # Pairs (memory, the same bytes in the stage); made anew when the stage is replaced.
        self.crossing: list[Pair] = []
        self.group = _CopyGroup()

    def lay(
        self, half: torch.Tensor, hosts: Sequence[torch.Tensor], devices: Sequence[torch.Tensor]
    ) -> None:
        """Prepare the copies between memory, the stage's `half` and the device's tensors."""
        first, nbytes = self.begin % ALIGNED, self.end - self.begin
        staged, self.group = half[first : first + nbytes], _CopyGroup()
        for place, index in self.members:
            host = hosts[place][index] if index else hosts[place]
            begin = host.data_ptr() - self.begin
            if not begin:
                self.crossing = _cut(_around(host, nbytes), staged)
            ours = staged[begin : begin + host.nbytes].view(host.dtype).view(host.shape)
            self.group.add(place, index, devices[place], ours)


class _Crossing:
    """Copies between this process's memory and one device, in one direction."""

    def __init__(
        self,
        device: torch.device,
        direction: Direction,
        hosts: Sequence[torch.Tensor],
        devices: Sequence[torch.Tensor],
        places: Sequence[int],
    ) -> None:
        self._direction: Direction = direction
        self._lane = lane_of(device, direction)
        self._alone: list[int] = []
        self._batches: list[_Batch] = []
        self._stage: torch.Tensor | None = None
        for place in sorted(places, key=lambda place: hosts[place].data_ptr()):
            host = hosts[place]
            if host.nbytes >= ALONE_BYTES and _plain(host, devices[place]):
                self._alone.append(place)
                continue
            for index in _pieces(host):
                self._put(place, index, host[index] if index else host)
        most = max((each.end - each.begin for each in self._batches), default=0)
        self._half = -(-(most + ALIGNED) // 512) * 512 if most else 0

    def _put(self, place: int, index: Index, host: torch.Tensor) -> None:
        begin, last = host.data_ptr(), self._batches[-1] if self._batches else None
        if last is None or last.end != begin or begin + host.nbytes - last.begin > PIECE_BYTES:
            last = _Batch(begin)
            self._batches.append(last)
        last.members.append((place, index))
        last.end = begin + host.nbytes

    def ready(self, hosts: Sequence[torch.Tensor], devices: Sequence[torch.Tensor]) -> None:
        """Allocate the stage.

        Raises:
            MemoryError: The device is out of memory.
        """
        with self._lane.lock:
            self._lay(hosts, devices)

    def _lay(self, hosts: Sequence[torch.Tensor], devices: Sequence[torch.Tensor]) -> None:
        stage = self._lane.stage(self._half) if self._half else None
        if stage is None or stage is self._stage:
            return
        half = stage.numel() // 2
        for number, batch in enumerate(self._batches):
            begin = number % 2 * half
            batch.lay(stage[begin : begin + half], hosts, devices)
        self._stage = stage

    def begin(self, hosts: Sequence[torch.Tensor], devices: Sequence[torch.Tensor]) -> Any:
        """Queue the copies after the work of the caller's stream; return the event of their end."""
        lane = self._lane
        with lane.lock, torch.inference_mode():
            self._lay(hosts, devices)
            current = lane.current()
            lane.near.wait_stream(current)
            lane.link.wait_stream(current)
            both = hosts, devices
            done = lane.event_after(
                self._out(*both) if self._direction == "out" else self._in(*both)
            )
            current.wait_event(done)
            return done

    def _out(self, hosts: Sequence[torch.Tensor], devices: Sequence[torch.Tensor]) -> Any:
        # Copy from the device: gather each batch, then transfer it.
        lane = self._lane
        self._cross(hosts, devices)
        for number, batch in enumerate(self._batches):
            free, full = lane.free[number % 2], lane.full[number % 2]
            with lane.on(lane.near):
                lane.near.wait_event(free)
                batch.group.run(devices, "out")
                full.record(lane.near)
            with lane.on(lane.link):
                lane.link.wait_event(full)
                for memory, staged in batch.crossing:
                    memory.copy_(staged, non_blocking=True)
                free.record(lane.link)
        return lane.link

    def _in(self, hosts: Sequence[torch.Tensor], devices: Sequence[torch.Tensor]) -> Any:
        # Copy to the device: transfer each batch, then scatter it.
        lane = self._lane
        for number, batch in enumerate(self._batches):
            free, full = lane.free[number % 2], lane.full[number % 2]
            with lane.on(lane.link):
                lane.link.wait_event(free)
                for memory, staged in batch.crossing:
                    staged.copy_(memory, non_blocking=True)
                full.record(lane.link)
            with lane.on(lane.near):
                lane.near.wait_event(full)
                batch.group.run(devices, "in")
                free.record(lane.near)
        self._cross(hosts, devices)
        lane.near.wait_stream(lane.link)
        return lane.near

    def _cross(self, hosts: Sequence[torch.Tensor], devices: Sequence[torch.Tensor]) -> None:
        """Transfer the large tensors, each by itself."""
        with self._lane.on(self._lane.link):
            for place in self._alone:
                host, device = hosts[place], devices[place]
                pairs: list[Pair] = [(host, device)]
                if len(pieces(host.data_ptr(), host.nbytes)) > 1:
                    pairs = _cut(_around(host, host.nbytes), _around(device, host.nbytes))
                for one, other in pairs:
                    to, from_ = (one, other) if self._direction == "out" else (other, one)
                    to.copy_(from_, non_blocking=True)


class _Mirrored:
    """Copies out of one device by a second copy on it, with the layout of the host memory."""

    def __init__(
        self,
        device: torch.device,
        mirror: torch.Tensor,
        address: int,
        hosts: Sequence[torch.Tensor],
        devices: Sequence[torch.Tensor],
        places: Sequence[int],
    ) -> None:
        self._lane, self._group = lane_of(device, "out"), _CopyGroup()
        runs: list[tuple[int, int]] = []
        places = sorted(places, key=lambda place: hosts[place].data_ptr())
        for place in places:
            host = hosts[place]
            begin = host.data_ptr() - address
            end = begin + host.nbytes
            ours = mirror[begin:end].view(host.dtype).view(host.shape)
            self._group.add(place, (), devices[place], ours)
            if runs and runs[-1][1] == begin:
                runs[-1] = runs[-1][0], end
            else:
                runs.append((begin, end))
        first = hosts[places[0]]
        shift = first.data_ptr() - address
        memory = _around(first, runs[-1][1] - shift)
        self._runs = [
            pair
            for begin, end in runs
            for pair in _cut(memory[begin - shift : end - shift], mirror[begin:end])
        ]

    def ready(self, _hosts: Sequence[torch.Tensor], _devices: Sequence[torch.Tensor]) -> None:
        """Do nothing: no further memory is needed."""

    def begin(self, _hosts: Sequence[torch.Tensor], devices: Sequence[torch.Tensor]) -> Any:
        """Queue all copies; the caller's stream waits only for the second copy."""
        self.copy(devices)
        return self.cross()

    def copy(self, devices: Sequence[torch.Tensor]) -> Any:
        """Queue the second copy; return an event for its end."""
        lane = self._lane
        with lane.lock, torch.inference_mode():
            current = lane.current()
            lane.near.wait_stream(current)
            lane.near.wait_stream(lane.link)  # `link` may still transfer the previous second copy
            with lane.on(lane.near):
                self._group.run(devices, "out")
            copied = lane.event_after(lane.near)
            current.wait_event(copied)
            return copied

    def cross(self) -> Any:
        """Queue the transfer of the second copy; return an event for its end."""
        lane = self._lane
        with lane.lock, torch.inference_mode():
            lane.link.wait_stream(lane.near)
            with lane.on(lane.link):
                for memory, mirror in self._runs:
                    memory.copy_(mirror, non_blocking=True)
            return lane.event_after(lane.link)


class _Within:
    """Copies within a device."""

    def __init__(
        self,
        device: torch.device,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        places: Sequence[int],
    ) -> None:
        self._lane, self._group = lane_of(device, "in"), _CopyGroup()
        for place in places:
            self._group.add(place, (), destinations[place], sources[place])

    def ready(self, _sources: Sequence[torch.Tensor], _to: Sequence[torch.Tensor]) -> None:
        """Do nothing: no further memory is needed."""

    def begin(self, _sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> Any:
        """Queue copies from the sources given at construction; return an event for their end."""
        lane = self._lane
        with lane.lock, torch.inference_mode():
            current = lane.current()
            lane.near.wait_stream(current)
            with lane.on(lane.near):
                self._group.run(destinations, "in")
            done = lane.event_after(lane.near)
            current.wait_event(done)
            return done


class DeviceCopies:
    """Repeated copies with at least one side on a device.

    Args:
        destinations, sources: As in `copies.Copies`.
        places: The indices of the pairs to copy.
        second: The second copy through which to copy out of its device; None: copy directly.
    """

    def __init__(
        self,
        destinations: Sequence[Any],
        sources: Sequence[Any],
        places: Sequence[int],
        second: Second | None = None,
    ) -> None:
        by_way: dict[tuple[torch.device, Way], list[int]] = {}
        for place in places:
            to, from_ = destinations[place], sources[place]
            if to.numel():
                here = to if on_device(to) else from_
                way: Way = "out" if here is from_ else "within" if on_device(from_) else "in"
                by_way.setdefault((here.device, way), []).append(place)
        self._outward: list[_Crossing | _Mirrored] = []
        self._inward: list[_Crossing | _Within] = []
        for (device, way), some in by_way.items():
            if way == "within":
                self._inward.append(_Within(device, sources, destinations, some))
            elif way == "in":
                self._inward.append(_Crossing(device, "in", sources, destinations, some))
            elif second is not None and second[0].device == device:
                both = destinations, sources
                self._outward.append(_Mirrored(device, *second, *both, some))
            else:
                self._outward.append(_Crossing(device, "out", destinations, sources, some))

    def ready(self, destinations: Sequence[Any], sources: Sequence[Any]) -> None:
        """Allocate all memory, so that later calls allocate none.

        Raises:
            MemoryError: A device is out of memory.
        """
        for outward in self._outward:
            outward.ready(destinations, sources)
        for inward in self._inward:
            inward.ready(sources, destinations)

    def begin(self, destinations: Sequence[Any], sources: Sequence[Any]) -> Arriving:
        """Queue all copies, after `ready`; they run as the theory of operation says."""
        done = [each.begin(destinations, sources) for each in self._outward]
        done += [each.begin(sources, destinations) for each in self._inward]
        return Arriving(done, (destinations, sources))

    def copy(self, sources: Sequence[Any]) -> "Arriving":
        """Queue only the second copy, which all pairs must use; `cross` transfers it later."""
        done = [each.copy(sources) for each in self._outward if isinstance(each, _Mirrored)]
        return Arriving(done, sources)

    def cross(self) -> "Arriving":
        """Queue the transfer of the second copy that `copy` made."""
        return Arriving(
            [each.cross() for each in self._outward if isinstance(each, _Mirrored)], None
        )


def _cut(memory: torch.Tensor, other: torch.Tensor) -> list[Pair]:
    """Cut memory at the boundaries of its pinned pieces, and `other` at the same offsets."""
    cuts = pieces(memory.data_ptr(), memory.numel())
    return [(memory[begin:end], other[begin:end]) for begin, end in cuts]


def _around(view: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return `nbytes` bytes of a view's storage, from the begin of the view."""
    storage = view.untyped_storage()
    begin = view.data_ptr() - storage.data_ptr()
    flat: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=view.device)
    return flat.set_(storage, begin, (nbytes,), (1,))  # pyright: ignore


class Readers:
    """Events that mark the end of readers' work on devices; the next writer waits for them.

    A device may still execute a reader's work after the reader's block of code has ended.
    """

    def __init__(self) -> None:
        self.devices: frozenset[torch.device] = frozenset()  # the devices of all targets
        self._last: dict[tuple[torch.device, int], Any] = {}

    def record_end(self) -> None:
        """Record that a reader's work, in this thread's current streams, ends here."""
        for device in self.devices:
            lane = lane_of(device, "in")
            if lane.capturing():  # a graph reads only when it is replayed
                continue
            stream = lane.current()
            event = self._last.get((device, stream.cuda_stream))
            if event is None:
                event = self._last[device, stream.cuda_stream] = lane.event()
            event.record(stream)

    def wait_for_readers(self) -> None:
        """Make later work in this thread's current streams wait for the readers' work."""
        for (device, _), event in [*self._last.items()]:
            lane_of(device, "in").current().wait_event(event)
