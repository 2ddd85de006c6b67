"""A TorchRL collector with two workers, whose actions show which weights each worker runs.

python examples/torchrl_collector.py
"""

# pyright: reportMissingTypeStubs=false
from functools import partial
from typing import Any

from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv

from weightbus.torchrl import ZMQWeightSyncScheme


def main() -> None:
    """Change the weights in place of training, update the workers, and print what each one runs."""
    net = nn.Linear(3, 1)
    scheme = ZMQWeightSyncScheme()  # on other hosts too: ZMQWeightSyncScheme("tcp://...:5555")
    schemes: dict[str, Any] = {"policy": scheme}
    collector = MultiSyncCollector(
        [partial(GymEnv, "Pendulum-v1")] * 2,
        TensorDictModule(net, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=20,
        total_frames=80,
        weight_sync_schemes=schemes,
        track_policy_version=True,
        cat_results="stack",  # the first dimension of a batch is the worker
    )
    try:
        for step, batch in enumerate(collector):
            for worker, rollout in enumerate(batch):
                runs, acts = rollout["next", "policy_version"][-1], rollout["action"].mean()
                print(f"batch {step}: worker {worker} runs update {runs} and acts {acts:+.2f}")
            nn.init.zeros_(net.weight)
            nn.init.constant_(net.bias, step / 10)
            collector.update_policy_weights_()  # returns when both workers have applied the weights
            print(f"now at version {dict(scheme.versions())} by worker")
    finally:
        collector.shutdown()
        scheme.shutdown()


if __name__ == "__main__":
    main()
