"""Handles torch tensors as tensors of a layout: signatures, views, copies, faults.

This module is imported only for a torch object, so a process with only numpy arrays needs no torch.
"""

import contextlib
import ctypes
import operator
import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import native
from .dtypes import name_of_torch, torch_dtype
from .errors import StateError
from .layout import Signature, TensorSpec
from .numpy_tensors import Bytes

PLAIN = {torch.Tensor, torch.nn.Parameter}

_EXCHANGE: object = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch 2.10
_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")

# Devices whose tensors have real addresses. Tensors on other devices (such as XLA) may have none.
_ADDRESSED: Final = ("cpu", "cuda", "xpu")
# Before every copy of a tensor of at least this size, its storage's size is checked, which takes a
# hundredth of the copy's time. For a smaller tensor only the address is compared, which changes
# when the storage is freed.
LARGE_BYTES: Final = 2**20

GATHER: Final = (
    "on every rank call weightbus.gather(model).publish(publisher, ...), which gathers it on rank "
    "0 and publishes it there; the other ranks give None as the publisher. Or, with a publisher on "
    "each rank, call weightbus.sharded(model).publish(publisher, ...)"
)


def signature(name: str, tensor: torch.Tensor) -> Signature:
    """Return a tensor's dtype name and shape; StateError if it cannot be published."""
    if type(tensor) not in PLAIN and torch.nn.parameter.is_lazy(tensor):
        raise StateError(f"{name}: has no shape yet; run the module once to initialise it")
    if not is_one_block(tensor):
        raise StateError(f"{name}: {_in_other_blocks(tensor)}")
    if fault := memory_fault(tensor):
        raise StateError(f"{name}: {fault}")
    try:
        dtype = name_of_torch(tensor.dtype)
    except StateError as error:
        raise StateError(f"{name}: {error}") from None
    shape = tuple(tensor.shape)
    if dtype == "F4":  # torch counts pairs of elements
        if not shape:
            raise StateError(f"{name}: a 0-d {tensor.dtype} is two elements and has no dimension")
        shape = (*shape[:-1], 2 * shape[-1])
    return dtype, shape


def is_one_block(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided memory: not sparse, nested, quantised or a wrapper."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    # The check of other types is slow, but nearly all tensors are plain.
    return type(tensor) in PLAIN or not is_traceable_wrapper_subclass(tensor)


def _in_other_blocks(tensor: torch.Tensor) -> str:
    """Return an error text for a tensor that is not strided memory, with what to give instead."""
    kind = type(tensor).__name__
    if _is_a(tensor, "torch.distributed.tensor", "DTensor"):
        return (
            f"a {kind}, of which each rank holds a part: {GATHER}. (model: also a mapping of such "
            "tensors)"
        )
    return (
        f"a {kind} of layout {tensor.layout} is not one block of elements; give it as a plain "
        "tensor (.to_dense() or .dequantize())"
    )


def _is_a(tensor: torch.Tensor, module: str, name: str) -> bool:
    """Return whether a tensor is of a class, without importing the module of the class."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(tensor, kind)


# Tensors without memory.


def memory_fault(tensor: torch.Tensor) -> str | None:
    """Return an error text with advice if some elements of a tensor are not in memory; else None.

    A copy of such a tensor would read at address null, or beyond the tensor's memory, and crash. A
    tensor on the meta device has no memory by design, which is not a fault. Tensors that are not
    strided are not checked.
    """
    if type(tensor) not in PLAIN and _is_a(tensor, "torch._subclasses.fake_tensor", "FakeTensor"):
        return (
            "a FakeTensor, which has a shape and no values: make the model outside of "
            "FakeTensorMode"
        )
    try:
        if tensor.data_ptr() and tensor.untyped_storage().nbytes() >= _reach(tensor):
            return None
    except RuntimeError as error:
        return _without_storage(tensor, error)
    return _explained(tensor)


def _reach(tensor: torch.Tensor) -> int:
    """Return the offset, in bytes, at which a tensor ends in its storage."""
    elements = tensor.numel()
    if elements and not tensor.is_contiguous():
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * step for size, step in sizes)
    return (int(tensor.storage_offset()) + elements) * tensor.itemsize if elements else 0


def _without_storage(tensor: torch.Tensor, error: RuntimeError) -> str | None:
    """Return an error text for a tensor whose storage raises; None if that is expected."""
    if not is_one_block(tensor) or tensor.device.type not in (*_ADDRESSED, "meta"):
        return None
    return (
        f"a {type(tensor).__name__} that has no memory of its own ({str(error).splitlines()[0]}): "
        "inside of torch.func's transforms tensors are wrapped; give it as a plain tensor, outside"
    )


def _explained(tensor: torch.Tensor) -> str | None:
    """Return an error text if a tensor has a null address or a short storage; else None."""
    if not tensor.numel():
        return placeholder_fault(tensor)
    if not is_one_block(tensor) or tensor.device.type not in (*_ADDRESSED, "meta"):
        return None
    storage, reach = tensor.untyped_storage(), _reach(tensor)
    try:
        storage.data_ptr()
    except RuntimeError:  # the storage has no memory, even if its size is not 0
        return _wrapping(tensor)
    if tensor.is_meta:
        return None
    if not storage.nbytes():
        return (
            "its memory has been freed (a storage of 0 bytes), as FSDP2 and offloaders do between "
            "two passes: publish it when it is gathered or loaded again, or publish a copy that "
            "was made then (.clone())"
        )
    if storage.nbytes() < reach:
        return (
            f"its storage has {storage.nbytes()} bytes, and its elements reach to {reach}: a part "
            "of its memory has been freed (resize_() of the storage); give a tensor that has all"
        )
    return _wrapping(tensor)


def _wrapping(tensor: torch.Tensor) -> str:
    # Return what kind of tensor a wrapper is, and what to give instead.
    kind = type(tensor).__name__
    if _is_a(tensor, "torch.masked.maskedtensor.core", "MaskedTensor"):
        return f"a {kind}, which would lose its mask: give its .to_tensor(value) or .get_data()"
    if type(tensor) not in PLAIN:
        return (
            f"a {kind}, a wrapper subclass that has no memory of its own: give what it wraps, or "
            "a plain tensor of its values"
        )
    return (
        "a tensor without memory (data_ptr() is 0), as functional tensors and zeros of forward-"
        "mode differentiation are: give a .clone(), made outside of such a transform"
    )


def placeholder_fault(tensor: torch.Tensor) -> str | None:
    """Return an error text if an empty tensor is ZeRO 3's placeholder of a parameter; else None."""
    number = getattr(tensor, "ds_id", None)
    if number is None or tensor.numel() or not getattr(tensor, "ds_numel", 1):
        return None
    return (
        f"the placeholder that DeepSpeed's ZeRO 3 leaves of a parameter (ds_id {number}), without "
        "its values: on every rank enter deepspeed.zero.GatheredParameters(model.parameters()), "
        "since it waits for all ranks, and publish inside of that block on rank 0"
    )


def large(tensors: Iterable[object]) -> list[int]:
    """Return the indexes of the tensors whose storage sizes are checked; see `LARGE_BYTES`."""
    return [
        place
        for place, each in enumerate(tensors)
        if isinstance(each, torch.Tensor) and each.numel() * each.itemsize >= LARGE_BYTES
    ]


def identity(tensor: torch.Tensor) -> Hashable | None:
    """Return a key that is equal for tensors with the same elements; None if there are none."""
    if not tensor.numel() or tensor.is_meta:
        return None
    where = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
    return *where, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def place(tensor: torch.Tensor) -> tuple[Hashable, int, tuple[int, ...]]:
    """Return the address space of a tensor, its address there, and its strides in bytes."""
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    if tensor.is_meta:  # there every storage begins at address 0
        begin = int(tensor.storage_offset()) * tensor.itemsize
        return ("meta", cast("Any", tensor.untyped_storage())._cdata), begin, strides  # noqa: SLF001
    where = tensor.device.type if tensor.device.type == "cpu" else str(tensor.device)
    return where, tensor.data_ptr(), strides


def marks(tensors: Sequence[torch.Tensor]) -> Sequence[object] | None:
    """Return values that change if a plain tensor is replaced, moved or reshaped.

    Return None if a tensor has no such values, for example because it has no memory. The caller's
    full analysis then reports the tensor.
    """
    if native.BUILT and _EXCHANGE is not None:
        with contextlib.suppress(BufferError, RuntimeError):  # complex, sparse and nested tensors
            return native.marks(tensors, _EXCHANGE)
    # Four lists instead of one of tuples, for speed: ten thousand tensors are common.
    try:
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
        if min(addresses, default=native.FIRST_ADDRESS) < native.FIRST_ADDRESS and any(
            address < native.FIRST_ADDRESS and tensor.numel()
            for address, tensor in zip(addresses, tensors, strict=True)
        ):
            return None
        contiguous = [*map(torch.Tensor.is_contiguous, tensors)]
        return [addresses, [*map(_SHAPE, tensors)], contiguous, [*map(_DTYPE, tensors)]]
    except RuntimeError:  # sparse, nested and the like
        return None


def bare(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be copied as contiguous bytes of this process's memory."""
    return (
        tensor.device.type == "cpu"
        and is_one_block(tensor)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bytes in the form of a version; they share its memory if possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data: Bytes = plain.reshape(-1).view(torch.uint8).numpy()
    return data


def views(specs: Iterable[TensorSpec], data: Bytes) -> list[torch.Tensor]:
    """Return each tensor as a torch tensor that shares the memory of the data section.

    A tensor that is not aligned to its element is a copy instead. This occurs only in files that
    other software wrote. So only views of a layout made by `Layout.plan` can be written through.
    Torch has no read-only tensors: do not write to views of read-only data.
    """
    address: int = data.__array_interface__["data"][0]
    if not data.size:
        flat = torch.empty(0, dtype=torch.uint8)
    elif data.flags.writeable:
        flat = torch.frombuffer(data, dtype=torch.uint8)
    else:  # through ctypes, since torch warns about each read-only buffer
        memory = (ctypes.c_uint8 * data.size).from_address(address)
        vars(memory)["owner"] = data  # so that every tensor of this memory keeps `data` alive
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    tensors: list[torch.Tensor] = []
    for spec in specs:
        part = flat[spec.begin : spec.end]
        if (address + spec.begin) % torch_dtype(spec.dtype).itemsize:
            part = part.clone()
        tensors.append(shaped(part, spec))
    return tensors


def shaped(part: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the bytes of a tensor (`part`, on any device) as a tensor with its dtype and shape."""
    shape = spec.shape if spec.dtype != "F4" else (*spec.shape[:-1], spec.shape[-1] // 2)
    return part.view(torch_dtype(spec.dtype)).view(shape)


def owner(spec: TensorSpec, data: Bytes) -> torch.Tensor:
    """Return a tensor of the data section as a torch tensor with its own storage object."""
    return shaped(torch.frombuffer(data[spec.begin : spec.end], dtype=torch.uint8), spec)


def rehouse_fault(tensor: torch.Tensor, *, parts: bool = False) -> str | None:
    """Return why a tensor cannot be moved to other memory as the same object; None if it can.

    No other tensor may share the storage, since the other tensor would keep the old storage. With
    `parts`, the tensor may be a part of a storage that is moved as a whole.
    """
    if type(tensor) not in PLAIN:
        return f"a {type(tensor).__name__}, no plain tensor"
    if tensor.device.type != "cpu":
        return f"on {tensor.device}, not on the CPU"
    if not bare(tensor):
        return "not contiguous, or a view (conjugate, negative, of inference mode) that hides bytes"
    if tensor.untyped_storage().is_shared():
        return "shared with other processes (share_memory_())"
    if torch.cuda.is_available() and tensor.is_pinned():
        return "pinned memory"
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes != tensor.nbytes and not parts:
        return f"{tensor.nbytes} bytes of a storage of {nbytes} (give a .clone() of it)"
    return None


def copy(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors pairwise, in place, also between dtypes and devices."""
    # In one call, since a Python loop over many small tensors takes three times as long. Inference
    # mode, not no_grad, since a target may have tensors that were made in inference mode.
    with torch.inference_mode():
        torch._foreach_copy_(destinations, sources)  # pyright: ignore


def changed(tensors: list[torch.Tensor]) -> None:
    """Increment the version counters of tensors, so that a backward pass on old values fails."""
    torch.autograd.graph.increment_version(tensors)


def target_fault(name: str, tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be written to; None if it can."""
    if tensor.is_meta:
        return f"{name}: on the meta device, without memory; only a module is given memory here"
    shape, stride = tensor.shape, tensor.stride()
    repeats = 0 in stride and any(n > 1 and not s for n, s in zip(shape, stride, strict=True))
    if repeats and tensor.numel():
        return f"{name}: expanded, so that elements share memory; give a .clone() of it"
    return None
