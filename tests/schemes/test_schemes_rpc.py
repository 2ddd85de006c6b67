"""The scheme over torch RPC: workers of a group run the weights that were sent, and say so."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc

from weightbus.bus.errors import PublishError
from weightbus.python_client.schemes.torch_rpc import RPCTransport, RPCWeightSyncScheme
from weightbus.tests.compose.waiting import stop
from weightbus.tests.schemes import rpc_group
from weightbus.tests.schemes.ray_cluster import SECONDS, model
from weightbus.tests.schemes.rpc_group import Collector, Coroutine, Forward, Group, group

# PyTorch's own: its RPC backend uses a process group in a way that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning:torch")


@pytest.fixture(scope="session")
def everybody() -> Generator[Group]:
    """One group for good.

    PyTorch counts, process by process, what was gathered in any group. Whoever was in one before
    would wait in the next for members that are new, without end. A module's fixture can be made
    twice in a process: where tests are shared out, some of a module may come back to it later.
    """
    with group(3) as running:
        yield running


def built(workers: Group) -> Group:
    """Have workers that are no receivers yet."""
    for worker in range(len(workers.names)):
        workers.call(worker, rpc_group.build)
    return workers


@pytest.fixture
def workers(everybody: Group) -> Group:
    """Two workers that are no receivers yet."""
    return built(everybody.some("worker1", "worker2"))


def connected(workers: Group, trained: nn.Module, **kwargs: Any) -> RPCWeightSyncScheme:
    """Return a scheme that has given all workers their first weights."""
    scheme = RPCWeightSyncScheme(timeout=SECONDS, **kwargs)
    scheme.init_on_sender(model_id="policy", workers=workers.names, model=trained)
    for worker in range(2):
        workers.call(worker, rpc_group.become, scheme, worker)
        workers.call(worker, rpc_group.connect)
    scheme.connect()
    return scheme


def fill(network: nn.Module, value: float) -> None:
    network.load_state_dict(model(value).state_dict())


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_workers_get_the_first_weights_and_then_each_that_is_sent(
    workers: Group, strategy: Any
) -> None:
    trained = model(1.0)
    scheme = connected(workers, trained, strategy=strategy)
    assert workers.values() == [{1.0}, {1.0}]
    fill(trained, 2.0)
    assert workers.values() == [{1.0}, {1.0}], "training is not sending"
    scheme.send()
    assert workers.values() == [{2.0}, {2.0}]
    scheme.send(model(3.0), worker_ids=[1])
    assert workers.values() == [{2.0}, {3.0}]
    assert scheme.receipt is not None
    assert scheme.receipt.in_state("applied") == ["1"]
    assert scheme.versions() == {0: 2, 1: 3}
    workers.call(0, rpc_group.train, 7.0)
    assert workers.values() == [{7.0}, {3.0}], "the worker's weights are its own"
    with pytest.raises(ValueError, match="Worker 2 not registered"):
        scheme.send(worker_ids=2)


def test_weights_may_change_as_soon_as_an_async_send_returns(workers: Group) -> None:
    trained = nn.Linear(1000, 1000)  # large enough to be still on its way
    scheme = RPCWeightSyncScheme(timeout=SECONDS, strict=False)
    scheme.init_on_sender(model_id="policy", workers=workers.names, model=trained)
    for worker in range(2):
        workers.call(worker, rpc_group.become_large, scheme, worker)
    scheme.connect()
    for value in range(1, 20):
        with torch.no_grad():
            trained.weight.fill_(value)
            scheme.send_async()
            trained.weight.fill_(-1)
        scheme.wait_async()
        for worker in range(2):
            assert workers.call(worker, rpc_group.extremes) == (value, value)


def test_a_worker_that_runs_no_version_is_not_said_to_run_one(workers: Group) -> None:
    scheme = RPCWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(model_id="policy", workers=workers.names, model=model(1.0))
    workers.call(0, rpc_group.become_refusing, scheme, 0)
    workers.call(1, rpc_group.become, scheme, 1)
    workers.call(1, rpc_group.connect)
    scheme.connect()
    scheme.send()
    with pytest.raises(PublishError, match=r"1 of 2 .*worker 0 failed.*no version runs.*no twos"):
        scheme.send(model(2.0))
    assert scheme.versions() == {1: 3}
    scheme.send(model(3.0))
    assert scheme.versions() == {0: 4, 1: 4}


def test_a_stopped_worker_costs_no_more_than_the_deadline(workers: Group) -> None:
    scheme = connected(workers, model(1.0))
    stop(workers.pid(1))
    try:
        with pytest.raises(PublishError, match=r"1 of 2 .*worker 1 behind"):
            scheme.send(model(2.0), timeout=1.0)
        assert scheme.receipt is not None
        assert scheme.receipt.seconds < 5.0
        with pytest.raises(PublishError, match=r"worker 1 behind"):
            scheme.send(model(3.0), timeout=1.0)
    finally:
        os.kill(workers.pid(1), signal.SIGCONT)
    scheme.send(model(4.0))
    assert workers.values() == [{4.0}, {4.0}], "what was late did not overwrite it"
    assert scheme.versions() == {0: 4, 1: 4}


def test_two_models_in_the_same_workers(workers: Group) -> None:
    first = connected(workers, model(1.0))
    second = RPCWeightSyncScheme(timeout=SECONDS)
    second.init_on_sender(model_id="second", workers=workers.names, model=model(5.0))
    for worker in range(2):
        workers.call(worker, rpc_group.become, second, worker, "second")
        workers.call(worker, rpc_group.connect, "second")
    second.connect()
    assert workers.values("second") == [{5.0}, {5.0}]
    second.send(model(6.0))
    first.send(model(2.0))
    assert workers.values("second") == [{6.0}, {6.0}]
    assert workers.values() == [{2.0}, {2.0}]


def test_the_first_weights_wait_for_receivers_that_come_later(workers: Group) -> None:
    scheme = RPCWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(model_id="policy", workers=workers.names, model=model(1.0))
    workers.call(0, rpc_group.become, scheme, 0)  # this one is there, but not connected
    scheme.connect()
    assert workers.values() == [{0.0}, {0.0}]
    workers.call(1, rpc_group.become, scheme, 1)
    for worker in range(2):
        workers.call(worker, rpc_group.connect)
    assert workers.values() == [{1.0}, {1.0}]


def test_workers_that_have_weights_of_their_own_begin_with_them(workers: Group) -> None:
    scheme = RPCWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(workers=workers.names, params_map={0: model(1.0), 1: model(2.0)})
    workers.call(0, rpc_group.become, scheme, 0)
    scheme.connect()
    workers.call(1, rpc_group.become, scheme, 1)
    for worker in range(2):
        workers.call(worker, rpc_group.connect)
    assert workers.values() == [{1.0}, {2.0}]


def test_a_send_waits_for_a_receiver_until_its_deadline(workers: Group) -> None:
    scheme = RPCWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(model_id="policy", workers=workers.names)
    scheme.connect()
    with pytest.raises(PublishError, match=r"worker 0 failed.*no receiver of model 'policy'"):
        scheme.send(model(2.0), timeout=1.0)
    scheme.send_async(model(3.0))
    for worker in range(2):
        workers.call(worker, rpc_group.become, scheme, worker)
        workers.call(worker, rpc_group.connect)
    scheme.wait_async()
    assert workers.values() == [{3.0}, {3.0}]


def test_a_model_without_memory_waits_for_its_first_weights(workers: Group) -> None:
    scheme = RPCWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(model_id="policy", workers=workers.names, model=model(1.0))
    connecting: list[Any] = []
    for worker, name in enumerate(workers.names):
        workers.call(worker, rpc_group.build_hollow)
        workers.call(worker, rpc_group.become, scheme, worker)
        connecting.append(rpc.rpc_async(name, rpc_group.connect, timeout=SECONDS))
    scheme.connect()
    for future in connecting:
        future.wait()
    assert workers.values() == [{1.0}, {1.0}]


def test_nothing_is_applied_while_the_weights_are_read(workers: Group, tmp_path: Path) -> None:
    scheme = connected(workers, model(1.0))
    started = tmp_path / "reading"
    reading = rpc.rpc_async(
        workers.names[0], rpc_group.read_for, args=(1.0, str(started)), timeout=SECONDS
    )
    while not started.exists():
        assert workers.call(1, rpc_group.values_of, "policy") == {1.0}
    scheme.send(model(2.0))
    reading.wait()
    assert scheme.receipt is not None
    assert (scheme.receipt.workers["0"].seconds or 0.0) > 0.2, "it waited for the reader"
    assert workers.values() == [{2.0}, {2.0}]


# The older API, and collectors.


def test_the_older_vintage_applies_where_it_polls(workers: Group) -> None:
    scheme = RPCWeightSyncScheme("state_dict", timeout=SECONDS)
    scheme.init_on_sender("policy", workers=workers.names, source_model=model(1.0))
    for worker in range(2):
        workers.call(worker, rpc_group.become_worker, scheme)
    sender = scheme.get_sender()
    sender.send_async()
    assert [workers.call(worker, rpc_group.poll, SECONDS) for worker in range(2)] == [True, True]
    sender.wait_async()
    assert workers.values() == [{1.0}, {1.0}]
    assert not workers.call(0, rpc_group.poll, 0.0)
    with pytest.raises(PublishError, match=r"worker 1 staged .*applied when .*receive\(\)"):
        sender.send(model(2.0), worker_ids=1, timeout=1.0)
    assert workers.values() == [{1.0}, {1.0}]
    assert workers.call(1, rpc_group.poll, SECONDS)
    assert workers.values() == [{1.0}, {2.0}]


def test_a_collector_may_have_the_documented_method_instead(workers: Group) -> None:
    infos = [rpc.get_worker_info(name) for name in workers.names]
    rrefs = [rpc.remote(name, Collector) for name in workers.names]

    class Trainer:
        collector_infos, collector_rrefs, collector_class = infos, rrefs, Collector
        policy = model(1.0)
        num_workers = 2

    trainer = Trainer()
    scheme = RPCWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(model_id="policy", context=trainer)
    scheme.connect()
    states = [rref.rpc_sync(timeout=SECONDS).state() for rref in rrefs]
    assert states == [({1.0}, ["TensorDict"])] * 2
    transport = scheme.create_transport((infos[1], rrefs[1], Collector))
    assert isinstance(transport, RPCTransport)
    transport.send_weights("policy", model(2.0))
    RPCTransport(infos[0], rrefs[0], Collector).send_weights(model(3.0))
    states = [rref.rpc_sync(timeout=SECONDS).state() for rref in rrefs]
    assert [values for values, _ in states] == [{3.0}, {2.0}]


@pytest.mark.parametrize("kind", [Coroutine, Forward])
def test_what_the_documented_method_promises_is_waited_for(workers: Group, kind: Any) -> None:
    rref: Any = rpc.remote(workers.names[0], kind)
    scheme = RPCWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender("policy", workers=workers.names[:1], collector_rrefs=[rref])
    scheme.connect()
    scheme.send(model(2.0))
    assert rref.rpc_sync(timeout=SECONDS).state() == ({2.0}, ["TensorDict"])
    with pytest.raises(PublishError, match=r"(?s)worker 0 failed.*size mismatch"):
        scheme.send(model(features=5))
    assert scheme.versions() == {0: 1}


def test_without_workers_there_is_nobody_to_send_to() -> None:
    with pytest.raises(ValueError, match="collector_infos"):
        RPCWeightSyncScheme().init_on_sender(model_id="policy", model=model())
    with pytest.raises(ValueError, match="needs a worker"):
        RPCTransport()


def test_a_worker_that_does_not_exist_is_named(workers: Group) -> None:
    scheme = RPCWeightSyncScheme(timeout=SECONDS)
    scheme.init_on_sender(model_id="policy", workers=[workers.names[0], "nobody"])
    workers.call(0, rpc_group.become, scheme, 0)
    workers.call(0, rpc_group.connect)
    scheme.connect()
    with pytest.raises(PublishError, match=r"1 of 2 .*worker 1 lost.*nobody"):
        scheme.send(model(2.0))
    assert workers.values()[0] == {2.0}


def test_a_killed_worker_is_named_and_the_others_are_served(everybody: Group) -> None:
    workers = built(everybody.some("worker3", "worker2"))  # the group does not take worker3 back
    scheme = connected(workers, model(1.0))
    os.kill(workers.pid(0), signal.SIGKILL)
    workers.processes[0].join(SECONDS)
    with pytest.raises(PublishError, match=r"1 of 2 .*worker 0 lost.*RPC worker worker3"):
        scheme.send(model(2.0))
    assert scheme.receipt is not None
    assert scheme.receipt.seconds < SECONDS / 2
    scheme.send(model(3.0), worker_ids=1)
    assert workers.call(1, rpc_group.values_of, "policy") == {3.0}
    assert scheme.versions() == {0: 1, 1: 3}
    late = RPCWeightSyncScheme(timeout=SECONDS)
    late.init_on_sender(model_id="policy", workers=workers.names, model=model(4.0))
    with pytest.raises(PublishError, match=r"first weights\. worker 0 lost.*worker3"):
        late.connect()
    assert workers.call(1, rpc_group.values_of, "policy") == {4.0}
    late.send(model(5.0), worker_ids=1)
    assert workers.call(1, rpc_group.values_of, "policy") == {5.0}
