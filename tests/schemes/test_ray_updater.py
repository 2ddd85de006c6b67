"""The updater brings weights to Ray actors as often as documented, and knows who has them."""

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict
from torch import nn

from weightbus.bus.errors import PublishError
from weightbus.python_client.schemes.weight_updaters import RayWeightUpdater, WeightUpdaterBase
from weightbus.tests.schemes.ray_cluster import (
    DEAD,
    SECONDS,
    Promising,
    Updatable,
    cluster,
    model,
    start,
    start_all,
)

pytestmark = pytest.mark.timeout(400)  # an actor may take its time to start


@pytest.fixture(scope="module", autouse=True)
def pair() -> Generator[list[Any]]:
    with cluster():
        yield start_all(Updatable, Updatable)


def weights(value: float = 1.0, *, features: int = 4) -> TensorDict:
    """Return what a trainer gives the updater: the model's parameters and buffers."""
    module: Any = TensorDict.from_module(model(value, features=features))
    return module.data


def seen(actors: list[Any]) -> list[set[float]]:
    return ray.get([actor.values.remote() for actor in actors], timeout=SECONDS)


def calls(actors: list[Any]) -> list[int]:
    return [len(kinds) for kinds in ray.get([a.received.remote() for a in actors], timeout=SECONDS)]


@pytest.fixture(scope="module")
def promising() -> Any:
    return start(Promising)


@pytest.fixture
def actors(pair: list[Any]) -> list[Any]:
    ray.get([actor.reset.remote() for actor in pair], timeout=SECONDS)
    return pair


def test_a_push_is_there_when_it_returns(actors: list[Any]) -> None:
    own: Any = weights(1.0)
    updater = RayWeightUpdater(own, actors)
    updater.push_weights()
    assert seen(actors) == [{1.0}, {1.0}]
    own.apply_(lambda t: t.fill_(2))
    assert seen(actors) == [{1.0}, {1.0}], "the workers have a copy"
    updater()
    assert seen(actors) == [{2.0}, {2.0}]
    assert updater.versions() == {0: 2, 1: 2}
    assert updater.receipt is not None
    assert updater.receipt.in_state("applied") == ["0", "1"]
    assert updater.receipt.nbytes == sum(t.nbytes for t in own.values(True, True))


@pytest.mark.parametrize(
    ("form", "arrives_as"),
    [
        (lambda: weights(3.0), "TensorDict"),
        (lambda: model(3.0), "TensorDict"),
        (lambda: dict(model(3.0).state_dict()), "dict"),
        (lambda: weights(3.0).to_dict(), "TensorDict"),
    ],
    ids=["TensorDict", "module", "state dict", "nested dict"],
)
def test_weights_may_be_given(actors: list[Any], form: Any, arrives_as: str) -> None:
    RayWeightUpdater(weights(), actors).push_weights(form())
    assert seen(actors) == [{3.0}, {3.0}]
    assert ray.get(actors[0].received.remote(), timeout=SECONDS) == [arrives_as]


@pytest.mark.parametrize("ids", [1, [1], (1,), [1, 1]])
def test_a_push_can_be_for_some(actors: list[Any], ids: Any) -> None:
    updater = RayWeightUpdater(weights(), actors)
    updater.push_weights(worker_ids=ids)
    assert seen(actors) == [{0.0}, {1.0}]
    assert calls(actors) == [0, 1]
    assert updater.versions() == {1: 1}
    updater.push_weights(worker_ids=[])
    assert calls(actors) == [0, 1]


def test_pushes_within_the_interval_are_skipped(actors: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), actors, max_interval=2)
    history: list[list[int]] = []
    for _ in range(7):
        updater.push_weights()
        history.append(calls(actors))
    assert history == [[n, n] for n in (0, 0, 1, 1, 1, 2, 2)]


def test_targeted_pushes_count_for_their_workers_alone(actors: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), actors, max_interval=2)
    updater.push_weights(worker_ids=[0, 0, 0])
    assert calls(actors) == [1, 0]
    updater.push_weights(worker_ids=1)
    updater.push_weights(worker_ids=1)
    updater.push_weights()
    assert calls(actors) == [1, 1]


def test_a_push_that_reaches_nobody_stores_nothing(
    actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = RayWeightUpdater(weights(), actors, max_interval=1)
    monkeypatch.setattr(ray, "put", None)
    updater.push_weights()
    monkeypatch.undo()
    updater.push_weights()
    assert calls(actors) == [1, 1]


@pytest.mark.parametrize("wrong", [2, -1, [0, 7], "0", None.__class__, [0.5]])
def test_ids_that_do_not_exist_are_refused(actors: list[Any], wrong: Any) -> None:
    updater = RayWeightUpdater(weights(), actors, max_interval=1)
    hooks: list[str] = []
    updater.register_post_hook(lambda: hooks.append("called"))
    with pytest.raises(IndexError, match="2 remote collectors, with the ids 0 to 1"):
        updater.push_weights(worker_ids=wrong)
    assert not hooks
    updater.push_weights()
    assert calls(actors) == [0, 0], "the refused push did not count"


def test_hooks_are_called_in_order_after_every_push(actors: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), actors, max_interval=1)
    order: list[str] = []
    updater.register_post_hook(lambda: order.append(f"a{calls(actors)}"))
    updater.register_post_hook(lambda: order.append("b"))
    updater.push_weights()  # skipped
    updater.push_weights()
    assert order == ["a[0, 0]", "b", "a[1, 1]", "b"]
    assert len(updater.post_hooks) == 2


def test_a_dead_actor_is_named_and_the_others_are_served(actors: list[Any]) -> None:
    actors = [start(Updatable), actors[1]]
    updater = RayWeightUpdater(weights(), actors, timeout=SECONDS)
    hooks: list[str] = []
    updater.register_post_hook(lambda: hooks.append("called"))
    pid: Any = ray.get(actors[0].pid.remote(), timeout=SECONDS)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PublishError, match=f"worker 0 lost.*{DEAD}") as caught:
        updater.push_weights()
    assert caught.value.receipt is updater.receipt
    assert caught.value.receipt.in_state("applied") == ["1"]
    assert caught.value.receipt.seconds < SECONDS / 2
    assert seen(actors[1:]) == [{1.0}]
    assert hooks == ["called"], "worker 1 does run new weights"
    updater.push_weights(weights(2.0), worker_ids=1)
    assert seen(actors[1:]) == [{2.0}]
    assert updater.versions() == {1: 2}


def test_a_worker_that_missed_a_push_is_due_again(actors: list[Any]) -> None:
    updater = RayWeightUpdater(weights(features=5), actors, max_interval=1)
    updater.push_weights()
    with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*size mismatch") as caught:
        updater.push_weights()
    assert caught.value.receipt.in_state("failed") == ["0", "1"]
    assert not updater.versions()
    updater.push_weights(weights(1.0))
    assert seen(actors) == [{1.0}, {1.0}]


# What a method returns may be a promise of its effect.


@pytest.mark.parametrize("kind", ["future", "references"])
def test_a_push_waits_for_what_the_method_promises(
    promising: Any, actors: list[Any], kind: str
) -> None:
    ray.get(promising.promise.remote(kind, actors[0]), timeout=SECONDS)
    updater = RayWeightUpdater(weights(), [promising], timeout=SECONDS)
    updater.push_weights(weights(2.0))
    assert seen([actors[0] if kind == "references" else promising]) == [{2.0}]
    assert updater.versions() == {0: 1}
    with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*size mismatch"):
        updater.push_weights(weights(features=5))
    assert updater.versions() == {0: 1}


# The documented hooks.


class Mapped(RayWeightUpdater):
    """An updater of a user's own, by the documentation: every hook, and Ray's own calls."""

    def _get_server_weights(self) -> Any:
        self.trace = ["get"]
        return ray.put(self.policy_weights)

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        self.trace.append(f"map {type(policy_or_weights).__name__}")
        own = policy_or_weights
        if isinstance(own, ray.ObjectRef):
            own = ray.get(own, timeout=SECONDS)
        return own.apply(lambda t: t + 1)

    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> Any:
        self.trace.append(f"sync {worker_id} {type(server_weights).__name__}")
        actor = self.remote_collectors[worker_id]
        return actor.update_policy_weights_.remote(server_weights)


def test_every_hook_gets_what_the_documentation_says(actors: list[Any]) -> None:
    updater = Mapped(weights(), actors)
    updater.push_weights()
    assert updater.trace == ["get", "map ObjectRef", "sync 0 TensorDict", "sync 1 TensorDict"]
    assert seen(actors) == [{2.0}, {2.0}]
    assert updater.versions() == {0: 1, 1: 1}, "what the hook returned was waited for"
    updater.push_weights(weights(4.0), worker_ids=1)
    assert updater.trace[4:] == ["map TensorDict", "sync 1 TensorDict"]
    assert seen(actors) == [{2.0}, {5.0}]
    with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*size mismatch"):
        updater.push_weights(weights(features=5), worker_ids=0)


class ByPosition(RayWeightUpdater):
    """One that hands its arguments on by position, as the signature of TorchRL's own has them."""

    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> Any:
        return super()._sync_weights_with_worker(worker_id, server_weights)


def test_arguments_by_position_and_a_skip_that_counts(actors: list[Any]) -> None:
    updater = ByPosition(weights(3.0), actors, max_interval=2)
    assert [updater._skip_update(0) for _ in range(4)] == [True, True, False, False]  # noqa: SLF001
    updater = ByPosition(weights(3.0), actors, max_interval=1)
    updater.push_weights()
    assert updater.versions() == {}
    updater.push_weights()
    assert seen(actors) == [{3.0}, {3.0}]
    assert updater.versions() == {0: 1, 1: 1}


class Stored(RayWeightUpdater):
    """One whose weights come from elsewhere in Ray's object store."""

    def _get_server_weights(self) -> Any:
        return ray.put(self.policy_weights)


class Sending(RayWeightUpdater):
    """One that hands the reference that it was given on, as TorchRL's own does."""

    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> Any:
        assert isinstance(server_weights, ray.ObjectRef)
        assert isinstance(ray.get(server_weights, timeout=SECONDS), TensorDict)
        self.remote_collectors[worker_id].update_policy_weights_.remote(server_weights)


def test_server_weights_are_a_reference_as_ray_makes_it(actors: list[Any]) -> None:
    updater = Stored(weights(3.0), actors)
    updater.push_weights()
    assert seen(actors) == [{3.0}, {3.0}]
    assert updater.versions() == {0: 1, 1: 1}
    sending = Sending(weights(4.0), actors)
    sending.push_weights()
    assert seen(actors) == [{4.0}, {4.0}]
    assert sending.versions() == {}, "nobody can say what became of a call that was not returned"


# The base.


class Local(WeightUpdaterBase):
    """An updater of a user's own, without workers."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.got: list[Any] = []

    def _get_server_weights(self) -> Any:
        return self.network

    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        self.got.append((worker_id, server_weights))


class Collector:
    def __init__(self) -> None:
        self.version = 0

    def increment_version(self) -> None:
        self.version += 1


def test_subclasses_say_how_to_sync() -> None:
    network = model(1.0)
    updater = Local(network)
    updater.push_weights()
    ((worker, got),) = updater.got
    assert worker is None
    assert torch.equal(got["0", "weight"], network.state_dict()["0.weight"])
    given = {"w": torch.ones(1)}
    updater.push_weights(given, worker_ids=torch.device("cpu"))
    assert updater.got[1] == (torch.device("cpu"), given)
    with pytest.raises(TypeError, match=r"policy_or_weights must be None, .* got .*int"):
        updater.push_weights(3)
    assert updater.all_worker_ids() is None
    updater.init(1, key=2)
    assert Local.from_policy(network) is None


def test_what_a_users_own_way_to_sync_returns_is_waited_for() -> None:
    done: list[Any] = []

    class Later(Local):
        async def _sync_weights_with_worker(  # type: ignore[override]  # pyright: ignore
            self, *, worker_id: Any = None, server_weights: Any
        ) -> None:
            done.append((worker_id, server_weights))

    given = {"w": torch.ones(1)}
    Later(model()).push_weights(given, worker_ids=[1, 2])
    assert done == [(1, given), (2, given)]


def test_a_hook_that_nobody_would_await_is_refused() -> None:
    async def hook() -> None: ...

    with pytest.raises(TypeError, match=r"hook .*async.*plain function"):
        Local(model()).register_post_hook(hook)


def test_an_updater_has_one_collector() -> None:
    updater, collector = Local(model()), Collector()
    assert updater.collector is None
    with pytest.raises(RuntimeError, match="no collector is registered"):
        updater.increment_version()
    updater.register_collector(collector)
    updater.register_collector(collector)
    assert updater.collector is collector
    assert updater.collectors == [collector]
    updater.increment_version()
    assert collector.version == 1
    with pytest.raises(RuntimeError, match=r"Cannot register collector twice.*Collector"):
        updater.register_collector(Collector())
    del collector
    assert updater.collector is None


def test_a_base_updater_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="_sync_weights_with_worker"):
        WeightUpdaterBase()  # type: ignore[abstract]
