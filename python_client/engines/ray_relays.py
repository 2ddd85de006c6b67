"""Runs a relay on each node of a Ray cluster, in an actor that Ray places and restarts.

    relays()    called in the trainer: starts a thread that starts an actor on each node
    address()   called on any node: finds the node's own actor by name, and a few other actors

The name of an actor contains the id of its node, so only Ray needs to know where relays are. A
relay's port is chosen before its actor is created: Ray restarts a killed actor with the same
arguments, so workers find the restarted relay at the same address.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...bus.errors import AddressError, WorkersMissingError
from ...bus.net import endpoints
from ...codecs.errors import WeightBusError
from .. import checks
from ..closing import Closable
from ..keys import check_exposure, relay_keys
from ..observing.relay_status import RelayStatus
from ..publisher import Publisher
from ..relay import Relay
from ..settings import Settings, settings_of

log = logging.getLogger("weightbus.relay")

NAMESPACE = "weightbus"  # Ray's namespace of the actors' names, shared by all jobs of a cluster
LOOK_SECONDS = (
    1.0  # between two checks of Ray's nodes, each two short calls of Ray's control service
)
START_SECONDS = 120.0  # within which an actor's process must start, also on a busy node
RETRY_SECONDS = 10.0  # between a failed start and the next one
BIND_SECONDS = 10.0  # within which the process of a killed actor must free the port
ANSWER_SECONDS = 2.0  # within which actors must report their status, or close
OTHERS = 2  # how many relays of other nodes a worker gets as alternatives
OTHERS_SECONDS = 1.0  # within which these must answer; one may be on a node that has just died
CALLS = 8  # how many calls an actor handles concurrently
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.05, 0.5  # between two checks, such as for a node's actor

Nodes = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class NodeRelay:
    """The relay on one node of a Ray cluster.

    Attributes:
        node: The node's id in Ray.
        host: The node's address in Ray.
        name: The relay's name, by which `through` in receipts names it.
        address: The relay's address for workers; None: the relay has not started yet.
        status: The relay's status; None: no answer came, for example while Ray restarts the relay.
        error: Why the relay has not started; empty: no error is known.
    """

    __module__ = "weightbus.ray"

    node: str
    host: str
    name: str
    address: str | None
    status: RelayStatus | None
    error: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings that all relays of a set share; the fields are as the arguments of `relays`."""

    upstream: tuple[str, ...]
    models: tuple[str, ...]
    keys: str | None
    insecure: bool
    settings: Settings


# On the relay's node.


class RelayActor:
    """Runs the relay of one node; instances are Ray actors.

    Args:
        plan: The relay's settings.
        name: The relay's name.
        address: The address to bind, with a port.
    """

    def __init__(self, plan: Plan, name: str, address: str) -> None:
        self._plan = plan
        own = relay_keys(plan.keys, name, plan.upstream)
        # With keys, a worker's key file is for relays only, so workers cannot use the publisher.
        self._alternatives = [] if own.below is not None else [*plan.upstream]
        settings = plan.settings
        if settings.data is None:  # by default the next port, which may be in use
            settings = replace(settings, data=f"{address.rpartition(':')[0]}:0")
        make = partial(
            Relay,
            [*plan.upstream],
            address,
            plan.models,
            name=name,
            keys=own,
            insecure=plan.insecure,
            settings=settings,
        )
        self._relay = _bind(make)

    def find(self) -> tuple[str, list[str]]:
        """Return the relay's address, and the publisher's, which workers may use instead."""
        return self._relay.address, self._alternatives

    def serves(self, plan: Plan) -> bool:
        """Return whether the relay has the settings of this plan."""
        return plan == self._plan

    def join(self, seconds: float) -> str:
        """Wait until the publisher accepts the relay; return an error text, empty if it did."""
        try:
            joined = self._relay.wait_joined(seconds)
        except WeightBusError as error:
            return f"{type(error).__name__}: {error}"
        return "" if joined else f"nothing answered there within {seconds:.0f} s"

    def status(self) -> RelayStatus:
        """Return the relay's status."""
        return self._relay.status()

    def close(self) -> None:
        """Close the relay: its workers change over to their next address."""
        self._relay.close()


def _bind(make: Callable[[], Relay]) -> Relay:
    """Make a relay once its port is free; raise AddressError if it is not within BIND_SECONDS."""
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            return make()
        except AddressError:
            if time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_SECONDS_MAX)


def free_address(plan: Plan, name: str, host: str) -> str:
    """Return an address with a free port on this node, if a relay may be bound to it.

    Raises:
        AddressError: Other hosts can reach the address, and there are no keys on this node.
        KeysError: The keys cannot be read here.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = relay_keys(plan.keys, name, plan.upstream)
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    check_exposure(own.below, plan.insecure, address, plan.settings.data)
    return address


# In the trainer.


@dataclass(slots=True)
class _Node:
    """A node that has a relay, or gets one; `start` is the task that starts the relay."""

    id: str
    host: str
    relay: str
    actor_name: str
    actor: Any = None
    address: str | None = None
    error: Exception | None = None
    retry_at: float = 0.0
    start: "asyncio.Task[None] | None" = field(default=None, repr=False)


class Relays(Closable):
    """The relays on the nodes of a Ray cluster.

    Args:
        plan, name, watch: From `weightbus.ray.relays()`, which makes this object.

    As long as the process that called `relays()` lives, nodes that join the cluster get a relay.
    `close()`, or the end of a `with` block, ends the relays. Otherwise they outlive the process,
    with the versions that they have, until the next call of `relays()` with this name takes over.
    """

    __module__ = "weightbus.ray"

    def __init__(self, plan: Plan, name: str, watch: "_NodeWatch") -> None:
        """Use a running `_NodeWatch`. Call `weightbus.ray.relays()` instead of this constructor."""
        self._plan, self._name, self._watch = plan, name, watch

    def __repr__(self) -> str:
        where = ", ".join(self._plan.upstream)
        return f"<Relays {self._name} of {where} on {len(self._watch.nodes)} nodes>"

    def status(self) -> dict[str, NodeRelay]:
        """Return the relay of each node, by the node's id in Ray. The call takes up to 2 s."""
        nodes = [*self._watch.nodes.values()]
        refs = {node.id: node.actor.status.remote() for node in nodes if node.actor is not None}
        answers = _answers([*refs.values()], ANSWER_SECONDS)
        found = {id_: answers.get(ref) for id_, ref in refs.items()}
        return {
            node.id: NodeRelay(
                node.id,
                node.host,
                node.relay,
                node.address,
                found.get(node.id),
                "" if node.error is None else _words(node.error),
            )
            for node in nodes
        }

    def close(self) -> None:
        """End the relays: workers change over to their next address, or keep their weights."""
        self._watch.close()


def relays(
    publisher: Publisher | str | Sequence[str],
    models: Iterable[str] | None = None,
    *,
    nodes: str | Nodes = "all",
    keys: str | Path | None = None,
    insecure: bool = False,
    name: str = "ray",
    settings: Settings | None = None,
    timeout: float = 120.0,
) -> Relays:
    """Start a relay on each node of the Ray cluster, and on each node that joins later.

    Workers anywhere in the cluster give `weightbus.ray.address()` to their Subscriber. If the
    publisher is bound to 127.0.0.1, so are the relays, and all nodes must be on this host.
    Otherwise each relay is bound to its node's address, which needs keys, or `insecure`.

    Args:
        publisher: The Publisher, or its address, or several addresses as a `Relay` has them.
        models: The ids of the models that the relays pass on. None: those that the Publisher has
            published or prepared.
        nodes: "all"; or a function that takes a node as in `ray.nodes()`, and returns whether the
            node gets a relay.
        keys: A path on each node: a relay's folder, as `weightbus keygen --relay` makes it, or the
            folder that contains it. `--relay "ray-*"` makes one key for all relays. None: the
            folder in WEIGHTBUS_KEYS on the node; if that is not set, no keys.
        insecure: Without keys, allow addresses that other hosts can reach.
        name: The name of this set of relays, for a cluster with several publishers. The names of
            its relays begin with it.
        settings: The settings of each relay.
        timeout: Seconds to wait until each node has a relay, which must have joined a Publisher.

    Returns:
        The relays. You need not keep the object.

    Raises:
        AddressError: A node cannot reach the publisher, or other hosts can reach a relay and there
            are no keys.
        KeysError: The keys cannot be read on a node.
        RuntimeError: Ray is not initialised here.
        ValueError: A name is invalid, or there are no models.
        WorkersMissingError: A node had no relay in time; the text says why.
    """
    ray = _ray("weightbus.ray.relays()")
    checks.check_name(name, "relays")
    chosen = settings_of("Relay", settings)
    if isinstance(publisher, Publisher):
        above: tuple[str, ...] = (endpoints.for_other_hosts(publisher.address, _node_address),)
        models = publisher.models if models is None else models
    else:
        above = endpoints.check_all(publisher)
    ids = () if models is None or isinstance(models, str) else (*dict.fromkeys(models),)
    if not ids:
        raise ValueError(
            f'models={models!r}: give the ids of the models that relays pass on, as ["policy"], or '
            "a Publisher that has published them"
        )
    for model in ids:
        checks.check_name(model, "model")
    wanted = _wanted(nodes)
    plan = Plan(above, ids, None if keys is None else str(keys), insecure, chosen)
    local = all(map(endpoints.is_local, above))
    watch = _NodeWatch(plan, name, wanted, ray.util.get_node_ip_address() if local else None)
    joins = isinstance(publisher, Publisher)
    if (before := _watches.pop(name, None)) is not None:  # as when a notebook's cell runs again
        before.leave()
    _watches[name] = watch
    watch.begin(checks.seconds(timeout, "timeout", positive=True), joins=joins)
    return Relays(plan, name, watch)


def _node_address() -> str:
    """Return the IP address by which the nodes of the cluster reach this one."""
    return str(_ray("").util.get_node_ip_address())


def _wanted(nodes: str | Nodes) -> Nodes:
    if callable(nodes):
        return nodes
    if nodes != "all":
        raise ValueError(f'nodes={nodes!r}: give "all", or a function of a node of ray.nodes()')
    return lambda _node: True


class _NodeWatch:
    """Checks the nodes of the cluster, in a thread, and starts a relay on each that has none.

    Args:
        plan: The settings of the relays.
        name: The name of the set.
        wanted: Returns whether a node gets a relay.
        here: This node's address if only this host can reach the publisher; None: other hosts can.

    Attributes:
        nodes: By id, the nodes that have a relay, or get one.
    """

    def __init__(self, plan: Plan, name: str, wanted: Nodes, here: str | None) -> None:
        self._plan, self._name, self._wanted, self._here = plan, name, wanted, here
        self.nodes: dict[str, _Node] = {}
        self._ready: Future[None] = Future()
        self._first = True  # until each node has had a relay
        self._joins = False  # whether a relay counts as started only once it has joined
        self._cluster = _cluster()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="weightbus-ray", daemon=True)

    def begin(self, timeout: float, *, joins: bool) -> None:
        """Start the thread; wait until each node has a relay that, if `joins`, has joined."""
        self._joins, self._timeout = joins, timeout
        self._thread.start()
        try:
            self._ready.result(timeout + START_SECONDS)
        except BaseException:
            self.close()
            raise

    def leave(self) -> dict[str, _Node]:
        """End the thread but not the relays; return the nodes, and forget them."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(START_SECONDS)
        nodes, self.nodes = self.nodes, {}
        return nodes

    def close(self) -> None:
        """End the thread and the relays; idempotent."""
        actors = [node.actor for node in self.leave().values() if node.actor is not None]
        if not actors or _cluster() != self._cluster:
            return
        _answers([actor.close.remote() for actor in actors], ANSWER_SECONDS)
        for actor in actors:
            _kill(actor)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._follow())
        finally:
            self._loop.close()

    async def _follow(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._start_all()
        except TimeoutError:
            self._ready.set_exception(WorkersMissingError(self._missing()))
        except Exception as error:
            self._ready.set_exception(error)
        else:
            self._first = False
            self._ready.set_result(None)
            while not self._over.is_set() and _cluster() == self._cluster:
                try:
                    self._look()
                except Exception as error:  # Ray's control service may be restarting
                    log.warning("Ray's nodes cannot be listed: %s", _words(error))
                await self._pause()
        for node in self.nodes.values():
            if node.start is not None:
                node.start.cancel()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._over.wait()
        except TimeoutError:
            pass

    async def _start_all(self) -> None:
        """Return once each node has a relay; raise the error of the first relay that fails."""
        self._kill_unwanted()
        while True:
            self._look()
            for node in self.nodes.values():
                if node.error is not None:
                    raise node.error
            starts = [node.start for node in self.nodes.values() if node.start is not None]
            if not starts:
                return
            await asyncio.wait(starts, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    def _missing(self) -> str:
        without = [
            f"{node.relay} on node {node.id[:12]} ({node.host})"
            for node in self.nodes.values()
            if node.start is not None
        ]
        return (
            f"relays have not started within {self._timeout:g} s: {', '.join(without[:5])}"
            f"{' and others' * (len(without) > 5)}. Is weightbus installed on these nodes, and can "
            f"they reach {', '.join(self._plan.upstream)}? Give a longer timeout=, or leave nodes "
            "out with nodes="
        )

    def _kill_unwanted(self) -> None:
        """End relays of an earlier program on nodes that get no relay now."""
        wanted = {node["NodeID"] for node in _alive() if self._wanted(node)}
        for actor_name in _actor_names(self._name):
            actor = _actor(actor_name)
            if actor is not None and actor_name.rpartition("-")[2] not in wanted:
                _kill(actor)

    def _look(self) -> None:
        """Start relays on nodes that have none, and forget nodes that are dead."""
        alive = {node["NodeID"]: node for node in _alive() if self._wanted(node)}
        actors, now = _actor_names(self._name), time.monotonic()
        for id_ in [*self.nodes]:
            if id_ not in alive:
                dead = self.nodes.pop(id_)
                if dead.start is not None:
                    dead.start.cancel()
                log.warning("node %s (%s) is dead, with %s", id_[:12], dead.host, dead.relay)
        for id_, found in alive.items():
            node, host = self.nodes.get(id_), found["NodeManagerAddress"]
            if node is None:
                relay = f"{self._name}-{id_[:12]}"
                node = self.nodes[id_] = _Node(id_, host, relay, f"{self._name}-{id_}")
            ended = node.actor is not None and node.actor_name not in actors
            failed = node.error is not None and now >= node.retry_at
            if node.start is None and (ended or failed or (node.actor, node.error) == (None, None)):
                node.actor = node.error = None
                node.start = self._loop.create_task(self._start(node))

    async def _start(self, node: _Node) -> None:
        """Start a node's relay, or take over the relay of an earlier program; record an error."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._start_relay(node)
        except Exception as error:
            node.error = _cause(error)
            if isinstance(error, TimeoutError) and not isinstance(error, WeightBusError):
                text = f"its actor has not started within {START_SECONDS:.0f} s"
                node.error = WorkersMissingError(f"{node.relay}: {text}")
            node.retry_at = time.monotonic() + RETRY_SECONDS
            if not self._first:
                words = _words(node.error)
                log.warning("node %s (%s) has no relay: %s", node.id[:12], node.host, words)
        finally:
            node.start = None

    async def _start_relay(self, node: _Node) -> None:
        ray, plan = _ray("a relay"), self._plan
        if self._here not in (None, node.host):
            raise AddressError(
                f"node {node.id[:12]} ({node.host}) cannot reach a publisher at "
                f"{', '.join(plan.upstream)}: bind it to an address of its host, as "
                f'Publisher("tcp://{self._here}:0"), and give both sides keys'
            )
        actor, address = _actor(node.actor_name), None
        if actor is not None:
            address, _ = await actor.find.remote()
            if not await actor.serves.remote(plan):
                if not self._first:
                    self._over.set()
                    raise WorkersMissingError(
                        f"another program has taken over the relays {self._name!r}: give one of "
                        "them another name="
                    )
                _kill(actor)
                actor = None
        if actor is None:
            placing: Any = {"scheduling_strategy": _on(node.id), "num_cpus": 0}
            if address is None:
                probe = ray.remote(free_address).options(**placing)
                host = "127.0.0.1" if self._here is not None else node.host
                address = await probe.remote(plan, node.relay, host)
            options = placing | {
                "name": node.actor_name,
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "max_restarts": -1,
                "max_concurrency": CALLS,
            }
            factory = ray.remote(RelayActor).options(**options)
            while actor is None:
                try:
                    actor = factory.remote(plan, node.relay, address)
                except ValueError:  # an actor with this name exists
                    if not self._first:
                        text = f"another program is just starting {node.relay}"
                        raise WorkersMissingError(text) from None
                    await asyncio.sleep(PAUSE_SECONDS_MIN)  # the killed actor still has the name
            address, _ = await actor.find.remote()
        if self._first and self._joins:
            why = await actor.join.remote(self._timeout)
            if why:
                raise AddressError(
                    f"{node.relay} on node {node.id[:12]} ({node.host}) has not joined the "
                    f"publisher at {', '.join(plan.upstream)}: {why}"
                )
        node.actor, node.address = actor, address


_watches: dict[str, _NodeWatch] = {}  # of this process, by the name of the set


# On any node.


def address(name: str = "ray", *, timeout: float = 120.0) -> list[str]:
    """Return the addresses for a Subscriber on this node; the first is that of the node's relay.

    Up to two relays of other nodes follow, then, without keys, the publisher. Call this in a task,
    an actor, or a driver that runs on a node. The call waits until the node's relay has started.

    Args:
        name: The `name` with which `weightbus.ray.relays()` was called.
        timeout: Seconds to wait for the relay of this node.

    Returns:
        The addresses, in order of preference.

    Raises:
        RuntimeError: Ray is not initialised here.
        WorkersMissingError: This node had no relay in time.
    """
    ray = _ray("weightbus.ray.address()")
    context = ray.get_runtime_context()
    own = f"{name}-{context.get_node_id()}"
    deadline = time.monotonic() + checks.seconds(timeout, "timeout")
    pause = PAUSE_SECONDS_MIN
    while True:
        actor = _actor(own)
        left = deadline - time.monotonic()
        answer = [] if actor is None else [*_answers([actor.find.remote()], max(left, 0)).values()]
        if answer:
            break
        left = deadline - time.monotonic()
        if left <= 0:
            raise WorkersMissingError(_no_relay(own, name, timeout))
        time.sleep(min(pause, left))
        pause = min(2 * pause, PAUSE_SECONDS_MAX)
    ((first, publisher),) = answer
    # Nodes get different alternatives, so that their workers do not all go to the same relay.
    others = sorted(_actor_names(name) - {own}, key=lambda n: sha256((own + n).encode()).digest())
    actors = [actor for actor in map(_actor, others[:OTHERS]) if actor is not None]
    answers = _answers([actor.find.remote() for actor in actors], OTHERS_SECONDS)
    return [*dict.fromkeys((first, *(each for each, _ in answers.values()), *publisher))]


def _no_relay(own: str, name: str, timeout: float) -> str:

    text = f"node {own.rpartition('-')[2][:12]} has no relay of {name!r} within {timeout:g} s: "
    others = _actor_names(name)
    if own in others:
        return text + "its actor does not answer; Relays.status() in the trainer says why"
    if others:
        return text + (
            f"{len(others)} other nodes have one. Does nodes= of weightbus.ray.relays() leave this "
            "node out? If not, Relays.status() in the trainer says why"
        )
    return text + (
        "nor has any other node: call weightbus.ray.relays(publisher) in the trainer, with the "
        "same name=, or give a longer timeout="
    )


# Ray.


def _ray(caller: str) -> Any:
    """Return the module `ray`, which is imported only when needed, since that takes long.

    Raises:
        RuntimeError: `caller` is not empty, and Ray is not initialised.
    """
    import ray

    if caller and not ray.is_initialized():
        raise RuntimeError(f"{caller} needs Ray: call ray.init() first")
    return ray


def _cluster() -> object:
    """Return values that identify the cluster and this program's job; None if Ray has ended."""
    ray = _ray("")
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()


def _alive() -> list[dict[str, Any]]:
    return [node for node in _ray("").nodes() if node["Alive"]]


def _on(node: str) -> Any:

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy: Any = NodeAffinitySchedulingStrategy
    return strategy(node, soft=False)


def _actor_names(name: str) -> set[str]:
    """Return the names of the actors of a set."""
    found = _ray("").util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in found if each["namespace"] == NAMESPACE]
    return {each for each in names if each.rpartition("-")[0] == name}


def _actor(name: str) -> Any:
    """Return the actor with this name; None if there is none."""
    try:
        return _ray("").get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _kill(actor: Any) -> None:
    _ray("").kill(actor, no_restart=True)


def _answers(refs: list[Any], seconds: float) -> dict[Any, Any]:
    """Return, by reference, the values of the references that resolve in time without an error."""
    ray = _ray("")
    if not refs:
        return {}
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=seconds)
    values: dict[Any, Any] = {}
    for ref in sorted(done, key=refs.index):
        try:
            values[ref] = ray.get(ref)
        except ray.exceptions.RayError:  # the actor is dead, or is being restarted
            continue
    return values


def _cause(error: Exception) -> Exception:
    """Return the error that a remote call raised on its node."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
