"""TorchRL's Ray collectors and transforms take the schemes as their own."""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import os
import signal
import time
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torchrl")
pytest.importorskip("ray")

import ray
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl import weight_update
from torchrl.envs.transforms.module import RayModuleTransform

from weightbus import PublishError
from weightbus.python_client.schemes.ray import actor_of
from weightbus.tests.schemes.ray_cluster import SECONDS, cluster
from weightbus.tests.training.torchrl_parts import (
    Echo,
    collectors,
    collects,
    distributed,
    fill,
    one_weight,
    policy,
)
from weightbus.torchrl import (
    RayModuleTransformScheme,
    RayWeightSyncScheme,
    RayWeightUpdater,
)

# Ray's own collectors warn of their own ways, in words that change; and start many processes.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def a_cluster() -> Generator[None]:
    with cluster():
        yield


def ray_collector(**kwargs: Any) -> Any:
    return distributed.RayCollector(
        [partial(Echo, 0), partial(Echo, 1)],
        frames_per_batch=8,
        total_frames=10**9,
        remote_configs={"num_cpus": 0.5},
        **kwargs,
    )


def test_a_ray_collector_runs_with_a_scheme_from_start_to_end() -> None:
    scheme, trained = RayWeightSyncScheme(timeout=SECONDS), policy(1.0)
    collector = ray_collector(
        policy=trained,
        sync=False,
        weight_sync_schemes={"policy": scheme},
        collector_kwargs={"track_policy_version": True},
    )
    try:
        assert isinstance(scheme, weight_update.WeightSyncScheme)
        collector.update_policy_weights_()
        batches = iter(collector)
        collects(batches, {0: 1.0, 1: 1.0})
        version = newest_versions(batches)
        fill(trained, 2.0)
        collects(batches, {0: 1.0, 1: 1.0})
        collector.update_policy_weights_()
        collects(batches, {0: 2.0, 1: 2.0})
        assert newest_versions(batches) == {v + 1 for v in version}
        collector.update_policy_weights_(fill(policy(), 3.0), worker_ids=[1])
        collects(batches, {0: 2.0, 1: 3.0})
        with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*wrong.*worker 1 failed"):
            collector.update_policy_weights_({"module.wrong": trained.module.weight})
        collects(batches, {0: 2.0, 1: 3.0})
        an_updater_serves_it(collector, batches)
        one = next(batch for batch in batches if 1 in batch["worker"])
        a_killed_actor_is_named(collector, scheme, one)
    finally:
        collector.shutdown(shutdown_ray=False)
    assert not scheme.initialized_on_sender, "TorchRL shuts its schemes down itself"


def test_a_ray_collector_of_collectors_that_make_their_own_policies() -> None:
    scheme = RayWeightSyncScheme(timeout=SECONDS)
    make: Any = distributed.RayCollector
    collector = make(
        [partial(Echo, 0)],
        policy_factory=partial(policy, 1.0),
        collector_class=collectors.MultiSyncCollector,
        num_workers_per_collector=1,
        frames_per_batch=8,
        total_frames=10**9,
        remote_configs={"num_cpus": 0.5},
        weight_sync_schemes={"policy": scheme},
    )
    try:
        batches = iter(collector)
        for value in (2.0, 3.0):
            collector.update_policy_weights_(fill(policy(), value))
            collects(batches, {0: value})
        assert scheme.receipt is not None
        assert scheme.receipt.in_state("applied") == ["0"]
        with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*wrong"):
            collector.update_policy_weights_({"module.wrong": policy().module.weight})
        collects(batches, {0: 3.0})
    finally:
        collector.shutdown(shutdown_ray=False)


def newest_versions(batches: Any) -> set[int]:
    return set(next(batches)["next", "policy_version"].flatten().tolist())


def an_updater_serves_it(collector: Any, batches: Any) -> None:
    weights = fill(policy(), 7.0)
    updater = RayWeightUpdater(weights, collector.remote_collectors, timeout=SECONDS)
    updater.register_collector(collector)
    updater.push_weights()
    collects(batches, {0: 7.0, 1: 7.0})
    updater.push_weights(fill(policy(), 8.0), worker_ids=0)
    collects(batches, {0: 8.0, 1: 7.0})
    updater.push_weights(fill(policy(), 9.0).state_dict())
    collects(batches, {0: 9.0, 1: 9.0})


def a_killed_actor_is_named(collector: Any, scheme: Any, batch: Any) -> None:
    workers, pids = batch["worker"].flatten().tolist(), batch["pid"].flatten().tolist()
    os.kill(dict(zip(workers, pids, strict=True))[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PublishError, match="worker 1 lost"):
        collector.update_policy_weights_()
    assert time.monotonic() - started < SECONDS
    assert scheme.receipt.in_state("applied") == ["0"]
    collector.update_policy_weights_(worker_ids=0)


def test_a_ray_module_transform_takes_its_scheme() -> None:
    scheme = RayModuleTransformScheme(timeout=SECONDS)
    module = TensorDictModule(one_weight(1.0), in_keys=["observation"], out_keys=["value"])
    transform = RayModuleTransform(weight_sync_scheme=scheme, module=module, num_cpus=0.5)
    try:
        assert value_of(transform) == 1.0
        scheme.send(fill(module, 2.0))
        assert value_of(transform) == 2.0
        assert scheme.receipt is not None
        assert scheme.receipt.in_state("applied") == ["0"]
        fill(module, 3.0)
        assert value_of(transform) == 2.0
    finally:
        ray.kill(actor_of(transform))
    with pytest.raises(PublishError, match="worker 0 lost"):
        scheme.send(fill(module, 4.0))
    scheme.shutdown()


def value_of(transform: Any) -> float:
    return float(transform(TensorDict(observation=[[1.0]]))["value"])
