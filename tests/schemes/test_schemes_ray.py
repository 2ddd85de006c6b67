"""The schemes over Ray: actors of any class run the weights that were sent, and say so."""

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
import ray
import ray.cloudpickle
import torch

from weightbus.bus.errors import PublishError
from weightbus.python_client.schemes.ray import (
    RayActorTransport,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
    RayTransport,
    RayWeightSyncScheme,
)
from weightbus.python_client.schemes.weight_updaters import RayWeightUpdater
from weightbus.tests.compose.waiting import stop
from weightbus.tests.schemes.ray_cluster import (
    DEAD,
    SECONDS,
    Async,
    HookedHost,
    Host,
    Receiver,
    Rollout,
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
        yield start_all(Receiver, Receiver)


@pytest.fixture
def actors(pair: list[Any]) -> list[Any]:
    """Two actors that are no receivers yet. (A new one takes seconds.)"""
    get([actor.reset.remote() for actor in pair])
    return pair


def get(refs: Any) -> Any:
    return ray.get(refs, timeout=SECONDS)


def seen(actors: list[Any]) -> list[set[float]]:
    return get([actor.values.remote() for actor in actors])


def connected(actors: list[Any], trained: Any, **kwargs: Any) -> RayWeightSyncScheme:
    """Return a scheme that has given all actors their first weights."""
    scheme = RayWeightSyncScheme(timeout=SECONDS, **kwargs)
    scheme.init_on_sender(model_id="policy", remote_collectors=actors, model=trained)
    get([actor.become.remote(scheme, worker_idx=i) for i, actor in enumerate(actors)])
    get([actor.connect.remote() for actor in actors])
    scheme.connect()
    return scheme


def fill(network: torch.nn.Module, value: float) -> None:
    network.load_state_dict(model(value).state_dict())


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_actors_get_the_first_weights_and_then_each_that_is_sent(
    actors: list[Any], strategy: Any
) -> None:
    trained = model(1.0)
    scheme = connected(actors, trained, strategy=strategy)
    assert seen(actors) == [{1.0}, {1.0}]
    fill(trained, 2.0)
    assert seen(actors) == [{1.0}, {1.0}], "training is not sending"
    scheme.send()
    assert seen(actors) == [{2.0}, {2.0}]
    scheme.send(model(3.0), worker_ids=1)
    assert seen(actors) == [{2.0}, {3.0}]
    assert scheme.receipt is not None
    assert scheme.receipt.in_state("applied") == ["1"]
    scheme.send({0: model(4.0), 1: model(5.0)})
    assert seen(actors) == [{4.0}, {5.0}]
    versions = scheme.versions()
    assert versions[1] == versions[0] + 1 == 5
    get(actors[0].train.remote())
    assert seen([actors[0]]) == [{7.0}], "the worker's weights are its own"
    with pytest.raises(ValueError, match="Worker 2 not registered"):
        scheme.send(worker_ids=2)


def test_weights_may_change_as_soon_as_an_async_send_returns(actors: list[Any]) -> None:
    trained = model(1.0)
    scheme = connected(actors, trained)
    for value in (2.0, 3.0, 4.0):
        fill(trained, value)
        scheme.send_async()
        fill(trained, -1.0)
        with pytest.raises(RuntimeError, match="previous send is pending"):
            scheme.send_async()
        scheme.wait_async()
        assert seen(actors) == [{value}, {value}]
    with pytest.raises(RuntimeError, match="No async send is pending"):
        scheme.wait_async()


def test_a_killed_actor_is_named_and_the_others_are_served(actors: list[Any]) -> None:
    actors = [start(Receiver), actors[1]]
    scheme = connected(actors, model(1.0))
    os.kill(get(actors[0].pid.remote()), signal.SIGKILL)
    with pytest.raises(PublishError, match=rf"1 of 2 .*worker 0 lost.*Actor\(Receiver.*{DEAD}"):
        scheme.send(model(2.0))
    assert scheme.receipt is not None
    assert scheme.receipt.seconds < SECONDS / 2
    assert seen(actors[1:]) == [{2.0}]
    scheme.send(model(3.0), worker_ids=[1])
    assert seen(actors[1:]) == [{3.0}]
    assert scheme.versions()[1] > scheme.versions()[0]


def test_a_stopped_actor_costs_no_more_than_the_deadline(actors: list[Any]) -> None:
    scheme = connected(actors, model(1.0))
    pid = get(actors[1].pid.remote())
    stop(pid)
    try:
        with pytest.raises(PublishError, match="worker 1 behind: no answer within 1 s"):
            scheme.send(model(2.0), timeout=1.0)
        with pytest.raises(PublishError, match="worker 1 behind"):
            scheme.send(model(3.0), timeout=1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert seen(actors) == [{3.0}, {3.0}], "it caught up"
    scheme.send(model(4.0))
    assert seen(actors) == [{4.0}, {4.0}]
    assert scheme.versions() == {0: 4, 1: 4}


def test_a_scheme_of_the_workers_own_and_no_receiver_at_all(actors: list[Any]) -> None:
    scheme = RayWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(model_id="policy", remote_collectors=actors, model=model(1.0))
    get([a.become.remote(RayWeightSyncScheme()) for a in actors[:1]])
    get(actors[0].connect.remote())
    scheme.connect()
    with pytest.raises(PublishError, match=r"worker 1 failed.*no receiver of model 'policy'"):
        scheme.send(model(2.0))
    assert seen(actors) == [{2.0}, {0.0}]


def test_a_receiver_that_polls_in_the_actors_only_thread_is_served(actors: list[Any]) -> None:
    scheme = RayWeightSyncScheme(timeout=SECONDS, background=False)
    scheme.init_on_sender(model_id="policy", remote_collectors=actors, model=model(1.0))
    get([actor.become.remote(scheme, worker_idx=i) for i, actor in enumerate(actors)])
    get([actor.connect.remote() for actor in actors])
    scheme.connect()
    scheme.send(model(2.0))
    assert seen(actors) == [{2.0}, {2.0}]
    assert get([actor.poll.remote() for actor in actors]) == [True, True]
    assert get([actor.poll.remote() for actor in actors]) == [False, False]


# Actors that are no receivers, and the older API.


def test_an_actor_may_have_the_documented_method_instead() -> None:
    actors = start_all(Updatable, Rollout)
    scheme = RayWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(model_id="policy", remote_collectors=actors, model=model(1.0))
    scheme.connect()
    assert seen(actors) == [{1.0}, {0.0}]
    with pytest.raises(PublishError, match=r"1 of 2 .*worker 1 failed.*init_on_receiver"):
        scheme.send(model(2.0))
    assert seen(actors) == [{2.0}, {0.0}]
    assert get(actors[0].received.remote()) == ["TensorDict", "TensorDict"]


def test_an_actor_with_an_event_loop_has_its_weights_when_a_send_returns() -> None:
    actor = start(Async)
    scheme = RayWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(model_id="policy", remote_collectors=[actor], model=model(1.0))
    scheme.connect()
    assert seen([actor]) == [{1.0}]
    scheme.send(model(2.0))
    assert seen([actor]) == [{2.0}]
    updater = RayWeightUpdater(model(3.0), [actor], timeout=SECONDS)
    updater.push_weights()
    assert seen([actor]) == [{3.0}]
    for push in (scheme.send, updater.push_weights):
        with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*size mismatch"):
            push(model(features=5))
    assert (scheme.versions(), updater.versions()) == ({0: 2}, {0: 1})
    ray.kill(actor)


def test_the_older_vintage(actors: list[Any]) -> None:
    scheme = RayWeightSyncScheme("state_dict", timeout=SECONDS)
    scheme.init_on_sender("policy", remote_collectors=actors, source_model=model(1.0))
    get([actor.become_worker.remote(scheme) for actor in actors])
    sender = scheme.get_sender()
    sender.send()
    assert seen(actors) == [{1.0}, {1.0}]
    sender.send_async(model(2.0), worker_ids=[1])
    sender.wait_async()
    assert seen(actors) == [{1.0}, {2.0}]
    sender.update_weights(model(3.0))
    transport = scheme.create_transport(actors[0])
    assert isinstance(transport, RayTransport)
    transport.send_weights("policy", model(4.0))
    assert seen(actors) == [{4.0}, {3.0}]
    RayTransport(actors[1]).send_weights(dict(model(5.0).state_dict()))
    assert seen(actors) == [{4.0}, {5.0}]


def test_a_scheme_travels_in_any_state(actors: list[Any]) -> None:
    scheme = connected(actors, model(1.0))
    pickler: Any = ray.cloudpickle
    copy = pickler.loads(pickler.dumps(scheme))
    assert not copy.initialized_on_sender
    copy.init_on_sender(model_id="policy", remote_collectors=actors, model=model(2.0))
    copy.connect()
    assert seen(actors) == [{2.0}, {2.0}]
    with pytest.raises(PublishError, match="follows a newer sender"):
        scheme.send(model(3.0))
    assert seen(actors) == [{2.0}, {2.0}]


def test_without_actors_there_is_nobody_to_send_to() -> None:
    with pytest.raises(ValueError, match="must be provided via context or kwargs"):
        RayWeightSyncScheme().init_on_sender(model_id="policy", model=model())
    with pytest.raises(ValueError, match="actor_refs"):
        RayModuleTransformScheme().init_on_sender("policy", model=model())


# Modules in actors.


class Transform:
    """What TorchRL's RayModuleTransform is to a scheme."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_a_hosted_module_is_given_weights_by_the_actors_method(strategy: Any) -> None:
    actor = start(Host)
    scheme = RayModuleTransformScheme(strategy, timeout=SECONDS)
    scheme.init_on_sender("policy", actor_refs=[actor], source_model=model(1.0))
    sender = scheme.get_sender()
    assert isinstance(sender, RayModuleTransformSender)
    sender.update_weights(None)
    assert seen([actor]) == [{1.0}]
    RayActorTransport(actor, strategy).send_weights("policy", model(2.0))
    assert seen([actor]) == [{2.0}]
    expected = {"tensordict": "TensorDict", "state_dict": "dict"}[strategy]
    assert set(get(actor.received.remote())) == {expected}
    with pytest.raises(ValueError, match="Unknown update method: x"):
        RayActorTransport(actor, "x")


def test_a_transform_that_was_given_the_scheme_becomes_a_receiver() -> None:
    actor = start(HookedHost)
    scheme = RayModuleTransformScheme(timeout=SECONDS)
    remember: Any = scheme._set_transform  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    remember(Transform(actor))
    scheme.init_on_sender()
    scheme.connect()
    scheme.send(model(1.0))
    assert seen([actor]) == [{1.0}]
    assert get(actor.received.remote()) == [], "it was applied in place, by the receiver"
    assert isinstance(scheme.create_receiver(), RayModuleTransformReceiver)
    with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*0\.weight"):
        scheme.send(model(1.0, features=5))
    os.kill(get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(PublishError, match=r"worker 0 lost.*HookedHost"):
        scheme.send(model(2.0))
