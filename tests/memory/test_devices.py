"""Weights on a device: what crosses how, what waits for what. (`test_gpu.py`: on a real one.)"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus import DeadlineError, Publisher, Settings, Subscriber
from weightbus.bus.errors import ClosedError
from weightbus.bus.memory import segment
from weightbus.bus.receipt import Receipt
from weightbus.codecs import device_copies, device_memory
from weightbus.codecs.apply import Reader
from weightbus.codecs.errors import StateError
from weightbus.codecs.state import Writer, state_of
from weightbus.python_client.applying.reading import ReadingLock
from weightbus.tests.memory import standin_device
from weightbus.tests.memory.standin_device import Standin

SECONDS = 20.0
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.uint8]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Standin:
    """A device whose link takes little at once."""
    monkeypatch.setattr(device_copies, "ALONE_BYTES", 512)
    monkeypatch.setattr(device_copies, "PIECE_BYTES", 1024)
    return standin_device.install(monkeypatch)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.randint(0, 2 if dtype == torch.bool else 100, shape, dtype=torch.int32)
    return (made + (seed % 2)).to(dtype) if dtype != torch.bool else made.to(dtype)


@st.composite
def described(draw: st.DrawFn) -> list[tuple[tuple[int, ...], torch.dtype, bool, bool]]:
    """Shapes, dtypes, whether transposed, and whether on the device."""
    shape = st.lists(st.integers(0, 24), max_size=3).map(tuple)
    each = st.tuples(shape, st.sampled_from(DTYPES), st.booleans(), st.sampled_from([1, 1, 1, 0]))
    return [(s, d, t, bool(there)) for s, d, t, there in draw(st.lists(each, max_size=12))]


def built(
    some: list[tuple[tuple[int, ...], torch.dtype, bool, bool]], device: Standin, seed: int
) -> dict[str, torch.Tensor]:
    state = dict[str, torch.Tensor]()
    for number, (shape, dtype, transposed, there) in enumerate(some):
        made = tensor(shape, dtype, seed)
        made = made.mT if transposed and made.ndim >= 2 else made
        state[f"t{number}"] = device.put(made) if there and made.numel() else made
    return state


@settings(max_examples=60, deadline=None)
@given(described(), st.booleans())
def test_what_crosses_is_what_was_there(
    some: list[tuple[tuple[int, ...], torch.dtype, bool, bool]], second: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "ALONE_BYTES", 512)
        patch.setattr(device_copies, "PIECE_BYTES", 1024)
        patch.setattr(device_memory, "PIECE_BYTES", 4096)
        device = standin_device.install(patch)
        writer: Any = None
        source = built(some, device, 0)
        for seed in range(2):  # what was prepared once is used again
            for each in source.values():
                each.copy_(tensor(tuple(each.shape), each.dtype, seed))
            state = state_of(source)
            if writer is None:
                data = np.full(state.layout().nbytes, 0xEE, np.uint8)
                writer = Writer(state.layout(), data, second=second)
            writer.write(state)
            apart = {name: each.clone().contiguous() for name, each in source.items()}
            wanted = np.zeros(writer.section.layout.nbytes, np.uint8)
            Writer(writer.section.layout, wanted).write(state_of(apart))
            assert np.array_equal(writer.section.data, wanted)
        target = built(some, device, 1)
        reader = Reader(writer.section.layout, writer.section.data)
        for _ in range(2):
            for each in target.values():
                each.zero_()
            reader.copy_into(target)
            assert all(torch.equal(target[name], each) for name, each in source.items())


@given(st.integers(1, 10_000), st.integers(0, 10_000))
def test_memory_is_pinned_in_pieces_that_a_copy_can_tell(address: int, nbytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "PIECE_BYTES", 1000)
        cuts = device_memory.pieces(address, nbytes)
        # A part of it is cut where the whole is.
        begin = nbytes // 3
        inner = {begin + end for _, end in device_memory.pieces(address + begin, nbytes - begin)}
    assert [end for _, end in cuts][:-1] == [begin for begin, _ in cuts][1:]
    assert (cuts[0][0], cuts[-1][1]) == (0, nbytes)
    assert all(end - begin <= 1000 for begin, end in cuts)
    assert inner == {end for _, end in cuts if end > begin} or begin == nbytes


def test_a_note_fits_where_it_is_put() -> None:
    note = device_memory.encode_note(bytes(16), bytes(64), 2**40)
    assert len(note) == segment.NOTE_BYTES


def test_small_tensors_cross_together_and_large_ones_alone(device: Standin) -> None:
    source = {f"s{i}": device.put(torch.full((25,), float(i))) for i in range(30)}
    source["large"] = device.put(torch.ones(1000))
    state = state_of(source)
    writer = Writer(state.layout(), np.zeros(state.layout().nbytes, np.uint8))
    writer.ready(state)
    crossing: Any = vars(vars(vars(writer)["_copies"])["devices"])["_outward"][0]
    assert len(vars(crossing)["_alone"]) == 1
    batches = [len(batch.members) for batch in vars(crossing)["_batches"]]
    assert batches == [10, 10, 10]  # of 100 bytes each


def test_no_memory_on_the_device_leaves_the_target_as_it_was(device: Standin) -> None:
    source = {"a": torch.ones(10), "b": torch.ones(10)}
    state = state_of(source)
    data = np.zeros(state.layout().nbytes, np.uint8)
    Writer(state.layout(), data).write(state)
    target = {"a": torch.zeros(10), "b": device.put(torch.zeros(10))}
    reader, device.room = Reader(state.layout(), data), 10
    with pytest.raises(MemoryError):
        reader.copy_into(target)
    assert not reader.begun
    assert not target["a"].any()


def test_a_version_is_out_once_its_weights_are_there(device: Standin) -> None:
    weights = {"w": device.put(torch.ones(300))}
    target = {"w": torch.zeros(300)}
    with Publisher() as publisher, Subscriber(publisher.address, {"m": target}) as worker:
        publisher.wait_for_workers(1, SECONDS)
        device.done.clear()
        future = publisher.publish_async("m", weights, timeout=SECONDS)
        assert worker.receive(0.2) is None
        assert not future.done()
        device.done.set()
        assert worker.receive(SECONDS) is not None
        assert future.result(SECONDS).in_state("applied")
    assert target["w"].all()


def test_a_device_that_is_late_fails_the_publish_and_keeps_the_memory(device: Standin) -> None:
    weights = {"w": device.put(torch.ones(300))}
    with Publisher() as publisher:
        device.done.clear()
        late = publisher.publish_async("m", weights, timeout=0.2)
        with pytest.raises(DeadlineError, match="m: the weights were not copied"):
            late.result(SECONDS)
        with pytest.raises(DeadlineError):  # it is still being written to
            publisher.publish("m", weights, timeout=0.2)
        publisher.publish("other", {"w": torch.ones(3)}, timeout=SECONDS)
        device.done.set()
        assert publisher.publish("m", weights, timeout=SECONDS).version == 1


def test_a_device_that_fails_fails_the_publish(device: Standin) -> None:
    with Publisher() as publisher:
        device.fault = RuntimeError("an illegal address was accessed")
        future = publisher.publish_async("m", {"w": device.put(torch.ones(3))}, timeout=SECONDS)
        with pytest.raises(RuntimeError, match="illegal address"):
            future.result(SECONDS)
        device.fault = None
        publisher.publish("m", {"w": torch.ones(3)}, timeout=SECONDS)


def test_a_publisher_may_be_closed_meanwhile(device: Standin) -> None:
    with Publisher() as publisher:
        device.done.clear()
        future = publisher.publish_async("m", {"w": device.put(torch.ones(3))}, timeout=SECONDS)
    device.done.set()
    with pytest.raises(ClosedError):
        future.result(SECONDS)


def test_a_state_that_does_not_fit_is_said_at_once(device: Standin) -> None:
    with Publisher() as publisher, pytest.raises(StateError):
        publisher.publish_async("m", {"": device.put(torch.ones(3))})


@pytest.mark.parametrize("encoding", ["raw", "delta"])
def test_digests_are_those_of_the_bytes(device: Standin, encoding: Any) -> None:
    weights, target = {"w": device.put(torch.arange(5e5))}, {"w": torch.zeros(500_000)}
    few = Settings(shared_memory=False, encoding=encoding)
    plain = Settings(shared_memory=False)
    with (
        Publisher(settings=few) as publisher,
        Subscriber(publisher.address, {"m": target}, settings=plain).start(),
    ):
        publisher.wait_for_workers(1, SECONDS)
        receipts: list[Receipt] = []
        for _ in range(3):
            weights["w"][7] += 1
            receipts.append(publisher.publish("m", weights, timeout=SECONDS))
            assert torch.equal(target["w"], weights["w"])
        again = publisher.publish("m", {"w": weights["w"].clone()}, timeout=SECONDS)
    assert again.digest
    assert receipts[-1].digest == again.digest


def test_a_writer_waits_on_the_device_for_readers_that_have_left(device: Standin) -> None:
    lock, here = ReadingLock(), torch.device("cpu")
    lock.reads_on(frozenset({here}))
    with lock.reading():
        pass
    assert not device.current.waited
    device.capturing = True
    with lock.reading():  # into a graph: what is recorded there cannot be waited for
        pass
    lock.wait_for_readers()
    (event,) = device.current.waited
    assert isinstance(event, standin_device.Event)
    assert event.recorded


@pytest.mark.usefixtures("device")
def test_a_block_ends_though_the_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = ReadingLock()
    lock.reads_on(frozenset({torch.device("cpu")}))

    def fails(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(standin_device.Event, "record", fails)
    with pytest.raises(RuntimeError, match="lost"), lock.reading():
        pass
    with lock.writing(0.0):
        pass


def test_an_apply_waits_for_the_device(device: Standin) -> None:
    target, done = {"w": device.put(torch.zeros(300))}, threading.Event()
    with Publisher() as publisher, Subscriber(publisher.address, {"m": target}) as worker:
        publisher.wait_for_workers(1, SECONDS)
        future = publisher.publish_async("m", {"w": torch.ones(300)}, timeout=SECONDS)
        device.done.clear()
        thread = threading.Thread(target=_then(lambda: worker.receive(SECONDS), done))
        thread.start()
        assert not done.wait(0.2)
        assert not future.done()
        device.done.set()
        assert future.result(SECONDS).in_state("applied")
        thread.join(SECONDS)
    assert target["w"].all()


def _then(call: Callable[[], object], done: threading.Event) -> Callable[[], None]:
    def run() -> None:
        call()
        done.set()

    return run
