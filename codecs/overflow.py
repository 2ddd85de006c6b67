"""Values that are lost to a narrower dtype: they were finite, and are beyond what it can hold.

A float32 value of 1e5 is infinite in float16. What becomes of such a value is the framework's
affair (infinity; NaN, or the greatest value, in an 8-bit float that has no infinity); how many
there are is counted here, and alike for all dtypes.

To look for them must cost little beside the conversion. So what is looked at is the data section,
where tensors of one dtype lie end to end: the least and the greatest of many elements, which torch
finds with all of its threads, tell whether any has to be counted. Without torch, the bits of
floats are compared: without the sign, they are in the order of magnitudes.
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

LARGE_BYTES: Final = 2**16  # a tensor of so many is worth a call of its own
BLOCK_BYTES: Final = 2**18  # looked at once: what caches hold
TENSORS_SHOWN: Final = 4  # of those that have lost values: the first names show where it comes from

Found = Mapping[str, tuple[str, int]]  # by name: what it became, and how many values were lost


@dataclass(frozen=True, slots=True)
class _Bits:
    """A float dtype as integers.

    Attributes:
        width: Bytes of an element.
        greatest: The greatest finite value.
        least: The least magnitude that is rounded to something beyond that.
        end: The code behind that of the greatest finite value: of infinity, or of NaN.
    """

    width: int
    greatest: float
    least: float
    end: int


@cache
def _bits(dtype: str) -> _Bits:
    kind = numpy_dtype(dtype)
    limits = cast("Any", ml_dtypes).finfo(kind)
    width = kind.itemsize
    code = int(np.array(limits.max, kind).view(f"u{width}"))
    greatest = float(limits.max)
    # Half a step beyond the greatest is as near to it as to what would come next, and then the one
    # of an even code is taken. In the widest there is nothing beyond.
    step = math.ldexp(1.0, math.frexp(greatest)[1] - 1 - int(limits.nmant))
    least = greatest + step / 2
    if code % 2 == 0:
        least = math.nextafter(least, math.inf)
    return _Bits(width, greatest, least, code + 1)


def narrows(source: str, destination: str) -> bool:
    """Tell whether a conversion of one dtype to the other may lose finite values."""
    if source == destination or {DTYPES[source].kind, DTYPES[destination].kind} != {"float"}:
        return False
    return _bits(source).greatest > _bits(destination).greatest


@cache
def _least_code(source: str, destination: str) -> int:
    """Return the least code of a source that is lost to a destination."""
    kind, least = numpy_dtype(source), _bits(destination).least
    if source == "F64" and destination != "F32":
        # It may be rounded to F32 first, so what is half a step of that below is lost as well.
        single = np.float32(least)
        if float(single) < least:
            single = np.nextafter(single, np.float32(np.inf))
        least = (float(single) + float(np.nextafter(single, np.float32(0)))) / 2
        if int(single.view(np.uint32)) % 2:
            least = math.nextafter(least, math.inf)
    with np.errstate(over="ignore"):
        near = np.array(least).astype(kind)
    code = int(near.view(f"u{kind.itemsize}"))
    return code + (float(near) < least)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Tensors whose values may be lost, by where they lie in a data section.

    Attributes:
        tensors: They, and what each was converted from and to.
        large: Of these, targets that are looked at themselves, since they are narrower than what
            the section has of them, or are on a device.
        runs: Where the others lie, without the gaps; their dtype; and the least code that has to be
            looked at.
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
        """Return those that are narrowed, of some with their source and destination; or None.

        The section holds either what they were converted from, or what they were converted to.
        Where they are converted to is there for as long as what is returned.
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
            here = spec.dtype == source
            code = _least_code(source, destination) if here else _bits(destination).end
            if runs and runs[-1][1:] == (spec.begin, spec.dtype, code):
                runs[-1] = (runs[-1][0], spec.end, spec.dtype, code)
            else:
                runs.append((spec.begin, spec.end, spec.dtype, code))
        looked_at = [large[spec.name] for spec, *_ in some if spec.name in large]
        return cls(some, looked_at, runs) if some else None

    def found_on(self, device: "torch.Tensor", sources: Mapping[str, Leaf]) -> Found:
        """Count the same, of a section that lies on a device: it comes here if any was lost."""
        from .dtypes import torch_dtype

        for begin, end, dtype, code in self.runs:
            values = device[begin:end].view(torch_dtype(dtype))
            if values.numel() and _is_beyond(values, _value(dtype, code)):
                return self.found(device.cpu().numpy(), sources)
        return self.found(device.cpu().numpy(), sources) if any(map(_infinite, self.large)) else {}

    def _any(self, data: Bytes) -> bool:
        """Tell whether values may have been lost: a greatest one is as great as that."""
        return any(map(_infinite, self.large)) or any(_reaches(data, *run) for run in self.runs)

    def found(self, data: Bytes, sources: Mapping[str, Leaf]) -> Found:
        """Count the values that were lost in each tensor.

        Args:
            data: The section.
            sources: Where it holds what values became: what they were, by name.
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


def _infinite(became: "torch.Tensor") -> bool:
    """Tell whether an element is infinite, or NaN."""
    return _is_beyond(became, math.inf)


def _is_beyond(values: "torch.Tensor", least: float) -> bool:
    """Tell whether an element is as great as that, with either sign, or NaN."""
    import torch

    low, high = torch.aminmax(values if values.itemsize > 1 else values.float())
    return not (-least < float(low) and float(high) < least)


def _value(dtype: str, code: int) -> float:
    return float(np.array(code, f"u{_bits(dtype).width}").view(numpy_dtype(dtype)))


def _reaches(data: Bytes, begin: int, end: int, dtype: str, code: int) -> bool:
    """Tell whether an element of some has this code or a greater one, with either sign."""
    width = _bits(dtype).width
    if "torch" in sys.modules and width > 1 and end > begin:
        run = TensorSpec("", dtype, ((end - begin) // width,), begin, end)
        return _is_beyond(of_torch().views([run], data)[0], _value(dtype, code))
    sign = 1 << (8 * width - 1)
    for at in range(begin, end, BLOCK_BYTES):
        block = data[at : min(at + BLOCK_BYTES, end)]
        # As integers with a sign, negative floats are the least; without, they are the greatest.
        positive, all_of_it = block.view(f"i{width}"), block.view(f"u{width}")
        if int(positive.max()) >= code or int(all_of_it.max()) >= sign + code:
            return True
    return False


def _count(values: Leaf, source: str, destination: str) -> int:
    """Count the finite values that are beyond a destination."""
    bits, least, count = _bits(source), _least_code(source, destination), 0
    kind = f"u{bits.width}"
    magnitude = np.array((1 << (8 * bits.width - 1)) - 1, kind)
    for block in _blocks(values, source):
        codes = block.view(kind) & magnitude
        count += int(np.count_nonzero((codes >= least) & (codes < bits.end)))
    return count


def _blocks(values: Leaf, dtype: str) -> Iterator[NDArray[Any]]:
    """Cut values, wherever they are, into arrays of one dimension."""
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


def sentence(found: Found) -> str:
    """Say in words what was lost."""
    shown: list[str] = []
    for name, (dtype, count) in [*found.items()][:TENSORS_SHOWN]:
        values = "1 finite value is" if count == 1 else f"{count} finite values are"
        most = f"{_bits(dtype).greatest:.6g}"
        shown.append(f"{printable(name, NAME_SHOWN)}: {values} beyond {dtype} (at most {most})")
    more = len(found) - len(shown)
    shown += [f"and so in {more} more tensor{'s' if more > 1 else ''}"] if more else []
    return "; ".join(shown)
