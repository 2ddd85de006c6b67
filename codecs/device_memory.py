"""Pins pages of this process for a CUDA device, and makes device memory that others can map.

This module calls the driver's library, since `torch` has no functions for most of this. It does not
call the CUDA runtime library: an error there would remain as the runtime's last error, and the
user's next check would report it. Without the driver's library (ROCm, macOS) nothing is pinned or
shared: copies are correct, but slower.

This module is imported only for a tensor on a device. It never initialises CUDA itself.
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

# CUresult codes and flags, as in cuda.h.
OUT_OF_MEMORY, ALREADY_REGISTERED = 2, 712
PORTABLE, READ_ONLY = 1, 8
LAZY_PEER_ACCESS = 1

PIECE_BYTES = 2**27  # bytes that are pinned in one call

HANDLE_BYTES, UUID_BYTES = 64, 16
MAGIC = b"WBCUDA1\0"
_NOTE = struct.Struct(f"<8s{UUID_BYTES}s{HANDLE_BYTES}sQ")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class DriverError(Exception):
    """A driver call failed; `code` is its CUresult."""

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
    """Make torch's CUDA context of a device current during a `with` block."""
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
    """Memory of this process that stays pinned as long as this object exists.

    The memory is pinned piece by piece (see `pieces`), so that other threads can map memory in
    between. CUDA refuses a copy across two pieces, so memory that code outside of this package
    copies from must be pinned as a `whole`.

    Args:
        data: The memory. If it is read-only, the device can only read it.
        index: The device whose context pins the memory; all devices may use it.
        whole: Whether to pin the memory in one piece.

    Raises:
        DriverError: The memory cannot be pinned.
    """

    def __init__(self, data: Bytes, index: int, *, whole: bool = False) -> None:
        self._data, self._index = data, index  # keeps the pages mapped until they are unpinned
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
            with suppress(Exception), _context(self._index):  # the process may be exiting
                _call("cuMemHostUnregister", ctypes.c_void_p(address))


def pieces(address: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the offsets (begin, end) of each of the pieces in which memory is pinned."""
    first = PIECE_BYTES - address % PIECE_BYTES
    cuts = [0, *range(first, nbytes, PIECE_BYTES), nbytes]
    return list(pairwise(cuts))


def pinned(data: Bytes, device: torch.device, *, whole: bool = False) -> Pinned | None:
    """Pin memory. Return None if it is empty or pinned already, or if pinning fails."""
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
    index = cast("int | None", device.index)  # None for "cuda"
    return torch.cuda.current_device() if index is None else index


class _Memory:
    """A block of a device's memory, in a form that `torch.as_tensor` accepts."""

    def __init__(self, address: int, nbytes: int, index: int) -> None:
        self.address, self.index = address, index
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

    def tensor(self) -> torch.Tensor:
        """Return the memory as a uint8 tensor, which keeps the memory alive."""
        return torch.as_tensor(self, device=f"cuda:{self.index}")


class _Own(_Memory):
    """Memory that this process allocated."""

    def __del__(self) -> None:
        with suppress(Exception), _context(self.index):
            _call("cuMemFree_v2", ctypes.c_uint64(self.address))


class _Others(_Memory):
    """Memory of another process, mapped here."""

    def __del__(self) -> None:
        with suppress(Exception), _context(self.index):
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(self.address))


class Mirror:
    """Memory of a device that other processes of this host can map.

    The memory does not come from torch's allocator, which returns parts of larger blocks, and maps
    some of these blocks in ways that other processes cannot open.

    Args:
        device: The device.
        nbytes: The size in bytes, at least 1.

    Attributes:
        flat: The memory, as uint8.
        note: The bytes that other processes need to map the memory; empty if they cannot.

    Raises:
        MemoryError: The device is out of memory.
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
                    torch.cuda.empty_cache()  # free memory that torch caches
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
            self.note = encode_note(_uuid(index), bytes(handle), nbytes)


def encode_note(uuid: bytes, handle: bytes, nbytes: int) -> bytes:
    """Return the note that other processes need to map memory: device, handle, size. (S12)"""
    return _NOTE.pack(MAGIC, uuid, handle, nbytes)


def _uuid(index: int) -> bytes:
    device, uuid = ctypes.c_int(), (ctypes.c_char * UUID_BYTES)()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
    return bytes(uuid)


def mapped(note: bytes, device: torch.device) -> torch.Tensor | None:
    """Map another process's memory on this device; return it as uint8, or None if that fails."""
    magic, uuid, raw, nbytes = _NOTE.unpack(note)
    index = _index(device)
    if magic != MAGIC or not nbytes:
        return None
    try:
        if _uuid(index) != uuid:  # the memory is on another device
            return None
        handle, address = _Handle.from_buffer_copy(raw), ctypes.c_uint64()
        with _context(index):
            flags = ctypes.c_uint(LAZY_PEER_ACCESS)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, flags)
    except DriverError as error:
        log.info("the publisher's memory on %s could not be mapped: %s", device, error)
        return None
    return _Others(address.value, nbytes, index).tensor()
