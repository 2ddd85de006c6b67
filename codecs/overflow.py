"""Counts finite values that a conversion loses, because a narrower dtype cannot hold them.

A float32 value of 1e5 is infinite in float16. The framework decides what such a value becomes
(infinity; in an 8-bit float without infinity, NaN or the greatest value). This module counts such
values, in the same way for all dtypes.

The search must be cheap compared with the conversion. So it scans the data section, where tensors
of one dtype are adjacent. The least and the greatest element of a dtype show whether values must be
counted at all; torch finds both with all of its threads. Without torch, bit patterns are compared
without their sign bit: they are ordered like the magnitudes.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .dtypes import DTYPES, numpy_dtype
from .layout import NAME_SHOWN, TensorSpec
from .leaves import Leaf, of_torch
from .numpy_tensors import Bytes
from .words import printable

if TYPE_CHECKING:
    import torch

LARGE_BYTES: Final = 2**16  # each tensor from this size on is checked in a call of its own
BLOCK_BYTES: Final = 2**18  # bytes scanned at once, which fit into the caches
TENSORS_SHOWN: Final = 4  # tensors that a text names

LostValues = Mapping[str, tuple[str, int]]  # by name: the new dtype, and the number of lost values


@dataclass(frozen=True, slots=True)
class _FloatFormat:
    """The bit patterns ("codes") of a float dtype.

    Attributes:
        width: Bytes of an element.
        greatest: The greatest finite value.
        least: The least magnitude that rounds to a value beyond `greatest`.
        end: The code after the code of `greatest`: that of infinity or of NaN.
    """

    width: int
    greatest: float
    least: float
    end: int


@cache
def _bits(dtype: str) -> _FloatFormat:
    kind = numpy_dtype(dtype)
    limits = cast("Any", ml_dtypes).finfo(kind)
    width = kind.itemsize
    code = int(np.array(limits.max, kind).view(f"u{width}"))
    greatest = float(limits.max)
    # A value half a step above `greatest` is a tie, which rounds to the even code.
    step = math.ldexp(1.0, math.frexp(greatest)[1] - 1 - int(limits.nmant))
    least = greatest + step / 2
    if code % 2 == 0:
        least = math.nextafter(least, math.inf)
    return _FloatFormat(width, greatest, least, code + 1)


def narrows(source: str, destination: str) -> bool:
    """Return whether a conversion from `source` to `destination` may lose finite values."""
    if source == destination or {DTYPES[source].kind, DTYPES[destination].kind} != {"float"}:
        return False
    return _bits(source).greatest > _bits(destination).greatest


@cache
def _least_code(source: str, destination: str) -> int:
    """Return the least bit pattern of `source` whose value is lost in `destination`."""
    kind, least = numpy_dtype(source), _bits(destination).least
    if source == "F64" and destination != "F32":
        # Values may be rounded to F32 first, so values up to half an F32 step lower are lost, too.
        single = np.float32(least)
        if float(single) < least:
            single = np.nextafter(single, np.float32(np.inf))
        least = (float(single) + float(np.nextafter(single, np.float32(0)))) / 2
        if int(single.view(np.uint32)) % 2:
            least = math.nextafter(least, math.inf)
    with np.errstate(over="ignore"):
        rounded = np.array(least).astype(kind)
    code = int(rounded.view(f"u{kind.itemsize}"))
    return code + (float(rounded) < least)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Tensors that may lose values, with their positions in a data section.

    Attributes:
        tensors: (tensor, source dtype, destination dtype) of each.
        large: Large target tensors. These are scanned instead of their data in the section, because
            they are narrower, or are on a device.
        runs: (begin, end, dtype, code) of each run of adjacent other tensors in the section. Values
            must be counted if the run has a bit pattern of at least `code`.
    """

    tensors: Sequence[tuple[TensorSpec, str, str]]
    large: "Sequence[torch.Tensor]"
    runs: Sequence[tuple[int, int, str, int]]

    @classmethod
    def of(
        cls,
        tensors: Iterable[tuple[TensorSpec, str, str]],
        targets: Mapping[str, Leaf] | None = None,
    ) -> "Narrowed | None":
        """Return the tensors whose conversion may lose values; None if there are none.

        Args:
            tensors: Tensors, each with its source and destination dtype. The section contains each
                tensor in one of these two dtypes.
            targets: The tensors that get the converted values, by name, if the section contains the
                values before the conversion. The result keeps these tensors' memory alive.
        """
        large: dict[str, torch.Tensor] = {
            name: leaf.detach()
            for name, leaf in (targets or {}).items()
            if not isinstance(leaf, np.ndarray) and leaf.nbytes >= LARGE_BYTES and leaf.itemsize > 1
        }
        some = sorted((each for each in tensors if narrows(*each[1:])), key=lambda t: t[0].begin)
        runs: list[tuple[int, int, str, int]] = []
        for spec, source, destination in some:
            if spec.name in large:
                continue
            unconverted = spec.dtype == source
            code = _least_code(source, destination) if unconverted else _bits(destination).end
            if runs and runs[-1][1:] == (spec.begin, spec.dtype, code):
                runs[-1] = (runs[-1][0], spec.end, spec.dtype, code)
            else:
                runs.append((spec.begin, spec.end, spec.dtype, code))
        scanned = [large[spec.name] for spec, *_ in some if spec.name in large]
        return cls(some, scanned, runs) if some else None

    def found_on(self, device: "torch.Tensor", sources: Mapping[str, Leaf]) -> LostValues:
        """Return the lost values for a section on a device; see `found`.

        The section is copied to the host only if values were lost.
        """
        from .dtypes import torch_dtype

        for begin, end, dtype, code in self.runs:
            values = device[begin:end].view(torch_dtype(dtype))
            if values.numel() and _is_beyond(values, _value(dtype, code)):
                return self.found(device.cpu().numpy(), sources)
        return self.found(device.cpu().numpy(), sources) if any(map(_infinite, self.large)) else {}

    def _any(self, data: Bytes) -> bool:
        """Return whether values may have been lost; cheaper than counting."""
        return any(map(_infinite, self.large)) or any(_reaches(data, *run) for run in self.runs)

    def found(self, data: Bytes, sources: Mapping[str, Leaf]) -> LostValues:
        """Return the new dtype and the number of lost values of each tensor that lost some.

        Args:
            data: The section.
            sources: By name, the tensors before the conversion, where the section has them after.
        """
        if not self._any(data):
            return {}
        found: dict[str, tuple[str, int]] = {}
        for spec, source, destination in self.tensors:
            if spec.dtype == source:
                values: Leaf = data[spec.begin : spec.end].view(numpy_dtype(source))
            elif spec.name in sources:
                end = _bits(destination).end
                if not _reaches(data, spec.begin, spec.end, destination, end):
                    continue
                values = sources[spec.name]
            else:
                continue
            count = _count(values, source, destination)
            if count:
                found[spec.name] = destination, count
        return found


def lost(became: Leaf, values: Leaf, source: str, destination: str) -> int:
    """Return how many finite values a conversion has lost.

    Args:
        became: The converted values.
        values: The values before the conversion.
        source, destination: The names of the two dtypes.
    """
    if not narrows(source, destination) or not len(became.reshape(-1)):
        return 0
    if not isinstance(became, np.ndarray) and not _infinite(became):
        return 0
    return _count(values, source, destination)


def _infinite(became: "torch.Tensor") -> bool:
    """Return whether any element is infinite or NaN."""
    return _is_beyond(became, math.inf)


def _is_beyond(values: "torch.Tensor", least: float) -> bool:
    """Return whether any element has at least this magnitude, or is NaN."""
    import torch

    low, high = torch.aminmax(values if values.itemsize > 1 else values.float())
    return not (-least < float(low) and float(high) < least)


def _value(dtype: str, code: int) -> float:
    return float(np.array(code, f"u{_bits(dtype).width}").view(numpy_dtype(dtype)))


def _reaches(data: Bytes, begin: int, end: int, dtype: str, code: int) -> bool:
    """Return whether any element's bit pattern, without the sign bit, is at least `code`."""
    width = _bits(dtype).width
    if "torch" in sys.modules and width > 1 and end > begin:
        run = TensorSpec("", dtype, ((end - begin) // width,), begin, end)
        return _is_beyond(of_torch().views([run], data)[0], _value(dtype, code))
    sign = 1 << (8 * width - 1)
    for at in range(begin, end, BLOCK_BYTES):
        block = data[at : min(at + BLOCK_BYTES, end)]
        # Bit patterns of negative floats are below all others as signed integers, and above all
        # others as unsigned ones.
        positive, all_of_it = block.view(f"i{width}"), block.view(f"u{width}")
        if int(positive.max()) >= code or int(all_of_it.max()) >= sign + code:
            return True
    return False


def _count(values: Leaf, source: str, destination: str) -> int:
    """Return the number of finite values that are lost in `destination`."""
    bits, least, count = _bits(source), _least_code(source, destination), 0
    kind = f"u{bits.width}"
    magnitude = np.array((1 << (8 * bits.width - 1)) - 1, kind)
    for block in _blocks(values, source):
        codes = block.view(kind) & magnitude
        count += int(np.count_nonzero((codes >= least) & (codes < bits.end)))
    return count


def _blocks(values: Leaf, dtype: str) -> Iterator[NDArray[Any]]:
    """Yield values as one-dimensional numpy arrays, copied from a device if necessary."""
    for part in _rows(values):
        if isinstance(part, np.ndarray):
            yield np.ascontiguousarray(part, numpy_dtype(dtype)).reshape(-1)
        else:
            from . import torch_tensors

            yield torch_tensors.bytes_of(part)


def _rows(values: Leaf) -> Iterator[Leaf]:
    if not values.ndim:
        yield values
        return
    rows = max(1, BLOCK_BYTES * len(values) // max(1, values.nbytes))
    for begin in range(0, len(values), rows):
        yield values[begin : begin + rows]


def sentence(found: LostValues) -> str:
    """Return a sentence on the lost values."""
    shown: list[str] = []
    for name, (dtype, count) in [*found.items()][:TENSORS_SHOWN]:
        values = "1 finite value is" if count == 1 else f"{count} finite values are"
        most = f"{_bits(dtype).greatest:.6g}"
        shown.append(f"{printable(name, NAME_SHOWN)}: {values} beyond {dtype} (at most {most})")
    more = len(found) - len(shown)
    shown += [f"and likewise in {more} more tensor{'s' if more > 1 else ''}"] if more else []
    return "; ".join(shown)
