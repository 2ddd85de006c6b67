"""Cases of the pieces of chunks, for workers that take a part and publishers that send parts."""

from collections.abc import Iterator

from weightbus.tests.vectors.parts import Json, crc32c

DATA = bytes(range(7, 7 + 60))
CHUNK = 20

# Name, and the `ranges` of a fetch.
REQUESTS: tuple[tuple[str, list[int]], ...] = (
    ("one interval inside of a chunk", [23, 4, 4, 1]),
    ("one interval over a border", [15, 10, 10, 1]),
    ("columns of a matrix", [2, 3, 6, 10]),
    ("columns of one byte", [0, 1, 2, 30]),
    ("two ranges", [3, 2, 5, 3, 31, 4, 9, 3]),
    ("intervals that touch each other", [4, 2, 2, 8]),
    ("more intervals than the version has bytes", [40, 1, 3, 2**40]),
    ("all of a chunk", [20, 20, 20, 1]),
    ("no bytes of it", [0, 5, 5, 1]),
    ("three numbers", [0, 5, 5]),
    ("no length", [20, 0, 5, 1]),
    ("no times", [20, 5, 5, 0]),
    ("a stride below the length", [20, 5, 4, 2]),
    ("nothing", []),
)


def cases() -> Iterator[Json]:
    """Yield, of each request and chunk, the piece, its CRC and that of the rest; or null."""
    for name, ranges in REQUESTS:
        for index in range(len(DATA) // CHUNK):
            begin = index * CHUNK
            chunk = DATA[begin : begin + CHUNK]
            yield {
                "name": f"{name}, chunk {index}",
                "level": None,
                "rules": ["T2", "T3"],
                "chunk": chunk.hex(),
                "begin": begin,
                "ranges": ranges,
                "ok": piece(chunk, begin, ranges),
            }


def piece(chunk: bytes, begin: int, ranges: list[int]) -> Json | None:
    """Return what is sent of a chunk; None: all of it."""
    rows = [ranges[at : at + 4] for at in range(0, len(ranges), 4)]
    for row in rows:
        if len(row) < 4 or row[1] < 1 or row[3] < 1 or row[2] < row[1]:
            return None
    inside = [
        at - begin
        for first, length, stride, times in rows
        for k in range(min(times, len(DATA)))
        for at in range(first + k * stride, first + k * stride + length)
        if begin <= at < begin + len(chunk)
    ]
    if not 0 < len(inside) < len(chunk):
        return None
    rest = bytearray(chunk)
    for at in inside:
        rest[at] = 0
    data = bytes(chunk[at] for at in inside)
    return {"piece": data.hex(), "crc": crc32c(data), "rest": crc32c(bytes(rest))}
