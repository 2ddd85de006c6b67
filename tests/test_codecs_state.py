"""A model becomes bytes and comes back, bit for bit."""

import numpy as np
import torch
from torch import nn

from weightbus.codecs.apply import check, copy_into
from weightbus.codecs.layout import Layout
from weightbus.codecs.state import state_of, write_into


def test_a_module_with_tied_weights_comes_back() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4), "n": nn.BatchNorm1d(4)})
    model["b"].weight = model["a"].weight
    state = state_of(model)
    assert state.aliases == {"b.weight": "a.weight"}
    layout = state.layout()
    data = np.empty(layout.nbytes, np.uint8)
    write_into(state, layout, data)
    other = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4), "n": nn.BatchNorm1d(4)})
    pointers = [p.data_ptr() for p in other.parameters()]
    assert check(Layout.parse(layout.header), other) == []
    copy_into(layout, data, other)
    assert pointers == [p.data_ptr() for p in other.parameters()]
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
