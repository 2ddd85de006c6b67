"""A process that has hardly any descriptors left: nothing aborts, and everybody says why."""

import json
from typing import Any

import pytest

from weightbus.tests.cli.starting import python

pytest.importorskip("resource")

# In a process of its own, whose limit is low. `fill(n)` leaves n descriptors.
PROLOGUE = """
import json, logging, os, resource, sys, threading
import numpy as np
from weightbus import Publisher, PublishError, Subscriber, Settings, WorkersMissingError
said, warned = [], threading.Event()
class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
        if "turned away" in said[-1]: warned.set()
logging.getLogger("weightbus.publisher").addHandler(Keep())
MOST = 256
resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
def fill(left):
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for each in held[len(held) - left:]:
            os.close(each)
    return held[:len(held) - left]
def weights(): return {"m": np.zeros(8, np.float32)}
"""

MADE = """
def publisher(): return Publisher(settings=Settings(shared_memory=False))
def subscriber():
    return Subscriber("tcp://127.0.0.1:9", {"m": weights()}, settings=Settings(shared_memory=False))
told = []
for make in (publisher, subscriber):
    for left in map(int, sys.argv[1:]):
        held = fill(left)
        try:
            made, text = make(), "made"
            made.close()
        except OSError as error:
            text = str(error)
        for each in held: os.close(each)
        told.append(text)
print(json.dumps(told))
"""

TURNED_AWAY = """
import subprocess
publisher = Publisher(settings=Settings(shared_memory=False, ping=0.1, lost_after=0.5))
held = fill(22)
other = [sys.executable, "-c", "import sys, numpy as np; from weightbus import Subscriber\\n"
    "sys.stdin.readline()\\n"  # until there is none left for it
    "with Subscriber(sys.argv[1], {'m': {'m': np.zeros(8, np.float32)}}): sys.stdin.read()"]
for _ in range(12): os.close(held.pop(0))
with subprocess.Popen([*other, publisher.address], stdin=subprocess.PIPE) as worker:
    held += fill(22)
    worker.stdin.write(b"\\n"), worker.stdin.flush()
    told = {}
    warned.wait(90)
    def missing(call, *arguments, **keywords):
        while True:  # its hello may be heard before its connection is closed
            try:
                call(*arguments, **keywords)
            except (PublishError, WorkersMissingError) as error:
                if "turned away" in str(error):
                    return str(error)
    told["publish"] = missing(publisher.publish, "m", weights(), expect=1, timeout=1.0)
    told["wait_for_workers"] = missing(publisher.wait_for_workers, 1, 0.2)
    told["log"], said[:] = list(said), []
    publisher.workers()
    told["workers"] = list(said)
    look = [sys.executable, "-m", "weightbus", "doctor", publisher.address, "--json"]
    told["doctor"] = subprocess.run(look, stdout=subprocess.PIPE).stdout.decode()
    for each in held: os.close(each)
    publisher.wait_for_workers(1, 30)
    worker.communicate()
print(json.dumps(told))
"""


def run(code: str, *words: object) -> Any:
    return json.loads(python("-c", PROLOGUE + code, *words, timeout=120).stdout.splitlines()[-1])


def test_with_hardly_any_left_it_is_an_error_and_no_abort() -> None:
    few = list(range(24))
    told = run(MADE, *few, 25)
    for texts in (told[: len(told) // 2], told[len(told) // 2 :]):
        for left, text in zip(few, texts, strict=False):
            assert f"{left} of this process's 256 descriptors are left" in text
            assert "(`ulimit -n`)" in text
        assert texts[-1] == "made"


def test_workers_that_there_is_no_descriptor_for_are_told_of_everywhere() -> None:
    told = run(TURNED_AWAY)
    for where in ("publish", "wait_for_workers", "log", "workers"):
        said = told[where] if isinstance(told[where], str) else "\n".join(told[where])
        assert "connections were turned away" in said, where
        assert "last from 127.0.0.1" in said
        assert "of 256 descriptors in use" in said
        assert "`ulimit -n`" in said
    assert len([line for line in told["log"] if "turned away" in line]) == 1, "once a minute"
    found = {row["about"]: row for row in json.loads(told["doctor"])["findings"]}
    assert "of 256 descriptors in use" in found["descriptors"]["text"]
