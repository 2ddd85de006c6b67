"""Your own Ray actors, whose policies one scheme keeps up to date.

python examples/ray_actors.py
"""

from typing import Any

import ray
import torch
from torch import nn

from weightbus.torchrl import RayWeightSyncScheme


class Rollout:
    """An actor that runs a policy; any class can be an actor."""

    def __init__(self, scheme: RayWeightSyncScheme, index: int) -> None:
        self.policy, self.scheme = nn.Linear(4, 1, bias=False), scheme
        scheme.init_on_receiver(model_id="policy", model=self.policy, worker_idx=index)
        scheme.connect()

    def act(self) -> float:
        return self.policy(torch.ones(4)).item()


def main() -> None:
    """Change the weights in place of training, and send them; every actor then acts by them."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    policy = nn.Linear(4, 1, bias=False)
    scheme = RayWeightSyncScheme()
    actors: list[Any] = [ray.remote(num_cpus=1)(Rollout).remote(scheme, i) for i in range(2)]
    scheme.init_on_sender(model_id="policy", remote_collectors=actors, model=policy)
    scheme.connect()  # returns when every actor has the first weights
    for step in range(3):
        with torch.no_grad():
            policy.weight.fill_(step)
        scheme.send()  # returns when every actor has the weights; names actors that died
        acts = ray.get([actor.act.remote() for actor in actors])
        for worker, version in scheme.versions().items():
            print(f"worker {worker} runs version {version} and acts {acts[worker]}")
    ray.shutdown()


if __name__ == "__main__":
    main()
