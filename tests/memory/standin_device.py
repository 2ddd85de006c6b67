"""A stand-in for a CUDA device: memory of this process that counts as the device's memory.

Copies are made at once; the test decides when they are reported as done.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from weightbus.codecs import apply, copies, device_copies, device_memory, state, torch_tensors


class Event:
    def __init__(self, device: "Standin") -> None:
        self._device, self.recorded = device, False

    def record(self, _stream: object) -> None:
        self.recorded = True

    def query(self) -> bool:
        if self._device.fault is not None:
            raise self._device.fault
        return self._device.done.is_set()


class Stream:
    """A stream, which does everything at once; `waited` lists what it should wait for."""

    cuda_stream = 7

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_stream(self, stream: object) -> None:
        self.waited.append(stream)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Lane:
    def __init__(self, device: "Standin") -> None:
        self._device = device
        self.near, self.link = Stream(), Stream()
        self.free, self.full = ([self.event(), self.event()] for _ in range(2))
        self.lock = threading.Lock()
        self._stage: torch.Tensor | None = None

    def event(self) -> Event:
        return Event(self._device)

    def event_after(self, stream: object) -> Event:
        event = self.event()
        event.record(stream)
        return event

    def on(self, _stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def current(self) -> Stream:
        return self._device.current

    def capturing(self) -> bool:
        return self._device.capturing

    def stage(self, half: int) -> torch.Tensor:
        if self._stage is None or self._stage.numel() < 2 * half:
            self._stage = self._device.empty(2 * half)
        return self._stage


class Standin:
    """The device, which has so many bytes."""

    def __init__(self) -> None:
        self.room, self.capturing = 2**40, False
        self.fault: Exception | None = None
        self.done = threading.Event()
        self.done.set()
        self.current = Stream()
        self.lanes: dict[str, Lane] = {}
        self._there: dict[int, torch.UntypedStorage] = {}

    def holds(self, leaf: Any) -> bool:
        """Return whether a tensor is on the device."""
        return isinstance(leaf, torch.Tensor) and (leaf.untyped_storage().data_ptr() in self._there)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor on the device, with all tensors that share its storage."""
        storage = tensor.untyped_storage()
        self._there[storage.data_ptr()] = storage  # kept, so that its address is not reused
        return tensor

    def empty(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.room:
            raise MemoryError(f"no {nbytes} bytes on a device that is not there")
        return self.put(torch.full((nbytes,), 0xA5, dtype=torch.uint8))

    def lane(self, _device: torch.device, direction: str) -> Lane:
        return self.lanes.setdefault(direction, Lane(self))


class Mirror:
    def __init__(self, device: Standin, nbytes: int) -> None:
        self.flat, self.note = device.empty(nbytes), b"a note"


def install(monkeypatch: pytest.MonkeyPatch) -> Standin:
    """Return the device; tensors are on it once the test has called its `put`."""
    device = Standin()
    bare: Callable[[torch.Tensor], bool] = torch_tensors.bare
    for module in (copies, device_copies, state, apply):
        monkeypatch.setattr(module, "on_device", device.holds)
    monkeypatch.setattr(torch_tensors, "bare", lambda t: not device.holds(t) and bare(t))
    monkeypatch.setattr(device_copies, "lane_of", device.lane)
    monkeypatch.setattr(device_memory, "pinned", lambda _data, _device: None)
    monkeypatch.setattr(device_memory, "Mirror", lambda _, nbytes: Mirror(device, nbytes))
    return device
