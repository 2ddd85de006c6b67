"""Plain PyTorch with RPC: one trainer and two workers, whose weights one scheme keeps up to date.

python examples/rpc_plain_pytorch.py
"""

import tempfile

import torch
from torch import nn
from torch.distributed import rpc
from torch.multiprocessing.spawn import spawn

from weightbus.torchrl import RPCWeightSyncScheme

WORKERS = ["worker1", "worker2"]
policy = nn.Linear(4, 1, bias=False)  # each process has its own
scheme = RPCWeightSyncScheme()


def act() -> float:
    """Run the policy. (The trainer calls this function in a worker.)"""
    with scheme.reading():  # new weights are applied only after this block
        return policy(torch.ones(4)).item()


def process(rank: int, folder: str) -> None:
    """Run the trainer (rank 0) or a worker."""
    meeting = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meeting")
    name = ["trainer", *WORKERS][rank]
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=meeting)
    if rank > 0:
        scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=rank - 1)
        scheme.connect()
    else:
        scheme.init_on_sender(model_id="policy", workers=WORKERS, model=policy)
        scheme.connect()
        for step in range(3):
            nn.init.constant_(policy.weight, step)
            scheme.send()  # returns when every worker has the weights; names workers that died
            acts = [rpc.rpc_sync(worker, act) for worker in WORKERS]
            for worker, version in scheme.versions().items():
                print(f"{WORKERS[worker]} runs version {version} and acts {acts[worker]}")
    rpc.shutdown()  # waits for the other processes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(process, args=(folder,), nprocs=3)
