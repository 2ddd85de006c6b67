"""The cases of `casts.json`: values of one dtype as another has them, by exact arithmetic alone."""

import hashlib
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations, product

from weightbus.tests.vectors.parts import Json

FORMATS = {"F64": (11, 52), "F32": (8, 23), "F16": (5, 10), "BF16": (8, 7)}  # exponent, fraction
CHANCE = 64  # values of any bits, in each case


def cast_cases() -> Iterator[Json]:
    """Yield the values of each pair of dtypes."""
    for source, target in permutations(FORMATS, 2):
        values = [
            bits for bits in values_for(source, target) if not rounds_twice(bits, source, target)
        ]
        yield {
            "name": f"{source} to {target}",
            "level": None,
            "from": source,
            "to": target,
            "in": packed(values, source),
            "out": packed([cast(bits, source, target) for bits in values], target),
        }


def packed(values: list[int], dtype: str) -> str:
    """Return bit patterns as they lie in memory, in hexadecimal digits."""
    nbytes = (1 + sum(FORMATS[dtype])) // 8
    return b"".join(bits.to_bytes(nbytes, "little") for bits in values).hex()


def values_for(source: str, target: str) -> list[int]:
    """Return bit patterns of the source at which a cast can go wrong."""
    found = dict.fromkeys(edges(source))
    for bits in edges(target):
        value, after = value_of(bits, target), value_of(bits + 1, target)
        if isinstance(value, Fraction) and isinstance(after, Fraction):
            for exact in (value, (value + after) / 2):
                near = nearest(exact, source) | sign_of(bits, target, source)
                found |= dict.fromkeys((near, near + 1, max(0, near - 1)))
    largest = nearest(2 * max_of(target) - max_of_below(target), source)  # what rounds to infinity
    found |= dict.fromkeys(largest + step for step in (-1, 0, 1) if largest < infinity(source))
    width = (1 + sum(FORMATS[source])) // 8
    found |= dict.fromkeys(
        int.from_bytes(hashlib.sha256(f"{source} {target} {n}".encode()).digest()[:width], "little")
        for n in range(CHANCE)
    )
    return list(found)


def edges(dtype: str) -> Iterator[int]:
    """Yield zero, the least, the greatest, ones and halves, what is no number; of both signs."""
    exponent, fraction = FORMATS[dtype]
    one = ((1 << exponent - 1) - 1) << fraction
    whole = infinity(dtype)
    least = 1 << fraction  # of those that are not subnormal
    plain = [0, 1, 2, 3, least - 2, least - 1, least, least + 1, one, one + 1, one + 2, one - 1]
    plain += [one + least, one + (3 << fraction) // 2, whole - 2, whole - 1, whole]
    # Of the last, all that a truncated cast would keep is the exponent: an infinity.
    plain += [whole | 1 << fraction - 1, whole | 1]
    for sign, bits in product((0, 1), plain):
        yield sign << exponent + fraction | bits


def infinity(dtype: str) -> int:
    """Return the bits of infinity."""
    exponent, fraction = FORMATS[dtype]
    return ((1 << exponent) - 1) << fraction


def max_of(dtype: str) -> Fraction:
    """Return the greatest number."""
    return Fraction(value_of(infinity(dtype) - 1, dtype))


def max_of_below(dtype: str) -> Fraction:
    """Return what lies half a step below it, so that the same above it is reached by doubling."""
    return (max_of(dtype) + Fraction(value_of(infinity(dtype) - 2, dtype))) / 2


def value_of(bits: int, dtype: str) -> Fraction | float:
    """Return what bits mean, without their sign: a number, infinity, or none."""
    exponent, fraction = FORMATS[dtype]
    bits &= (1 << exponent + fraction) - 1
    if bits >= infinity(dtype):
        return math.inf if bits == infinity(dtype) else math.nan
    power, rest = bits >> fraction, bits & (1 << fraction) - 1
    rest |= 1 << fraction if power else 0
    return rest * Fraction(2) ** (max(power, 1) - (1 << exponent - 1) + 1 - fraction)


def nearest(value: Fraction, dtype: str) -> int:
    """Return the bits of the nearest value; of two equally near ones, the even one's."""
    exponent, fraction = FORMATS[dtype]
    least = 2 - (1 << exponent - 1)
    power = least
    while value >= Fraction(2) ** (power + 1):
        power += 1
    steps = round(value / Fraction(2) ** (power - fraction))  # Python rounds halves to even
    return min(((power - least) << fraction) + steps, infinity(dtype))


def sign_of(bits: int, source: str, target: str) -> int:
    """Return the sign of some bits, where the target has it."""
    return (bits >> sum(FORMATS[source])) << sum(FORMATS[target])


def cast(bits: int, source: str, target: str) -> int:
    """Return the bits of a value in another dtype."""
    value = value_of(bits, source)
    if isinstance(value, Fraction):
        there = nearest(value, target)
    else:
        there = infinity(target) | (0 if math.isinf(value) else 1 << FORMATS[target][1] - 1)
    return sign_of(bits, source, target) | there


def rounds_twice(bits: int, source: str, target: str) -> bool:
    """Return whether the way through F32, which the protocol allows, leads elsewhere."""
    if source != "F64" or target == "F32":
        return False
    return cast(cast(bits, source, "F32"), "F32", target) != cast(bits, source, target)
