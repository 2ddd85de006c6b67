"""Memory that a CUDA device reaches: pages of ours that it copies from directly, and its own.

Through the driver's library, since `torch` has no call for most of this and the runtime's library
keeps the last error for whoever looks next. Where there is no such library (ROCm, macOS), nothing
is pinned and nothing is shared: copies are slower, and right.

Imported only where a tensor on a device is at hand. Nothing here starts CUDA by itself.
"""

import ctypes
import logging
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch

from .numpy_tensors import Bytes

log = logging.getLogger("weightbus")

# CUresult and flags, as in cuda.h.
OUT_OF_MEMORY, ALREADY_REGISTERED = 2, 712
PORTABLE, READ_ONLY = 1, 8
LAZY_PEER_ACCESS = 1

PIECE_BYTES = 2**27  # pinned at once

HANDLE_BYTES, UUID_BYTES = 64, 16
MAGIC = b"WBCUDA1\0"
_NOTE = struct.Struct(f"<8s{UUID_BYTES}s{HANDLE_BYTES}sQ")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class DriverError(Exception):
    """The driver refused; `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with CUDA error {code}")
        self.code = code


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    if driver is None:
        raise DriverError(name, -1)
    code: int = getattr(driver, name)(*arguments)
    if code:
        raise DriverError(name, code)


@contextmanager
def _context(index: int) -> Generator[None]:
    """Have the context that torch uses of a device be this thread's."""
    device, context, before = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(before))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", device)


class Pinned:
    """Memory of this process, in pages that stay where they are, for as long as this lives.

    It is pinned in pieces (`pieces`), so that other threads that map memory get their turn in
    between. CUDA refuses a copy that reaches from one into the next: what others copy from needs to
    be pinned as a `whole`.

    Args:
        data: It. If it is read-only, the device can only read it.
        index: The device whose context asks for it; all may use it.
        whole: In one piece.

    Raises:
        DriverError: It cannot be.
    """

    def __init__(self, data: Bytes, index: int, *, whole: bool = False) -> None:
        self._data, self._index = data, index  # no page is unmapped before it is let go of
        self._addresses: list[int] = []
        first: int = data.__array_interface__["data"][0]
        flags = ctypes.c_uint(PORTABLE if data.flags.writeable else PORTABLE | READ_ONLY)
        for begin, end in [(0, data.nbytes)] if whole else pieces(first, data.nbytes):
            where, nbytes = ctypes.c_void_p(first + begin), ctypes.c_size_t(end - begin)
            with _context(index):
                _call("cuMemHostRegister_v2", where, nbytes, flags)
            self._addresses.append(first + begin)

    def __del__(self) -> None:
        while addresses := getattr(self, "_addresses", None):
            address = addresses.pop()
            with suppress(Exception), _context(self._index):  # the process may be at its end
                _call("cuMemHostUnregister", ctypes.c_void_p(address))


def pieces(address: int, nbytes: int) -> list[tuple[int, int]]:
    """Return where the pieces begin and end that memory at an address is pinned in."""
    first = PIECE_BYTES - address % PIECE_BYTES
    cuts = [0, *range(first, nbytes, PIECE_BYTES), nbytes]
    return list(pairwise(cuts))


def pinned(data: Bytes, device: torch.device, *, whole: bool = False) -> Pinned | None:
    """Pin memory; None if it is pinned, or cannot be, which is only slower."""
    if not data.nbytes:
        return None
    try:
        return Pinned(data, _index(device), whole=whole)
    except DriverError as error:
        if error.code != ALREADY_REGISTERED and _driver() is not None:
            log.warning(
                "%d bytes could not be pinned (%s): copies to and from %s will be slower",
                data.nbytes,
                error,
                device,
            )
        return None


def _index(device: torch.device) -> int:
    index = cast("int | None", device.index)  # none: of "cuda"
    return torch.cuda.current_device() if index is None else index


class _Memory:
    """A piece of a device's memory, as `torch.as_tensor` takes it."""

    def __init__(self, address: int, nbytes: int, index: int) -> None:
        self.address, self.index = address, index
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

    def tensor(self) -> torch.Tensor:
        """Return it as bytes, which keep it."""
        return torch.as_tensor(self, device=f"cuda:{self.index}")


class _Own(_Memory):
    def __del__(self) -> None:
        with suppress(Exception), _context(self.index):
            _call("cuMemFree_v2", ctypes.c_uint64(self.address))


class _Others(_Memory):
    def __del__(self) -> None:
        with suppress(Exception), _context(self.index):
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(self.address))


class Mirror:
    """A device's memory that processes of this host may map.

    Not from torch's allocator, which hands out parts of what it has, and maps some of it in ways
    that no other process can open.

    Args:
        device: Whose.
        nbytes: How much, at least 1.

    Attributes:
        flat: It, as bytes.
        note: By what other processes find it; empty if they cannot.

    Raises:
        MemoryError: The device has no such memory.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        index = _index(device)
        address, self.note = ctypes.c_uint64(), b""
        try:
            with _context(index):
                try:
                    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
                except DriverError as error:
                    if error.code != OUT_OF_MEMORY:
                        raise
                    torch.cuda.empty_cache()  # what torch has, and does not use
                    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        except DriverError as error:
            if error.code == OUT_OF_MEMORY:
                raise MemoryError(f"no {nbytes} bytes on {device} for a second copy") from None
            if _driver() is not None:
                raise
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
            return
        self.flat = _Own(address.value, nbytes, index).tensor()
        with suppress(DriverError), _context(index):
            handle = _Handle()
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            self.note = noted(_uuid(index), bytes(handle), nbytes)


def noted(uuid: bytes, handle: bytes, nbytes: int) -> bytes:
    """Return what other processes find memory by: its device, its handle and its size. (S12)"""
    return _NOTE.pack(MAGIC, uuid, handle, nbytes)


def _uuid(index: int) -> bytes:
    device, uuid = ctypes.c_int(), (ctypes.c_char * UUID_BYTES)()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
    return bytes(uuid)


def mapped(note: bytes, device: torch.device) -> torch.Tensor | None:
    """Return another process's memory on this device as bytes; None if it is not to be had."""
    magic, uuid, raw, nbytes = _NOTE.unpack(note)
    index = _index(device)
    if magic != MAGIC or not nbytes:
        return None
    try:
        if _uuid(index) != uuid:  # on another device
            return None
        handle, address = _Handle.from_buffer_copy(raw), ctypes.c_uint64()
        with _context(index):
            flags = ctypes.c_uint(LAZY_PEER_ACCESS)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, flags)
    except DriverError as error:
        log.info("the publisher's memory on %s could not be mapped: %s", device, error)
        return None
    return _Others(address.value, nbytes, index).tensor()
