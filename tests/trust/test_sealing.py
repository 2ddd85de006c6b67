"""What is sealed is opened by those who have the key, where it belongs; and by nobody else."""

import builtins
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightbus.bus.chunks import Chunks
from weightbus.bus.effects import Notice, Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import Timing
from weightbus.bus.messages import (
    Announce,
    Beacon,
    Failed,
    Fetch,
    Hello,
    Pong,
    Refuse,
    Rekey,
    SealedChunk,
    SealedMessage,
    Welcome,
)
from weightbus.bus.net.outgoing import PlainMessage
from weightbus.bus.publisher.effects import (
    Broadcast,
    BroadcastChunk,
    BroadcastWhole,
    Release,
    SendChunk,
)
from weightbus.bus.publisher.offers import announcement, chunk_of, encode_effect, hash_chunk
from weightbus.bus.publisher.version import Version
from weightbus.bus.sealer import Sealer
from weightbus.bus.sealer import subject_of as subject_of_announced
from weightbus.bus.worker.keyring import Keyring
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.transfer import Transfer
from weightbus.codecs import sealing
from weightbus.codecs.errors import SealError
from weightbus.codecs.native import crc32c
from weightbus.codecs.sealing import (
    CHUNK,
    KEY_BYTES,
    PIECE_BYTES,
    SHORT_BYTES,
    GroupKey,
    Opening,
    Subject,
    nonce_of,
    seal,
)
from weightbus.tests.simulation.virtual_shell import version_of

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "sealing.json").read_text())
GROUP = bytes(range(KEY_BYTES))

Case = dict[str, Any]


def subject_of(version: Mapping[str, Any]) -> Subject:
    given: dict[str, Any] = {**version, "base": tuple(version["base"])}
    return Subject(**given)


def sealer() -> Sealer:
    """Return one that draws keys of ones, twos, and so on."""
    drawn = iter(bytes([number]) * KEY_BYTES for number in range(1, 9))
    return Sealer(lambda: next(drawn), lambda _model, nbytes: np.zeros(nbytes, np.uint8))


def numbered(chunk_bytes: int = 64) -> Version:
    """Return version 1, of epoch 7 and 40 bytes."""
    return version_of(1, np.arange(40, dtype=np.uint8), chunk_bytes, 7)


def described(by: Sealer, version: Version) -> tuple[Announce, bytes]:
    """Return how a version is announced to one worker, with its layout."""
    announce, layout = by.seal_for_worker(announcement(version), version.layout.header)
    assert isinstance(announce, Announce)
    assert layout is not None
    return announce, bytes(layout)


def test_no_two_versions_of_the_vectors_share_a_key() -> None:
    keys = [case["expect"]["ok"]["key"] for case in VECTORS["versions"]]
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize("case", VECTORS["payloads"], ids=lambda case: case["name"])
def test_payloads_are_opened_and_forged_ones_are_not(case: Case) -> None:
    sealed, tag = bytes.fromhex(case["sealed"]), bytes.fromhex(case["tag"])
    subject, at = subject_of(case["version"]), (case["purpose"], case["index"])
    key = GroupKey(bytes.fromhex(case["group"])).version_key(subject)
    data = subject.associated(*at, len(sealed))
    plain = bytearray(len(sealed))
    crc = Opening(key, nonce_of(*at), data, tag).decrypt(sealed, plain)
    if "error" in case["expect"]:
        assert crc is None
        return
    ok = {"plain": plain.hex(), "crc": crc, "nonce": nonce_of(*at).hex(), "associated": data.hex()}
    assert ok == case["expect"]["ok"]
    again = bytearray(len(sealed))
    assert seal(key, nonce_of(*at), data, plain, again) == (tag, crc)
    assert again == sealed


@given(
    data=st.binary(max_size=200)
    | st.sampled_from([bytes(SHORT_BYTES + 1), bytes(PIECE_BYTES + 5)]),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    bit=st.integers(min_value=0),
)
def test_what_is_sealed_is_opened_in_any_pieces_and_no_bit_may_change(
    data: bytes, cuts: list[int], bit: int
) -> None:
    key, nonce = GROUP, nonce_of(CHUNK, 3)
    sealed = bytearray(len(data))
    tag, crc = seal(key, nonce, b"here", data, sealed)
    assert crc == crc32c(data)
    assert seal(key, nonce, b"here", data, bytearray(len(data)), 7) == (tag, 7)
    place = memoryview(bytearray(sealed))
    opening = Opening(key, nonce, b"here", tag)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        opening.decrypt_next(place[begin:end], place[begin:end])
    assert opening.proves()
    assert bytes(place) == data
    invalid_frames = sealed + tag
    invalid_frames[bit // 8 % len(invalid_frames)] ^= 1 << bit % 8
    size = len(sealed)
    opening = Opening(key, nonce, b"here", bytes(invalid_frames[size:]))
    assert opening.decrypt(invalid_frames[:size], bytearray(size)) is None


names = st.text("ab.-", min_size=1, max_size=3)
numbers = st.integers(0, 3)
subjects = st.builds(
    Subject, names, numbers, numbers, numbers, numbers, names, st.tuples(numbers, numbers)
)


@given(subjects, subjects)
def test_names_and_associated_data_are_the_same_only_for_the_same(
    one: Subject, other: Subject
) -> None:
    def key(s: Subject) -> tuple[object, ...]:
        return s.model, s.epoch, s.version, s.encoding, s.base

    assert (one.names == other.names) == (key(one) == key(other))
    same = one.associated(1, 2, 3) == other.associated(1, 2, 3)
    assert same == (one == other)


def test_pushed_and_fetched_and_whole_are_the_same_bytes_sealed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version, by = numbered(), sealer()
    nonces: list[bytes] = []

    def counting(key: bytes, nonce: bytes, *rest: Any) -> tuple[bytes, int]:
        nonces.append(nonce)
        return seal(key, nonce, *rest)

    monkeypatch.setattr("weightbus.bus.sealer.seal", counting)
    announce = announcement(version)
    chunk = encode_effect(BroadcastChunk(version, 0, b"m/dat"), by)
    whole = encode_effect(BroadcastWhole(version, announce), by)
    assert isinstance(chunk, Broadcast)
    assert isinstance(whole, Broadcast)
    assert chunk.payload is whole.payload
    again, payload = by.chunk(version, 0)
    assert (again, payload) == (chunk.message, chunk.payload)
    assert nonces.count(nonce_of(CHUNK, 0)) == 1
    assert bytes(chunk.payload or b"") != bytes(version.snapshot.bytes(0, 40))
    first, second = (encode_effect(Broadcast(b"", announce, b"layout"), by) for _ in range(2))
    assert isinstance(first, Broadcast)
    assert isinstance(second, Broadcast)
    assert first.payload == second.payload != b"layout"
    assert isinstance(first.message, SealedMessage)
    assert first.message != second.message, "counted, so that none is a replay"


def test_memory_is_let_go_with_the_version() -> None:
    version, by = numbered(16), sealer()
    by.chunk(version, 1)
    assert version.sealed is not None
    assert encode_effect(Release(version), by) == Release(version)
    assert version.sealed is None


def test_what_there_is_no_memory_to_seal_does_not_go_out_and_ends_nothing() -> None:
    def none(_model: str, _nbytes: int) -> NDArray[np.uint8]:
        raise MemoryError

    by, version = (
        Sealer(lambda: bytes(32), none),
        numbered(),
    )
    announce = announcement(version)
    for effect in (SendChunk(version, 0, b"w"), BroadcastChunk(version, 0, b"m/dat")):
        assert isinstance(encode_effect(effect, by), Notice)
    assert version.digest, "for its end, after which workers ask for what they miss"
    whole = encode_effect(BroadcastWhole(version, announce), by)
    assert isinstance(whole, Broadcast)
    assert whole.payload is None
    assert isinstance(whole.message, SealedMessage)


def test_bytes_that_changed_are_never_sealed_again() -> None:
    data = np.arange(40, dtype=np.uint8)
    version, by = version_of(1, data, 64, 7), sealer()
    hash_chunk(version, 0)
    by.chunk(version, 0)
    version.sealed = None
    by.chunk(version, 0)
    version.sealed, data[3] = None, 99
    with pytest.raises(AssertionError, match="has changed"):
        by.chunk(version, 0)


def test_no_group_key_seals_a_chunk_that_a_relay_receives_again_with_other_bytes() -> None:
    data = np.arange(40, dtype=np.uint8)
    version, by = version_of(1, data, 64, 7), sealer()
    version.chunks.whole = False  # it is still being received
    version.chunks.put(0, crc32c(data))
    by.chunk(version, 0)
    version.chunks.clear()
    data[3] = 99
    version.chunks.put(0, crc32c(data))
    with pytest.raises(AssertionError, match="has changed"):
        by.chunk(version, 0)
    version.sealed = None  # its memory was needed
    with pytest.raises(AssertionError, match="has changed"):
        by.chunk(version, 0)
    by.rekey(0.0)
    assert by.chunk(version, 0)[0].key != "", "it goes out under another key"


def test_sealing_records_no_chunk_of_a_version_that_is_being_received() -> None:
    version, by = version_of(1, np.arange(40, dtype=np.uint8), 64, 7), sealer()
    version.chunks.whole = False
    version.chunks.clear()
    by.chunk(version, 0)
    assert version.chunks.crcs == [None], "its worker alone says what has arrived"


def test_the_same_bytes_under_another_epoch_or_group_key_are_sealed_anew() -> None:
    version, by = numbered(), sealer()
    first = bytes(by.chunk(version, 0)[1])
    version.epoch = 8
    second = bytes(by.chunk(version, 0)[1])
    by.rekey(0.0)
    third = bytes(by.chunk(version, 0)[1])
    assert len({first, second, third}) == 3


def test_chunks_that_wait_under_an_older_group_key_do_not_go_out() -> None:
    version, by = numbered(), sealer()
    other = version_of(2, np.arange(40, dtype=np.uint8), 64, 7)
    waiting = [PlainMessage([b"a/dat", b"{}", by.chunk(each, 0)[1]]) for each in (version, other)]
    words = PlainMessage([b"a/ctl", b"{}"])
    assert all(message.parts() for message in waiting)
    by.rekey(0.0)
    assert not any(message.parts() for message in waiting), "nobody has asked for any of it since"
    assert words.parts(), "of a version that was published while that key was good"


def test_a_group_key_is_as_old_as_it_may_be() -> None:
    drawn = iter([b"a" * 32, b"b" * 32])
    by = Sealer(lambda: next(drawn), lambda _m, n: np.zeros(n, np.uint8), life=10.0, now=5.0)
    assert not by.due(14.9)
    assert by.due(15.0)
    by.rekey(15.0)
    assert by.keys == [(b"b" * 32).hex()]
    assert not by.due(24.9)


def beacon(by: Sealer, version: int = 1) -> SealedMessage:
    message, _ = by.seal_for_all(Beacon(wbp=1, model="a", epoch=7, version=version), None)
    assert isinstance(message, SealedMessage)
    return message


def opened(keyring: Keyring, message: SealedMessage) -> bool:
    return keyring.published(message, []) is not None


def test_two_keys_are_held_for_a_change_and_the_older_one_not_for_long() -> None:
    by, keyring = sealer(), Keyring()
    keyring.begin(by.keys)
    old = [beacon(by) for _ in range(3)]
    by.rekey(0.0)
    new = [beacon(by) for _ in range(4)]
    assert not opened(keyring, new[0])
    assert keyring.lacks(0.0), "it asks for the key"
    assert keyring.lacks(0.0), "and again, where no hello could be said"
    keyring.add(by.keys, until=5.0)
    assert not keyring.lacks(1.0)
    assert opened(keyring, new[1])
    assert opened(keyring, old[0]), "what was on its way"
    assert not opened(keyring, new[0]), "older than what was opened"
    keyring.add(by.keys, until=50.0)  # told again: that changes nothing
    keyring.lacks(5.0)
    assert not opened(keyring, old[1])
    assert opened(keyring, new[2])
    keyring.begin(by.keys)
    assert not opened(keyring, new[2]), "a new session is not a way to play it again"
    assert opened(keyring, new[3])


def test_a_key_that_is_told_before_one_that_is_here_is_older_and_does_not_come_back() -> None:
    by, keyring = sealer(), Keyring()
    [old] = by.keys
    keyring.begin(by.keys)
    before = beacon(by)
    by.rekey(0.0)
    both = [old, *by.keys]
    keyring.add(both, until=5.0)
    said = [beacon(by) for _ in range(3)]
    assert opened(keyring, said[1])
    for until in (50.0, 60.0):
        keyring.lacks(until - 45.0)
        keyring.add(both, until)
        assert not opened(keyring, before)
        assert not opened(keyring, said[1]), "a replay"
    keyring.lacks(60.0)
    assert opened(keyring, said[2])


def test_of_two_keys_of_a_welcome_the_older_one_counts_for_a_while() -> None:
    by, keyring = sealer(), Keyring()
    old, before = by.keys, [beacon(by) for _ in range(2)]
    by.rekey(0.0)
    keyring.begin([*old, *by.keys], until=5.0)
    assert opened(keyring, before[0])
    keyring.lacks(5.0)
    assert not opened(keyring, before[1])
    assert opened(keyring, beacon(by))


def joined(by: Sealer, keyring: Keyring | None, version: int = 0) -> WorkerMachine:
    """Return a worker in a session, which was told the keys if it takes some."""
    worker = WorkerMachine(
        Hello(name="w", instance="0" * 32, models={}), ["a"], lambda *_: "", keyring=keyring
    )
    models = {"a": version} if version else {}
    told = Welcome(
        epoch=7, data="tcp://h:1", ping_ms=1000, lost_ms=5000, models=models, keys=by.keys
    )
    worker.receive([encode(told)], 0.0)
    return worker


def keyed_worker(by: Sealer, keyring: Keyring | None) -> WorkerMachine:
    """Return a worker in a session that has subscribed."""
    worker = joined(by, keyring)
    worker.receive_published([b"a/ctl", encode(beacon(by, 0))], 0.0)  # it has subscribed
    return worker


def test_a_pushed_chunk_of_what_does_not_arrive_is_neither_news_nor_a_sign_of_life() -> None:
    by = sealer()
    worker = keyed_worker(by, Keyring())
    lost_after = worker.timing.lost_after
    worker.receive([encode(Pong(wbp=1, epoch=7, models={}))], 1.0)
    invalid_frames = SealedChunk(
        model="a", epoch=7, version=2**53 - 1, index=0, key=beacon(by).key, tag="0" * 32
    )
    for now in (1.5, lost_after + 0.9):
        assert worker.receive_published([b"a/dat", encode(invalid_frames), bytes(40)], now) == []
    assert worker.followers["a"].versions.newest_known == (7, 0)
    assert worker.in_session
    worker.tick(lost_after + 1.0)
    assert not worker.in_session


def test_a_chunk_of_the_wrong_kind_is_not_even_news() -> None:
    by, version = sealer(), numbered()
    plain, sealed = chunk_of(version, 0), by.chunk(version, 0)
    for keyring, (wrong, data) in ((Keyring(), plain), (None, sealed)):
        worker = keyed_worker(by, keyring)
        assert worker.receive([encode(wrong), data], 0.5) == []
        assert worker.receive_published([b"a/dat", encode(wrong), data], 0.5) == []
    right, data = sealed
    assert keyed_worker(by, Keyring()).receive([encode(right), data], 0.5), "on control it is news"


def test_an_older_group_key_ends_outside_a_session_too_and_what_came_of_it() -> None:
    by, keyring = sealer(), Keyring()
    worker = keyed_worker(by, keyring)
    version = numbered()
    announce, layout = described(by, version)
    assert keyring.payload(announce, layout) is not None
    old = beacon(by)
    secret = GroupKey(bytes.fromhex(by.keys[0])).version_key(subject_of_announced(announce))
    assert secret in held_bytes(keyring)
    by.rekey(0.0)
    worker.receive([encode(Rekey(epoch=7, keys=by.keys))], 0.0)
    worker.receive([encode(Refuse(code="revoked", text=""))], 0.1)
    assert not worker.in_session
    worker.tick(worker.timing.lost_after)
    assert keyring.published(old, []) is None
    assert secret not in held_bytes(keyring)


def held_bytes(keyring: Keyring) -> list[object]:
    """Return the parts of all tuples that a keyring has."""
    tuples = [each for each in vars(keyring).values() if isinstance(each, tuple)]
    return [part for each in tuples for part in each]


def test_an_announcement_whose_payload_is_not_sound_is_repaired_by_fetching() -> None:
    by, keyring = sealer(), Keyring()
    keyring.begin(by.keys)
    version = numbered()
    announce, layout = described(by, version)
    assert keyring.payload(announce, layout) == version.layout.header
    assert keyring.payload(announce, bytes(len(layout))) is None
    for change in ({"version": 2}, {"tag": None}, {"key": "0" * 16}, {"nbytes": 41}):
        assert keyring.payload(msgspec.structs.replace(announce, **change), layout) is None


def test_without_the_package_an_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return original(name, *rest)

    sealing.ciphers.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    for make in (sealer, Keyring):
        with pytest.raises(SealError, match=r"pip install 'weightbus\[keys\]'"):
            make()


def test_a_layout_that_cannot_be_opened_is_not_asked_for_again_and_again() -> None:
    by, keyring, other = sealer(), Keyring(), sealer()
    other.rekey(0.0)
    worker = joined(other, keyring, version=1)
    version = numbered()
    announce, layout = described(by, version)
    said = [worker.receive([encode(announce), layout], 0.01 * n) for n in range(10)]
    assert not any(said)
    assert any(isinstance(e, Send) and isinstance(e.message, Hello) for e in worker.tick(0.3))


def test_what_is_announced_in_the_clear_is_not_supported_with_a_layout_neither() -> None:
    by, keyring = sealer(), Keyring()
    worker = joined(by, keyring)
    version = numbered()
    clear = announcement(version)
    for encryption in (None, "aes-512"):
        said = msgspec.structs.replace(clear, encryption=encryption)
        effects = worker.receive([encode(said), version.layout.header], 0.0)
        answers = [e.message for e in effects if isinstance(e, Send)]
        assert [m.code for m in answers if isinstance(m, Failed)] == ["unsupported"]


def test_an_announcement_counts_once_whether_there_is_a_place_for_its_payload_or_not() -> None:
    by, keyring = sealer(), Keyring()
    worker = joined(by, keyring)
    version = numbered()
    for fits in (True, False):
        said = encode_effect(BroadcastWhole(version, announcement(version)), by)
        assert isinstance(said, Broadcast)
        frames, size = [said.topic, encode(said.message)], 40 if fits else 41
        lease = worker.place(frames, size)
        assert (lease is not None) == fits
        keyring.lacks(0.0)
        taken = worker.receive_published(lease or [*frames, b""], 0.0)
        fetches = [e for e in taken if isinstance(e, Send) and isinstance(e.message, Fetch)]
        assert fetches, "its layout is not known yet"
        worker.followers["a"].gone(7, version.version, 0.0)
        assert worker.place(frames, size) is None, "a replay"
        assert worker.receive_published([*frames, b""], 0.0) == []


def transfer(version: Version, keyring: Keyring | None) -> Transfer:
    """Return a version on its way to a worker."""
    announce, _ = sealer().seal_for_worker(announcement(version), None)
    assert isinstance(announce, Announce)
    plan = version.plan
    chunks = Chunks(plan, np.zeros(40, np.uint8), [None] * plan.count, version.layout.id)
    return Transfer(announce, chunks, 0.0, Timing(), keyring)


def received(arriving: Transfer, chunk: SealedChunk, sealed: bytes, pieces: int) -> bool:
    """Receive a chunk straight into its place; return whether it counts."""
    lease = arriving.lend(chunk, len(sealed))
    assert lease is not None
    for begin in range(0, len(sealed), pieces):
        piece = sealed[begin : begin + pieces]
        lease.view[lease.count :][: len(piece)] = piece
        lease.received(len(piece))
    before = arriving.chunks.here
    arriving.take(chunk, lease, 0.0, pushed=True)
    return arriving.chunks.here > before


@pytest.mark.parametrize("pieces", [1, 7, 16])
def test_what_is_received_in_place_is_opened_there_and_counts_if_its_tag_is_right(
    pieces: int,
) -> None:
    by, keyring = sealer(), Keyring()
    keyring.begin(by.keys)
    data = np.arange(40, dtype=np.uint8)
    version = version_of(1, data, 16, 7)
    arriving = transfer(version, keyring)
    for index in range(3):
        chunk, payload = by.chunk(version, index)
        invalid_frames = bytearray(payload)
        invalid_frames[-1] ^= 1
        assert not received(arriving, chunk, bytes(invalid_frames), pieces)
        assert arriving.chunks.here == index
        assert received(arriving, chunk, bytes(payload), pieces)
    arriving.end(version.digest)
    assert arriving.chunks.proves(version.digest)
    assert bytes(arriving.chunks.memory) == bytes(data)


def test_a_sealed_version_takes_no_chunk_in_the_clear_and_the_other_way_round() -> None:
    by, keyring = sealer(), Keyring()
    keyring.begin(by.keys)
    version = numbered()
    plain, data = chunk_of(version, 0)
    chunk, sealed = by.chunk(version, 0)
    for opens, right, wrong in (
        (keyring, (chunk, sealed), (plain, data)),
        (None, (plain, data), (chunk, sealed)),
    ):
        arriving = transfer(version, opens)
        assert arriving.lend(wrong[0], 40) is None
        arriving.take(wrong[0], wrong[1], 0.0, pushed=False)
        assert arriving.chunks.here == 0
        arriving.take(right[0], right[1], 0.0, pushed=False)
        assert arriving.chunks.here == 1
