"""Starts a relay on each node of a torchrun script, and gives every rank the relays' addresses.

Theory of operation: the ranks *meet* by keys in torchrun's store; each wait has a deadline. In the
keys, N is the number of a meeting, R that of a rank, and G that of a node (GROUP_RANK).

    key       written by                     value
    rounds    rank 0                         the number of meetings so far
    N/join/R  rank R, except rank 0          its node, and the publisher's address, if known
    N/plan    rank 0, once all have joined   the relays' upstream, or why there are no relays
    N/relay/G local rank 0 of node G         the address of its relay, or why there is none
    N/end     rank 0, once all relays run    the addresses of all relays, or why there are none

The store outlives an elastic restart, and so do its keys. torchrun gives ranks nothing that
identifies an incarnation of the group: TORCHELASTIC_RESTART_COUNT counts only the failures of a
node's own ranks, so after a restart it differs between nodes. Therefore rank 0 counts the meetings.
Ranks may join the last meeting until it has a plan; later ranks wait for the next one. If rank 0
ends before it writes the plan, the ranks that have joined join the next meeting instead.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]

from ...bus.deadline import Deadline
from ...bus.errors import DeadlineError, KeysError
from ...bus.net import endpoints
from ...bus.trust.grants import Grant
from ...bus.trust.keys import AT, ORIGIN, STAR, SUFFIX, WORKERS, RelayKeys, WorkerKeys
from ...codecs.errors import WeightBusError
from .. import checks
from ..closing import Closable
from ..keys import relay_keys
from ..publisher import Publisher
from ..publishing.ranks import MARGIN_SECONDS, ROUNDS_KEPT, own_host, store_errors
from ..relay import Relay
from ..settings import Settings

LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 0.002, 0.2  # seconds between two checks of the store
SHOWN = 8  # ranks that an error names
LOOPBACK = "127.0.0.1"  # where a relay without keys listens
CALL = "weightbus.torchrun.relays()"
_NAMESPACE = Path("/proc/self/ns/net")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_T = TypeVar("_T", bound=msgspec.Struct)


class Relays(Closable):
    """The addresses for a rank's Subscriber, and the relay of its node; made by `relays`.

    Attributes:
        addresses: The addresses for a Subscriber of this rank, the preferred one first: the relay
            of this node, the relays of other nodes, the publisher. On the publisher's node the
            publisher is first. A relay that only its own host can reach is listed only there.
        names: The name of the relay at each address; `publisher` for the publisher's address.
        relay: On local rank 0 of a node that has a relay, that relay; None on other ranks.

    The end of the `with` block, or `close()`, ends the node's relay. Ranks do not wait for each
    other there: workers that still run change over to their next address.
    """

    __module__ = "weightbus.torchrun"

    def __init__(
        self, addresses: Sequence[str], names: Sequence[str], relay: Relay | None, keep: object
    ) -> None:
        """Use `relays` instead. `keep` is an object that must live as long as these relays."""
        self.addresses, self.names, self.relay = tuple(addresses), tuple(names), relay
        self._keep = keep

    def __repr__(self) -> str:
        return f"<Relays at {', '.join(self.addresses)}>"

    def worker_keys(self, folder: str | Path, name: str) -> list[WorkerKeys]:
        """Return a worker's keys, one for each of `addresses`, as `keys=` for its Subscriber.

        Args:
            folder: The folder of all keys, made by `weightbus keygen` with `--at` for each relay
                and `--at publisher`.
            name: The worker's name: `name=` of its Subscriber.

        Raises:
            KeysError: A file is missing or invalid.
        """
        return [_worker_keys(Path(folder), name, where) for where in self.names]

    def close(self) -> None:
        """End this node's relay, on local rank 0; idempotent."""
        if self.relay is not None:
            self.relay.close()
        self._keep = None


def relays(
    upstream: Publisher | str | Sequence[str] | None,
    models: Iterable[str],
    *,
    address: str | None = None,
    name: str = "node",
    keys: RelayKeys | str | Path | None = None,
    insecure: bool = False,
    settings: Settings | None = None,
    timeout: float = 60.0,
) -> Relays:
    """Start a relay on each node, and return the addresses for this rank's Subscriber.

    Every rank of a script that torchrun has started must call this. Local rank 0 of each node
    starts the relay. The publisher's node gets no relay: its workers read the publisher's memory.

    Args:
        upstream: On the rank that has the Publisher, that Publisher, and None on the other ranks.
            For a publisher outside of this job: its address, or several as for a Relay.
        models: The ids of the models that the relays pass on.
        address: The address that this node's relay listens on. None: without keys 127.0.0.1, for
            workers of this node only; with keys, or `insecure`, the interface of this node that
            reaches MASTER_ADDR. For 0.0.0.0, other nodes get the address of that interface.
        name: The first part of each relay's name; a hyphen and the node's GROUP_RANK follow, as in
            `node-0`. Jobs with the same publisher need different names.
        keys: The keys of this node's relay, as for a Relay; in a folder of all keys, the relay's
            name selects them. None: use the folder in WEIGHTBUS_KEYS, if that is set.
        insecure: Without keys, let other nodes reach the relay.
        settings: The settings of this node's relay.
        timeout: Seconds within which all ranks must make this call. The relays then have as long to
            start and, if a rank has the Publisher, to join it.

    Raises:
        DeadlineError: A rank did not make this call in time, or a relay did not start or join.
        WeightBusError: torchrun did not start this process, no publisher is known, or another rank
            has failed; the text names the rank.
        AddressError: An address is invalid, or other hosts cannot reach the publisher.
        KeysError: The keys cannot be read.
        RefusedError: The publisher refuses this node's relay.

    After an elastic restart the script makes this call again, which starts new relays. A process
    that can reach torchrun's store can make the ranks use another address.
    """
    checks.seconds(timeout, "timeout", positive=True)
    checks.check_name(f"{name}-0", "relay")
    rank = TorchrunRank.here(os.environ)
    own = join_of(rank, upstream)
    store, keep = _store(rank, timeout)
    listens = Listens(address, f"{name}-{rank.node}", keys, insecure, settings)
    return meet(rank, store, own, models, listens, timeout, keep)


@dataclass(frozen=True)
class TorchrunRank:
    """The rank of this process, as torchrun's environment variables give it.

    Attributes:
        rank, size: The rank, and the number of ranks.
        node: The index of the node.
        local: The rank on the node.
        master, port: The host and the port of the store.
    """

    rank: int
    size: int
    node: int
    local: int
    master: str
    port: int

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> "TorchrunRank":
        """Return this process's rank from environment variables.

        Raises:
            WeightBusError: torchrun did not start this process.
        """
        names = "RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
        missing = [name for name in names if not environ.get(name)]
        if missing:
            raise WeightBusError(
                f"{CALL} needs {', '.join(missing)} in the environment, which torchrun sets: "
                "start this script with torchrun, or start a weightbus.Relay on each host and give "
                "workers its address"
            )
        rank, size, node, local, master, port = (environ[name] for name in names)
        return cls(int(rank), int(size), int(node), int(local), master, int(port))


class _Join(msgspec.Struct):
    node: int
    leads: bool  # whether the rank is local rank 0
    host: str
    upstream: list[str]
    publishes: bool = False


class _Plan(msgspec.Struct):
    upstream: list[str] = []
    home: int | None = None  # the node of the rank that publishes, if one does
    publisher: int | None = None  # the rank that publishes, if one does
    leaders: dict[int, int] = {}  # the rank that starts the relay, by node
    fault: str = ""
    late: bool = False  # whether `fault` is a missed deadline


class _Placed(msgspec.Struct):
    name: str = ""
    address: str = ""
    host: str = ""
    fault: str = ""

    @property
    def local(self) -> bool:
        """Whether only the relay's own host can reach it."""
        return endpoints.is_local(self.address)


class _End(msgspec.Struct):
    relays: dict[int, _Placed] = {}  # by node
    fault: str = ""
    late: bool = False


_Checked = TypeVar("_Checked", _Plan, _End)


@dataclass(frozen=True)
class Listens:
    """The arguments of `relays` for this node's relay; `name` is the relay's whole name."""

    address: str | None
    name: str
    keys: RelayKeys | str | Path | None
    insecure: bool
    settings: Settings | None


def _store(rank: TorchrunRank, timeout: float) -> tuple[Store, object]:
    """Return the store, and an object to keep while other ranks use the store, or None.

    The store of the default process group is not kept, since it would then outlive the group.
    """
    name = f"weightbus/relays/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    if dist.is_initialized():
        default = distributed_c10d._get_default_store()  # noqa: SLF001  # pyright: ignore
        return PrefixStore(name, default), None
    try:
        own, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise DeadlineError(
            f"rank {rank.rank} has not reached torchrun's store at {rank.master}:{rank.port} in "
            f"{timeout:g} s: check that rank 0 runs, and check MASTER_ADDR and MASTER_PORT ({why})"
        ) from error
    return PrefixStore(name, own), own


def join_of(rank: TorchrunRank, upstream: Publisher | str | Sequence[str] | None) -> _Join:
    """Return the value with which this rank joins the meeting."""
    own = _Join(rank.node, rank.local == 0, _host_id(), [])
    if isinstance(upstream, Publisher):
        own.publishes, own.upstream = True, [_reachable(rank, upstream.address)]
    elif upstream is not None:
        own.upstream = list(endpoints.check_all(upstream))
    return own


def meet(
    rank: TorchrunRank,
    store: Store,
    own: _Join,
    models: Iterable[str],
    listens: Listens,
    timeout: float,
    keep: object = None,
) -> Relays:
    """Hold a meeting: start this node's relay if the plan says so, and wait for all relays.

    Args:
        rank: This rank.
        store: The store in which the ranks meet.
        own: The value with which this rank joins.
        models, listens: The arguments of the relay.
        timeout: As in `relays`.
        keep: An object that must live as long as the relays.
    """
    with contextlib.ExitStack() as undo:
        meeting = _Meeting(rank, store, timeout)
        plan = meeting.lead(own) if rank.rank == 0 else meeting.follow(own)
        relay = None
        if plan.leaders.get(rank.node) == rank.rank:
            try:
                relay = undo.enter_context(_open(rank, plan, models, listens))
                _check_joined(plan, relay, timeout)
                placed = _Placed(relay.name, _reachable(rank, relay.address), own.host)
            except Exception as error:
                meeting.failed(error)
                raise
            meeting.placed(placed)
        rows = addresses_for(own, plan, meeting.finish(plan))
        undo.pop_all()
    return Relays([at for at, _ in rows], [of for _, of in rows], relay, keep)


class _Meeting:
    """One meeting of all ranks in the store."""

    def __init__(self, rank: TorchrunRank, store: Store, timeout: float) -> None:
        self._rank, self._store, self._timeout = rank, store, timeout
        self._number = 0

    @store_errors()
    def lead(self, own: _Join) -> _Plan:
        """Open a meeting on rank 0, and return the plan once all ranks have joined."""
        until = self._until()
        number = self._number = self._store.add("rounds", 1)
        for key in ("plan", "end"):
            self._store.delete_key(f"{number - ROUNDS_KEPT}/{key}")
        others = range(1, self._rank.size)
        arrived = [r for r in others if self._wait_for(f"join/{r}", until)]
        joined = {0: own} | {r: self._get(f"join/{r}", _Join) for r in arrived}
        missing = [r for r in others if r not in joined]
        plan = _Plan(fault=self._late_text(missing), late=True) if missing else plan_of(joined)
        self._set("plan", plan)
        for r in arrived:
            self._store.delete_key(f"{number}/join/{r}")
        return _checked(plan)

    @store_errors()
    def follow(self, own: _Join) -> _Plan:
        """Join the meeting that rank 0 opens, and return its plan."""
        if not self._wait(lambda: self._join_last(own), self._until(MARGIN_SECONDS)):
            raise DeadlineError(self._late_text([] if self._number else [0]))
        return _checked(self._get("plan", _Plan))

    def _join_last(self, own: _Join) -> bool:
        """Join the last meeting if it is open; return whether this rank's meeting has a plan."""
        number = self._store.add("rounds", 0)
        if number not in (0, self._number) and not self._store.check([f"{number}/plan"]):
            self._number = number
            self._set(f"join/{self._rank.rank}", own)
        return self._number > 0 and self._has("plan")

    @store_errors()
    def placed(self, relay: _Placed) -> None:
        """Write the address of this node's relay."""
        self._set(f"relay/{self._rank.node}", relay)

    def failed(self, error: Exception) -> None:
        """Write why this node has no relay."""
        fault = f"rank {self._rank.rank} has no relay for its node: {type(error).__name__}: {error}"
        # If the store is lost, too, `error` is still the error that the user needs.
        with contextlib.suppress(RuntimeError, WeightBusError):
            if self._rank.rank:
                self.placed(_Placed(fault=fault))
            else:
                self._set("end", _End(fault=fault))

    @store_errors()
    def finish(self, plan: _Plan) -> dict[int, _Placed]:
        """Return the relays by node, once all nodes that get a relay have it."""
        if self._rank.rank:
            if not self._wait_for("end", self._until(2 * MARGIN_SECONDS)):
                raise DeadlineError(
                    f"rank 0 did not list the relays in {self._timeout:g} s after all ranks had "
                    f"made this call, as seen by rank {self._rank.rank}: see the log of rank 0"
                )
            return _checked(self._get("end", _End)).relays
        until, found = self._until(MARGIN_SECONDS), dict[int, _Placed]()
        late, faults = list[int](), list[str]()
        for node, leader in plan.leaders.items():
            if self._wait_for(f"relay/{node}", until):
                found[node] = self._get(f"relay/{node}", _Placed)
                self._store.delete_key(f"{self._number}/relay/{node}")
                faults += [found[node].fault] * bool(found[node].fault)
            else:
                late.append(leader)
            if faults:
                break
        if late and not faults:
            waited = f"{self._timeout:g} s"
            faults = [f"{ranks_text(late)} did not start a relay in {waited}: see the logs there"]
        end = _End(found, "".join(faults), late=bool(late))
        self._set("end", end)
        return _checked(end).relays

    def _late_text(self, missing: list[int]) -> str:
        """Return the error text on ranks that have not made this call in time."""
        if missing:
            done = f"{ranks_text(missing)} did not call {CALL}"
        else:
            done = f"rank 0 made no plan (another rank did not call {CALL}, or rank 0 has ended)"
        return (
            f"{done} in the {self._timeout:g} s that rank {self._rank.rank} waited: every rank "
            "of the script must make this call; if a rank failed before, its log has the error"
        )

    def _until(self, more: float = 0.0) -> Deadline:
        return Deadline(time.monotonic() + self._timeout + more, "")

    def _wait(self, holds: Callable[[], bool], until: Deadline) -> bool:
        """Wait until a condition holds; return False if it does not before the deadline.

        This polls: the store's own `wait` logs warnings on a timeout, and blocks signal handlers.
        """
        pause = LOOK_SECONDS_MIN
        while not holds():
            if not until.left():
                return False
            time.sleep(min(pause, until.left()))
            pause = min(2 * pause, LOOK_SECONDS_MAX)
        return True

    def _has(self, key: str) -> bool:
        return self._store.check([f"{self._number}/{key}"])

    def _wait_for(self, key: str, until: Deadline) -> bool:
        """Wait for a key of this meeting; return False if it is not written in time."""
        return self._wait(lambda: self._has(key), until)

    def _set(self, key: str, word: msgspec.Struct) -> None:
        self._store.set(f"{self._number}/{key}", msgspec.json.encode(word).decode())

    def _get(self, key: str, kind: type[_T]) -> _T:
        return msgspec.json.decode(self._store.get(f"{self._number}/{key}"), type=kind)


def _checked(word: _Checked) -> _Checked:
    """Return what rank 0 has written; raise its fault: DeadlineError or WeightBusError."""
    if word.fault:
        raise (DeadlineError if word.late else WeightBusError)(word.fault)
    return word


def plan_of(joined: Mapping[int, _Join]) -> _Plan:
    """Return the plan for the ranks that have joined; `joined` has their values by rank."""
    given = {rank: tuple(own.upstream) for rank, own in joined.items() if own.upstream}
    above = dict[tuple[str, ...], int]()
    for rank, upstream in given.items():
        above.setdefault(upstream, rank)
    if not above:
        return _Plan(
            fault="no rank knows the publisher: give the rank that has it the Publisher, or give "
            "all ranks the address of a publisher outside of this job"
        )
    if len(above) > 1:
        (one, rank), (other, another) = list(above.items())[:2]
        return _Plan(
            fault=f"rank {rank} gives {', '.join(one)} as upstream, and rank {another} gives "
            f"{', '.join(other)}: give the Publisher on the rank that has it and None on the "
            "others, or the same address on all"
        )
    ((upstream, rank),) = above.items()
    publisher = next((r for r, own in joined.items() if own.publishes), None)
    if publisher is not None and endpoints.is_local(upstream[0]):
        host = joined[publisher].host
        cut = [r for r, own in joined.items() if own.host != host]
        if cut:
            return _Plan(
                fault=f"rank {publisher} publishes at {upstream[0]}, where only its own host can "
                f"connect, and {ranks_text(cut)} {'is' if len(cut) == 1 else 'are'} on another "
                f"host: bind tcp://0.0.0.0:PORT on rank {publisher}, with keys= "
                "(docs/guides/security.md)"
            )
    home = None if publisher is None else joined[publisher].node
    leaders = {own.node: r for r, own in joined.items() if own.leads and own.node != home}
    return _Plan(list(upstream), home, publisher, dict(sorted(leaders.items())))


def ranks_text(ranks: Sequence[int]) -> str:
    """Return a text that names ranks, at most SHOWN of them."""
    more = "" if len(ranks) <= SHOWN else f" and {len(ranks) - SHOWN} more"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:SHOWN]))}{more}"


def addresses_for(own: _Join, plan: _Plan, placed: Mapping[int, _Placed]) -> list[tuple[str, str]]:
    """Return the addresses for a rank, each with the relay's name, in order of preference.

    The list begins at the rank's own node, so that workers do not all change over to one relay.
    """
    nodes = sorted(placed, key=lambda node: (node < own.node, node))
    reached = [placed[n] for n in nodes if placed[n].host == own.host or not placed[n].local]
    behind = [(each.address, each.name) for each in reached]
    above = [(address, ORIGIN) for address in plan.upstream]
    return above + behind if own.node == plan.home else behind + above


def _open(rank: TorchrunRank, plan: _Plan, models: Iterable[str], listens: Listens) -> Relay:
    """Start this node's relay, and return it."""
    own = relay_keys(listens.keys, listens.name, plan.upstream)
    address = listens.address
    if address is None:
        exposed = own.below is not None or listens.insecure
        host = own_host(rank.master, rank.port) if exposed else LOOPBACK
        # Do not bind to a host name: on this node it may resolve to 127.0.0.1.
        numeric = endpoints.ip_address(host) is not None
        at = f"[{host}]" if ":" in host else host if numeric else endpoints.ANYWHERE[0]
        address = f"tcp://{at}:0"
    return Relay(
        plan.upstream,
        address,
        models,
        name=listens.name,
        keys=own,
        insecure=listens.insecure,
        settings=listens.settings,
    )


def _check_joined(plan: _Plan, relay: Relay, timeout: float) -> None:
    """Wait until the relay has joined, if a rank of this job has the publisher.

    Raises:
        DeadlineError: The relay has not joined in time.
    """
    if plan.publisher is None or relay.wait_joined(timeout):
        return
    raise DeadlineError(
        f"{relay.name} has not joined the publisher of rank {plan.publisher} at "
        f"{plan.upstream[0]} within {timeout:g} s: check that this host can reach that port, and "
        "the keys of both; `weightbus doctor` helps to find the cause"
    )


def _reachable(rank: TorchrunRank, address: str) -> str:
    """Return a bound address in the form that other nodes can use."""
    return endpoints.for_other_hosts(address, lambda: own_host(rank.master, rank.port))


def _host_id() -> str:
    """Return an id that is equal for processes that reach each other by 127.0.0.1."""
    with contextlib.suppress(OSError):
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.stat().st_ino}"
    return socket.gethostname()


def _worker_keys(folder: Path, name: str, where: str) -> WorkerKeys:
    """Return a worker's keys for a relay, or for the publisher.

    Raises:
        KeysError: There is no file of this worker for `where`, or there are several.
    """
    found = list[Path]()
    for file in sorted((folder / WORKERS).glob(f"*{SUFFIX}")):
        worker, _, at = file.stem.replace(STAR, "*").partition(AT)
        if Grant(worker).fits(name) and Grant(at or ORIGIN).fits(where):
            found.append(file)
    exact = [file for file in found if file.stem.partition(AT)[0] == name]
    if len(exact or found) != 1:
        raise KeysError(
            f"{folder / WORKERS} has {len(found)} files of worker {name} for {where}: make one "
            f"with weightbus keygen {folder} {name} --at {where}"
        )
    return WorkerKeys.read((exact or found)[0])
