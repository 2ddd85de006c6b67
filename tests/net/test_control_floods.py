"""A worker closes the connection of a publisher that sends more than was requested."""

import sys
from pathlib import Path

import numpy as np
import pytest

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.limits import UNASKED_BYTES_MAX
from weightbus.bus.net.incoming import ALERT_SECONDS, CHECK_SECONDS
from weightbus.tests.cli.starting import python
from weightbus.tests.trust.sealed_bus import keys_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell")

SECONDS = 120.0
BYTES_MAX = 1_000_000  # of the worker
NBYTES = 40 * 2**20  # of a version that is fetched
ROOM = 160 * 2**20  # for what a flood brings between two checks of a busy host, and for garbage

# A worker in another process, which prints how much memory it takes at most while a hostile
# publisher in another thread runs the given attack.
WORKER = """if True:
    import contextlib, hashlib, tempfile, time
    import numpy as np
    from weightbus import Settings, Subscriber
    from weightbus.bus.messages import Announce
    from weightbus.bus.net.zmtp import MORE
    from weightbus.tests.net.hostile import *
    from weightbus.tests.net.test_control_floods import *

    hostile = Hostile()
    settings = Settings(bytes_max=BYTES_MAX, shared_memory=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        Subscriber(hostile.address, {"m": TARGET}, settings=settings) as worker,
    ):
        worker.start()
        for _ in range(3):
            calm = peak = resident()
            with hostile.accept() as link:
                {ATTACK}
            print("peak", peak - calm, flush=True)
"""


def resident() -> int:
    """Return the bytes of memory of this process that are in use now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def worst(attack: str, target: str) -> int:
    """Return the most memory that a worker takes in an attack more than before, in bytes."""
    script = WORKER.replace("{ATTACK}", attack.strip()).replace("TARGET", target)
    output = python("-c", script, timeout=SECONDS).stdout
    found = [int(line.split()[1]) for line in output.splitlines() if line.startswith("peak")]
    assert len(found) == 3, output
    return max(found)


FLOOD = """
                link.welcome()
                data = frame(b"x" * 60_000, MORE)
                end = time.monotonic() + SECONDS
                while not link.flood(data) and peak - calm < 2 * ROOM:
                    assert time.monotonic() < end
                    peak = max(peak, resident())
"""
LAYOUT = """
                entry = '"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
                text = ("{" + ",".join(entry % n for n in range(300_000)) + "}").encode()
                header = len(text).to_bytes(8, "little") + text
                announce = Announce(
                    model="m", epoch=7, version=1, layout=hashlib.sha256(header).hexdigest(),
                    layout_bytes=len(header), nbytes=0, chunk_bytes=1, commit="auto",
                    acknowledge="applied", encoding="raw",
                )
                del text
                link.welcome(models={"m": 1})
                link.wait_for("fetch")
                calm = peak = resident()
                with contextlib.suppress(ConnectionError):  # it is as well hung up on
                    link.send(announce, [header])
                    failed = link.wait_for("failed")
                    assert failed["code"] == "too-large", failed
                peak = max(peak, resident())
"""


def test_the_frames_of_one_message_are_bounded() -> None:
    assert worst(FLOOD, '{"w": np.zeros(4, np.uint8)}') < ROOM
    assert UNASKED_BYTES_MAX + BYTES_MAX < ROOM
    assert ALERT_SECONDS < CHECK_SECONDS


@pytest.mark.parametrize("target", ["folder + '/f.safetensors'", "lambda pairs: list(pairs)"])
def test_a_layout_out_of_proportion_is_not_understood(target: str) -> None:
    assert worst(LAYOUT, target) < ROOM


@pytest.mark.parametrize("keyed", [False, True])
def test_whoever_fetches_much_is_not_hung_up_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keyed: bool
) -> None:
    """All versions are fetched here, in windows of 16 MiB."""
    path = f"ipc://{tmp_path}/d"
    told = Settings(ping=0.1, lost_after=5.0, shared_memory=False, data=path, chunk_bytes=2**20)
    own = Settings(ping=0.1, lost_after=5.0, shared_memory=False, bytes_max=NBYTES)
    theirs, ours = keys_in(tmp_path / "keys") if keyed else (None, None)
    target = {"w": np.zeros(NBYTES, np.uint8)}
    with (
        Publisher("tcp://127.0.0.1:0", settings=told, keys=theirs) as publisher,
        Subscriber(
            publisher.address,
            {"m": target},
            name="w",
            keys=ours,
            settings=own,
        ) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, timeout=SECONDS)
        for value in (1, 2, 3):
            weights = {"w": np.full(NBYTES, value, np.uint8)}
            assert publisher.publish("m", weights, timeout=SECONDS).in_state("applied") == ["w"]
    assert "hung up" not in caplog.text
