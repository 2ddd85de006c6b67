"""The helper in C computes what its twins in Python do, at every level of instructions."""

import ctypes
import importlib
import importlib.util
import mmap
import os
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightbus.codecs import native
from weightbus.tests.cli.starting import python

MEMORY = np.random.default_rng(7).integers(0, 256, 2**16, np.uint8)
SIZES = st.integers(0, 600) | st.integers(0, 40_000)
OFFSETS = st.integers(0, 130)

HELPER: Any = importlib.import_module("weightbus.codecs._native") if native.BUILT else None
built = pytest.mark.skipif(not native.BUILT, reason=native.description())


def twin_of(name: str) -> ModuleType:
    """Load the module a second time, as it is without the helper."""
    spec = importlib.util.spec_from_file_location(f"weightbus.codecs.{name}", native.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.CHOICE, "0")
        spec.loader.exec_module(module)
    assert not module.BUILT
    return module


TWIN = twin_of("twin")


@pytest.fixture(params=HELPER.levels() if native.BUILT else [])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    HELPER.use(request.param)
    yield request.param
    HELPER.use(HELPER.levels()[0])


def addresses(*arrays: NDArray[np.uint8]) -> native.Addresses:
    return np.array([a.__array_interface__["data"][0] for a in arrays], np.uint64)


def test_the_helper_is_built_where_changes_are_tested() -> None:
    if os.environ.get("CI") and os.environ.get(native.CHOICE) != "0":
        assert native.BUILT, "a C compiler and Python's headers are needed here"


@pytest.mark.parametrize("choice", ["0", "1"])
def test_the_environment_chooses(choice: str) -> None:
    code = "from weightbus.codecs import native; print(native.BUILT, native.description())"
    said = python("-c", code, env=os.environ | {native.CHOICE: choice}).stdout
    there = importlib.util.find_spec("weightbus.codecs._native") is not None
    chosen = choice == "1" and there
    assert said.startswith(f"{chosen} " + ("native helper (" if chosen else "Python ("))


@built
@given(offset=OFFSETS, size=SIZES, value=st.integers(0, 2**32 - 1))
def test_a_checksum_is_the_same_at_every_level(offset: int, size: int, value: int) -> None:
    data = MEMORY[offset : offset + size]
    for name in HELPER.levels():
        HELPER.use(name)
        assert native.crc32c(data, value) == TWIN.crc32c(data, value)
    HELPER.use(HELPER.levels()[0])


@pytest.mark.parametrize("of", [native, TWIN], ids=["chosen", "twin"])
def test_the_check_value_of_the_standard(of: ModuleType) -> None:
    assert of.crc32c(b"123456789") == 0xE3069283
    assert of.crc32c(b"") == 0
    assert of.crc32c(b"6789", of.crc32c(b"12345")) == 0xE3069283


def test_a_copy_is_hashed_and_stays_in_its_place(level: str) -> None:
    @given(offset=OFFSETS, to=st.integers(1, 70), size=SIZES, stream=st.booleans())
    @example(offset=0, to=64, size=2**15, stream=True)
    def copies(offset: int, to: int, size: int, stream: bool) -> None:
        source = MEMORY[offset : offset + size]
        room = np.full(size + 140, 7, np.uint8)
        crc = HELPER.copy_crc32c(room[to : to + size], source, 5, stream)
        assert crc == TWIN.crc32c(source, 5), level
        assert np.array_equal(room[to : to + size], source)
        assert set(room[:to]) | set(room[to + size :]) == {7}

    copies()


@pytest.mark.parametrize("of", [native, TWIN], ids=["chosen", "twin"])
def test_a_copy_says_what_it_copied(of: ModuleType) -> None:
    room = np.zeros(5_000, np.uint8)
    assert of.copy_crc32c(room, MEMORY[:5_000], 9) == TWIN.crc32c(MEMORY[:5_000], 9)
    assert np.array_equal(room, MEMORY[:5_000])
    with pytest.raises(ValueError, match=r"4999|4,999|broadcast"):
        of.copy_crc32c(room, MEMORY[:4_999])


PIECES = st.lists(st.tuples(st.integers(0, 60_000), SIZES), max_size=12)


@pytest.mark.parametrize("of", [native, TWIN], ids=["chosen", "twin"])
@given(pieces=PIECES, chunk_bytes=st.integers(1, 300) | st.integers(1, 50_000))
def test_pieces_are_gathered_and_each_chunk_hashed(
    of: ModuleType, pieces: list[tuple[int, int]], chunk_bytes: int
) -> None:
    parts = [MEMORY[begin : begin + size] for begin, size in pieces]  # which may overlap
    whole = np.concatenate([*parts, np.empty(0, np.uint8)])
    to = np.full(whole.size, 7, np.uint8)
    sizes = np.array([part.size for part in parts], np.uint64)
    crcs = of.gather(to, addresses(*parts), sizes, chunk_bytes)
    assert np.array_equal(to, whole)
    chunks = range(0, whole.size, chunk_bytes)
    assert [*crcs] == [TWIN.crc32c(whole[at : at + chunk_bytes]) for at in chunks]


@pytest.mark.parametrize("of", [native, TWIN], ids=["chosen", "twin"])
def test_a_piece_in_its_place_is_only_hashed(of: ModuleType) -> None:
    to = MEMORY[:1_000].copy()
    sizes = np.array([400, 600], np.uint64)
    crcs = of.gather(to, addresses(MEMORY[5_000:], to[400:]), sizes, 512)
    whole = np.concatenate([MEMORY[5_000:5_400], MEMORY[400:1_000]])
    assert np.array_equal(to, whole)
    assert [*crcs] == [TWIN.crc32c(whole[:512]), TWIN.crc32c(whole[512:])]


@pytest.fixture(name="live")
def _live() -> Iterator[NDArray[np.uint8]]:
    """Memory that another thread writes all the time, as a trainer's is."""
    live, over = MEMORY.copy(), threading.Event()

    def train() -> None:
        while not over.is_set():
            np.add(live, 1, live)  # lets others run meanwhile

    trainer = threading.Thread(target=train)
    trainer.start()
    yield live
    over.set()
    trainer.join()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [5, 100, 300, 1_500, 2**16])
def test_what_is_hashed_is_what_was_written(
    level: str, live: NDArray[np.uint8], size: int, stream: bool
) -> None:
    """Though it changes meanwhile: otherwise no worker could ever verify it."""
    parts = [live[at : at + size] for at in range(0, live.size - size + 1, size)] * 4
    to = np.zeros(size * len(parts) + 7, np.uint8)[7:]  # not aligned
    crcs, chunk_bytes = np.zeros(5, np.uint32), -(-to.size // 5)
    from_, sizes = addresses(*parts), np.full(len(parts), size, np.uint64)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        HELPER.gather(to, from_, sizes, chunk_bytes, crcs, stream)
        chunks = range(0, to.size, chunk_bytes)
        assert [*crcs] == [TWIN.crc32c(to[at : at + chunk_bytes]) for at in chunks], level


@pytest.mark.parametrize("of", [native, TWIN], ids=["chosen", "twin"])
@pytest.mark.parametrize("sizes", [[10], [10, 5], [2**63, 2**63]])
def test_pieces_of_another_length_are_refused(of: ModuleType, sizes: list[int]) -> None:
    to = np.full(14, 7, np.uint8)
    from_ = addresses(*[MEMORY] * len(sizes))
    with pytest.raises(ValueError, match="pieces"):
        of.gather(to, from_, np.array(sizes, np.uint64), 4)
    assert set(to) == {7}


@pytest.mark.parametrize("of", [native, TWIN], ids=["chosen", "twin"])
@given(pieces=PIECES)
def test_many_copies_are_made_again_and_again(
    of: ModuleType, pieces: list[tuple[int, int]]
) -> None:
    source = MEMORY.copy()
    parts = [source[begin : begin + size] for begin, size in pieces]
    rooms = [np.full(part.size + 2, 7, np.uint8) for part in parts]
    sizes = np.array([part.size for part in parts], np.uint64)
    run = of.copies(addresses(*[room[1:] for room in rooms]), addresses(*parts), sizes)
    for _ in range(2):
        run()
        for part, room in zip(parts, rooms, strict=True):
            assert np.array_equal(room[1:-1], part)
            assert room[0] == room[-1] == 7
        source += 1


@built
@given(begin=OFFSETS, to=st.integers(0, 70), size=st.integers(2**15 - 2, 2**15 + 600))
@example(begin=0, to=0, size=2**15)
def test_a_copy_around_the_caches_is_the_same(begin: int, to: int, size: int) -> None:
    source, room = MEMORY[begin : begin + size], np.full(to + size + 300, 7, np.uint8)
    HELPER.copies(addresses(room[to:]), addresses(source), np.array([size], np.uint64), True)
    assert np.array_equal(room[to : to + size], source)
    assert set(room[:to]) | set(room[to + size :]) == {7}


@built
@pytest.mark.parametrize("nbytes", [native.STREAM_BYTES - 1, native.STREAM_BYTES])
def test_large_copies_go_around_the_caches(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(HELPER, "copies", lambda *given: asked.append(len(given) == 4))
    half = np.array([1, nbytes - 1], np.uint64)
    native.copies(np.array([0, 2], np.uint64), np.array([9, 12], np.uint64), half)()
    assert asked == [nbytes >= native.STREAM_BYTES]


# Looking at tensors.

EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
looks = pytest.mark.skipif(not native.BUILT or EXCHANGE is None, reason="no helper, or old torch")


@looks
def test_whatever_is_changed_of_a_tensor_but_its_values_changes_its_mark() -> None:
    base = torch.zeros(6, 4)
    seen = {native.marks([base], EXCHANGE)}
    base.fill_(3)
    assert native.marks([base], EXCHANGE) in seen
    for other in (
        base[1:],
        base.t(),
        base.view(4, 6),
        base.view(24),
        base.view(torch.int32),
        base[:, :2],
        base[:1].expand(6, 4),
        base.clone(),
        torch.zeros(0, 4),
    ):
        mark = native.marks([other], EXCHANGE)
        assert mark not in seen
        seen.add(mark)


@looks
def test_marks_of_many_tensors_stand_one_after_the_other() -> None:
    tensors = [torch.zeros([1] * rank) for rank in (0, 64, 3) * 100]
    single = b"".join(native.marks([tensor], EXCHANGE) for tensor in tensors)
    assert native.marks(tensors, EXCHANGE) == single
    assert native.marks([], EXCHANGE) == b""


@looks
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=["complex, perhaps conjugated", "sparse", "meta"],
)
def test_some_tensors_cannot_be_looked_at(tensor: torch.Tensor) -> None:
    with pytest.raises((BufferError, RuntimeError)):
        native.marks([tensor], EXCHANGE)


@looks
def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        native.marks([torch.zeros(1)], object())


# Exchanging pages.


def mapping(nbytes: int, value: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = bytes([value]) * nbytes
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


@built
@pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, 5 * mmap.PAGESIZE, 2**22])
def test_pages_are_exchanged(nbytes: int) -> None:
    (one, a), (other, b) = mapping(nbytes, 1), mapping(nbytes, 2)
    for turn in range(3):
        native.exchange(a, b, nbytes)
        mine, others = (1, 2) if turn % 2 else (2, 1)
        assert one[:] == bytes([mine]) * nbytes
        assert other[:] == bytes([others]) * nbytes


@built
def test_what_cannot_be_exchanged_stays_as_it_is() -> None:
    size = 2 * mmap.PAGESIZE
    one, a = mapping(size, 1)
    with pytest.raises(OSError, match="Invalid argument"):
        native.exchange(a, a + 8, size)  # not on a boundary of pages: the second step fails
    assert one[:] == bytes([1]) * size


def test_without_the_helper_pages_are_not_exchanged() -> None:
    with pytest.raises(OSError, match="helper"):
        TWIN.exchange(0, 0, 0)


# Addresses where there is no memory.


@pytest.mark.parametrize("of", [native, TWIN], ids=["chosen", "python"])
@pytest.mark.parametrize("nowhere", [0, 24, native.FIRST_ADDRESS - 1, 2**64 - 8])
def test_nothing_is_copied_where_there_is_no_memory(of: ModuleType, nowhere: int) -> None:
    source, room = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
    sizes = np.array([32, 32], np.uint64)
    sound, odd = addresses(source, source), np.array([addresses(source)[0], nowhere], np.uint64)
    for to, from_ in ((addresses(room, room[32:]), odd), (odd, sound)):
        with pytest.raises(ValueError, match=f"32 bytes at address {nowhere}: there is no memory"):
            of.copies(to, from_, sizes)()
    with pytest.raises(ValueError, match=f"32 bytes at address {nowhere}: there is no memory"):
        of.gather(room, odd, sizes, 64)
    assert not room.any(), "all addresses are looked at before a byte is copied"
    assert (source == 7).all()
    with pytest.raises(ValueError, match="there is no memory"):
        of.bytes_at(nowhere, 32)


@pytest.mark.parametrize("of", [native, TWIN], ids=["chosen", "python"])
def test_what_is_empty_may_lie_nowhere(of: ModuleType) -> None:
    source, room = np.full(8, 7, np.uint8), np.zeros(8, np.uint8)
    nothing, sizes = np.array([0], np.uint64), np.array([0, 8], np.uint64)
    to, from_ = (np.concatenate([nothing, addresses(each)]) for each in (room, source))
    of.copies(to, from_, sizes)()
    assert (room == 7).all()
    room[:] = 0
    of.gather(room, from_, sizes, 8)
    assert (room == 7).all()


@built
def test_pages_are_exchanged_with_no_address_where_there_is_no_memory() -> None:
    size = mmap.PAGESIZE
    one, a = mapping(size, 1)
    for pair in ((a, 0), (0, a)):
        with pytest.raises(ValueError, match="there is no memory"):
            native.exchange(*pair, size)
    assert one[:] == bytes([1]) * size


@looks
def test_tensors_without_memory_have_no_marks() -> None:
    freed, part = torch.ones(4), torch.ones(8)[2:]
    for tensor in (freed, part):
        tensor.untyped_storage().resize_(0)
        with pytest.raises(BufferError, match="no memory"):
            native.marks([torch.zeros(1), tensor], EXCHANGE)
    assert native.marks([torch.zeros(0), freed[:0]], EXCHANGE), "nor does what is empty need any"
