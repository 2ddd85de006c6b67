"""Relays with keys: who joins where, what each level can decrypt, and what a revoked key ends."""

from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import AddressError, KeysError, Publisher, RefusedError, Settings, Subscriber
from weightbus.bus.chunks import Chunks
from weightbus.bus.publisher.version import Version
from weightbus.bus.sealer import Sealer
from weightbus.bus.trust.grants import Role
from weightbus.bus.trust.keys import PublisherKeys, RelayKeys, WorkerKeys, generate
from weightbus.codecs.native import crc32c
from weightbus.codecs.sealing import GroupKey
from weightbus.python_client.keys import KEYS
from weightbus.python_client.observing.observer import Observer
from weightbus.python_client.relay import Relay
from weightbus.tests.compose.waiting import wait_for

SECONDS = 60.0  # far more than anything here takes
SOON = Settings(ping=0.1, lost_after=1.0, shared_memory=False)
SHARED = Settings(ping=0.1, lost_after=1.0)
CHUNKED = 3 * 2**18  # numbers of a version of three chunks
WHOLE = 10  # numbers of a version that comes with its announcement


def arrays(value: float, size: int = CHUNKED) -> dict[str, Any]:
    return {"w": np.full(size, value, np.float32)}


class Keyed:
    """A publisher with keys, and its relays and workers, which are closed at the end."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self.folder = stack, folder
        self.targets: dict[str, dict[str, Any]] = {}
        self.keygen({"r1": "relay", "direct": "worker"})
        self.publisher = stack.enter_context(Publisher(keys=folder, settings=SOON))

    def keygen(self, names: dict[str, Role], **options: Any) -> None:
        generate(self.folder, names, **options)

    def relay(
        self,
        above: Publisher | Relay,
        name: str = "r1",
        keys: Any = None,
        settings: Settings = SOON,
    ) -> Relay:
        keys = self.folder / "relays" / name if keys is None else keys
        relay = Relay(
            above.address, "tcp://127.0.0.1:0", ["m"], name=name, keys=keys, settings=settings
        )
        return self._stack.enter_context(relay)

    def worker(
        self,
        above: Publisher | Relay,
        file: str | None,
        size: int = CHUNKED,
        settings: Settings = SOON,
    ) -> Subscriber:
        """Return a worker with a file of `workers/`, which applies in the background."""
        target, keys = arrays(0, size), "" if file is None else self.folder / "workers" / file
        worker = Subscriber(above.address, {"m": target}, keys=keys, settings=settings)
        self.targets[worker.name] = target
        return self._stack.enter_context(worker).start()

    def publish(self, value: float, *workers: Subscriber, size: int = CHUNKED) -> int:
        """Publish, and wait until each of these workers computes with the version."""
        receipt = self.publisher.publish("m", arrays(value, size), require=0, timeout=SECONDS)
        for worker in workers:
            update = worker.wait_for_version("m", receipt.version, timeout=SECONDS)
            assert update is not None, f"{worker.name} has no version {receipt.version}"
            assert (self.targets[worker.name]["w"] == value).all()
        return receipt.version

    def revoke(self, name: str) -> None:
        (self.folder / "allowed" / f"{name}.json").unlink()


@pytest.fixture
def keyed(tmp_path: Path) -> Generator[Keyed]:
    with ExitStack() as stack:
        yield Keyed(stack, tmp_path / "keys")


def sealer_of(side: Publisher | Relay) -> Sealer:
    loop: Any = side._below if isinstance(side, Relay) else side._loop  # noqa: SLF001 # pyright: ignore
    sealer: Sealer = loop._sealer  # noqa: SLF001
    return sealer


def ids_of(side: Publisher | Relay) -> set[str]:
    """Return the ids of the group keys that seal what this side publishes."""
    return {GroupKey(bytes.fromhex(key)).id for key in sealer_of(side).keys}


def known_to(worker: Subscriber) -> set[str]:
    """Return the ids of the group keys that a worker has."""
    ring: Any = worker._loop._machine._keyring  # noqa: SLF001 # pyright: ignore
    return {*ring._keys}  # noqa: SLF001


def refusal_of(side: Subscriber | Relay) -> RefusedError:
    with pytest.raises(RefusedError) as error:
        side.wait_joined(SECONDS)
    return error.value


@pytest.mark.parametrize("size", [WHOLE, CHUNKED])
def test_a_version_passes_keyed_relays_each_with_a_group_key_of_its_own(
    keyed: Keyed, size: int
) -> None:
    keyed.keygen({"r2": "relay"}, above=["r1"])
    keyed.keygen({"w": "worker"}, at=["r2"])
    relay = keyed.relay(keyed.publisher)
    last = keyed.relay(relay, "r2")
    worker = keyed.worker(last, "w@r2.json", size)
    assert worker.wait_joined(SECONDS)
    for value in (1, 2, 3):
        keyed.publish(value, worker, size=size)
    receipt = keyed.publisher.publish("m", arrays(4, size), expect=1, timeout=SECONDS)
    assert {name: each.state for name, each in receipt.workers.items()} == {"w": "applied"}
    keys = [ids_of(side) for side in (keyed.publisher, relay, last)]
    assert len(set[str]().union(*keys)) == 3
    assert known_to(worker) == keys[-1]


def test_what_a_relay_records_is_the_decrypted_bytes(keyed: Keyed) -> None:
    keyed.keygen({"w": "worker"}, at=["r1"])
    relay = keyed.relay(keyed.publisher)
    worker = keyed.worker(relay, "w@r1.json")
    assert worker.wait_joined(SECONDS)
    keyed.publish(1, worker)
    store: Any = relay._below._machine.state.store["m"]  # noqa: SLF001 # pyright: ignore
    version: Version | None = store.latest
    assert version is not None
    plain = arrays(1)["w"].view(np.uint8)
    chunks, plan = version.chunks, version.plan
    spans = [plan.span(index) for index in range(plan.count)]
    assert chunks.crcs == [crc32c(plain[begin:end]) for begin, end in spans]
    assert chunks.digest == worker.update("m").digest  # type: ignore[union-attr]
    assert version.was_sealed, "it was sent encrypted"


def test_a_worker_joins_only_the_relay_whose_key_its_file_has(keyed: Keyed) -> None:
    keyed.keygen({"w": "worker"}, at=["r1", "publisher"])
    keyed.keygen({"lost": "worker"}, at=["r1"])
    keyed.revoke("lost")
    relay = keyed.relay(keyed.publisher)
    assert keyed.worker(relay, "w@r1.json").wait_joined(SECONDS)
    assert "another key than the one" in str(refusal_of(keyed.worker(relay, "w.json")))
    assert "does not allow this worker's key" in str(
        refusal_of(keyed.worker(relay, "lost@r1.json"))
    )
    assert "asks for keys" in str(refusal_of(keyed.worker(relay, None)))


def test_workers_of_a_revoked_relay_keep_their_version_and_the_relay_reports_it(
    keyed: Keyed, caplog: pytest.LogCaptureFixture
) -> None:
    keyed.keygen({"w": "worker", "late": "worker"}, at=["r1"])
    relay = keyed.relay(keyed.publisher)
    worker = keyed.worker(relay, "w@r1.json")
    assert worker.wait_joined(SECONDS)
    first = keyed.publish(1, worker)
    keyed.revoke("r1")

    def gone() -> bool:
        return "r1" not in keyed.publisher.workers()

    wait_for(gone, "the relay to leave the roster", SECONDS)
    error = refusal_of(relay)
    assert error.code == "revoked"
    assert f"the publisher at {keyed.publisher.address} refuses relay 'r1'" in str(error)
    assert "relay r1 of" in caplog.text
    keyed.publish(2)
    late = keyed.worker(relay, "late@r1.json")
    assert late.wait_for_version("m", first, timeout=SECONDS)
    assert [each.version("m") for each in (worker, late)] == [first, first]
    assert (keyed.targets["w"]["w"] == 1).all()


def test_a_worker_revoked_at_a_relay_gets_and_can_decrypt_nothing_later(keyed: Keyed) -> None:
    keyed.keygen({"w": "worker", "out": "worker"}, at=["r1"])
    relay = keyed.relay(keyed.publisher)
    worker, out = keyed.worker(relay, "w@r1.json"), keyed.worker(relay, "out@r1.json")
    assert worker.wait_joined(SECONDS)
    assert out.wait_joined(SECONDS)
    first = keyed.publish(1, worker, out)
    before = ids_of(relay)
    assert known_to(out) == before
    above = ids_of(keyed.publisher)
    keyed.revoke("out")
    wait_for(lambda: ids_of(relay) != before, "another group key at the relay", SECONDS)
    keyed.publish(2, worker)
    assert refusal_of(out).code == "revoked"
    assert out.version("m") == first
    assert known_to(out).isdisjoint(ids_of(relay) | ids_of(keyed.publisher) | above)


def test_a_worker_revoked_at_a_relay_has_no_later_version_in_the_memory_that_it_mapped(
    keyed: Keyed,
) -> None:
    keyed.keygen({"w": "worker", "out": "worker"}, at=["r1"])
    relay = keyed.relay(keyed.publisher, settings=SHARED)
    worker, out = (keyed.worker(relay, f"{name}@r1.json", settings=SHARED) for name in ("w", "out"))
    assert worker.wait_joined(SECONDS)
    assert out.wait_joined(SECONDS)

    def segment() -> object:
        store: Any = relay._below._machine.state.store["m"]  # noqa: SLF001 # pyright: ignore
        return store.latest.chunks.memory.segment

    mapped = list[object]()
    for value in (1, 2, 3):
        keyed.publish(value, worker, out)
        mapped.append(segment())
    before = ids_of(relay)
    keyed.revoke("out")
    wait_for(lambda: ids_of(relay) != before, "another group key at the relay", SECONDS)
    for value in (4, 5, 6):
        keyed.publish(value, worker)
        assert segment() not in mapped


def test_a_workers_key_may_not_relay_and_a_relays_key_may_not_observe(keyed: Keyed) -> None:
    below = PublisherKeys.read(keyed.folder / "relays" / "r1")
    own = RelayKeys((WorkerKeys.read(keyed.folder, "direct"),), below)
    error = refusal_of(keyed.relay(keyed.publisher, "direct", own))
    assert error.code == "not-allowed"
    assert "weightbus keygen DIR --relay NAME" in str(error)
    assert keyed.publisher.workers() == {}
    [relays] = RelayKeys.read(keyed.folder, "r1").upstream
    with (
        Observer(keyed.publisher.address, relays) as observer,
        pytest.raises(RefusedError, match="an observer's"),
    ):
        observer.look(SECONDS)


def test_a_relay_with_the_keys_of_others_names_itself_and_the_publisher(
    keyed: Keyed, tmp_path: Path
) -> None:
    generate(tmp_path / "others", {"r1": "relay"})
    relay = keyed.relay(keyed.publisher, "r1", tmp_path / "others" / "relays" / "r1")
    error = refusal_of(relay)
    assert error.code == "keys"
    named = f"the publisher at {keyed.publisher.address} refuses relay 'r1' (keys): "
    assert str(error).startswith(named)
    assert "another key" in str(error)


ELSEWHERE, HERE = "tcp://192.0.2.1:1", "tcp://127.0.0.1:1"
ALL_HOSTS = "tcp://0.0.0.0:0"


@pytest.mark.parametrize(
    ("lacks", "upstream", "address", "data", "why"),
    [
        ("publisher.json", ELSEWHERE, ALL_HOSTS, None, "none for its own workers"),
        ("publisher.json", HERE, ALL_HOSTS, None, "none for its own workers"),
        ("publisher.json", HERE, "tcp://127.0.0.1:0", ALL_HOSTS, "none for its own workers"),
        ("upstream.json", ELSEWHERE, ALL_HOSTS, None, f"none for {ELSEWHERE}"),
        ("upstream.json", ELSEWHERE, "tcp://127.0.0.1:0", None, f"none for {ELSEWHERE}"),
    ],
)
def test_keys_on_one_side_are_refused_where_other_hosts_are_on_the_other(
    tmp_path: Path, lacks: str, upstream: str, address: str, data: str | None, why: str
) -> None:
    generate(tmp_path, {"r1": "relay"})
    folder = tmp_path / "relays" / "r1"
    (folder / lacks).unlink()
    with pytest.raises(AddressError, match="relay r1 has") as error:
        Relay(
            upstream,
            address,
            ["m"],
            name="r1",
            keys=folder,
            insecure=True,
            settings=Settings(data=data),
        )
    assert why in str(error.value)
    assert "weightbus keygen DIR --relay r1" in str(error.value)


def test_a_side_without_keys_may_be_on_the_relays_host(keyed: Keyed) -> None:
    keyed.keygen({"w": "worker"}, at=["r1"])
    own = RelayKeys.read(keyed.folder, "r1")
    plain_below = keyed.relay(keyed.publisher, "r1", RelayKeys(own.upstream, None))
    keyed_again = keyed.relay(plain_below, "r2", RelayKeys((), own.below))
    workers = keyed.worker(plain_below, None), keyed.worker(keyed_again, "w@r1.json")
    assert all(worker.wait_joined(SECONDS) for worker in workers)
    keyed.publish(1, *workers)


def test_a_keyed_relay_and_its_worker_change_over_to_their_next_addresses(keyed: Keyed) -> None:
    keyed.keygen({"r2": "relay"}, above=["r1", "publisher"])
    keyed.keygen({"w": "worker"}, at=["r1", "r2"])
    first, folder = keyed.relay(keyed.publisher), keyed.folder / "workers"
    above = first.address, keyed.publisher.address
    keys, target = keyed.folder / "relays" / "r2", arrays(0)
    with Relay(above, "tcp://127.0.0.1:0", ["m"], keys=keys, settings=SOON) as second:
        assert (second.name, second.upstream) == ("r2", first.address)
        files = [folder / "w@r1.json", folder / "w@r2.json"]
        addresses = [first.address, second.address]
        with Subscriber(addresses, {"m": target}, keys=files, settings=SOON).start() as worker:
            keyed.targets["w"] = target
            assert worker.wait_joined(SECONDS)
            keyed.publish(1, worker)
            first.close()
            wait_for(lambda: worker.address == second.address, "another relay", SECONDS)
            keyed.publish(2, worker)
            assert second.upstream == keyed.publisher.address
    with pytest.raises(KeysError, match=r"has 2 keys .* but 3 addresses"):
        Relay((*above, HERE), "tcp://127.0.0.1:0", ["m"], keys=keys)


def test_a_folder_that_is_no_relays_is_named(tmp_path: Path) -> None:
    generate(tmp_path, {"r1": "relay", "w": "worker"})
    folder = tmp_path / "relays" / "r1"
    assert RelayKeys.read(tmp_path, "r1") == RelayKeys.read(folder)
    with pytest.raises(KeysError, match="has 0 files for r2"):
        RelayKeys.read(tmp_path, "r2")
    (folder / "allowed").unlink()
    with pytest.raises(KeysError, match="allowed is missing: copy"):
        RelayKeys.read(folder)
    with pytest.raises(KeysError, match=r"is no relay's folder.*--relay NAME"):
        RelayKeys.read(tmp_path / "workers")


def test_the_environment_names_a_relays_keys(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS, str(keyed.folder))
    with Relay(
        keyed.publisher.address, "tcp://127.0.0.1:0", ["m"], name="r1", settings=SOON
    ) as relay:
        assert relay.wait_joined(SECONDS)
        assert keyed.publisher.workers().keys() == {"r1"}


def test_a_version_that_is_received_again_is_encrypted_with_another_key(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed.keygen({"w": "worker"}, at=["r1"])
    relay = keyed.relay(keyed.publisher)
    worker = keyed.worker(relay, "w@r1.json")
    assert worker.wait_joined(SECONDS)
    before, proves, failed = ids_of(relay), Chunks.proves, list[str]()

    def wrong_once(chunks: Chunks[Any], claim: str) -> bool:
        if not failed:
            failed.append(claim)
            return False
        return proves(chunks, claim)

    monkeypatch.setattr(Chunks, "proves", wrong_once)
    keyed.publish(1, worker)
    assert failed
    assert ids_of(relay).isdisjoint(before)
