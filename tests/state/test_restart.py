"""A trainer that is started again loads what it published last, whoever has the folder."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weightbus
from weightbus import Publisher, StateError, StateFolderError
from weightbus.python_client.files.state_folder import TABLE
from weightbus.tests.client.settling import settled
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than anything here takes
SAID = {"step": "12000"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def published(folder: Path, **options: Any) -> Tied:
    model = Tied()
    with Publisher(state=folder, history=2) as publisher:
        publisher.publish("policy", model, metadata=SAID, **settled(options))
    return model


def written(publisher: Publisher, *models: str) -> None:
    """Wait until the latest version of each model is on disk."""
    wait_for(lambda: all(map(publisher.history, models)), "it is on disk", SECONDS)


def equal(one: nn.Module, other: nn.Module) -> bool:
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[n], its[n]) for n in mine)


def test_the_first_start_has_nothing_to_load(tmp_path: Path) -> None:
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert weightbus.load(tmp_path / "not there", "policy", into=model) is None
    with Publisher(state=tmp_path):
        assert weightbus.load(tmp_path, "policy", into=model) is None
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_a_module_is_loaded_in_place_with_its_ties(tmp_path: Path) -> None:
    model, other = published(tmp_path), Tied()
    pointers = [p.data_ptr() for p in other.parameters()]
    stored = weightbus.load(str(tmp_path), "policy", into=other)
    assert stored is not None
    assert (stored.model, stored.version, stored.metadata) == ("policy", 1, SAID)
    assert equal(model, other)
    assert [p.data_ptr() for p in other.parameters()] == pointers
    assert other.head.weight is other.embed.weight
    assert all(p.requires_grad for p in other.parameters())


def test_each_of_several_models_and_each_older_version(tmp_path: Path) -> None:
    with Publisher(state=tmp_path, history=2) as publisher:
        for number in (1, 2):
            for name in ("policy", "critic"):
                weights = {"w": np.full(3, number, np.int32)}
                publisher.publish(name, weights, metadata={"of": f"{name} {number}"})
            publisher.close() if number == 2 else written(publisher, "policy", "critic")
    for name in ("policy", "critic"):
        into = {"w": np.zeros(3, np.int32)}
        stored = weightbus.load(tmp_path, name, into=into)
        assert stored is not None
        assert stored.metadata == {"of": f"{name} 2"}
        assert into["w"].tolist() == [2, 2, 2]
        stored = weightbus.load(tmp_path, name, into=into, version=(stored.epoch, 1))
        assert stored is not None
        assert stored.metadata == {"of": f"{name} 1"}
        assert into["w"].tolist() == [1, 1, 1]


def test_a_publisher_may_have_the_folder(tmp_path: Path) -> None:
    model = published(tmp_path)
    with Publisher(state=tmp_path) as publisher:
        other = Tied()
        stored = weightbus.load(tmp_path, "policy", into=other)
        assert stored is not None
        assert stored.metadata == SAID
        assert (publisher.epoch, 1) in stored.names, "as it is offered by now"
        assert equal(model, other)
        publisher.publish("policy", model, metadata={"step": "12001"})
    stored = weightbus.load(tmp_path, "policy", into=other)
    assert stored is not None
    assert stored.metadata == {"step": "12001"}


def test_while_versions_come_and_go(tmp_path: Path) -> None:
    """What was named a moment before may be deleted when it is opened."""
    with Publisher(state=tmp_path) as publisher:
        publisher.publish("m", {"w": np.zeros(9, np.int64)}, metadata={"n": "0"})
        written(publisher, "m")
        seen, over = set[str](), threading.Event()

        def publish() -> None:
            number = 0
            while not over.is_set():
                number += 1
                said = {"n": str(number)}
                publisher.publish("m", {"w": np.full(9, number)}, metadata=said)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            limit = threading.Event()
            for _ in range(2000):
                into = {"w": np.zeros(9, np.int64)}
                stored = weightbus.load(tmp_path, "m", into=into)
                assert stored is not None
                assert set(into["w"].tolist()) == {int(stored.metadata["n"])}
                seen.add(stored.metadata["n"])
                if len(seen) > 3:
                    break
                limit.wait(0.01)
        finally:
            over.set()
            thread.join(SECONDS)
    assert len(seen) > 3


def test_what_is_converted_comes_back_as_it_was_published(tmp_path: Path) -> None:
    model = published(tmp_path, dtype="bf16")
    other = Tied()
    with pytest.raises(StateError, match="cast=True"):
        weightbus.load(tmp_path, "policy", into=other)
    assert weightbus.load(tmp_path, "policy", into=other, cast=True) is not None
    assert torch.equal(other.embed.weight, model.embed.weight.bfloat16().float())


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    published(tmp_path)
    into = {"embed.weight": torch.zeros(5, 3), "odd": torch.zeros(2)}
    with pytest.raises(StateError, match="odd: F32"):
        weightbus.load(tmp_path, "policy", into=into)
    assert not into["embed.weight"].any()
    del into["odd"]
    with pytest.raises(StateError, match=r"norm\.bias: published"):
        weightbus.load(tmp_path, "policy", into=into)
    assert weightbus.load(tmp_path, "policy", into=into, strict=False) is not None
    assert into["embed.weight"].any()


def test_a_misspelt_model_or_version_says_what_there_is(tmp_path: Path) -> None:
    published(tmp_path)
    with pytest.raises(StateFolderError, match=r"'polcy'.*there are versions of policy"):
        weightbus.load(tmp_path, "polcy", into=Tied())
    with pytest.raises(StateFolderError, match=r"version \(7, 1\) of 'policy' is not in"):
        weightbus.load(tmp_path, "policy", into=Tied(), version=(7, 1))
    with pytest.raises(ValueError, match="model"):
        weightbus.load(tmp_path, "a/b", into=Tied())


def test_damage_is_found_before_anything_changes(tmp_path: Path) -> None:
    published(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    other = Tied()
    before = other.embed.weight.clone()
    with pytest.raises(StateFolderError, match="is damaged: it hashes to"):
        weightbus.load(tmp_path, "policy", into=other)
    assert torch.equal(before, other.embed.weight)
    file.write_bytes(data[:-1])
    with pytest.raises(StateFolderError, match="cannot be offered"):
        weightbus.load(tmp_path, "policy", into=other)
    file.unlink()
    with pytest.raises(StateFolderError, match="any more: newer versions replace older ones"):
        weightbus.load(tmp_path, "policy", into=other)
    table = tmp_path / TABLE
    table.write_bytes(table.read_bytes()[:-9])
    with pytest.raises(StateFolderError, match="damaged"):
        weightbus.load(tmp_path, "policy", into=other)
    assert table.exists(), "it is the publisher's to move away"
