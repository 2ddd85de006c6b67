"""Resident models: what stays, what moves, what an exchange of pages does and undoes."""

import copy
import io
import logging
import mmap
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import nn

from weightbus import Publisher, PublishError, Settings, Subscriber
from weightbus.bus.memory import pages
from weightbus.bus.staged import StagedVersion
from weightbus.codecs import native
from weightbus.codecs.errors import StateError
from weightbus.codecs.layout import Layout
from weightbus.codecs.state import state_of, write_into
from weightbus.python_client.applying.resident import (
    ResidentMemory,
    ResidentTarget,
    residence_of,
    resident,
)
from weightbus.python_client.applying.targets import MemoryTarget
from weightbus.tests.cli.starting import python

SECONDS = 60.0

needs_exchange = pytest.mark.skipif(not native.BUILT, reason="pages are exchanged in C alone")


class Policy(nn.Module):
    """Tied weights, buffers of both kinds, several dtypes, a scalar, and nothing at all."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.rand(33) > 0.5)
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.register_buffer("none", torch.zeros(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def layout_of(model: object) -> Layout:
    return state_of(model).layout()


def bytes_of(model: object) -> NDArray[np.uint8]:
    layout = layout_of(model)
    data = pages.memory_of(layout.nbytes)
    write_into(state_of(model), layout, data)
    return data


def staged(model: object, version: int = 1) -> StagedVersion:
    return StagedVersion("m", (1, version), layout_of(model), bytes_of(model), "")


def target_of(model: object) -> ResidentTarget:
    return ResidentTarget(model, MemoryTarget(model, strict=True, cast=False))


def pointers(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in model.state_dict().values()]


# Pages.


@needs_exchange
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 10_000, 2**21 - 1, 2**21, 5 * 2**20 + 17])
def test_pages_are_exchanged_and_stay_where_they_are(nbytes: int) -> None:
    one, other = pages.memory_of(nbytes), pages.memory_of(nbytes)
    one[:], other[:] = 1, 2
    places = pages.address_of(one), pages.address_of(other)
    pages.exchange(one, other)
    assert np.all(one == 2)
    assert np.all(other == 1)
    assert places == (pages.address_of(one), pages.address_of(other))


@pytest.mark.parametrize(
    "other",
    [
        np.zeros(4096, np.uint8),
        pages.memory_of(4095),
        pages.memory_of(8192)[4000:8096],
        pages.memory_of(8192)[4096:],
    ],
    ids=["of numpy", "another size", "in the middle of a page", "a part of something else's"],
)
def test_what_has_no_pages_of_its_own_is_not_exchanged(other: NDArray[np.uint8]) -> None:
    one = pages.memory_of(4096)
    with pytest.raises(
        ValueError, match=r"4096 and \d+ bytes cannot be exchanged: give two arrays"
    ):
        pages.exchange(one, other)


@pytest.mark.parametrize("huge", [False, True], ids=["pages of 4 KiB", "huge pages"])
@pytest.mark.parametrize("places", [(0, 0), (0, 4096), (4096, 0), (4096, 4096)], ids=str)
@needs_exchange
def test_a_model_is_exchanged_wherever_its_pages_begin(places: tuple[int, int], huge: bool) -> None:
    nbytes, left = 3 * 2**20 + 5, iter(places)

    def memory_of(nbytes: int) -> NDArray[np.uint8]:
        mapping = pages.Pages(nbytes)
        mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
        begin = (next(left) - pages.address_of(whole)) % pages.TABLE_BYTES
        return whole[begin : begin + nbytes]

    one, other = memory_of(nbytes), memory_of(nbytes)
    assert [pages.address_of(each) % pages.TABLE_BYTES for each in (one, other)] == [*places]
    expected = [np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8) for seed in (1, 2)]
    one[:], other[:] = expected
    for turn in range(3):
        pages.exchange(one, other)
        assert np.array_equal(one, expected[(turn + 1) % 2])
        assert np.array_equal(other, expected[turn % 2])


@needs_exchange
def test_a_fork_in_between_sees_one_version_or_the_other() -> None:
    memory = [pages.memory_of(2**21) for _ in range(2)]
    memory[0][:], memory[1][:] = 1, 2
    for _ in range(20):
        read, write = os.pipe()
        pages.exchange(*memory)
        child = os.fork()
        if not child:
            values = np.unique(memory[0]).tolist() + np.unique(memory[1]).tolist()
            os.write(write, bytes(values))
            os._exit(0)
        os.waitpid(child, 0)
        assert sorted(os.read(read, 10)) == [1, 2]
        os.close(read)
        os.close(write)


@needs_exchange
def test_where_room_is_short_nothing_changes_and_later_pages_are_exchanged_again() -> None:
    script = """
import resource
from weightbus.bus.memory import pages
one, other = (pages.memory_of(2**22) for _ in range(2))
one[:], other[:] = 1, 2
pages.exchange(one, other)
usual = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (2**20, usual[1]))
try:
    pages.exchange(one, other)
except MemoryError as error:
    words = str(error)
resource.setrlimit(resource.RLIMIT_AS, usual)
assert words == "no address space for 4194304 more bytes, which an exchange of pages needs", words
assert (one == 2).all() and (other == 1).all()
pages.exchange(one, other)
assert (one == 1).all() and (other == 2).all()
"""
    python("-c", script, timeout=SECONDS)


REFUSED = """
import ctypes, gc, os
from weightbus.bus.memory import pages
shim, outcomes = ctypes.CDLL(os.environ["SHIM"]), {}

def attempt(one, other):
    try:
        pages.exchange(one, other)
    except OSError as error:
        assert error.strerror == "Cannot allocate memory"
        return 0
    return 1

for case in [(move, taken) for move in (1, 2, 3) for taken in (0, 1)]:
    child = os.fork()
    if not child:
        one, other = (pages.memory_of(2**22 + 1) for _ in range(2))
        one[:], other[:] = 1, 2
        shim.refuse(*case)
        swapped = attempt(one, other)
        assert not attempt(one, other), "it tries again"
        gc.collect()
        assert shim.others_are_well()
        assert (one == 1 + swapped).all() and (other == 2 - swapped).all()
        os._exit(swapped)
    outcomes[case] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(outcomes)
"""


@needs_exchange
@pytest.mark.skipif(
    shutil.which("cc") is None and not os.environ.get("CI"), reason="a C compiler makes moves fail"
)
def test_a_move_that_fails_half_way_leaves_no_hole_and_touches_nobody_elses_memory(
    tmp_path: Path,
) -> None:
    shim = tmp_path / "refused_moves.so"
    source = Path(__file__).with_name("refused_moves.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source], check=True, timeout=SECONDS)  # noqa: S603, S607
    told = {"LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {shim}", "SHIM": str(shim)}
    done = python("-W", "ignore", "-c", REFUSED, env=os.environ | told, timeout=SECONDS)
    kept, swapped, aborted = 0, 1, -signal.SIGABRT
    expected = {(1, 0): kept, (1, 1): kept, (2, 0): kept, (2, 1): aborted}
    expected |= {(3, 0): swapped, (3, 1): aborted}
    assert done.stdout.strip() == str({case: int(expected[case]) for case in expected}), done.stderr
    assert done.stderr.count("the kernel lost a model's memory") == 2


# Moving in.


def test_a_model_that_moves_in_is_the_same_model() -> None:
    model = Policy()
    before, twin = [*model.parameters(), *model.buffers()], copy.deepcopy(model)
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    assert resident(model) is model
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))
    assert model.head.weight is model.embed.weight
    assert grads == {name: p.requires_grad for name, p in model.named_parameters()}
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    residence = residence_of(model, layout_of(model))
    assert residence.memory.tobytes() == bytes_of(model).tobytes()
    assert pages.address_of(residence.memory) % 4096 == 0


def test_moving_in_twice_moves_nothing() -> None:
    model = resident(Policy())
    before = pointers(model)
    assert pointers(resident(model)) == before


def test_each_tensor_is_saved_alone() -> None:
    large, small = nn.Linear(1000, 1000), nn.Linear(1000, 3)
    resident(nn.Sequential(large, small))
    file = io.BytesIO()
    torch.save(small.bias, file)
    assert file.tell() < 10_000
    file.seek(0)
    assert torch.equal(torch.load(file), small.bias)


def test_a_copy_of_a_resident_model_is_not_resident() -> None:
    model = resident(Policy())
    residence, twin = residence_of(model, layout_of(model)), copy.deepcopy(model)
    assert residence.has(model)
    assert not residence.has(twin)


def test_what_a_version_does_not_carry_stays_outside() -> None:
    model = Policy()
    cache, empty = model.get_buffer("cache").data_ptr(), model.none
    residence = residence_of(resident(model), layout_of(model))
    assert model.get_buffer("cache").data_ptr() == cache
    assert model.none is empty
    begin = pages.address_of(residence.memory)
    assert not begin <= cache < begin + residence.memory.nbytes


def test_autograd_is_told_of_what_changes_and_of_nothing_else() -> None:
    model, source = Policy(), Policy()
    target = target_of(resident(model))
    cache, weight = model.get_buffer("cache"), model.scale
    before = cache._version, weight._version  # noqa: SLF001
    target.apply(staged(source))
    after = cache._version, weight._version  # noqa: SLF001
    assert after[0] == before[0]
    assert after[1] > before[1]


def test_memory_lives_as_long_as_a_tensor_in_it() -> None:
    weight = resident(nn.Linear(30, 30)).weight
    expected = weight.detach().clone()
    others = [resident(nn.Linear(30, 30)) for _ in range(10)]
    assert torch.equal(weight, expected)
    del others


@pytest.mark.parametrize("kind", ["dict", "TensorDict"])
def test_dictionaries_move_in_as_well(kind: str) -> None:
    tensors = {"a": torch.arange(10.0), "b": torch.arange(3)}
    model: Any = tensors if kind == "dict" else TensorDict(tensors, batch_size=[])
    before = {name: model[name] for name in tensors}
    residence = residence_of(resident(model), layout_of(model))
    assert residence.has(model)
    assert all(model[name] is before[name] for name in tensors)
    model["a"] = torch.zeros(10)
    assert not residence.has(model)


def test_a_consolidated_tensordict_moves_in_and_is_an_ordinary_one_then() -> None:
    values = {"a": torch.arange(10.0), "b": {"c": torch.arange(3), "d": torch.rand(2) > 0.5}}
    model: Any = TensorDict(values, batch_size=[]).consolidate()
    twin, before = model.clone(), model["b", "c"]
    residence = residence_of(resident(model), layout_of(model))
    assert residence.has(model)
    assert model["b", "c"] is before
    assert (model == twin).all()
    assert not model.is_consolidated()  # what moves all of it at once would move the old storage
    source: Any = TensorDict(
        {"a": torch.ones(10), "b": {"c": twin["b", "c"] + 1, "d": twin["b", "d"]}}
    )
    target_of(model).apply(staged(source))
    assert (model == source).all()
    assert (model.consolidate() == source).all()


def test_a_consolidated_tensordict_in_shared_memory_stays_where_it_is() -> None:
    model: Any = TensorDict({"a": torch.arange(10.0)}).consolidate()
    model.share_memory_()
    with pytest.raises(StateError, match="a cannot be resident: it is shared with other"):
        resident(model)
    assert model.is_consolidated()


def shared() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.data = model.weight.data.share_memory_()
    return model


def view() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.zeros(10, 4)[2:6])
    return model


def overlapping() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("row", model.weight.data.view(16))
    return model


def beside() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("row", model.weight.data.view(16), persistent=False)
    return model


def transposed() -> nn.Module:
    model = nn.Linear(4, 5)
    model.weight = nn.Parameter(torch.zeros(4, 5).t())
    return model


class VersionInfo(torch.Tensor):
    """A tensor of somebody's own kind."""


def subclass() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.zeros(4, 4).as_subclass(VersionInfo))
    return model


def hooked() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_state_dict_post_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (shared, "weight cannot be resident: it is shared with other processes"),
        (view, r"weight cannot be resident: it is 64 bytes of a storage of 160 \(give a .clone"),
        (overlapping, "weight cannot be resident: it is part of the same storage as row"),
        (beside, "weight cannot be resident: a tensor that .* shares its storage"),
        (transposed, "weight cannot be resident: it is not contiguous"),
        (subclass, "a Linear cannot be resident: .* of special classes"),
        (hooked, r"a Linear cannot be resident: its state_dict\(\) has hooks"),
    ],
)
def test_what_cannot_move_is_named_and_nothing_moves(
    make: Callable[[], nn.Module], text: str
) -> None:
    model = make()
    before = pointers(model)
    with pytest.raises(StateError, match=text):
        resident(model)
    assert pointers(model) == before


def test_numpy_arrays_cannot_move() -> None:
    with pytest.raises(StateError, match="only torch tensors can be resident"):
        resident({"a": np.zeros(3)})


# Applying.


def versions(count: int) -> Iterator[Policy]:
    for seed in range(count):
        torch.manual_seed(seed)
        yield Policy()


def test_every_version_is_applied_in_place() -> None:
    model = Policy()
    target = target_of(model)
    target.apply(staged(model))
    target.settle()
    places = pointers(model)
    buffers = [pages.memory_of(layout_of(model).nbytes) for _ in range(2)]
    for number, source in enumerate(versions(6)):
        layout, data = layout_of(source), buffers[number % 2]
        write_into(state_of(source), layout, data)
        target.apply(StagedVersion("m", (1, number), layout, data, ""))
        target.settle()
        for name, value in source.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), (number, name)
        assert pointers(model) == places
        assert model.head.weight is model.embed.weight


@needs_exchange
def test_undoing_has_the_old_bytes_in_place() -> None:
    old, new = versions(2)
    expected = copy.deepcopy(old)
    target = target_of(old)
    target.apply(staged(new))
    assert torch.equal(old.scale, new.scale)
    assert target.undo()
    for name, value in expected.state_dict().items():
        assert torch.equal(old.state_dict()[name], value), name


def test_undoing_copies_where_pages_can_no_longer_be_exchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = versions(2)
    expected = bytes_of(old)
    target = target_of(old)
    target.apply(staged(new))
    exchanged = native.BUILT

    def refuse(*_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(native, "exchange", refuse)
    assert target.undo() == exchanged  # what was copied cannot be undone
    if exchanged:
        assert bytes_of(old).tobytes() == expected.tobytes()


def test_where_pages_cannot_be_exchanged_weights_are_copied_and_it_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not on this system")

    monkeypatch.setattr(native, "exchange", refuse)
    model, *sources = versions(4)
    target = target_of(model)
    with caplog.at_level(logging.WARNING):
        for source in sources:
            target.apply(staged(source))
            assert bytes_of(model).tobytes() == bytes_of(source).tobytes()
    (told,) = caplog.messages
    assert told == "weights are copied, not exchanged: not on this system"


def moved_by_data(model: Policy) -> None:
    model.scale.data = torch.zeros_like(model.scale)


def moved_by_assign(model: Policy) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def moved_by_sharing(model: Policy) -> None:
    model.share_memory()


@pytest.mark.parametrize("move", [moved_by_data, moved_by_assign, moved_by_sharing])
def test_a_model_that_something_moved_away_gets_the_version_all_the_same(
    move: Callable[[Policy], None],
) -> None:
    model, *sources = versions(4)
    target = target_of(model)
    for source in sources:
        target.apply(staged(source))
        target.settle()
        assert bytes_of(model).tobytes() == bytes_of(source).tobytes()
        move(model)


def test_a_backward_pass_that_spans_an_apply_fails_instead_of_mixing() -> None:
    old, new = nn.Linear(8, 8), nn.Linear(8, 8)
    target = target_of(resident(old))
    loss = old(old(torch.randn(4, 8))).sum()
    target.apply(staged(new))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_goes_on_with_the_same_parameters() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    target = target_of(resident(model))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        before = model.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, model.weight)
        target.apply(staged(nn.Linear(8, 8)))


@needs_exchange
@given(st.lists(st.sampled_from(["apply", "undo", "step", "move"]), max_size=12), st.integers(0, 9))
def test_whatever_happens_the_model_holds_one_version(steps: list[str], seed: int) -> None:
    torch.manual_seed(seed)
    first = nn.Linear(3, 5)
    model = nn.Sequential(first, nn.BatchNorm1d(5))
    target, expected = target_of(model), bytes_of(model)
    undo: NDArray[np.uint8] | None = None
    for step in steps:
        if step == "apply":
            source = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
            undo, expected = expected, bytes_of(source)
            target.apply(staged(source))
        elif step == "undo" and undo is not None:
            assert target.undo()
            expected, undo = undo, None
        elif step == "step":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            expected, undo = bytes_of(model), None
            target.settle()
        elif step == "move":
            target.settle()
            undo = None
            first.weight.data = first.weight.data.clone()
        assert bytes_of(model).tobytes() == expected.tobytes()


def test_a_residence_is_known_by_its_places() -> None:
    model = resident(nn.Linear(3, 3))
    residence: ResidentMemory = residence_of(model, layout_of(model))
    assert residence.has(model)
    model.register_buffer("more", torch.zeros(1))
    assert not residence.has(model)


# One copy for what lies together.


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2), st.booleans()), max_size=12))
def test_neighbours_are_copied_as_one(pieces: list[tuple[int, int, bool]]) -> None:
    source = np.arange(1000, dtype=np.uint16).astype(np.uint8)
    to, from_, sizes = list[int](), list[int](), list[int]()
    at = place = 0
    for size, gap, jump in pieces:
        to.append(at)
        from_.append(place)
        sizes.append(size)
        at += size + gap
        place += size + (7 if jump else gap)
    expected, found = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
    for begin, origin, size in zip(to, from_, sizes, strict=True):
        expected[begin : begin + size] = source[origin : origin + size]
    begins = [pages.address_of(found), pages.address_of(source)]
    lists = np.array([to, from_, sizes], np.uint64).reshape(3, -1)
    lists[:2] += np.array(begins, np.uint64)[:, None]
    native.copies(*np.random.default_rng(1).permutation(lists, axis=1))()
    assert found.tobytes() == expected.tobytes()
    if native.BUILT and pieces and not any(gap or jump for _, gap, jump in pieces):
        assert len(native.joined(*lists)[0]) <= 1 + sizes.count(0)


# Over the bus.


class Rows(torch.utils.data.Dataset[float]):
    """Reads a model in forked worker processes."""

    def __init__(self, model: nn.Linear) -> None:
        self._model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return self._model.weight[index, 0].item()


def filled(value: float, model: nn.Linear | None = None) -> nn.Linear:
    model = model or nn.Linear(300, 300)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@needs_exchange
@pytest.mark.parametrize("commit", ["auto", "together"])
def test_readers_see_whole_versions_at_one_address(commit: Literal["auto", "together"]) -> None:
    model = filled(0)
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(publisher.address, {"m": model}, settings=Settings(resident=True)) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", filled(1), timeout=SECONDS, commit=commit)
        places, seen = pointers(model), set[float]()
        for value in range(2, 30):
            done = publisher.publish_async("m", filled(value), timeout=SECONDS, commit=commit)
            while not done.done():
                with worker.reading():
                    values = set(model.weight.unique().tolist()) | set(model.bias.unique().tolist())
                assert len(values) == 1
                seen |= values
            done.result()
        with worker.reading():
            assert model.weight.unique().tolist() == [29]
        assert pointers(model) == places
        loader = torch.utils.data.DataLoader(
            Rows(model), num_workers=1, multiprocessing_context="fork"
        )
        assert [value.item() for value in loader] == [29] * 4


@needs_exchange
def test_a_version_that_is_aborted_is_never_exchanged() -> None:
    model, misfit = filled(0), {"weight": torch.zeros(3)}
    residence = residence_of(model, layout_of(model))
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(publisher.address, {"m": model}, settings=Settings(resident=True)) as worker,
        Subscriber(publisher.address, {"m": misfit}) as beside,
    ):
        worker.start()
        beside.start()
        publisher.wait_for_workers(2, SECONDS)
        publisher.publish("m", filled(1), timeout=SECONDS, require=1)
        with pytest.raises(PublishError):
            publisher.publish("m", filled(2), timeout=SECONDS, commit="together")
        with worker.reading():
            assert model.weight.unique().tolist() == [1]
        publisher.publish("m", filled(3), timeout=SECONDS, commit="together", require=1)
        with worker.reading():
            assert model.weight.unique().tolist() == [3]
    assert residence.has(model)


@needs_exchange
def test_a_hook_that_fails_leaves_the_version_before() -> None:
    model, fail = filled(0), threading.Event()

    def hook(_update: object) -> None:
        if fail.is_set():
            raise ValueError("not this one")

    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(
            publisher.address, {"m": model}, settings=Settings(resident=True, on_commit=hook)
        ) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", filled(1), timeout=SECONDS)
        fail.set()
        with pytest.raises(PublishError, match="not this one"):
            publisher.publish("m", filled(2), timeout=SECONDS)
        with worker.reading():
            assert model.weight.unique().tolist() == [1]
        assert worker.version("m") == 1


def test_a_version_in_shared_memory_is_copied_in() -> None:
    model = filled(0)
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": model}, settings=Settings(resident=True)) as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        for value in (1, 2):
            receipt = publisher.publish_async("m", filled(value), timeout=SECONDS)
            assert worker.receive(SECONDS)
            receipt.result()
            assert model.weight.unique().tolist() == [value]
        assert residence_of(model, layout_of(model)).has(model)


def test_what_cannot_be_resident_is_copied_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    arrays = {"a": np.zeros(10, np.float32)}
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(publisher.address, {"m": arrays}, settings=Settings(resident=True)) as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        for value in (1, 2):
            receipt = publisher.publish_async("m", {"a": np.full(10, value, np.float32)})
            assert worker.receive(SECONDS)
            assert receipt.result().version == value
            assert set(arrays["a"]) == {value}
    told = [message for message in caplog.messages if "exchanged" in message]
    assert told == [
        "weights are copied, not exchanged: only torch tensors can be resident; numpy arrays are "
        "copied to"
    ]


@needs_exchange
def test_a_snapshot_of_a_resident_model_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    model, joined = resident(Policy()), native.joined

    def counted(*pieces: native.Addresses) -> tuple[native.Addresses, ...]:
        found = joined(*pieces)
        counts.append(len(found[0]))
        return found

    monkeypatch.setattr(native, "joined", counted)
    data = bytes_of(model)
    assert counts[-1] <= 2  # and one of no bytes, which lies anywhere
    assert data.tobytes() == residence_of(model, layout_of(model)).memory.tobytes()
