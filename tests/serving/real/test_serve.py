"""A real `vllm serve`: its API server, engine core and worker, over HTTP, while it generates."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import weightbus
from weightbus.codecs.dtypes import name_of_torch
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.cli.starting import python
from weightbus.tests.serving.real.served import (
    LIMIT,
    LORA_RANK,
    Served,
    answer_of,
    chosen,
    saved,
    trained,
)
from weightbus.trl import WeightTransfer
from weightbus.types import Receipt
from weightbus.vllm import ServerError, VllmServers

pytestmark = pytest.mark.timeout(LIMIT)

SECONDS = 60.0
LONG = 1500  # words of an answer that is begun with one version, and ended with another
COMMAND = "from weightbus.python_client.cli.main import main; main()"
DEAD_SECONDS = 10.0  # that a trainer gives a server that was killed


class Deadly(VllmServers):
    """Servers that are killed when they are about to load."""

    doomed: Served | None = None

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self.doomed is not None:
            self.doomed.kill()
        super().finish_weight_update(weight_version)


@pytest.fixture(name="publisher")
def _publisher() -> Iterator[weightbus.Publisher]:
    with weightbus.Publisher() as publisher:
        yield publisher


@pytest.fixture(name="servers")
def _servers(served: Served) -> Iterator[Deadly]:
    with closing(Deadly(served.url)) as servers:
        yield servers


def transfers(publisher: weightbus.Publisher, servers: VllmServers, **given: Any) -> Transfers:
    """Return a trainer's transfers of such a model, which the server has joined."""
    made = Transfers(
        publisher,
        servers,
        model="policy",
        deployment="vllm",
        **{"timeout": SECONDS, "pause_timeout": SECONDS, **given},
    )
    weights = trained(1).state_dict()
    made.join({n: (name_of_torch(t.dtype), tuple(t.shape)) for n, t in weights.items()})
    return made


def runs(served: Served) -> tuple[list[int], str, bool]:
    """Return what it answers, which weights it says it runs, and whether it stands still."""
    version = served.get("/weight_info")["weight_version"]
    return served.answer(), version, served.get("/is_paused")["is_paused"]


def sent(receipt: Receipt, seed: int) -> tuple[list[int], str, bool]:
    return answer_of(trained(seed)), f"{receipt.epoch}.{receipt.version}", False


def test_it_is_updated_while_it_generates_and_a_version_that_does_not_fit_changes_nothing(
    served: Served, servers: VllmServers, publisher: weightbus.Publisher
) -> None:
    assert served.answer() == answer_of(trained(1))
    sending = transfers(publisher, servers)
    answer = served.stream(LONG)
    begun = next(answer)
    receipt = sending.send(trained(2).state_dict())
    words = begun + [word for words in answer for word in words]
    assert len(words) == LONG
    # What was kept is read anew with the new weights: vLLM clears its caches when it pauses.
    old, new = chosen(trained(1), words), chosen(trained(2), words)
    first = old.index(False)
    assert len(begun) <= first < LONG
    assert all(new[first:])
    assert runs(served) == sent(receipt, 2)

    bad = trained(3).state_dict()
    bad["model.norm.weight"] = torch.ones(7)
    with pytest.raises(weightbus.PublishError, match=r"vllm-dp0-rank0.*model.norm.weight: shape"):
        sending.send(bad)
    assert runs(served) == sent(receipt, 2)
    receipt = sending.send(trained(3).state_dict())
    assert runs(served) == sent(receipt, 3)


def test_what_trl_takes_sends_to_it(served: Served) -> None:
    with weightbus.Publisher() as publisher:
        transfer = WeightTransfer(publisher, server=served.url, timeout=SECONDS)
        transfer.init_weight_transfer()
        for seed in (4, 5):
            transfer.pause()
            transfer.send_weights(iter(trained(seed).named_parameters()))
            transfer.resume()
            assert transfer.receipt is not None
            assert runs(served) == sent(transfer.receipt, seed)
        transfer.destroy()


def bridged(
    served: Served, publisher: weightbus.Publisher, folder: Path, *words: str
) -> dict[str, Any]:
    """Have a bridge load one version, and return what it says of it."""
    command = [
        *("-c", COMMAND, "bridge", publisher.address),
        *("--server", served.url, "--kind", "vllm", "--model", "policy", "--once", "--json"),
        *("--folder", str(folder), *words),
    ]
    return json.loads(python(*command, timeout=SECONDS).stdout.splitlines()[-1])


def test_a_bridge_has_it_load_from_a_folder(
    served: Served, publisher: weightbus.Publisher, tmp_path: Path
) -> None:
    receipt = publisher.publish("policy", trained(6).state_dict())
    like = saved(tmp_path / "like", trained(6))
    assert bridged(served, publisher, tmp_path / "folder", "--like", str(like))["achieved"]
    assert runs(served) == sent(receipt, 6)


def adapter() -> dict[str, torch.Tensor]:
    """Return an adapter of all layers' queries, named as PEFT names it."""
    made: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(trained(1).model.layers):
        rows, columns = layer.self_attn.q_proj.weight.shape
        name = f"base_model.model.model.layers.{number}.self_attn.q_proj.lora"
        made[f"{name}_A.weight"] = torch.randn(LORA_RANK, columns)
        made[f"{name}_B.weight"] = torch.randn(rows, LORA_RANK)
    return made


@torch.no_grad()
def adapted(seed: int, by: dict[str, torch.Tensor]) -> list[int]:
    """Return what a model answers with an adapter."""
    model, parts = trained(seed), iter(by.values())
    for layer in model.model.layers:
        a, b = next(parts), next(parts)
        layer.self_attn.q_proj.weight += b @ a
    return answer_of(model)


def test_a_bridge_has_it_load_an_adapter_which_stays_when_its_model_is_updated(
    served: Served, servers: VllmServers, publisher: weightbus.Publisher, tmp_path: Path
) -> None:
    sending, given = transfers(publisher, servers), adapter()
    sending.send(trained(1).state_dict())
    config = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK}
    told = {"adapter_config.json": json.dumps({**config, "target_modules": ["q_proj"]})}
    with weightbus.Publisher() as other:
        other.publish("policy", given, metadata=told)
        assert bridged(served, other, tmp_path / "folder", "--lora", "chat")["achieved"]
    assert served.answer(model="chat") == adapted(1, given)
    receipt = sending.send(trained(2).state_dict())
    assert runs(served) == sent(receipt, 2)
    assert served.answer(model="chat") == adapted(2, given)


@pytest.mark.timeout(2 * LIMIT)  # it starts twice
def test_a_server_that_is_killed_is_told_of_in_time_and_reached_once_it_is_back(
    served: Served, servers: Deadly, publisher: weightbus.Publisher
) -> None:
    servers.doomed = served
    sending = transfers(publisher, servers, pause_timeout=DEAD_SECONDS)
    begun = time.monotonic()
    with pytest.raises((weightbus.PublishError, ServerError), match="vllm-dp0-rank0") as raised:
        sending.send(trained(7).state_dict())
    assert time.monotonic() - begun < 2 * DEAD_SECONDS
    assert served.url in str(raised.value)

    served.start()
    servers.doomed = None
    assert served.answer() == answer_of(trained(1))
    receipt = sending.send(trained(8).state_dict())
    assert runs(served) == sent(receipt, 8)
