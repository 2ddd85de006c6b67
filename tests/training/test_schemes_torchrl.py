"""TorchRL's collectors of processes on one host take the schemes as their own."""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import pytest

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl import weight_update

from weightbus import PublishError, Settings
from weightbus.tests.training.torchrl_parts import (
    Echo,
    agents,
    collectors,
    collects,
    fill,
    policy,
    seen_in,
    valued_echo,
)
from weightbus.tests.training.torchrl_tearing import story
from weightbus.torchrl import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    ZMQWeightSyncScheme,
)

QUICK = Settings(ping=0.2, lost_after=1.0)
SECONDS = 20.0  # what anything here may take on a busy machine


@contextmanager
def running(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[Any]:
    """Run a collector, and see that neither it nor its scheme leaves anything behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = make(*args, frames_per_batch=8, total_frames=-1, **kwargs)
    started = [psutil.Process(process.pid) for process in collector.procs]
    try:
        yield collector
    finally:
        collector.shutdown(timeout=SECONDS)
        _, alive = psutil.wait_procs(started, timeout=SECONDS)
        for process in alive:
            process.kill()
    assert not alive, "the collector left processes behind"


def threads() -> list[str]:
    """Return our threads."""
    return [t.name for t in threading.enumerate() if t.name.startswith("weightbus")]


ECHOES = [partial(Echo, 0), partial(Echo, 1)]
COLLECTORS = [
    pytest.param(
        collectors.MultiSyncCollector,
        partial(MultiProcessWeightSyncScheme, "state_dict"),
        id="sync-process",
    ),
    pytest.param(
        partial(collectors.Collector, num_collectors=2), ZMQWeightSyncScheme, id="collector-zmq"
    ),
]


@pytest.mark.parametrize(("make", "kind"), COLLECTORS)
def test_a_collector_runs_with_a_scheme_from_start_to_end(
    make: Any, kind: Callable[..., Any]
) -> None:
    scheme, trained = kind(liveness=QUICK), policy(1.0)
    schemes = {"policy": scheme}
    with running(
        make, ECHOES, policy=trained, weight_sync_schemes=schemes, track_policy_version=True
    ) as collector:
        assert isinstance(scheme, weight_update.WeightSyncScheme)
        batches = iter(collector)
        collects(batches, {0: 1.0, 1: 1.0})  # what the trainer had, though policies came as meta
        fill(trained, 2.0)
        collects(batches, {0: 1.0, 1: 1.0})  # in-place training is not visible without a send
        every_worker_is_reached(collector, scheme, batches)
        only_the_target_is_reached(collector, scheme, batches, trained)
        weights_that_do_not_fit_are_refused(collector, scheme, batches)
        a_killed_worker_is_named(collector, scheme)
    scheme.shutdown()
    assert threads() == []


@pytest.mark.parametrize(("make", "kind"), COLLECTORS)
def test_workers_act_by_tensordict_params_which_come_on_meta(
    make: Any, kind: Callable[..., Any]
) -> None:
    trained, schemes = agents(), {"policy": kind(liveness=QUICK)}
    fill(trained, 1.0)
    with running(make, ECHOES, policy=trained, weight_sync_schemes=schemes) as collector:
        batches = iter(collector)
        collects(batches, {0: 2.0, 1: 2.0})  # a weight and a bias
        fill(trained, 3.0)
        collector.update_policy_weights_()
        assert schemes["policy"].receipt.in_state("applied") == ["0", "1"]
        collects(batches, {0: 6.0, 1: 6.0})


def test_no_forward_pass_sees_a_part_of_an_update() -> None:
    seen = story("async-shared", 30)
    assert seen.updates == 30
    assert seen.newest == 31.0
    assert seen.torn == 0, seen
    assert threads() == []


def every_worker_is_reached(collector: Any, scheme: Any, batches: Any) -> None:
    collector.update_policy_weights_()
    assert scheme.receipt.in_state("applied") == ["0", "1"]
    collects(batches, {0: 2.0, 1: 2.0})
    assert seen_in(next(batches), ("next", "policy_version")).items() <= {0: {1}, 1: {1}}.items()


def only_the_target_is_reached(collector: Any, scheme: Any, batches: Any, trained: Any) -> None:
    collector.update_policy_weights_(fill(policy(), 3.0), worker_ids=[1])
    collects(batches, {0: 2.0, 1: 3.0})
    assert trained.module.weight.item() == 2.0, "a worker's weights reached the trainer's"
    assert scheme.versions()[0] < scheme.versions()[1]
    collector.update_policy_weights_({0: fill(policy(), 4.0), 1: fill(policy(), 5.0)})
    collects(batches, {0: 4.0, 1: 5.0})
    with pytest.raises(ValueError, match="Worker 2 not registered"):
        collector.update_policy_weights_(worker_ids=2)


def weights_that_do_not_fit_are_refused(collector: Any, scheme: Any, batches: Any) -> None:
    started = time.monotonic()
    with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*module\.wait.*worker 1 failed"):
        collector.update_policy_weights_({"module.wait": fill(policy(), 6.0)["module", "weight"]})
    assert time.monotonic() - started < SECONDS
    assert scheme.receipt.in_state("failed") == ["0", "1"]
    collects(batches, {0: 4.0, 1: 5.0})


def a_killed_worker_is_named(collector: Any, scheme: Any) -> None:
    os.kill(collector.procs[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PublishError, match="worker 1 lost"):
        collector.update_policy_weights_()
    assert time.monotonic() - started < SECONDS
    assert scheme.receipt.in_state("applied") == ["0"]
    collector.update_policy_weights_(worker_ids=0)


NO_SYNC = "the model 'policy' is on the meta device.*policy_factory"


def test_no_synchronisation_says_what_workers_lack() -> None:
    schemes = {"policy": NoWeightSyncScheme()}
    with (
        pytest.raises(RuntimeError, match=NO_SYNC),
        running(collectors.MultiSyncCollector, ECHOES[:1], policy(), weight_sync_schemes=schemes),
    ):
        pass


def test_two_models_are_kept_apart() -> None:
    schemes: dict[str, Any] = {
        "policy": SharedMemWeightSyncScheme(),
        "env.transform[0]": ZMQWeightSyncScheme(),
    }
    begin = {i: TensorDict.from_module(policy(i + 1.0)) for i in range(2)}
    schemes["policy"].init_on_sender(params_map=begin)
    envs = [partial(valued_echo, 0), partial(valued_echo, 1)]
    trained, valued = policy(1.0), valued_echo().transform[0]
    schemes["env.transform[0]"].init_on_sender("env.transform[0]", model=valued, num_workers=2)
    fill(valued, 10.0)
    with running(
        collectors.MultiSyncCollector, envs, policy=trained, weight_sync_schemes=schemes
    ) as collector:
        batches, reward = iter(collector), ("next", "reward")
        collects(batches, {0: 1.0, 1: 2.0})  # each worker what was given for it
        collects(batches, {0: 10.0, 1: 10.0}, reward)
        collector.update_policy_weights_(
            weights_dict={"policy": fill(trained, 2.0), "env.transform[0]": fill(valued, 20.0)}
        )
        collects(batches, {0: 2.0, 1: 2.0})
        collects(batches, {0: 20.0, 1: 20.0}, reward)
        collector.update_policy_weights_(
            fill(valued, 30.0), model_id="env.transform[0]", worker_ids=0
        )
        collects(batches, {0: 30.0, 1: 20.0}, reward)
        collects(batches, {0: 2.0, 1: 2.0})
    del batches, collector
    schemes.clear()
    gc.collect()
    assert threads() == [], "a scheme that nobody refers to any more is still at work"
