"""Loaders of every kind are recorded, and load the same from the recorded parts as from everything.

The models have two ranks, and load as tensor-parallel models of inference engines do.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from weightbus.codecs.dtypes import name_of_torch
from weightbus.codecs.layout import Signature
from weightbus.python_client.serving.recording import Recording, record
from weightbus.python_client.serving.regions import Box, Region, contiguous, whole
from weightbus.python_client.serving.stand_ins import PartError

RANKS = 2
Weights = dict[str, torch.Tensor]
Loader = Callable[["Model", torch.Tensor], object]


class Model(nn.Module):
    """A model of one rank whose tensors are loaded by functions.

    Args:
        rank: The rank.
        loaders: A loader for each name; others are skipped.
        shapes: The shape of each parameter.
    """

    def __init__(self, rank: int, loaders: dict[str, Loader], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.rank, self.loaders, self.loads = rank, loaders, 0
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if name in self.loaders:
                self.loaders[name](self, tensor)
                self.loads += 1


def drawn(seed: int, **shapes: tuple[int, ...]) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def signatures(weights: Weights) -> dict[str, Signature]:
    return {name: (name_of_torch(t.dtype), tuple(t.shape)) for name, t in weights.items()}


def parts(recording: Recording, weights: Weights) -> Weights:
    return {n: weights[n][cut(box)].contiguous() for n, box in recording.part.items()}


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


def state(model: nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: Weights, other: Weights) -> bool:
    """Return whether all values are equal, bit for bit."""
    assert one.keys() == other.keys()
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in ((one[name].contiguous(), other[name].contiguous()) for name in one)
    )


def checked(make: Callable[[], Any], weights: Weights) -> Recording:
    """Record a model, and compare what it loads from parts with what it loads from everything."""
    model, ordinary, by_loaders = make(), make(), make()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape).to(tensor.dtype))
    before, attributes = state(model), {**vars(model)}
    for other in (ordinary, by_loaders):
        other.load_state_dict(before)
    recording = record(model, model.load_weights, signatures(weights))
    assert same(state(model), before), "recording has changed the model"
    assert vars(model) == attributes
    ordinary.load_weights(weights.items())
    assert not same(state(ordinary), before)
    local = parts(recording, weights)
    by_loaders.load_weights(recording.pairs(local.items()))
    assert same(state(by_loaders), state(ordinary))
    for name, part in local.items():
        if name not in recording.ordinary:
            recording.apply(name, part)
    rest = ((name, part) for name, part in local.items() if name in recording.ordinary)
    model.load_weights(recording.pairs(rest))
    assert same(state(model), state(ordinary))
    return recording


# Tensors that are copied.


def qkv(heads: int, offset: int) -> Loader:
    """Load a rank's heads of q, k or v into the fused parameter, at an offset."""

    def load(model: Model, tensor: torch.Tensor) -> None:
        mine = tensor.narrow(0, model.rank * heads, heads)
        model.get_parameter("qkv").data.narrow(0, offset, heads).copy_(mine)

    return load


def gate_up(half: int) -> Loader:
    def load(model: Model, tensor: torch.Tensor) -> None:
        into = model.get_parameter("gate_up").data.chunk(2, 0)[half]
        into[:] = tensor.view(RANKS, 6, 16)[model.rank]

    return load


def by_row(model: Model, tensor: torch.Tensor) -> None:
    model.get_parameter("row").data.copy_(tensor.chunk(RANKS, 1)[model.rank])


def copied(name: str) -> Loader:
    return lambda model, tensor: model.get_parameter(name).data.copy_(tensor)


def bias(model: Model, tensor: torch.Tensor) -> None:
    model.get_parameter("bias").data.copy_(tensor[model.rank :: RANKS])


def vocabulary(model: Model, tensor: torch.Tensor) -> None:
    """Load a rank's words; the parameter has more rows, of zeros."""
    words = tensor.shape[0] // RANKS
    into = model.get_parameter("words")
    into[:words].data.copy_(tensor[model.rank * words : (model.rank + 1) * words])
    into[words:].data.fill_(0)


def transposed(model: Model, tensor: torch.Tensor) -> None:
    mine = tensor.narrow(1, 3 * model.rank, 3)
    model.get_parameter("turned").data.copy_(mine.t().contiguous().view(3, 2, 8).flatten(1))


def expert(number: int) -> Loader:
    """Load half of an expert into its place among the experts."""

    def load(model: Model, tensor: torch.Tensor) -> None:
        model.get_parameter("experts").data[number].copy_(tensor.chunk(RANKS, 0)[model.rank])

    return load


def fused_experts(model: Model, tensor: torch.Tensor) -> None:
    """Load experts that are one transposed tensor in the checkpoint, one by one."""
    for number, each in enumerate(tensor.unbind(0)):
        mine = each.transpose(0, 1).chunk(RANKS, 0)[model.rank]
        model.get_parameter("fused").data[number].copy_(mine)


COPIED: dict[str, Loader] = {
    "q": qkv(4, 0),
    "k": qkv(2, 4),
    "v": qkv(2, 6),
    "gate": gate_up(0),
    "up": gate_up(1),
    "row": by_row,
    "norm": copied("norm"),
    "bias": bias,
    "words": vocabulary,
    "turned": transposed,
    "expert0": expert(0),
    "expert1": expert(1),
    "fused": fused_experts,
}
PARAMETERS: dict[str, tuple[int, ...]] = {
    "qkv": (8, 16),
    "gate_up": (12, 16),
    "row": (16, 4),
    "norm": (16,),
    "bias": (8,),
    "words": (8, 16),
    "turned": (3, 16),
    "experts": (2, 6, 16),
    "fused": (2, 6, 16),
}
CHECKPOINT: dict[str, tuple[int, ...]] = {
    "q": (8, 16),
    "k": (4, 16),
    "v": (4, 16),
    "gate": (12, 16),
    "up": (12, 16),
    "row": (16, 8),
    "norm": (16,),
    "bias": (16,),
    "words": (10, 16),
    "turned": (16, 6),
    "unused": (8, 8),
    "expert0": (12, 16),
    "expert1": (12, 16),
    "fused": (2, 16, 12),
}


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_kind_of_loader_needs_its_box(rank: int) -> None:
    weights = drawn(1, **CHECKPOINT)
    recording = checked(lambda: Model(rank, COPIED, **PARAMETERS), weights)
    assert recording.why_whole == ""
    assert not recording.ordinary

    def half(size: int) -> tuple[int, int]:
        return rank * size, (rank + 1) * size

    every = (0, 16)
    assert recording.part == {
        "q": (half(4), every),
        "k": (half(2), every),
        "v": (half(2), every),
        "gate": (half(6), every),
        "up": (half(6), every),
        "row": (every, half(4)),
        "norm": (every,),
        "bias": ((rank, 15 + rank),),
        "words": (half(5), every),
        "turned": (every, half(3)),
        "expert0": (half(6), every),
        "expert1": (half(6), every),
        "fused": ((0, 2), every, half(6)),
    }
    needed, has = recording.bits
    assert has == 32 * sum(tensor.numel() for tensor in weights.values())
    assert needed == 32 * sum(part.numel() for part in parts(recording, weights).values())


def test_tied_embeddings_are_loaded_by_either_name() -> None:
    def make() -> Model:
        model = Model(1, {"words": vocabulary, "head": vocabulary}, words=(8, 16))
        model.register_parameter("head", model.get_parameter("words"))
        return model

    recording = checked(make, drawn(2, words=(10, 16), head=(10, 16)))
    assert recording.part == dict.fromkeys(("words", "head"), ((5, 10), (0, 16)))


def test_parts_in_several_boxes_need_the_box_around_them() -> None:
    def load(model: Model, tensor: torch.Tensor) -> None:
        """Load from q, k and v that are one tensor in the checkpoint."""
        for at, size, offset in ((0, 4, 0), (8, 2, 4), (12, 2, 6)):
            mine = tensor.narrow(0, at + model.rank * size, size)
            model.get_parameter("qkv").data.narrow(0, offset, size).copy_(mine)

    recording = checked(lambda: Model(0, {"qkv": load}, qkv=(8, 16)), drawn(3, qkv=(16, 16)))
    assert recording.part == {"qkv": ((0, 14), (0, 16))}


def test_a_part_without_elements_is_needed_by_no_rank() -> None:
    """More ranks than heads: the last one has none of them."""

    def load(model: Model, tensor: torch.Tensor) -> None:
        mine = tensor.narrow(0, min(model.rank * 4, 4), 4 - 4 * model.rank)
        into = model.get_parameter("row").data[: mine.shape[0]]
        into.copy_(mine)
        model.get_parameter("row").data[6:].copy_(tensor.narrow(0, 4, 0).t().contiguous().t())
        model.get_parameter("row").data[4:].copy_(tensor[3:4])

    weights = drawn(3, row=(4, 8))
    assert checked(lambda: Model(0, {"row": load}, row=(6, 8)), weights).part["row"][0] == (0, 4)
    assert checked(lambda: Model(1, {"row": load}, row=(6, 8)), weights).part["row"][0] == (3, 4)


def test_a_narrower_dtype_is_copied_into_a_wider_one() -> None:
    weights = {"row": drawn(4, row=(16, 8))["row"].bfloat16()}
    assert checked(lambda: Model(1, {"row": by_row}, row=(16, 4)), weights).ordinary == frozenset()


# Tensors that loaders compute with.


def computed(model: Model, tensor: torch.Tensor) -> None:
    model.get_parameter("row").data.copy_(-tensor.chunk(RANKS, 1)[model.rank].double().exp())


def cast(model: Model, tensor: torch.Tensor) -> None:
    model.get_parameter("row").data.copy_(tensor.half().chunk(RANKS, 1)[model.rank])


def added(model: Model, tensor: torch.Tensor) -> None:
    model.get_parameter("row").data.add_(tensor.chunk(RANKS, 1)[model.rank])


def by_index(model: Model, tensor: torch.Tensor) -> None:
    model.get_parameter("row").data.copy_(tensor[:, torch.arange(4) * 2 + model.rank])


def stacked(model: Model, tensor: torch.Tensor) -> None:
    one, other = tensor.narrow(1, 0, 2), tensor.narrow(1, 4, 2)
    model.get_parameter("row").data.copy_(torch.cat([one, other], 1))


def diagonal(model: Model, tensor: torch.Tensor) -> None:
    model.get_parameter("row").data[:8, 0].copy_(tensor.diagonal())


@pytest.mark.parametrize(
    ("load", "columns"),
    [
        *((computed, (4, 8)), (cast, (0, 8)), (added, (4, 8)), (by_index, (0, 8))),
        *((stacked, (0, 6)), (diagonal, (0, 8))),
    ],
)
def test_a_loader_that_computes_needs_what_it_computes_with(
    load: Loader, columns: tuple[int, int]
) -> None:
    """Its tensor is loaded by it; the other one is copied."""
    loaders: dict[str, Loader] = {"row": load, "words": vocabulary}
    weights = drawn(5, row=(16, 8), words=(10, 16))
    recording = checked(lambda: Model(1, loaders, row=(16, 4), words=(8, 16)), weights)
    assert recording.ordinary == {"row"}
    assert recording.part == {"row": ((0, 16), columns), "words": ((5, 10), (0, 16))}
    with pytest.raises(PartError, match=r"more than copy 'row'"):
        recording.apply("row", parts(recording, weights)["row"])


def test_a_scale_may_be_asked_for_its_value() -> None:
    def scale(model: Model, tensor: torch.Tensor) -> None:
        model.get_parameter("scale").data.fill_(tensor.item())

    weights = drawn(6, scale=(), row=(16, 8))
    loaders: dict[str, Loader] = {"scale": scale, "row": by_row}
    recording = checked(lambda: Model(1, loaders, scale=(1,), row=(16, 4)), weights)
    assert recording.part == {"scale": (), "row": ((0, 16), (4, 8))}
    assert recording.ordinary == {"scale"}


# Loaders that cannot be followed.


def asks(model: Model, tensor: torch.Tensor) -> None:
    if tensor[0, 0] > 0:
        by_row(model, tensor)


def asks_quietly(model: Model, tensor: torch.Tensor) -> None:
    try:
        asks(model, tensor)
    except Exception:
        model.loads = -1


def by_numpy(model: Model, tensor: torch.Tensor) -> None:
    by_row(model, torch.from_numpy(tensor.numpy()))


def by_address(model: Model, tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % 2 == 0:
        by_row(model, tensor)


def replaces_memory(model: Model, tensor: torch.Tensor) -> None:
    model.get_parameter("row").data = tensor.chunk(RANKS, 1)[model.rank]


def replaces_parameter(model: Model, tensor: torch.Tensor) -> None:
    by_row(model, tensor)
    model.row = nn.Parameter(model.get_parameter("row").clone(), requires_grad=False)


def keeps(model: Model, tensor: torch.Tensor) -> None:
    vars(model)["kept"] = tensor


def collects(model: Model, tensor: torch.Tensor) -> None:
    collected = torch.empty(tensor.shape)
    collected.copy_(tensor)
    by_row(model, collected)


def overwrites(model: Model, tensor: torch.Tensor) -> None:
    by_row(model, tensor.mul_(2))


def masked(model: Model, tensor: torch.Tensor) -> None:
    model.get_parameter("row").data.view(-1)[:1].copy_(tensor[tensor > 9][:1].sum())


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (asks, "needs its values"),
        (asks_quietly, "needs its values"),
        (by_numpy, "needs its values"),
        (by_address, "needs its values"),
        (replaces_memory, "replaces the memory"),
        (replaces_parameter, "replaces parameters of a Model"),
        (keeps, "keeps a part of 'row'"),
        (collects, "copies it to a tensor of its own"),
        (overwrites, "writes into a tensor that it loads"),
        (masked, "needs its values"),
    ],
)
def test_what_cannot_be_followed_needs_everything(load: Loader, why: str) -> None:
    model = Model(1, {"row": load, "words": vocabulary}, row=(16, 4), words=(8, 16))
    before, attributes = state(model), {**vars(model)}
    row = model.get_parameter("row")
    weights = drawn(7, row=(16, 8), words=(10, 16), unused=(3, 3))
    recording = record(model, model.load_weights, signatures(weights))
    assert why in recording.why_whole
    assert recording.part == {name: whole(tensor.shape) for name, tensor in weights.items()}
    assert model.get_parameter("row") is row
    assert same(state(model), before)
    assert vars(model) == attributes
    given = dict(recording.pairs(weights.items()))
    assert all(given[name] is tensor for name, tensor in weights.items())


def test_a_model_that_needs_names_that_it_does_not_read_needs_everything() -> None:
    class Counting(Model):
        def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            given = dict(pairs)
            super().load_weights({"row": given["row"], "unused": given["unused"]}.items())

    weights = drawn(8, row=(16, 8), unused=(3, 3))
    model = Counting(0, {"row": by_row}, row=(16, 4))
    recording = record(model, model.load_weights, signatures(weights))
    assert "KeyError: 'unused'" in recording.why_whole
    assert recording.part["row"] == ((0, 16), (0, 8))


def test_loaders_that_differ_from_run_to_run_need_everything() -> None:
    runs: list[int] = []

    def load(model: Model, tensor: torch.Tensor) -> None:
        runs.append(1)
        model.get_parameter("row").data.copy_(tensor.chunk(RANKS, 1)[len(runs) % RANKS])

    model = Model(0, {"row": load}, row=(16, 4))
    recording = record(model, model.load_weights, {"row": ("F32", (16, 8))})
    assert "do not do the same" in recording.why_whole


# Parts that do not fit.


def test_a_read_outside_of_the_part_is_an_error() -> None:
    model = Model(0, {"row": by_row}, row=(16, 4))
    recording = record(model, model.load_weights, {"row": ("F32", (16, 8))})
    model.rank = 1
    with pytest.raises(PartError, match=r"'row'.*only \[0:16, 0:4\] of \[16, 8\] was received"):
        model.load_weights(recording.pairs([("row", torch.ones(16, 4))]))
    assert not model.get_parameter("row").any()


@pytest.mark.parametrize(
    "part", [torch.ones(16, 8), torch.ones(16, 4).double(), torch.ones(4, 16).t()]
)
def test_a_part_of_another_form_is_an_error(part: torch.Tensor) -> None:
    model = Model(0, {"row": by_row}, row=(16, 4))
    recording = record(model, model.load_weights, {"row": ("F32", (16, 8))})
    with pytest.raises(PartError, match=r"must be torch.float32 \[16, 4\], contiguous"):
        recording.apply("row", part)
    with pytest.raises(PartError, match=r"must be torch.float32 \[16, 4\], contiguous"):
        model.load_weights(recording.pairs([("row", part)]))


def test_a_model_of_another_form_is_an_error() -> None:
    model = Model(0, {"row": by_row}, row=(16, 4))
    recording = record(model, model.load_weights, {"row": ("F32", (16, 8))})
    model.row = nn.Parameter(torch.zeros(4, 16).t(), requires_grad=False)
    with pytest.raises(PartError, match=r"row is torch.float32 \[16, 4\]"):
        recording.apply("row", torch.ones(16, 4))


def test_packed_values_are_needed_whole() -> None:
    """An element has two of them in torch, and one of them in a layout."""
    model = Model(0, {"row": by_row})
    model.register_buffer("row", torch.zeros(16, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            into = model.get_buffer("row").view(torch.uint8)
            into.copy_(tensor.view(torch.uint8).chunk(RANKS, 1)[0])

    recording = record(model, load, {"row": ("F4", (16, 8))})
    assert recording.why_whole == ""
    assert recording.part == {"row": ((0, 16), (0, 8))}


# Regions.


def positions(region: Region) -> list[int]:
    found = [region.offset]
    for count, stride in region.loops:
        found = [position + step * stride for position in found for step in range(count)]
    return found


def changed(rng: random.Random, view: torch.Tensor) -> torch.Tensor:
    """Return a view of a view, of a random kind."""
    dims = view.dim()
    match rng.choice(["narrow", "transpose", "view", "step", "select", "unsqueeze", "expand"]):
        case "narrow" if dims:
            dim = rng.randrange(dims)
            begin = rng.randrange(view.shape[dim])
            return view.narrow(dim, begin, rng.randint(1, view.shape[dim] - begin))
        case "transpose" if dims > 1:
            return view.transpose(*rng.sample(range(dims), 2))
        case "view" if view.is_contiguous():
            rows = rng.choice([n for n in range(1, view.numel() + 1) if view.numel() % n == 0])
            return view.view(rows, -1)
        case "step" if dims:
            return view[..., ::2]
        case "select" if dims > 1:
            return view[rng.randrange(view.shape[0])]
        case "expand" if view.numel() < 500:
            return view.unsqueeze(0).expand(2, *view.shape)
        case _:
            return view.unsqueeze(0)


def test_regions_are_where_torch_has_the_elements() -> None:
    followed, seeds = 0, 2000
    for seed in range(seeds):
        rng = random.Random(seed)
        shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4)))
        numbered = torch.arange(torch.Size(shape).numel()).reshape(shape)
        view, memory = numbered, Region(0, tuple(zip(shape, contiguous(shape), strict=True)))
        region: Region | None = memory
        for _ in range(rng.randint(1, 6)):
            view = changed(rng, view)
            loops = tuple(zip(view.shape, view.stride(), strict=True))
            region = Region(int(view.storage_offset()), loops).within(memory)
            if region is None:
                break
            if rng.random() < 0.2:
                view, memory = view.clone(memory_format=torch.contiguous_format), region
        if region is None:
            continue
        followed += 1
        assert positions(region) == view.flatten().tolist(), seed
        box = region.box(shape)
        assert box is not None
        at = torch.unravel_index(torch.tensor(positions(region)), shape)
        assert box == tuple((int(i.min()), int(i.max()) + 1) for i in at), seed
        local = numbered[cut(box)].flatten()
        place = region.in_box(shape, box)
        assert place is not None
        assert local[torch.tensor(positions(place))].tolist() == view.flatten().tolist(), seed
    assert followed > seeds * 0.9
