"""Relays on the nodes of a real Ray cluster: who has one, who uses it, and what deaths do."""

import os
import signal
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.util

import weightbus
from weightbus import AddressError, KeysError, Publisher, Settings, WorkersMissingError
from weightbus.bus.trust.keys import generate
from weightbus.python_client.engines import ray_relays
from weightbus.python_client.keys import KEYS
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.tunnel import Tunnel
from weightbus.tests.relay.ray_nodes import SOON, STORE, cluster, get, lose, workers
from weightbus.tests.schemes.ray_cluster import SECONDS, START_SECONDS

pytestmark = pytest.mark.timeout(400)  # an actor may take its time to start

SIZE = 2**20  # numbers of a version of four chunks
NBYTES = 4 * SIZE
SPEED = 2 * NBYTES  # bytes a second of each connection, so that a version takes half a second
QUICK = Settings(ping=0.1, lost_after=1.0, grace=0.2)


def arrays(value: float, size: int = SIZE) -> dict[str, Any]:
    return {"w": np.full(size, value, np.float32)}


@pytest.fixture(scope="module")
def nodes() -> Generator[Any]:
    """A cluster of two nodes."""
    with cluster(2) as made:
        yield made


@pytest.fixture
def stack() -> Generator[ExitStack]:
    with ExitStack() as made:
        yield made


def tunnelled(
    stack: ExitStack, settings: Settings, speed: float = float("inf")
) -> tuple[Publisher, Tunnel, Tunnel]:
    """Return a publisher, and the tunnels before its two sockets."""
    control, data = (stack.enter_context(closing(Tunnel(speed))) for _ in range(2))
    settings = replace(settings, advertise=data.address, shared_memory=False)
    publisher = stack.enter_context(Publisher(settings=settings))
    control.lead_to(publisher.address)
    data.lead_to(publisher.data_address)
    return publisher, control, data


def started(stack: ExitStack, publisher: Any, **options: Any) -> Any:
    made = weightbus.ray.relays(publisher, ["m"], settings=SOON, timeout=START_SECONDS, **options)
    return stack.enter_context(made)


def through(publisher: Publisher) -> dict[str, tuple[str, ...]]:
    return {name: status.through for name, status in publisher.workers().items()}


def test_each_node_has_a_relay_and_its_workers_use_it(nodes: Any, stack: ExitStack) -> None:
    publisher = stack.enter_context(Publisher(settings=SOON))
    found = started(stack, publisher).status()
    assert found.keys() == {node.node_id for node in nodes.list_all_nodes()}
    assert all(relay.status is not None and relay.status.joined for relay in found.values())
    names, actors = {}, []
    for number, node in enumerate(nodes.list_all_nodes()):
        actors.append(workers(node, [f"w{number}"], SIZE))
        names[f"w{number}"] = (found[node.node_id].name,)
        own, *others, last = get(actors[-1].found.remote())
        assert own == found[node.node_id].address
        assert others == [r.address for r in found.values() if r.node != node.node_id]
        assert last == publisher.address
    receipt = publisher.publish("m", arrays(1), expect=2, timeout=SECONDS)
    assert {name: worker.through for name, worker in receipt.workers.items()} == names


def test_one_copy_is_sent_to_a_node_with_eight_workers(nodes: Any, stack: ExitStack) -> None:
    publisher, control, data = tunnelled(stack, SOON)
    node = nodes.list_all_nodes()[1]
    relays = started(stack, control.address, nodes=lambda found: found["NodeID"] == node.node_id)
    actor = workers(node, [f"w{number}" for number in range(8)], SIZE)
    before = len(control.told) + len(data.told)
    for value in (1, 2, 3):
        receipt = publisher.publish("m", arrays(value), expect=8, timeout=SECONDS)
        assert len(receipt.in_state("applied")) == 8
        assert get(actor.values.remote()) == {value}
    assert get(actor.digests.remote()) == {""}, "they copied it from the relay's memory"
    copies = (len(control.told) + len(data.told) - before) / (3 * NBYTES)
    print(f"copies of a version on the wire to a node with eight workers: {copies:.3f}")
    assert 1 <= copies < 2, "on a busy host, some chunks are requested again"
    (relay,) = relays.status().values()
    assert relay.status.received == {"m": 3 * NBYTES}


@pytest.mark.parametrize(
    ("settings", "bound"),
    [pytest.param(SOON, 2.0, id="soon"), pytest.param(QUICK, 1.0, id="quick")],
)
def test_a_node_that_joins_gets_a_relay_and_its_end_is_in_the_receipt(
    nodes: Any, stack: ExitStack, settings: Settings, bound: float
) -> None:
    publisher, control, data = tunnelled(stack, settings, SPEED)
    relays = started(stack, control.address)
    near = workers(nodes.head_node, ["near"], SIZE)
    node, joined_at = nodes.add_node(**STORE), time.monotonic()

    def relay_of() -> Any:
        found = relays.status().get(node.node_id)
        return found if found is not None and found.status is not None else None

    relay = wait_for(relay_of, "the node that has joined has a relay", START_SECONDS)
    print(f"a node that joined had a relay after {time.monotonic() - joined_at:.1f} s")
    far = workers(node, ["far-0", "far-1"], SIZE)
    first = publisher.publish("m", arrays(1), expect=3, timeout=SECONDS)
    assert get(far.values.remote()) == {1}
    assert first.workers["far-0"].through == first.workers["far-1"].through == (relay.name,)

    def halfway() -> bool:
        return len(control.told) + len(data.told) > before + 3 * NBYTES // 2

    before = len(control.told) + len(data.told)
    coming = publisher.publish_async("m", arrays(2), require="alive", timeout=SECONDS)
    wait_for(halfway, "half of the version has gone to the three relays", SECONDS)
    lost_at = lose(nodes, node)
    receipt = coming.result(SECONDS)
    took = time.monotonic() - lost_at
    print(f"the receipt named the dead {took:.2f} s after the end of the node")
    assert sorted(receipt.in_state("lost")) == ["far-0", "far-1"]
    assert receipt.in_state("applied") == ["near"]
    assert get(near.values.remote()) == {2}
    assert took < bound
    gone = lambda: node.node_id not in relays.status()  # noqa: E731
    wait_for(gone, "Ray says that the node is dead", SECONDS)


def test_workers_go_on_while_their_relay_is_restarted_and_return(
    nodes: Any, stack: ExitStack
) -> None:
    publisher = stack.enter_context(Publisher(settings=SOON))
    relays = started(stack, publisher)
    node = nodes.list_all_nodes()[1]
    relay = relays.status()[node.node_id]
    actor = workers(node, ["w"], SIZE)
    publisher.publish("m", arrays(1), expect=1, timeout=SECONDS)
    pid = publisher.workers()[relay.name].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_for(lambda: through(publisher)["w"] != (relay.name,), "it is elsewhere", SECONDS)
    receipt = publisher.publish("m", arrays(2), expect=1, timeout=SECONDS)
    print(f"the worker had a version by another way {time.monotonic() - killed_at:.1f} s later")
    assert receipt.workers["w"].through != (relay.name,)

    def returned() -> bool:
        found = publisher.workers().get("w")  # absent while it goes from one relay to the other
        return found is not None and found.through == (relay.name,) and found.state != "lost"

    wait_for(returned, "it is back at its relay", START_SECONDS)
    print(f"it was back at its relay after {time.monotonic() - killed_at:.1f} s")
    receipt = publisher.publish("m", arrays(3), expect=1, timeout=SECONDS)
    assert receipt.workers["w"].through == (relay.name,)
    assert get(actor.values.remote()) == {3}
    assert relays.status()[node.node_id].address == relay.address


def test_another_program_takes_over_the_relays_where_they_are(nodes: Any, stack: ExitStack) -> None:
    first = stack.enter_context(Publisher(settings=SOON))
    left = weightbus.ray.relays(first, ["m"], settings=SOON, timeout=START_SECONDS)
    addresses = {node: relay.address for node, relay in left.status().items()}
    pids = {relay.pid for relay in first.workers().values()}
    actor = workers(nodes.head_node, ["w"], SIZE)
    first.publish("m", arrays(1), expect=1, timeout=SECONDS)
    same = weightbus.ray.relays(first, ["m"], settings=SOON, timeout=START_SECONDS)
    assert {w.pid for w in first.workers().values() if w.name != "w"} == pids, "none is new"
    second = stack.enter_context(Publisher(settings=SOON))
    relays = started(stack, second)
    assert {node: relay.address for node, relay in relays.status().items()} == addresses
    receipt = second.publish("m", arrays(2), expect=1, timeout=SECONDS)
    assert receipt.workers["w"].through == (relays.status()[nodes.head_node.node_id].name,)
    assert get(actor.values.remote()) == {2}
    left.close()
    same.close()
    assert all(r.status is not None for r in relays.status().values()), "they close their own only"


def test_relays_with_keys(
    nodes: Any, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS, raising=False)
    generate(tmp_path, {"ray-*": "relay"})
    generate(tmp_path, {"w*": "worker"}, at=["ray-*"])
    host = ray.util.get_node_ip_address()
    publisher = stack.enter_context(Publisher(f"tcp://{host}:0", keys=tmp_path, settings=SOON))
    relays = started(stack, publisher, keys=tmp_path)
    keys = str(tmp_path / "workers" / "w+@ray-+.json")
    actor = workers(nodes.head_node, ["w"], SIZE, keys=keys)
    receipt = publisher.publish("m", arrays(1), expect=1, timeout=SECONDS)
    own = relays.status()[nodes.head_node.node_id]
    assert receipt.workers["w"].through == (own.name,)
    found = get(actor.found.remote())
    assert found[0] == own.address
    assert sorted(found) == sorted(r.address for r in relays.status().values())


@pytest.mark.usefixtures("nodes")
def test_relays_that_other_hosts_can_reach_need_keys(stack: ExitStack, tmp_path: Path) -> None:
    publisher = stack.enter_context(Publisher("tcp://0.0.0.0:0", insecure=True))
    with pytest.raises(AddressError, match=r"other hosts can reach tcp://.*give keys="):
        weightbus.ray.relays(publisher, ["m"])
    with pytest.raises(KeysError, match="is no relay's folder"):
        weightbus.ray.relays(publisher, ["m"], keys=tmp_path)
    assert ray_relays._actor_names("ray") == set()  # noqa: SLF001 # pyright: ignore
    relays = started(stack, publisher, insecure=True)
    host = ray.util.get_node_ip_address()
    for relay in relays.status().values():
        assert relay.address.startswith(f"tcp://{host}:")
        assert relay.status.upstream.startswith(f"tcp://{host}:"), "not 0.0.0.0"


@pytest.mark.usefixtures("nodes")
def test_nodes_on_other_hosts_need_a_publisher_that_they_can_reach(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = stack.enter_context(Publisher())
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "198.51.100.7")
    with pytest.raises(AddressError, match=r'cannot reach .*Publisher\("tcp://198\.51\.100\.7:0"'):
        weightbus.ray.relays(publisher, ["m"])


def test_what_is_missing_is_named(nodes: Any, stack: ExitStack) -> None:
    publisher = stack.enter_context(Publisher())
    with pytest.raises(ValueError, match="a Publisher that has published them"):
        weightbus.ray.relays(publisher)
    with pytest.raises(ValueError, match='give "all"'):
        weightbus.ray.relays(publisher, ["m"], nodes="gpu")
    with pytest.raises(WorkersMissingError, match=r"nor has any other node: call weightbus\.ray"):
        weightbus.ray.address(timeout=0.1)
    other = nodes.list_all_nodes()[1]
    publisher.prepare("m", arrays(1))
    only = started(stack, publisher, nodes=lambda node: node["NodeID"] == other.node_id)
    assert only.status().keys() == {other.node_id}
    with pytest.raises(WorkersMissingError, match=r"1 other nodes have one\. Does nodes="):
        weightbus.ray.address(timeout=0.1)


def test_without_ray_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"weightbus\.ray\.address\(\) needs Ray: call ray.init"):
        weightbus.ray.address()
    with pytest.raises(RuntimeError, match=r"weightbus\.ray\.relays\(\) needs Ray: call ray.init"):
        weightbus.ray.relays("tcp://127.0.0.1:1", ["m"])
