"""A rank whose model's loaders read slices receives only these slices."""

import threading
from collections.abc import Iterable, Mapping

import pytest
import torch

from weightbus import Publisher
from weightbus.codecs.layout import Signature
from weightbus.python_client.serving.rank import Join, Rank, RankVersion
from weightbus.python_client.serving.recording import Recording, record
from weightbus.types import Staged

SECONDS = 60.0
ROWS, COLUMNS = 256, 64
TENSORS: dict[str, tuple[str, list[int]]] = {
    "up.weight": ("F32", [ROWS, COLUMNS]),
    "down.weight": ("F32", [COLUMNS, ROWS]),
    "norm.weight": ("F32", [COLUMNS]),
}


class Half(torch.nn.Module):
    """Half of two layers, as one of two ranks has it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.up = torch.nn.Linear(COLUMNS, ROWS // 2, bias=False)
        self.down = torch.nn.Linear(ROWS // 2, COLUMNS, bias=False)
        self.norm = torch.nn.LayerNorm(COLUMNS, bias=False)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            part = tensor
            if name != "norm.weight":
                part = tensor.narrow(int(name == "down.weight"), self.rank * ROWS // 2, ROWS // 2)
            self.get_parameter(name).data.copy_(part)


class Loader:
    """Loads versions into such a model; with `whole`, in a way that cannot be followed."""

    def __init__(self, model: Half, *, whole: bool = False) -> None:
        self.model, self._whole = model, whole

    def rehearse(self, tensors: Mapping[str, Signature]) -> str:
        return "" if tensors else "nothing is published"

    def record(self, tensors: Mapping[str, Signature]) -> Recording:
        def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in pairs:
                decided = self._whole and bool((tensor != 0).any())  # by values: not to be followed
                self.model.load_weights([(name, tensor)] if not decided else [])

        return record(self.model, load, tensors)

    def make_ready(self, staged: Staged) -> None:
        """Nothing can be done ahead."""

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(pairs)


def published() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: torch.randn(shape) for name, (_, shape) in TENSORS.items()}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_receives_what_its_loaders_read(rank: int, *, whole: bool) -> None:
    model, full = Half(rank), published()
    member = Rank(Loader(model, whole=whole), parts=True)
    with Publisher("tcp://127.0.0.1:0") as publisher:
        member.join(Join(publisher.address, tensors=TENSORS), "dp0-rank0")
        try:
            taken = member.takes_part
            publisher.wait_for_workers(1, SECONDS)
            calling = threading.Thread(
                target=publisher.publish, args=("policy", full), kwargs={"timeout": SECONDS}
            )
            calling.start()
            member.update(RankVersion(publisher.epoch, 1, SECONDS))
            member.finish()
            calling.join(SECONDS)
        finally:
            member.leave()
    half = rank * ROWS // 2
    assert torch.equal(model.up.weight, full["up.weight"][half : half + ROWS // 2])
    assert torch.equal(model.down.weight, full["down.weight"][:, half : half + ROWS // 2])
    assert torch.equal(model.norm.weight, full["norm.weight"])
    assert taken is not whole


def test_a_version_of_other_tensors_is_refused_by_name() -> None:
    model, full = Half(0), published()
    member = Rank(Loader(model), parts=True)
    with Publisher("tcp://127.0.0.1:0") as publisher:
        member.join(Join(publisher.address, tensors=TENSORS), "dp0-rank0")
        try:
            publisher.wait_for_workers(1, SECONDS)
            wrong = full | {"norm.weight": torch.zeros(3)}
            receipt = publisher.publish("policy", wrong, timeout=SECONDS, require=0)
        finally:
            member.leave()
    (worker,) = receipt.workers.values()
    assert worker.state == "failed"
    assert "norm.weight: shape [3] published" in worker.detail
