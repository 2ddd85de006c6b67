"""Workers in each language, behind a relay on their host: with shared memory and without it.

`make LANGUAGE` builds a driver. A language whose driver is not built is skipped.
"""

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from weightbus import Publisher, Settings, Subscriber
from weightbus.python_client.relay import Relay
from weightbus.tests.conformance.driver import Driver, Options
from weightbus.tests.conformance.languages import LANGUAGES, Language
from weightbus.tests.relay.test_relay_patches import TRIES, Tree, offered

SECONDS = 60.0  # far more than anything here takes
NETWORK = Settings(ping=0.2, lost_after=2.0, shared_memory=False)
SHARED = Settings(ping=0.2, lost_after=2.0)
SIZE = 3 * 2**18  # numbers of a version of three chunks


def skip_unless_built(language: Language) -> None:
    if language.folder and not Path(language.command[0]).is_file():
        pytest.skip(f"the driver is not built: make -C {language.folder} driver")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.key)
def test_a_worker_behind_a_relay(language: Language, shared: bool, tmp_path: Path) -> None:
    if shared and "shared-memory" in language.unsupported:
        pytest.skip(f"{language.title} has no shared memory")
    skip_unless_built(language)
    target = {"w": np.zeros(SIZE, np.float32)}
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(settings=NETWORK))
        made = Relay(publisher.address, "tcp://127.0.0.1:0", ["m"], name="r", settings=SHARED)
        relay = stack.enter_context(made)
        # With this worker, versions are announced to others on the topic of their chunks.
        near = stack.enter_context(Subscriber(relay.address, {"m": target}, settings=SHARED))
        options = Options(shared=shared, tensors=False)
        driver = Driver(language.command, relay.address, "w", options, tmp_path)
        stack.enter_context(closing(driver))
        assert near.wait_joined(SECONDS)
        driver.wait_event("joined")
        for value in (1, 2, 3):
            weights = {"w": np.full(SIZE, value, np.float32)}
            publishing = publisher.publish_async("m", weights, expect=2, timeout=SECONDS)
            assert near.receive(SECONDS) is not None
            receipt = publishing.result(SECONDS)
            digest = "" if shared else receipt.digest
            driver.wait_event("applied", version=receipt.version, digest=digest)


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.key)
def test_a_worker_behind_a_relay_gets_patches(language: Language, tmp_path: Path) -> None:
    skip_unless_built(language)
    with ExitStack() as stack:
        tree = Tree(stack)
        relay = tree.relay()
        options, link = Options(tensors=False), tree.links[-1]
        driver = Driver(language.command, link.address, "w", options, tmp_path)
        stack.enter_context(closing(driver))
        driver.wait_event("joined")
        ratios = list[float]()
        for number in range(1, 3 + TRIES):
            before = link.nbytes
            receipt = tree.publish(expect=1)
            driver.wait_event("applied", version=number, digest=receipt.digest)
            tree.wait_known(receipt, "r1", "w")
            if number > 2:  # the topics change at the first patch
                (nbytes,) = offered(relay)
                ratios.append((link.nbytes - before) / nbytes)
        assert 1 <= min(ratios) < 2, "a worker that a busy host delays fetches chunks again"
