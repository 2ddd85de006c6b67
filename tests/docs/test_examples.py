"""The examples that run by themselves do, and print what every worker runs."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import zmq

import weightbus
from weightbus.tests.compose.waiting import wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
PAUSE = 1.0  # seconds, after which a worker of level 1 asks again; then twice as long


@pytest.mark.parametrize("name", ["numpy_worker.py", "jax_worker.py"])
def test_a_worker_of_the_line_predicts_with_each_version(name: str) -> None:
    with (
        weightbus.Publisher(
            "tcp://127.0.0.1:0", settings=weightbus.Settings(shared_memory=False)
        ) as publisher,
        running(name, publisher.address, "--name", "w0") as worker,
    ):
        publisher.wait_for_workers(1, timeout=60)
        weights = {"slope": np.array([2, -1, 0.5], np.float32), "offset": np.zeros((), np.float32)}
        for offset in range(3):
            weights["offset"][()] = offset
            receipt = publisher.publish("line", weights, timeout=60)
            assert rows(worker, 1) == [
                {
                    "worker": "w0",
                    "version": receipt.version,
                    "prediction": 1.5 + offset,
                    "digest": receipt.digest,
                }
            ]
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=30) == 0
        said_goodbye = publisher.publish("line", weights, timeout=60)
        assert said_goodbye.workers == {}, "one that is only lost would still be waited for"


def test_a_worker_of_level_1_keeps_the_newest_version(tmp_path: Path) -> None:
    path, address = tmp_path / "m.safetensors", f"ipc://{tmp_path}/bus"
    weights = {"w": np.arange(300, dtype=np.float32)}  # 38 chunks: three windows

    def opened() -> weightbus.Publisher:
        return weightbus.Publisher(address, settings=weightbus.Settings(chunk_bytes=32))

    def is_published() -> bool:
        return bool((safetensors.numpy.load_file(path)["w"] == weights["w"]).all())

    with opened() as publisher:
        receipt = publisher.publish("m", weights, timeout=60)  # it joins late
        with running("level1_worker.py", address, "m", str(path)):
            publisher.wait_for_workers(1, timeout=60)
            wait_for(path.exists, "the version from before it came is kept", 60)
            assert is_published()
            for _ in range(3):
                weights["w"] += 1
                assert publisher.publish("m", weights, timeout=60).digest
                assert is_published()
            with pytest.raises(weightbus.PublishError, match="unsupported"):
                publisher.publish("m", weights, commit="together", timeout=60)
            publisher.close()
            with opened() as later:
                later.wait_for_workers(1, timeout=60)
                weights["w"] += 1
                again = later.publish("m", weights, timeout=60)
                assert (again.epoch > receipt.epoch, again.version) == (True, 1)
                assert is_published()
    assert len((EXAMPLES / "level1_worker.py").read_text().splitlines()) <= 185


@pytest.mark.parametrize("code", ["digest-mismatch", "layout-invalid", "unsupported"])
def test_a_worker_of_level_1_does_not_ask_at_once_for_what_has_failed(
    tmp_path: Path, code: str
) -> None:
    header = b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}   '
    layout = len(header).to_bytes(8, "little") + header
    of = {"wbp": 1, "model": "m", "epoch": 7, "version": 1}
    about = {"layout_bytes": len(layout), "nbytes": 0, "chunk_bytes": 1024, "commit": "auto"}
    digest = hashlib.sha256(b"" if code == "layout-invalid" else layout).hexdigest()
    encoding = "another" if code == "unsupported" else "raw"
    asked, failed = list[float](), set[str]()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

        def say(**fields: Any) -> None:
            body = [layout] if fields["type"] == "announce" else []
            router.send_multipart([who, json.dumps(of | fields).encode(), *body])

        with running("level1_worker.py", address, "m", str(tmp_path / "m")):
            while len(asked) < (3 if code == "unsupported" else 2):
                assert router.poll(60_000), "nothing is said any more"
                who, said = router.recv_multipart()
                match json.loads(said):
                    case {"type": "hello"}:
                        say(type="welcome", data="", ping_ms=1000, lost_ms=5000, models={})
                    case {"type": "ping"}:
                        say(type="pong", models={"m": 1})
                    case {"type": "fetch", "version": version}:
                        asked += [time.monotonic()] * (version == 0)
                        say(type="announce", **about, layout=digest, encoding=encoding)
                        say(type="end", digest="0" * 64)
                    case told:
                        failed.add(told["code"])
    assert failed == {code}
    pauses = [after - before for before, after in pairwise(asked)]
    assert all(pause >= 0.99 * PAUSE * 2**n for n, pause in enumerate(pauses)), pauses
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["numpy_worker.py", "jax_worker.py"])
def test_a_worker_of_the_line_leaves_when_nothing_comes(name: str) -> None:
    with running(name, "tcp://127.0.0.1:1", "--patience", "0.2") as worker:
        assert worker.wait(timeout=60) == 0
        assert rows(worker, 1) == []


def test_a_trainer_in_jax_learns_the_line(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/bus"
    weights = {"slope": np.zeros(3, np.float32), "offset": np.zeros((), np.float32)}
    with (
        weightbus.Subscriber(address, {"line": weights}, name="w0") as worker,
        running("jax_trainer.py", address) as trainer,
    ):
        worker.start()
        published = rows(trainer, 4)
        assert [row["version"] for row in published] == [1, 2, 3, 4]
        assert published[0]["loss"] > published[3]["loss"]
        assert trainer.wait(timeout=30) == 0
        assert worker.wait_for_version("line", 4, timeout=30)
    assert weights["slope"] == pytest.approx([2.0, -1.0, 0.5], abs=0.01)
    assert weights["offset"] == pytest.approx(3.0, abs=0.01)


def test_the_trainer_of_the_line_learns_it(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/bus"
    weights = {"slope": np.zeros(3, np.float32), "offset": np.zeros((), np.float32)}
    with (
        weightbus.Subscriber(address, {"line": weights}, name="w0") as worker,
        running("numpy_trainer.py", address, "--seconds", "inf") as trainer,
    ):
        worker.start()
        first, second, third = rows(trainer, 3)
        assert [row["version"] for row in (first, second, third)] == [1, 2, 3]
        assert first["epoch"] == second["epoch"] == third["epoch"]
        assert third["loss"] < second["loss"] < first["loss"]
        for row in (first, second, third):
            assert (row["workers"], row["lost"]) == ({"w0": "applied"}, [])
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(timeout=30) == 0
    assert weights["offset"] > 0


@contextmanager
def running(name: str, *arguments: str) -> Generator["subprocess.Popen[str]"]:
    """Run an example until the block ends."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            yield process
        finally:
            process.kill()


def rows(process: "subprocess.Popen[str]", count: int) -> list[dict[str, Any]]:
    """Return the next lines that it prints, fewer only if it ends."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    return [json.loads(line) for line in lines if line]
