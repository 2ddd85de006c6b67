"""Where little differs, that alone is written: but what is there afterwards is the version."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.messages import DELTA, PatchId
from weightbus.bus.staged import StagedVersion
from weightbus.codecs.copies import SCAN_WORDS, SMALL_BYTES, Differences
from weightbus.codecs.layout import Layout
from weightbus.codecs.state import state_of, write_into
from weightbus.python_client.applying.targets import MemoryTarget

SECONDS = 20.0
COUNT = SMALL_BYTES  # elements of the larger tensor
BY = PatchId(DELTA, 1, 1)
Weights = dict[str, NDArray[Any]]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(["u1", "<f2", "<f4", "<f8", "<c16", "?"]),
    count=st.sampled_from([SMALL_BYTES + 1, SCAN_WORDS + 3]),
    offset=st.integers(0, 1),
    many=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_differs_is_found_and_written_bit_for_bit(
    dtype: str, count: int, offset: int, many: bool, seed: int
) -> None:
    rng, width = np.random.default_rng(seed), np.dtype(dtype).itemsize
    new = rng.integers(0, 2 if dtype == "?" else 256, count * width, np.uint8)
    memory = np.zeros(offset + new.size, np.uint8)
    old = memory[offset:]
    old[:] = new
    at = rng.choice(count, count // (4 if many else 200), replace=False)
    old.reshape(count, width)[at] ^= 1
    pair = [old.view(dtype)], [new.view(dtype)]
    if many:
        with pytest.raises(ValueError, match="differs"):
            Differences(*pair)
        return
    differences = Differences(*pair)
    assert not np.array_equal(old, new), "to look changes nothing"
    differences.write()
    assert np.array_equal(old, new)


@pytest.mark.parametrize(
    ("to", "from_"),
    [
        (np.zeros((COUNT, 2), np.float32)[:, 0], np.zeros(COUNT, np.float32)),
        (np.zeros(COUNT, np.float16), np.zeros(COUNT, np.int16)),
        (torch.zeros(COUNT, 2)[:, 0], torch.zeros(COUNT)),
    ],
)
def test_what_is_not_plain_memory_is_left_to_who_copies_all(to: Any, from_: Any) -> None:
    with pytest.raises(ValueError, match="plain"):
        Differences([to], [from_])


def test_torch_hears_of_it() -> None:
    """A backward pass that needs the old values must fail."""
    large, small = torch.zeros(COUNT), torch.zeros(3)
    new = [torch.zeros(COUNT), torch.ones(3)]
    new[0][7] = float("nan")
    before = [tensor._version for tensor in (large, small)]  # noqa: SLF001
    Differences([large, small], new).write()
    assert torch.isnan(large).nonzero().tolist() == [[7]]
    assert torch.equal(small, new[1])
    after = [tensor._version for tensor in (large, small)]  # noqa: SLF001
    assert all(now > was for now, was in zip(after, before, strict=True))


def test_what_is_looked_at_stays_in_memory_whatever_a_reader_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = np.zeros(COUNT, np.float32)
    lives, tensor = weakref.ref(array), torch.from_numpy(array)
    del array
    seen, look = list[bool](), Differences._where  # noqa: SLF001 # pyright: ignore

    def moved(self: Differences, there: Any, new: Any) -> Any:
        tensor.data = torch.zeros(COUNT)  # its reader moves it, as `module.to()` does
        seen.append(lives() is not None)
        return look(self, there, new)

    monkeypatch.setattr(Differences, "_where", moved)
    Differences([tensor], [torch.zeros(COUNT)])
    assert seen == [True]


def test_an_interrupt_before_a_version_is_applied_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, here = MemoryTarget.prepare, {"w": np.zeros(3, np.float32)}

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(MemoryTarget, "prepare", ahead)
        raise KeyboardInterrupt

    hooked = Settings(shared_memory=False, on_commit=print)  # so that this thread applies
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(publisher.address, {"m": here}, name="w", settings=hooked) as worker,
    ):
        published = publisher.publish_async("m", {"w": np.ones(3, np.float32)}, expect=1)
        monkeypatch.setattr(MemoryTarget, "prepare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.receive(timeout=SECONDS)
        update = worker.receive(timeout=SECONDS)
        assert update is not None
        assert published.result(SECONDS).workers["w"].state == "applied"
    assert here["w"].all()


class Bench:
    """A model to which versions are applied out of one buffer, as the bus does in turns."""

    def __init__(self, *, sole_writer: bool = True) -> None:
        self.model = self.weights(0)
        self.target = MemoryTarget(self.model, strict=True, cast=False, sole_writer=sole_writer)
        self.layout = state_of(self.model).layout()
        self.data = np.zeros(self.layout.nbytes, np.uint8)
        self.number = 0
        self.apply(self.next())  # all of it: then it is known how to

    def weights(self, number: int) -> Weights:
        large = np.zeros(COUNT, np.float32)
        large[:number] = 1
        return {"w": large, "b": np.full(3, number, np.float32)}

    def next(self, patch: PatchId | None = BY) -> StagedVersion:
        self.number += 1
        write_into(state_of(self.weights(self.number)), self.layout, self.data)
        layout: Layout = self.layout
        return StagedVersion("m", (1, self.number), layout, self.data, "", patch=patch)

    def apply(self, staged: StagedVersion) -> None:
        self.target.apply(staged)
        self.target.settle()

    @property
    def right(self) -> bool:
        """Whether the model is the version."""
        wanted = self.weights(self.number)
        return all(np.array_equal(self.model[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("sole_writer", "patch", "mended"), [(True, BY, False), (False, BY, True), (True, None, True)]
)
def test_what_differs_alone_is_written_if_nobody_else_writes(
    sole_writer: bool, patch: PatchId | None, mended: bool
) -> None:
    bench = Bench(sole_writer=sole_writer)
    staged = bench.next(patch)
    bench.target.prepare(staged)
    bench.model["w"][100] = 5.0  # who does so has said that nobody does
    bench.apply(staged)
    assert bench.right is mended
    staged = bench.next()
    bench.target.prepare(staged)
    bench.apply(staged)
    assert bench.right, "the next version mends it"


def test_what_users_wrote_before_is_mended() -> None:
    bench = Bench()
    bench.model["w"][100] = 5.0
    staged = bench.next()
    bench.target.prepare(staged)
    bench.apply(staged)
    assert bench.right


def test_who_has_looked_before_another_version_was_applied_copies_all() -> None:
    bench = Bench()
    staged = bench.next()
    bench.target.prepare(staged)
    differ = bench.target._differences  # noqa: SLF001 # pyright: ignore
    other = StagedVersion("m", (1, 1), bench.layout, np.ones_like(bench.data), "")
    for moment in ("before", "meanwhile", "failed"):
        if moment == "meanwhile":  # somebody looks while it is applied, and is done before it is
            bench.target.apply(other)
            bench.target.prepare(staged)
            bench.target.settle()
        elif moment == "failed":
            bench.target.apply(other)
            bench.target.prepare(staged)
            bench.target.undo()
        else:
            bench.apply(other)
            bench.target._differences = differ  # noqa: SLF001 # pyright: ignore
        bench.model["w"][:] = 9.0  # as if it had come after that look
        bench.apply(staged)
        assert bench.right, moment


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_over_the_bus_it_is_the_version_and_little_was_written(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, written, write = 2**20, list[int](), Differences.write
    rng = np.random.default_rng(0)
    model = {"w": rng.normal(0, 0.05, count).astype(np.float16)}
    here: dict[str, Any] = {"w": np.zeros(count, np.float16)}
    if kind == "torch":
        here = {"w": torch.zeros(count, dtype=torch.float16)}

    def noted(self: Differences) -> None:
        written.append(sum(at.size for _, at, _ in self._found))  # pyright: ignore
        write(self)

    monkeypatch.setattr(Differences, "write", noted)
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(
            publisher.address,
            {"m": here},
            name="w",
            settings=Settings(sole_writer=True, shared_memory=False),
        ) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        for step in range(8):  # each of three buffers is copied from as a whole, once
            model["w"].view(np.uint16)[step::100] ^= 1
            publisher.publish("m", model, settings=Settings(encoding="delta"), timeout=SECONDS)
            assert np.array_equal(np.asarray(here["w"]), model["w"])
    assert written
    assert all(abs(size - count // 100) <= 1 for size in written)
