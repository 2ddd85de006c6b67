"""Workers that take a part of each version: what they get, and how many bytes that takes."""

import json
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import weightbus
from weightbus import Part, Publisher, PublishError, Settings, Subscriber
from weightbus.bus.publisher import joining, publishing
from weightbus.python_client.observing.observer import Observer
from weightbus.tests.client import parts_ranks
from weightbus.tests.client.ranks import SECONDS as RANK_SECONDS
from weightbus.tests.client.ranks import run_ranks
from weightbus.tests.net.tunnel import Tunnel
from weightbus.tests.trust.sealed_bus import keys_in
from weightbus.types import Pairs, Receipt

SECONDS = 60.0
ROWS, COLUMNS = 1024, 768
HALVES = slice(0, ROWS // 2), slice(ROWS // 2, ROWS)
Weights = dict[str, NDArray[Any]]


def weights(seed: int = 0) -> Weights:
    """Return two matrices of three chunks each, and a vector that no rank shares out."""
    random = np.random.default_rng(seed)
    shapes = {"up": (ROWS, COLUMNS), "down": (ROWS, COLUMNS), "norm": (COLUMNS,)}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def slices(rank: int) -> dict[str, Any]:
    """Return the slices of one of two ranks: rows of one matrix, and columns of the other."""
    half = COLUMNS // 2
    return {"up": HALVES[rank], "down": (None, (rank * half, rank * half + half))}


def local(rank: int, full: Weights) -> Weights:
    half = COLUMNS // 2
    columns = full["down"][:, rank * half : rank * half + half]
    return {"up": full["up"][HALVES[rank]], "down": columns, "norm": full["norm"]}


def empty(rank: int) -> Weights:
    return {name: np.zeros(t.shape, t.dtype) for name, t in local(rank, weights()).items()}


def check(here: Weights, rank: int, full: Weights) -> None:
    for name, tensor in local(rank, full).items():
        np.testing.assert_array_equal(here[name], tensor, name)


class Counted:
    """A publisher and its address through tunnels that count bytes."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self.publisher = stack.enter_context(Publisher("tcp://127.0.0.1:0", **options))
        self._tunnels = [stack.enter_context(closing(Tunnel())) for _ in range(2)]
        self._tunnels[0].lead_to(self.publisher.address)
        self._tunnels[1].lead_to(self.publisher.data_address)
        self.address = self._tunnels[0].address

    @property
    def nbytes(self) -> int:
        return sum(len(tunnel.told) for tunnel in self._tunnels)

    def spoil(self, pieces: int) -> None:
        self._tunnels[0].spoil = pieces


@contextmanager
def ranks(
    shared_memory: bool = False, **options: Any
) -> Generator[tuple[Counted, list[Weights], list[Subscriber]]]:
    """Run a publisher, and the workers of two ranks of one host."""
    keys = options.pop("worker_keys", None)
    with ExitStack() as stack:
        counted = Counted(stack, **options)
        models = [empty(rank) for rank in range(2)]
        workers = [
            stack.enter_context(
                Subscriber(
                    counted.address,
                    {"policy": Part(model, slices(rank))},
                    name=f"rank-{rank}",
                    keys=keys,
                    settings=Settings(shared_memory=shared_memory),
                )
            ).start()
            for rank, model in enumerate(models)
        ]
        counted.publisher.wait_for_workers(2, SECONDS)
        yield counted, models, workers


def publish(publisher: Publisher, full: object, **options: Any) -> Receipt:
    receipt = publisher.publish("policy", full, timeout=SECONDS, **options)
    assert all(worker.state == "applied" for worker in receipt.workers.values()), receipt
    return receipt


def test_two_ranks_of_a_host_get_the_bytes_of_one_version_together() -> None:
    with ranks() as (counted, models, _):
        for seed in range(3):
            full, before = weights(seed), counted.nbytes
            receipt = publish(counted.publisher, full)
            for rank, model in enumerate(models):
                check(model, rank, full)
            assert counted.nbytes - before <= 1.05 * receipt.nbytes


def test_a_part_is_copied_from_shared_memory() -> None:
    with ranks(shared_memory=True) as (counted, models, _):
        full, before = weights(1), counted.nbytes
        publish(counted.publisher, full)
        for rank, model in enumerate(models):
            check(model, rank, full)
        assert counted.nbytes - before < 100_000


def test_sealed_chunks_are_sent_whole_and_cut_by_the_worker(tmp_path: Path) -> None:
    keys, own = keys_in(tmp_path)
    with ranks(keys=keys, worker_keys=own) as (counted, models, _):
        full = weights(1)
        publish(counted.publisher, full)
        for rank, model in enumerate(models):
            check(model, rank, full)


def test_damaged_pieces_are_fetched_again() -> None:
    with ranks() as (counted, models, _):
        counted.spoil(3)
        full = weights(1)
        publish(counted.publisher, full)
        for rank, model in enumerate(models):
            check(model, rank, full)


def test_of_a_publisher_without_the_feature_the_worker_takes_all_and_keeps_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (joining, publishing):
        monkeypatch.setattr(module, "PARTS", "no-such-feature")
    with ranks() as (counted, models, _):
        for seed in range(2):
            full, before = weights(seed), counted.nbytes
            receipt = publish(counted.publisher, full)
            for rank, model in enumerate(models):
                check(model, rank, full)
            assert counted.nbytes - before >= 1.9 * receipt.nbytes


def test_a_small_version_and_one_that_commits_together() -> None:
    with Publisher("tcp://127.0.0.1:0") as publisher:
        model = {"w": np.zeros(4, np.float32)}
        part = Part(model, {"w": slice(2, 6)})
        with Subscriber(publisher.address, {"policy": part}, name="w").start():
            publisher.wait_for_workers(1, SECONDS)
            for step in range(4):
                full = {"w": np.arange(10, dtype=np.float32) + step}
                publish(publisher, full, commit="together" if step % 2 else "auto")
                np.testing.assert_array_equal(model["w"], full["w"][2:6])


def test_a_part_comes_through_a_relay() -> None:
    with Publisher("tcp://127.0.0.1:0") as publisher, ExitStack() as stack:
        relay = stack.enter_context(
            weightbus.Relay(publisher.address, "tcp://127.0.0.1:0", models=["policy"])
        )
        model = empty(1)
        few = Settings(shared_memory=False)
        worker = Subscriber(
            relay.address, {"policy": Part(model, slices(1))}, name="w", settings=few
        )
        stack.enter_context(worker).start()
        publisher.wait_for_workers(1, SECONDS)
        for seed in range(3):
            full = weights(seed)
            publish(publisher, full)
            check(model, 1, full)


def test_a_function_and_a_file_get_the_slices(tmp_path: Path) -> None:
    got = dict[str, NDArray[Any]]()

    def load(pairs: Pairs) -> None:
        got.update({name: array.copy() for name, array in pairs.arrays()})

    full, path = weights(), tmp_path / "part.safetensors"
    taken = {"down": (None, (0, 3)), "norm": None}
    targets: list[Any] = [load, path]
    with Publisher("tcp://127.0.0.1:0") as publisher, ExitStack() as stack:
        for target in targets:
            worker = Subscriber(publisher.address, {"policy": Part(target, taken)})
            stack.enter_context(worker).start()
        publisher.wait_for_workers(2, SECONDS)
        publish(publisher, full)
    for found in (got, load_file(path)):
        assert {*found} == {*taken}
        np.testing.assert_array_equal(found["down"], full["down"][:, :3])
        np.testing.assert_array_equal(found["norm"], full["norm"])


def test_slices_have_the_names_of_a_renamed_target() -> None:
    full = weights()
    model = {f"model.{name}": tensor for name, tensor in empty(0).items()}
    part = Part(model, {f"model.{name}": sides for name, sides in slices(0).items()})
    with Publisher("tcp://127.0.0.1:0") as publisher:
        rename = {name: f"model.{name}" for name in full}
        worker = Subscriber(publisher.address, {"policy": part}, rename=rename)
        with worker.start():
            publisher.wait_for_workers(1, SECONDS)
            publish(publisher, full)
    check({name.removeprefix("model."): tensor for name, tensor in model.items()}, 0, full)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda full: full | {"more": full["norm"]}, "more: published, not in the target"),
        (lambda full: {"up": full["up"]}, "down: in the part of this worker, not published"),
        (lambda full: full | {"up": full["up"][:600]}, r"up: the slice [512:1024, 0:768] is not"),
        (lambda full: full | {"up": full["up"][:, :5]}, "up: shape [512, 5] published, [512, 768]"),
        (lambda full: full | {"up": full["norm"] + 1}, "up: the slice [512:1024] is not inside of"),
        (lambda full: full | {"down": full["norm"] + 1}, "down: slices of 2 dimensions, published"),
    ],
)
def test_a_version_that_does_not_fit_a_part_is_refused_by_name(
    spoil: Callable[[Weights], Weights], text: str
) -> None:
    with Publisher("tcp://127.0.0.1:0") as publisher:
        part = Part(empty(1), slices(1))
        with Subscriber(publisher.address, {"policy": part}, name="w").start():
            publisher.wait_for_workers(1, SECONDS)
            with pytest.raises(PublishError) as found:
                publisher.publish("policy", spoil(weights()), timeout=SECONDS)
    assert text in str(found.value)


@pytest.mark.parametrize("side", [slice(0, 4, 2), (0,), (0.0, 1.0), "0:4", [(0, 1), 3]])
def test_what_is_no_slice_is_refused_at_once(side: Any) -> None:
    with pytest.raises(ValueError, match=r"slices\['w'\] has .*; give a slice of step 1"):
        Part({}, {"w": side})


def test_a_worker_of_a_part_cannot_be_verified_from_outside() -> None:
    with Publisher("tcp://127.0.0.1:0") as publisher:
        part = Part(empty(0), slices(0))
        with Subscriber(publisher.address, {"policy": part}, name="w").start():
            publisher.wait_for_workers(1, SECONDS)
            publish(publisher, weights())
            with Observer(publisher.address) as observer:
                answer = observer.verify("w", "policy", SECONDS)
    assert answer.code == "unsupported"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(2 * RANK_SECONDS)
def test_a_target_of_dtensors_takes_its_own_slices_from_all_ranks_of_a_trainer(
    tmp_path: Path,
) -> None:
    for text in run_ranks(parts_ranks.__file__, parts_ranks.RANKS, tmp_path):
        saw = json.loads(text.splitlines()[-1])
        assert saw["equal"] == dict.fromkeys(saw["equal"], True)
        assert len(saw["equal"]) == 2
        assert saw["from other ranks"]
