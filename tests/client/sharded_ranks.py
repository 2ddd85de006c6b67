"""One of two ranks that train a sharded model on the CPU.

    python sharded_ranks.py RANK SIZE FOLDER

Rank 0 prints a JSON object of what it saw. A rank that is not part of something waits for a key of
the store, which is not a collective: so whatever would wait for it is seen to wait.
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import weightbus
from weightbus import Publisher, StateError, Subscriber
from weightbus.codecs.apply import check
from weightbus.codecs.state import state_of
from weightbus.python_client.schemes.strategy import WeightStrategy
from weightbus.tests.docs.test_docs import GUIDES, blocks

RANKS = 2
SECONDS = 30.0


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sharded(kind: str, mesh: Any) -> Any:
    if kind == "FSDP1":
        return FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    made = model()
    for part in (made[0], made[2], made):
        fully_shard(part, mesh=mesh)
    return made


def publish_whole(publisher: Publisher | None, model: object) -> None:
    """Run the line that the guide has for every rank."""
    (block,) = (b for b in blocks(GUIDES / "pytorch-loop.md", "python") if "gather(" in b)
    names = {"weightbus": weightbus, "publisher": publisher, "model": model}
    exec(block, names)  # noqa: S102 - it is ours


def said(does: Callable[[], object]) -> str:
    begun = time.monotonic()
    try:
        returned = does()
    except (StateError, ValueError) as error:
        assert time.monotonic() - begun < SECONDS, "it has waited for the other rank"
        return f"{type(error).__name__}: {error}"
    return f"returned {returned}"


def alone(shards: Any, publisher: Publisher, folder: Path) -> dict[str, str]:
    """Return what one rank is told that gives a sharded model without the others."""
    layout = state_of(model()).layout()

    def subscribe() -> None:
        Subscriber(publisher.address, {"m": {"layer": shards}}).close()

    def target() -> None:
        Subscriber(publisher.address, {"m": shards}).close()

    return {
        "publish": said(lambda: publisher.publish("m", shards, timeout=5)),
        "publish inside of another": said(
            lambda: publisher.publish("m", nn.ModuleDict({"a": shards}), timeout=5)
        ),
        "publish_async": said(lambda: publisher.publish_async("m", shards, timeout=5)),
        "prepare": said(lambda: publisher.prepare("m", shards)),
        "resident": said(lambda: weightbus.resident(shards)),
        "scheme, state_dict": said(lambda: WeightStrategy("state_dict").extract_weights(shards)),
        "scheme, tensordict": said(
            lambda: state_of(WeightStrategy("tensordict").tensors_of(shards))
        ),
        "target": said(target),
        "target, checked": "\n".join(check(layout, shards)),
        "target in a mapping": said(subscribe),
        "load": said(lambda: weightbus.load(folder / "state", "m", into=shards)),
        "target of a scheme": said(
            lambda: WeightStrategy("state_dict").apply_weights(shards, model().state_dict())
        ),
    }


def seen_by_rank_0(publisher: Publisher, folder: Path, kinds: dict[str, Any]) -> dict[str, Any]:
    with Publisher("tcp://127.0.0.1:0", state=folder / "state") as keeps:
        keeps.publish("m", model(), timeout=SECONDS)
    return {kind: alone(shards, publisher, folder) for kind, shards in kinds.items()}


def freed_after_a_pass(shards: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of one layer as they were in a pass, which has freed them since."""
    kept: dict[str, torch.Tensor] = {}
    shards[0].register_forward_hook(  # type: ignore[index]
        lambda part, *_: kept.update(part.named_parameters()), prepend=True
    )
    shards(torch.ones(1, 4))
    return kept


def main(rank: int, folder: Path) -> None:
    store: Any = vars(dist)["FileStore"](str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    kinds = {kind: sharded(kind, mesh) for kind in ("FSDP1", "FSDP2")}
    kept = freed_after_a_pass(kinds["FSDP2"])
    saw = dict[str, Any]()
    if rank:
        store.wait(["alone"], timedelta(seconds=4 * SECONDS))
        for shards in kinds.values():
            publish_whole(None, shards)
    else:
        with Publisher("tcp://127.0.0.1:0") as publisher:
            saw = seen_by_rank_0(publisher, folder, kinds)
            saw["freed"] = said(lambda: publisher.publish("m", kept, timeout=5))
            store.set("alone", "over")
            copies = {kind: nn.Sequential(*model().eval()) for kind in kinds}
            for kind, copy in copies.items():
                for parameter in copy.parameters():
                    nn.init.zeros_(parameter)
                with Subscriber(publisher.address, {"policy": copy}).start():
                    publisher.wait_for_workers(1, SECONDS)
                    publish_whole(publisher, kinds[kind])
                theirs, ours = copy.state_dict(), model().state_dict()
                saw[f"whole, {kind}"] = all(torch.equal(theirs[name], ours[name]) for name in ours)
        print(json.dumps(saw))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
