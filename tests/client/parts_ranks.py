"""One of two ranks that train a model with FSDP2, and take its versions into tensor parallel ones.

    python parts_ranks.py RANK SIZE FOLDER

Prints a JSON object: whether this rank's slices are those of the published model.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import weightbus
from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.net.sources import SourceFetcher

RANKS = 2
SECONDS = 60.0
FETCH = SourceFetcher.fetch
WIDTH, HIDDEN = 96, 250  # the second halves of HIDDEN are uneven over chunks


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
    )


def main(rank: int, folder: Path) -> None:
    store: Any = vars(dist)["FileStore"](str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    engine = parallelize_module(model(0), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    few = Settings(shared_memory=False, chunk_bytes=4096)
    equal = dict[str, bool]()
    with (
        Publisher("tcp://127.0.0.1:0", settings=few) as publisher,
        patch.object(
            SourceFetcher, "fetch", autospec=True, side_effect=SourceFetcher.fetch
        ) as jobs,
    ):
        store.set(f"address-{rank}", publisher.address)
        address = store.get("address-0").decode()
        with Subscriber(
            address, {"policy": engine}, name=f"rank-{rank}", settings=Settings(shared_memory=False)
        ).start():
            for seed in (1, 2):
                trained = model(seed)
                fully_shard(trained, mesh=mesh)
                if rank == 0:
                    publisher.wait_for_workers(RANKS, SECONDS)
                weightbus.sharded(trained).publish(publisher, "policy", timeout=SECONDS)
                dist.barrier()
                equal[str(seed)] = same(engine, model(seed))
            taken = sum(call.args[1].cut is not None for call in jobs.call_args_list)
            dist.barrier()
    print(json.dumps({"equal": equal, "from other ranks": taken > 0}))
    dist.destroy_process_group()


def same(engine: nn.Module, whole: nn.Module) -> bool:
    expected = whole.state_dict()
    for name, tensor in engine.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(full, expected[name]):
            return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
