"""Header and data are a safetensors file: what we write others load, what they write we apply."""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, load_model, save, save_file, save_model
from torch import nn

from weightbus.codecs.apply import as_arrays, copy_into
from weightbus.codecs.layout import Layout
from weightbus.tests.codecs.test_codecs_apply import published


def model() -> nn.ModuleDict:
    made = nn.ModuleDict(
        {"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6), "norm": nn.BatchNorm1d(4)}
    )
    made["head"].weight = made["embed"].weight
    return made


def written(source: object, path: Path) -> Path:
    layout, data = published(source)
    path.write_bytes(layout.header + bytes(data))
    return path


def opened(path: Path) -> tuple[Layout, bytes]:
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    return Layout.parse(whole[:end]), whole[end:]


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def test_safetensors_loads_what_we_write(tmp_path: Path) -> None:
    ours, theirs = model(), model()
    path = written(ours, tmp_path / "x.safetensors")
    load_model(theirs, path)
    assert_same(theirs, ours)
    loaded = load_file(path)
    assert "head.weight" not in loaded
    for name, value in loaded.items():
        assert torch.equal(value, ours.state_dict()[name])
    for name, array in load_numpy(path).items():
        np.testing.assert_array_equal(array, loaded[name].numpy())


def test_we_apply_what_safetensors_writes(tmp_path: Path) -> None:
    theirs, ours = model(), model()
    save_model(theirs, str(tmp_path / "x"), {"format": "pt"})
    layout, data = opened(tmp_path / "x")
    assert dict(layout.aliases) == {"head.weight": "embed.weight"}
    assert dict(layout.metadata) == {"format": "pt", "head.weight": "embed.weight"}
    copy_into(layout, data, ours)
    assert_same(ours, theirs)
    save_file({"x": torch.arange(3), "y": torch.ones(2).bfloat16()}, tmp_path / "y")
    arrays = as_arrays(*opened(tmp_path / "y"))
    assert arrays["x"].tolist() == [0, 1, 2]
    assert arrays["y"].astype(np.float32).tolist() == [1, 1]


def test_our_bytes_are_the_very_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "z": torch.rand(3),
        "a.b": torch.rand(2, 2),
        'é\n\x01"': torch.arange(5),
        "half": torch.rand(3).half(),
        "brain": torch.rand(3).bfloat16(),
        "mask": torch.tensor([True, False, True]),
        "four": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "scalar": torch.tensor(1.5),
        "none": torch.zeros(0, 3),
    }
    whole = save(tensors)
    header = Layout.parse(whole[: 8 + int.from_bytes(whole[:8], "little")])
    in_order = {spec.name: tensors[spec.name] for spec in header.tensors}
    assert written(in_order, tmp_path / "x").read_bytes() == whole
    layout, data = published(tensors)
    assert bytes(data) == whole[len(header.header) :]
    assert layout.names() == tuple(tensors)
