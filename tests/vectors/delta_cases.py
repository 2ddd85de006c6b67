"""The cases of `deltas.json`: patches bit by bit, right ones and every kind of wrong one."""

import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from weightbus.tests.vectors.layout_cases import info
from weightbus.tests.vectors.parts import Json, crc32c, digest, padded, spans

CHUNK_BYTES = 2**12
UNCHANGED, STEPS, OVERWRITE, RAW = range(4)
EVERY = 31

Row = tuple[int, int, int, int, int]  # of a table: count, gap, large, large gap, size
Step = tuple[int, int]  # a gap, and the step behind it
NONE: Row = (0, 0, 0, 0, 0)


class Bits:
    """A string of bits, from the lowest bit of the first byte on."""

    def __init__(self) -> None:
        self.bits: list[int] = []

    def number(self, value: int, width: int) -> None:
        self.bits += [value >> place & 1 for place in range(width)]

    def rice(self, values: Sequence[int], k: int) -> None:
        for value in values:
            self.bits += [0] * (value >> k) + [1]
        for value in values:
            self.number(value % 2**k, k)

    def golomb(self, values: Sequence[int], k: int) -> None:
        widths = [(value + 2**k).bit_length() - 1 for value in values]
        for width in widths:
            self.bits += [0] * (width - k) + [1]
        for value, width in zip(values, widths, strict=True):
            self.number(value + 2**k - 2**width, width)

    def pack(self) -> bytes:
        value = sum(bit << place for place, bit in enumerate(self.bits))
        return value.to_bytes(-(-len(self.bits) // 8), "little")


def table(rows: Sequence[Row]) -> bytes:
    """Return the table of a group."""
    bits = Bits()
    for count, gap, large, large_gap, size in rows:
        bits.number(count, 5)
        if count:
            bits.number(gap, 5)
            bits.number(large, 5)
            if large not in (0, EVERY):
                bits.number(large_gap, 5)
            if large:
                bits.number(size, 4)
    return bytes([len(rows)]) + bits.pack()


def steps(rows: Sequence[Row], by_class: Sequence[Sequence[Step]]) -> bytes:
    """Return the body of a block of steps."""
    bits = Bits()
    used = [(row, pairs) for row, pairs in zip(rows, by_class, strict=True) if row[0]]
    for (count, _, large, _, _), pairs in used:
        bits.number(len(pairs), count)
        if large not in (0, EVERY):
            bits.number(sum(abs(step) > 1 for _, step in pairs), large)
    for (_, gap, large, large_gap, size), pairs in used:
        sizes = [abs(step) for _, step in pairs]
        which = [index for index, value in enumerate(sizes) if value > 1]
        bits.rice([gap for gap, _ in pairs], gap)
        bits.bits += [int(step < 0) for _, step in pairs]
        if large == EVERY:
            bits.golomb([value - 1 for value in sizes], size)
        elif large:
            before = [-1, *which]
            bits.rice([b - a - 1 for a, b in zip(before, which, strict=False)], large_gap)
            bits.golomb([sizes[index] - 2 for index in which], size)
    return bits.pack()


def overwrite(gaps: Sequence[int], k: int, elements: bytes) -> bytes:
    """Return the body of a block that names what differs."""
    bits = Bits()
    bits.rice(gaps, k)
    return (len(gaps) | k << 19).to_bytes(3, "little") + bits.pack() + elements


def entry(mode: int, nbytes: int) -> bytes:
    """Return the entry of a block."""
    value, out = nbytes * 4 + mode, b""
    while value > 127:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def group(blocks: Sequence[tuple[int, bytes]], rows: Sequence[Row] = ()) -> bytes:
    """Return a group of blocks, each with its mode and body."""
    entries = b"".join(entry(mode, len(body)) for mode, body in blocks)
    return entries + (table(rows) if rows else b"") + b"".join(body for _, body in blocks)


Runs = Sequence[tuple[bytes, int]]  # bytes, and how often they are repeated


def whole(runs: Runs) -> bytes:
    return b"".join(data * times for data, times in runs)


_crc32c = cache(crc32c)  # most chunks of the large cases are the same


def digest_of(layout: bytes, data: bytes) -> str:
    crcs = [_crc32c(data[begin:end]) for begin, end in spans(len(data), CHUNK_BYTES)]
    return digest(hashlib.sha256(layout).hexdigest(), CHUNK_BYTES, crcs)


def header(layout: bytes, old: bytes, new: bytes, **other: int | bytes) -> bytes:
    """Return the header of a patch; `other` has what is to be wrong in it."""
    parts: dict[str, int | bytes] = {
        "magic": b"WBDELTA1",
        "flags": 0,
        "chunk_bytes": CHUNK_BYTES,
        "nbytes": len(old),
        "layout_id": hashlib.sha256(layout).digest(),
        "base": bytes.fromhex(digest_of(layout, old)),
        "target": bytes.fromhex(digest_of(layout, new)),
    }
    return struct.pack("<8sIIQ32s32s32s", *{**parts, **other}.values())


def halves(*elements: int) -> bytes:
    return struct.pack(f"<{len(elements)}H", *elements)


def of_one(dtype: str, nbytes: int, bits: int = 16) -> bytes:
    """Return a layout of one tensor."""
    return padded({"w": info(dtype, [nbytes * 8 // bits], 0, nbytes)})


def ok(name: str, layout: bytes, base: Runs, target: Runs, body: bytes) -> Json:
    old, new = whole(base), whole(target)
    case = _case(name, layout, base, header(layout, old, new) + body)
    shown = {"target": new.hex()} if len(new) <= 400 else {}
    return {**case, **shown, "expect": {"ok": {"digest": digest_of(layout, new)}}}


def _case(name: str, layout: bytes, base: Runs, patch: bytes) -> Json:
    runs = [[data.hex(), times] for data, times in base]
    return {"name": name, "level": None, "layout": layout, "base": runs, "patch": patch}


# Sixteen elements of bfloat16 in classes 14 and 15, which take turns.
OLD = halves(*[0x3F80, 0x3E00] * 8)
EVEN: Row = (3, 1, 0, 0, 0)
BOTH: list[Row] = [*[NONE] * 14, (2, 1, 0, 0, 0), (3, 0, 2, 1, 2)]
FLAT: list[Row] = [(3, 1, 0, 0, 0)]
UP_DOWN = [(0, 1), (6, -1), (7, 1)]  # elements 0, 7 and 15
LAYOUT = of_one("BF16", 32)
NEW = halves(0x3F81, *[0x3E00, 0x3F80] * 3, 0x3DFF, *[0x3F80, 0x3E00] * 3, 0x3F80, 0x3E01)


def _right() -> Iterator[Json]:
    flat = group([(STEPS, steps(FLAT, [UP_DOWN]))], FLAT)
    yield ok("steps of one unit", LAYOUT, [(OLD, 1)], [(NEW, 1)], flat)
    by_class = group([(STEPS, steps(BOTH, [*[[]] * 14, UP_DOWN[:1], [(1, -9), (4, 2)]]))], BOTH)
    old = halves(*[0x3E00] * 8, *[0x3F80] * 8)
    new = halves(0x3E01, *[0x3E00] * 7, 0x3F80, 0x3F77, *[0x3F80] * 4, 0x3F82, 0x3F80)
    yield ok("steps by class", LAYOUT, [(old, 1)], [(new, 1)], by_class)
    yield from _numbers()
    yield from _many()
    yield from _bytes()
    yield from _shapes()


def _numbers() -> Iterator[Json]:
    rows: list[Row] = [(2, 0, EVERY, 0, 12)]
    pairs = [
        (0x0000, 0x8000),  # zero, and minus zero: one step down
        (0x7F80, 0x7FC1),  # infinity, and a NaN
        (0xFFFF, 0x7FFF),  # the first of all, and the last
    ]
    old, new = (halves(*column) for column in zip(*pairs, strict=True))
    found = [(0, -1), (0, 0x41), (0, 0xFFFF)]
    body = group([(STEPS, steps(rows, [found]))], rows)
    # Six bytes as they are would be fewer; a sender should say so, and a receiver need not care.
    layout = of_one("BF16", 206)
    more = (halves(0x1234), 100)
    yield ok("zero, NaN and the longest step", layout, [(old, 1), more], [(new, 1), more], body)
    yield _ends_of_classes()
    rows = [(1, 0, 0, 0, 0)]
    old, new = halves(*[5] * 200), halves(*[5] * 150, 6, *[5] * 49)
    body = group([(STEPS, steps(rows, [[(150, 1)]]))], rows)
    yield ok("a long unary code", of_one("BF16", 400), [(old, 1)], [(new, 1)], body)
    for dtype in ("I16", "U16"):
        rows = [(1, 2, 0, 0, 0)]
        body = group([(STEPS, steps(rows, [[(3, 1)]]))], rows)
        name = f"a step in {dtype}"
        old, new = halves(5, 5, 5, 0xFFFE, 5), halves(5, 5, 5, 0xFFFD, 5)
        yield ok(name, of_one(dtype, 10), [(old, 1)], [(new, 1)], body)
    rows = [*[NONE] * 7, (1, 0, 0, 0, 0), *[NONE] * 8]  # exponents 14 and 15
    old, new = halves(*[0x0400] * 30, 0x3C00, 0x7C00), halves(*[0x0400] * 30, 0x3BFF, 0x7C00)
    by_class: list[list[Step]] = [[(0, -1)] if row[0] else [] for row in rows]
    body = group([(STEPS, steps(rows, by_class))], rows)
    yield ok("F16 has classes of its own", of_one("F16", 64), [(old, 1)], [(new, 1)], body)


def _ends_of_classes() -> Json:
    exponents = (
        0,
        95,
        96,
        97,
        98,
        125,
        126,
        127,
        128,
        255,
    )  # 4 of class 0, one each, 4 of class 15
    old = [sign | exponent << 7 for exponent in exponents for sign in (0, 0x8000)]
    new = list(old)
    new[7] -= 1  # of exponent 97, negative: one step up
    new[8] += 1
    new[11] -= 1
    new[18] += 1
    rows: list[Row] = [
        *[(1, 3, 0, 0, 0), (1, 0, 0, 0, 0)],
        *[NONE] * 12,
        *[(1, 1, 0, 0, 0), (1, 2, 0, 0, 0)],
    ]
    found: list[list[Step]] = [[(7, 1)], [(0, 1)], *[[]] * 12, [(1, 1)], [(6, 1)]]
    body = group([(STEPS, steps(rows, found))], rows)
    base, target = halves(*old), halves(*new)
    return ok("the ends of classes", of_one("BF16", 40), [(base, 1)], [(target, 1)], body)


def _many() -> Iterator[Json]:
    """Yield blocks that a reader of 64 elements at a time reads in pieces, the last one short."""
    classes: dict[str, Callable[[int], int]] = {
        "BF16": lambda u: min(max((u >> 7 & 255) - 96, 0) >> 1, 15),
        "F16": lambda u: u >> 11 & 15,
        "I16": lambda _: 0,
    }
    for seed, (dtype, of_class) in enumerate(classes.items()):
        dice = random.Random(seed)
        exponents = [dice.randrange(88, 132) for _ in range(303)]
        old = [dice.randrange(2) << 15 | e << 7 | dice.randrange(128) for e in exponents]
        if dtype == "F16":
            old = [dice.randrange(2**16) for _ in old]
        kinds: list[Row] = [(7, 2, EVERY, 0, 1), (7, 1, 6, 1, 2), (7, 0, 0, 0, 0)]
        rows = [NONE if number == 5 else kinds[number % 3] for number in range(16)]
        rows = [(9, 0, 9, 1, 3)] if dtype == "I16" else rows
        yield _stepped(f"many steps in {dtype}", dtype, old, of_class, rows, dice)


def _stepped(
    name: str,
    dtype: str,
    old: list[int],
    of_class: Callable[[int], int],
    rows: Sequence[Row],
    dice: random.Random,
) -> Json:
    """Return a case where many elements take steps, as many as the codes of their class have."""
    found: list[list[Step]] = [[] for _ in rows]
    since, new = [0] * 16, list(old)
    for at, before in enumerate(old):
        number = of_class(before)
        row = rows[number]
        sizes = [1, 1, 1, 2, 3, 70] if row[2] else [1]
        step = dice.choice(sizes) * dice.choice([-1, 1])
        place = (65535 - before if before & 0x8000 else before + 32768) + step
        kept = dice.random() < 0.6 and at < len(old) - 1
        if not row[0] or kept or not 0 <= place <= 65535:
            since[number] += 1
            continue
        new[at] = place - 32768 if place & 0x8000 else 65535 - place
        found[number].append((since[number], step))
        since[number] = 0
    body = group([(STEPS, steps(rows, found))], rows)
    layout = of_one(dtype, 2 * len(old))
    return ok(name, layout, [(halves(*old), 1)], [(halves(*new), 1)], body)


def _bytes() -> Iterator[Json]:
    for dtype, width in (("F32", 4), ("F64", 8), ("F8_E4M3", 1), ("BOOL", 1), ("BF16", 2)):
        old, element = bytes(12 * width), bytes(range(1, width + 1))
        new = bytes(2 * width) + element + bytes(8 * width) + element
        body = group([(OVERWRITE, overwrite([2, 8], 3, element * 2))])
        layout = of_one(dtype, 12 * width, 8 * width)
        yield ok(f"overwritten elements of {dtype}", layout, [(old, 1)], [(new, 1)], body)
    layout = of_one("F4", 16, 4)
    body = group([(OVERWRITE, overwrite([9], 3, b"\x5a"))])
    new = bytes(9) + b"\x5a" + bytes(6)
    yield ok("two elements of F4 are a byte", layout, [(bytes(16), 1)], [(new, 1)], body)
    new = bytes(range(32))
    yield ok("a raw block", LAYOUT, [(OLD, 1)], [(new, 1)], group([(RAW, new)]))


def _shapes() -> Iterator[Json]:
    yield ok("nothing changed", LAYOUT, [(OLD, 1)], [(OLD, 1)], group([(UNCHANGED, b"")]))
    yield ok("nothing there", padded({}), [], [], b"")
    layout = padded(
        {
            "a": info("F32", [2], 0, 8),
            "b": info("F32", [0, 3], 8, 8),
            "c": info("BF16", [8], 8, 24),
            "cd": info("I8", [0], 24, 24),
            "d": info("BF16", [8], 24, 40),
            "e": info("U8", [1], 40, 41),
        }
    )
    old, new = bytes(8) + OLD + b"\1", bytes(8) + NEW + b"\2"
    flat = group([(STEPS, steps(FLAT, [UP_DOWN]))], FLAT)
    body = group([(UNCHANGED, b"")]) + flat + group([(RAW, b"\2")])
    yield ok("stretches of one dtype each", layout, [(old, 1)], [(new, 1)], body)
    entries = {
        "a": info("F32", [4], 0, 16),
        "b": info("BF16", [16], 16, 48),
        "c": info("I16", [5], 48, 58),
    }
    row: list[Row] = [(1, 2, 0, 0, 0)]
    body = group([(OVERWRITE, overwrite([1], 0, b"\1\2\3\4"))]) + flat
    body += group([(STEPS, steps(row, [[(3, 1)]]))], row)
    old, new = bytes(16) + OLD + halves(5, 5, 5, 0xFFFE, 5), bytes(4) + b"\1\2\3\4" + bytes(8) + NEW
    new += halves(5, 5, 5, 0xFFFD, 5)
    yield ok("more changes than are kept", padded(entries), [(old, 1)], [(new, 1)], body)
    layout = padded({"a": info("U8", [1], 0, 1), "b": info("BF16", [16], 1, 33)})
    old, new = b"\1" + OLD, b"\1" + NEW
    body = group([(UNCHANGED, b"")]) + flat
    yield ok("elements at odd bytes", layout, [(old, 1)], [(new, 1)], body)
    size = 2**18 + 1
    layout = padded({"w": info("U8", [size], 0, size)})
    body = group([(OVERWRITE, overwrite([2**18 - 1], 17, b"\7")), (RAW, b"\7")])
    runs = [(bytes(1), 2**18 - 1), (b"\7\7", 1)]
    yield ok("two blocks", layout, [(bytes(1), size)], runs, body)
    blocks = [(UNCHANGED, b"")] * 16
    rows: list[list[Row]] = [[(2, 1, 0, 0, 0)], [(1, 4, EVERY, 0, 0)]]
    blocks[3] = (STEPS, steps(rows[0], [[(2, 1), (0, 1)]]))
    body = group(blocks, rows[0]) + group([(STEPS, steps(rows[1], [[(0, 3)]]))], rows[1])
    size = 2**22 + 8
    runs = [(bytes(2), 3 * 2**18 + 2), (b"\1\0", 2), (bytes(2), 13 * 2**18 - 4), (b"\3\0", 1)]
    runs.append((bytes(2), 7))
    layout = of_one("BF16", 2 * size)
    yield ok("two groups, each with a table", layout, [(bytes(2), size)], runs, body)


def _wrong() -> Iterator[tuple[str, bytes]]:
    """Yield patches for `OLD` in `LAYOUT` that lead nowhere."""
    start, same = header(LAYOUT, OLD, NEW), header(LAYOUT, OLD, OLD)
    body = steps(FLAT, [UP_DOWN])
    right = group([(STEPS, body)], FLAT)
    yield "another magic", header(LAYOUT, OLD, NEW, magic=b"WBDELTA2") + right
    yield "the flag of history", header(LAYOUT, OLD, NEW, flags=1) + right
    yield "another layout", header(LAYOUT, OLD, NEW, layout_id=bytes(32)) + right
    yield "another size", header(LAYOUT, OLD, NEW, nbytes=34) + right
    yield "another base", header(LAYOUT, OLD, NEW, base=bytes(32)) + right
    yield "another target", header(LAYOUT, OLD, NEW, target=bytes(32)) + right
    yield "chunks of no bytes", header(LAYOUT, OLD, NEW, chunk_bytes=0) + right
    yield "chunks beyond the limit", header(LAYOUT, OLD, NEW, chunk_bytes=2**26 + 1) + right
    yield "bytes behind the end", start + right + b"\0"
    yield "the block twice", start + right + right
    yield "the block twice in one group", start + group([(STEPS, body)] * 2, FLAT)
    yield "no block", start
    yield "an entry without end", start + b"\xff\xff\xff\xff\x00"
    yield "an entry that is longer than need be", same + b"\x80\x00"
    yield "nothing overwritten, in no bytes", same + group([(OVERWRITE, overwrite([], 0, b""))])
    yield "an unchanged block with a body", same + group([(UNCHANGED, b"\1")])
    yield "a raw block of another size", same + group([(RAW, OLD[:-1])])
    full: list[Row] = [(12, 0, EVERY, 0, 14)]
    much = steps(full, [[(0, -1)] * 14])
    yield "a body as large as the block", start + group([(STEPS, much)], full)
    yield "a body larger than the block", start + group([(STEPS, bytes(33))], FLAT)
    yield "a body without bytes", start + group([(STEPS, b"")], FLAT)
    yield "a body that ends early", start + group([(STEPS, body)], FLAT)[:-1]
    yield "a table without classes", start + entry(STEPS, len(body)) + b"\0" + body
    yield "a table of two classes", start + group([(STEPS, body)], FLAT * 2)
    for name, rows in {
        "a count of 20 bits": [(20, 1, 0, 0, 0)],
        "a gap's parameter of 19": [(3, 19, 0, 0, 0)],
        "a large count of 20 bits": [(3, 1, 20, 0, 0)],
        "a large gap's parameter of 19": [(3, 1, 1, 19, 0)],
    }.items():
        yield f"a table with {name}", start + entry(STEPS, 4) + table(rows) + bytes(4)
    yield "a table that ends early", start + entry(STEPS, 4) + table(FLAT)[:-1]
    bad = table(FLAT)[:-1] + bytes([table(FLAT)[-1] | 0x80])
    yield "a table with bits behind it", start + entry(STEPS, len(body)) + bad + body
    yield from ((name, start + patch) for name, patch in _wrong_bodies())


def _wrong_bodies() -> Iterator[tuple[str, bytes]]:
    far = [(0, 1), (14, 1), (0, 1)]
    yield "a gap past the end", group([(STEPS, steps(FLAT, [far]))], FLAT)
    wide: list[Row] = [(5, 0, 0, 0, 0)]
    yield "more steps than elements", group([(STEPS, steps(wide, [[(0, 1)] * 17]))], wide)
    many = Bits()
    many.number(7, 3)
    many.rice([0, 0, 0], 1)
    yield "a count that lies", group([(STEPS, many.pack())], FLAT)
    endless = Bits()
    endless.number(1, 3)
    endless.number(0, 200)
    yield "a unary run without end", group([(STEPS, endless.pack())], FLAT)
    body = steps(FLAT, [UP_DOWN])
    yield "bits behind the codes", group([(STEPS, body[:-1] + bytes([body[-1] | 0x80]))], FLAT)
    yield "a byte behind the codes", group([(STEPS, body + b"\0")], FLAT)
    rows: list[Row] = [(3, 1, 3, 0, 0)]
    bits = Bits()
    bits.number(1, 3)
    bits.number(2, 3)
    bits.rice([0], 1)
    bits.number(0, 1)
    bits.rice([0, 0], 0)
    bits.golomb([0, 0], 0)
    yield "more large steps than steps", group([(STEPS, bits.pack())], rows)
    bits = Bits()
    bits.number(1, 3)
    bits.number(1, 3)
    bits.rice([0], 1)
    bits.number(0, 1)
    bits.rice([1], 0)
    bits.golomb([0], 0)
    yield "a large step behind the last", group([(STEPS, bits.pack())], rows)
    every: list[Row] = [(3, 1, EVERY, 0, 0)]
    bits = Bits()
    bits.number(1, 3)
    bits.rice([0], 1)
    bits.number(0, 1)
    bits.golomb([2**17 - 1], 0)
    yield "a size of 17 bits", group([(STEPS, bits.pack())], every)
    beyond = [(0, 0x8000)]
    yield "a step beyond the numbers", group([(STEPS, steps(every, [beyond]))], every)
    below = [(0, -0xC000)]
    yield "a step below the numbers", group([(STEPS, steps(every, [below]))], every)
    body = steps(BOTH, [*[[]] * 14, [(7, 1), (0, 1)], []])
    yield "a gap past the elements of a class", group([(STEPS, body)], BOTH)
    yield "nothing overwritten", group([(OVERWRITE, overwrite([], 0, b"\0"))])
    yield "overwritten past the end", group([(OVERWRITE, overwrite([16], 2, b"ab"))])
    yield "an overwrite's parameter of 19", group([(OVERWRITE, overwrite([0], 19, b"ab"))])
    yield "overwritten with too little", group([(OVERWRITE, overwrite([0, 0, 0], 0, b"ab"))])
    yield "overwritten with too much", group([(OVERWRITE, overwrite([0], 0, b"abcd"))])
    short = (2**19 - 1).to_bytes(3, "little")
    yield "a count that is all there is", group([(OVERWRITE, short)])
    yield "a part of a count", group([(OVERWRITE, short[:2])])


def _too_many_chunks() -> Json:
    size = 2**20 + 1
    layout = padded({"w": info("U8", [size], 0, size)})
    same = digest(hashlib.sha256(layout).hexdigest(), 1, [_crc32c(b"\0")] * size)
    both = {"base": bytes.fromhex(same), "target": bytes.fromhex(same)}
    start = header(layout, b"", b"", chunk_bytes=1, nbytes=size, **both)
    body = group([(UNCHANGED, b"")] * 5)
    case = _case("more than 2^20 chunks", layout, [(b"\0", size)], start + body)
    return {**case, "expect": {"error": "patch"}}


def _wrapped() -> Json:
    """Return a case with a gap of 2^32, which is none in 32 bits."""
    row: list[Row] = [(1, 18, 0, 0, 0)]
    body = group([(STEPS, steps(row, [[(2**32, 1)]]))], row)
    layout, old, new = of_one("BF16", 6000), bytes(6000), b"\1" + bytes(5999)
    case = _case("a gap of 2^32", layout, [(b"\0", 6000)], header(layout, old, new) + body)
    return {**case, "expect": {"error": "patch"}}


def _half_wrong() -> Json:
    """Return a case of a raw block that is right, before one that is not."""
    layout = padded({"a": info("U8", [2], 0, 2), "b": info("BF16", [16], 2, 34)})
    body = group([(RAW, b"\7\7")]) + group(
        [(STEPS, steps(FLAT, [[(0, 1), (14, 1), (0, 1)]]))], FLAT
    )
    old = bytes(2) + OLD
    case = _case(
        "a right block before a wrong one", layout, [(old, 1)], header(layout, old, old) + body
    )
    return {**case, "expect": {"error": "patch"}}


def delta_cases() -> Iterator[Json]:
    """Yield bases, patches, and what becomes of them."""
    yield from _right()
    yield from (_too_many_chunks(), _wrapped(), _half_wrong())
    for name, patch in _wrong():
        yield {**_case(name, LAYOUT, [(OLD, 1)], patch), "expect": {"error": "patch"}}
    flat = group([(STEPS, steps([(1, 0, 0, 0, 0)], [[(0, 1)]]))], [(1, 0, 0, 0, 0)])
    small = of_one("F32", 32, 32)
    patch = header(small, OLD, NEW) + flat
    case = _case("steps where elements have 32 bits", small, [(OLD, 1)], patch)
    yield {**case, "expect": {"error": "patch"}}
    layout = of_one("I16", 32)
    rows = [*[NONE] * 15, EVEN]
    body = group([(STEPS, steps(rows, [*[[]] * 15, UP_DOWN]))], rows)
    case = _case("classes of integers", layout, [(OLD, 1)], header(layout, OLD, NEW) + body)
    yield {**case, "expect": {"error": "patch"}}
