"""Torch tensors as tensors of a layout: what they are, how their bytes come and go.

Imported only where a torch object is at hand, so that a numpy-only process needs no torch.
"""

import contextlib
import ctypes
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, cast

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


def signature(name: str, tensor: torch.Tensor) -> Signature:
    """Return a tensor's dtype name and shape; StateError if it cannot travel."""
    if type(tensor) not in PLAIN and torch.nn.parameter.is_lazy(tensor):
        raise StateError(f"{name}: has no shape yet; run the module once to initialise it")
    if not is_one_block(tensor):
        kind = type(tensor).__name__
        raise StateError(
            f"{name}: a {kind} of layout {tensor.layout} is not one block of elements; give it as "
            "a plain tensor (.to_dense(), .full_tensor() or .dequantize())"
        )
    try:
        dtype = name_of_torch(tensor.dtype)
    except StateError as error:
        raise StateError(f"{name}: {error}") from None
    shape = tuple(tensor.shape)
    if dtype == "F4":  # two elements to each of torch's
        if not shape:
            raise StateError(f"{name}: a 0-d {tensor.dtype} is two elements and has no dimension")
        shape = (*shape[:-1], 2 * shape[-1])
    return dtype, shape


def is_one_block(tensor: torch.Tensor) -> bool:
    """Tell a tensor that has elements in memory, with strides, from all the other kinds."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    # Nearly all are plain, and this is the slow question.
    return type(tensor) in PLAIN or not is_traceable_wrapper_subclass(tensor)


def identity(tensor: torch.Tensor) -> Hashable | None:
    """Return what two tensors share exactly if they are the same elements; None if empty."""
    if not tensor.numel() or tensor.is_meta:
        return None
    where = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
    return *where, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def place(tensor: torch.Tensor) -> tuple[Hashable, int, tuple[int, ...]]:
    """Return the memory that a tensor's elements lie in, where there, and the strides in bytes."""
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    if tensor.is_meta:  # every storage begins at 0 there
        begin = int(tensor.storage_offset()) * tensor.itemsize
        return ("meta", cast("Any", tensor.untyped_storage())._cdata), begin, strides  # noqa: SLF001
    where = tensor.device.type if tensor.device.type == "cpu" else str(tensor.device)
    return where, tensor.data_ptr(), strides


def marks(tensors: Sequence[torch.Tensor]) -> Sequence[object] | None:
    """Return what tells plain tensors that were exchanged or reshaped; None if some have none."""
    if native.BUILT and _EXCHANGE is not None:
        with contextlib.suppress(BufferError, RuntimeError):  # complex ones, and those below
            return native.marks(tensors, _EXCHANGE)
    # Four lists and not one of tuples, since ten thousand tensors are nothing unusual.
    try:
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
        contiguous = [*map(torch.Tensor.is_contiguous, tensors)]
        return [addresses, [*map(_SHAPE, tensors)], contiguous, [*map(_DTYPE, tensors)]]
    except RuntimeError:  # sparse, nested and the like
        return None


def bare(tensor: torch.Tensor) -> bool:
    """Tell whether the bytes in memory, one after the other, are what the tensor holds."""
    return (
        tensor.device.type == "cpu"
        and is_one_block(tensor)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes that a tensor has in a version; its own memory where they lie there so."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data: Bytes = plain.reshape(-1).view(torch.uint8).numpy()
    return data


def views(specs: Iterable[TensorSpec], data: Bytes) -> list[torch.Tensor]:
    """Return each tensor's part of the data section as a tensor that shares its memory.

    A part that is not aligned to its element (only files written by others have such) is copied
    instead, so views to be written into must come from a layout that was planned here. Torch knows
    no read-only tensors: views of read-only data must not be written into.
    """
    address: int = data.__array_interface__["data"][0]
    if not data.size:
        flat = torch.empty(0, dtype=torch.uint8)
    elif data.flags.writeable:
        flat = torch.frombuffer(data, dtype=torch.uint8)
    else:  # by the bare address, since torch warns of a read-only buffer every time
        memory = (ctypes.c_uint8 * data.size).from_address(address)
        vars(memory)["owner"] = data  # lives for as long as any tensor of it does
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    tensors: list[torch.Tensor] = []
    for spec in specs:
        part = flat[spec.begin : spec.end]
        if (address + spec.begin) % torch_dtype(spec.dtype).itemsize:
            part = part.clone()
        tensors.append(shaped(part, spec))
    return tensors


def shaped(part: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor's part of the data section, which lies anywhere, as that tensor."""
    shape = spec.shape if spec.dtype != "F4" else (*spec.shape[:-1], spec.shape[-1] // 2)
    return part.view(torch_dtype(spec.dtype)).view(shape)


def owner(spec: TensorSpec, data: Bytes) -> torch.Tensor:
    """Return a tensor's part of the data section as a tensor with a storage of just these bytes."""
    return shaped(torch.frombuffer(data[spec.begin : spec.end], dtype=torch.uint8), spec)


def rehouse_fault(tensor: torch.Tensor, *, parts: bool = False) -> str | None:
    """Say why a tensor cannot be given other memory while it stays the same object; None if it can.

    The object must be all that there is of it: whoever shares its storage would keep the old one.
    With `parts`, it may be a part of a storage that is moved as a whole.
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
    """Copy tensors pairwise, in place, casting and moving between devices where they differ."""
    # In one call, since a Python loop over many small tensors takes three times as long.
    # Inference mode rather than no_grad, since a target may hold tensors that were made in it.
    with torch.inference_mode():
        torch._foreach_copy_(destinations, sources)  # pyright: ignore


def changed(tensors: list[torch.Tensor]) -> None:
    """Say that memory was written to, so that a backward pass that needs the old values fails."""
    torch.autograd.graph.increment_version(tensors)


def target_fault(name: str, tensor: torch.Tensor) -> str | None:
    """Say why a tensor cannot be written into; None if it can."""
    if tensor.is_meta:
        return f"{name}: on the meta device, without memory; only a module is given memory here"
    shape, stride = tensor.shape, tensor.stride()
    repeats = 0 in stride and any(n > 1 and not s for n, s in zip(shape, stride, strict=True))
    if repeats and tensor.numel():
        return f"{name}: expanded, so that elements share memory; give a .clone() of it"
    return None
