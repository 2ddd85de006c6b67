"""Weights on a real GPU; `test_devices.py` has what needs none. Skipped where torch finds none."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from weightbus import ApplyError, Publisher, PublishError, Settings, Subscriber
from weightbus.codecs import device_copies, device_memory
from weightbus.codecs.apply import Reader
from weightbus.codecs.state import Writer, state_of

SECONDS = 60.0
NETWORK = Settings(shared_memory=False)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


def some(seed: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Return tensors as models have them, and unusual ones."""
    torch.manual_seed(seed)
    state = {f"small.{i}": torch.randn(1 + 7 * i) for i in range(300)}
    state["large"] = torch.randn(1500, 1024)
    state["bf16"] = torch.randn(2000, 999).bfloat16()
    state["tiny"] = torch.randn(3).half()
    state["scalar"] = torch.tensor(float(seed))
    state["flag"] = torch.tensor([True, False, bool(seed % 2)])
    state["fp8"] = torch.randn(513).to(torch.float8_e4m3fn)
    state["fp8.large"] = torch.randn(2**21).to(torch.float8_e5m2)
    state["empty"] = torch.empty(0, 4)
    state = {name: each.to(device) for name, each in state.items()}
    state["transposed"] = torch.randn(300, 700).to(device).T
    state["transposed.large"] = torch.randn(9000, 1000).to(device).T
    state["strided"] = torch.randn(100, 64).to(device)[:, ::2]
    state["in.memory"] = torch.randn(300)  # CPU and GPU mixed
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

    return all(torch.equal(raw(each), raw(other[name])) for name, each in one.items())


@pytest.mark.parametrize("second", [False, True])
def test_bytes_are_the_same(second: bool) -> None:
    state = state_of(some(0))
    data = np.full(state.layout().nbytes, 0xEE, np.uint8)
    writer = Writer(state.layout(), data, second=second)
    target = some(9)
    reader = Reader(state.layout(), data)
    for seed in range(3):
        source = some(seed)
        writer.write(state_of(source))
        wanted = np.zeros(state.layout().nbytes, np.uint8)
        Writer(state.layout(), wanted).write(state_of(some(seed, "cpu")))
        reader.copy_into(target)
        assert same(source, target)


@pytest.mark.parametrize("second", [False, True])
def test_all_on_one_device(second: bool) -> None:
    weights, target = some(0), some(1)
    del weights["in.memory"], target["in.memory"]
    with (
        Publisher(settings=Settings(device_copy=second)) as publisher,
        Subscriber(publisher.address, {"m": target}) as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        for seed in range(5):
            for name, each in some(seed).items():
                if name in weights:
                    weights[name].copy_(each)
            future = publisher.publish_async("m", weights, timeout=SECONDS)
            assert worker.receive(SECONDS) is not None
            assert future.result(SECONDS).in_state("applied")
            assert same(weights, target)


def test_memory_is_pinned() -> None:
    data = np.zeros(2**24, np.uint8)
    held = device_memory.pinned(data, torch.device("cuda"))
    assert held is not None
    assert torch.from_numpy(data).is_pinned()
    assert device_memory.pinned(data, torch.device("cuda")) is None  # is already
    del held
    assert not torch.from_numpy(data).is_pinned()


@pytest.mark.parametrize("few", [Settings(), NETWORK], ids=["shared", "network"])
def test_values_are_converted(few: Settings) -> None:
    weights = {"w": torch.randn(3000, 1000, device="cuda"), "b": torch.randn(9, device="cuda")}
    target = {name: torch.zeros_like(each) for name, each in weights.items()}
    half = Settings(shared_memory=few.shared_memory, dtype="bf16")
    with (
        Publisher(settings=half) as publisher,
        Subscriber(publisher.address, {"m": target}, cast=True, settings=few) as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        future = publisher.publish_async("m", weights, timeout=SECONDS)
        assert worker.receive(SECONDS) is not None
        assert future.result(SECONDS).digest or few.shared_memory
    assert all(torch.equal(target[n], each.bfloat16().float()) for n, each in weights.items())


def test_tied_and_module() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(100, 64)
            self.head = torch.nn.Linear(64, 100, bias=False)
            self.head.weight = self.embed.weight

    source, target = Tied().cuda(), Tied().cuda()
    pointer = target.head.weight.data_ptr()
    with Publisher() as publisher, Subscriber(publisher.address, {"m": target}) as worker:
        publisher.wait_for_workers(1, SECONDS)
        future = publisher.publish_async("m", source, timeout=SECONDS)
        assert worker.receive(SECONDS) is not None
        future.result(SECONDS)
    assert torch.equal(source.embed.weight, target.head.weight)
    assert target.head.weight.data_ptr() == pointer


def busy(seconds: float) -> None:
    """Keep the current stream busy for some seconds."""
    spin: Any = vars(torch.cuda)["_sleep"]
    spin(int(seconds * 1.5e9))


@pytest.mark.parametrize("second", [False, True])
def test_publishing_returns_at_once_and_nothing_tears(second: bool) -> None:
    weights = {f"w{i}": torch.zeros(2**22, device="cuda") for i in range(8)}
    target = {name: torch.zeros(2**22) for name in weights}
    with Publisher(settings=Settings(device_copy=second)) as publisher:
        publisher.prepare("m", weights)
        with Subscriber(publisher.address, {"m": target}) as worker:
            publisher.wait_for_workers(1, SECONDS)
            for number in range(1, 30):
                for each in weights.values():
                    each.fill_(number)
                if number % 5 == 0:
                    busy(0.1)
                    for each in weights.values():
                        each.fill_(number)
                begun = time.perf_counter()
                future = publisher.publish_async("m", weights, timeout=SECONDS)
                took = time.perf_counter() - begun
                for each in weights.values():  # the caller changes its weights at once
                    each.fill_(-1.0)
                if number % 5 == 0:
                    assert took < 0.08
                assert worker.receive(SECONDS) is not None
                future.result(SECONDS)
                assert all(bool((each == number).all()) for each in target.values())


def test_a_reader_that_has_left_is_waited_for_on_the_device() -> None:
    target = {"w": torch.zeros(2**22, device="cuda")}
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": target}, settings=NETWORK).start() as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        stream = torch.cuda.Stream()
        for number in range(1, 12):
            with torch.cuda.stream(stream), worker.reading():
                busy(0.02)
                seen = target["w"].clone()
            publisher.publish("m", {"w": torch.full((2**22,), float(number))}, timeout=SECONDS)
            stream.synchronize()
            assert bool((seen == number - 1).all())
            assert bool((target["w"] == number).all())


def test_a_graph_goes_on_with_new_weights() -> None:
    layer = torch.nn.Linear(64, 64, bias=False).cuda()
    batch, graph = torch.ones(1, 64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.no_grad():
        layer(batch)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = layer(batch)
    with Publisher() as publisher, Subscriber(publisher.address, {"m": layer}) as worker:
        publisher.wait_for_workers(1, SECONDS)
        for number in range(3):
            future = publisher.publish_async(
                "m", {"weight": torch.full((64, 64), float(number))}, timeout=SECONDS
            )
            assert worker.receive(SECONDS) is not None
            future.result(SECONDS)
            graph.replay()
            torch.cuda.synchronize()
            assert bool((out == 64 * number).all())


def test_no_memory_is_said_and_the_old_version_runs_on() -> None:
    size = 3000
    target = {"w": torch.zeros(9, device="cuda"), "t": torch.zeros(size, size, device="cuda").T}
    with Publisher() as publisher, Subscriber(publisher.address, {"m": target}) as worker:
        publisher.wait_for_workers(1, SECONDS)

        def publish(value: float) -> Any:
            weights = {"w": torch.full((9,), value), "t": torch.full((size, size), value)}
            return publisher.publish_async("m", weights, timeout=SECONDS)

        lane = device_copies.lane_of(torch.device("cuda", 0), "in")
        vars(lane)["_stage"] = None
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-9)
        try:
            failed = publish(1.0)
            with pytest.raises(ApplyError, match="on cuda:0 to copy by way of") as raised:
                worker.receive(SECONDS)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert raised.value.code == "no-memory"
        assert not target["w"].any()
        with pytest.raises(PublishError, match="bytes on cuda"):
            failed.result(SECONDS)
        again = publish(2.0)
        assert worker.receive(SECONDS) is not None
        again.result(SECONDS)
        assert bool((target["t"] == 2).all())


WORKER = """
import sys, time, torch
from weightbus import Subscriber
target = {f"w{i}": torch.zeros(int(sys.argv[3]), device="cuda") for i in range(8)}
with Subscriber(sys.argv[1], {"m": target}, name=sys.argv[2]) as worker:
    print("here", flush=True)
    while True:
        update = worker.receive(0.5)
        if update is not None:
            values = {float(v) for each in target.values() for v in (each.min(), each.max())}
            near = worker._targets["m"]._readers[-1][1]._from_second
            print("torn" if len(values) > 1 else "whole", update.version, values.pop(),
                  "near" if near else "far", flush=True)
"""


class Other:
    """A worker in another process."""

    def __init__(self, address: str, name: str, size: int = 2**24) -> None:
        command = [sys.executable, "-c", WORKER, address, name, str(size)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._said:
                self.lines.append(line.strip())
                self._said.notify_all()

    def said(self, version: int) -> str:
        """Wait until the worker has printed that it runs at least a version; return that line."""

        def there() -> bool:
            last = self.lines[-1].split() if self.lines else []
            return len(last) == 4 and int(last[1]) >= version

        with self._said:
            assert self._said.wait_for(there, SECONDS), self.lines
            return self.lines[-1]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


def filled(weights: dict[str, torch.Tensor], value: float) -> None:
    for each in weights.values():
        each.fill_(value)


def test_workers_of_the_same_device_copy_from_there_and_may_die() -> None:
    weights = {f"w{i}": torch.zeros(2**24, device="cuda") for i in range(8)}
    with Publisher(settings=Settings(device_copy=True)) as publisher:
        others = [Other(publisher.address, f"worker-{i}") for i in range(2)]
        try:
            publisher.wait_for_workers(2, SECONDS)
            for number in range(1, 60):
                filled(weights, float(number))
                if number == 20:
                    os.kill(others[0].process.pid, signal.SIGSTOP)  # at an arbitrary moment
                if number == 25:
                    others[0].process.kill()
                publisher.publish_async("m", weights, require=0, timeout=SECONDS)
                filled(weights, -1.0)
                others[1].said(number)  # the other worker copies meanwhile, until it is stopped
            filled(weights, 60.0)
            publisher.publish("m", weights, workers=["worker-1"], timeout=SECONDS)
            assert others[1].said(60) == "whole 60 60.0 near"
        finally:
            for other in others:
                other.end()
    for other in others:
        assert not [line for line in other.lines if line.startswith("torn")], other.lines


def test_who_is_not_on_the_device_asks_for_the_bytes_and_gets_them() -> None:
    weights = {f"w{i}": torch.zeros(2**20, device="cuda") for i in range(8)}
    targets = [{name: torch.zeros(2**20) for name in weights} for _ in range(2)]
    with Publisher(settings=Settings(device_copy=True)) as publisher:
        near = Other(publisher.address, "near", 2**20)
        try:
            publisher.wait_for_workers(1, SECONDS)
            filled(weights, 1.0)
            publisher.publish("m", weights, timeout=SECONDS)  # no worker needs a transfer
            with (
                Subscriber(publisher.address, {"m": targets[0]}).start(),
                Subscriber(publisher.address, {"m": targets[1]}, settings=NETWORK).start(),
            ):
                publisher.wait_for_workers(3, SECONDS)
                for number in range(2, 9):
                    filled(weights, float(number))
                    future = publisher.publish_async("m", weights, timeout=SECONDS)
                    filled(weights, -1.0)
                    assert len(future.result(SECONDS).in_state("applied")) == 3
                    for target in targets:
                        assert all(bool((each == number).all()) for each in target.values())
            assert near.said(8) == "whole 8 8.0 near"
        finally:
            near.end()


TRAINER = """
import sys, torch
from weightbus import Publisher, Settings
weights = {f"w{i}": torch.zeros(2**24, device="cuda") for i in range(8)}
with Publisher(settings=Settings(device_copy=True)) as publisher:
    print(publisher.address, flush=True)
    publisher.wait_for_workers(1, 60)
    number = 0
    while True:
        number += 1
        for each in weights.values():
            each.fill_(float(number))
        publisher.publish_async("m", weights, require=0, timeout=60)
"""


def test_a_trainer_may_die_while_its_memory_is_copied() -> None:
    for versions in (3, 11):
        command = [sys.executable, "-c", TRAINER]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
        assert trainer.stdout is not None
        target = {f"w{i}": torch.zeros(2**24, device="cuda") for i in range(8)}
        try:
            with Subscriber(trainer.stdout.readline().strip(), {"m": target}) as worker:
                number = 0
                for number in range(100):
                    update = worker.receive(SECONDS if number < versions else 0.5)
                    if number == versions:
                        trainer.kill()
                    if update is None:
                        break
                    values = {float(v) for t in target.values() for v in (t.min(), t.max())}
                    assert values == {float(update.version)}
                assert number > versions
        finally:
            trainer.kill()
            trainer.wait()
            trainer.stdout.close()


def test_nothing_is_started_before_it_is_needed() -> None:
    code = """
import torch, weightbus, numpy as np
from weightbus import Publisher, Subscriber
target = {"w": torch.zeros(3)}
with Publisher() as p, Subscriber(p.address, {"m": target}) as w:
    p.wait_for_workers(1, 30)
    f = p.publish_async("m", {"w": torch.ones(3)}, timeout=30)
    assert w.receive(30)
    f.result(30)
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)  # noqa: S603
