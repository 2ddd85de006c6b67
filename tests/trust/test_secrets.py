"""No secret is in what is shown of the objects that have it: logs and tracebacks show that."""

from collections.abc import Callable
from pathlib import Path

import pytest

from weightbus import Http
from weightbus.bus.trust.grants import Grant
from weightbus.bus.trust.keys import PublisherKeys, WorkerKeys
from weightbus.codecs.sealing import KEY_BYTES, GroupKey
from weightbus.python_client.cli.bridge import BridgeOptions
from weightbus.python_client.cli.publish import PageOptions
from weightbus.python_client.serving.calls import CallError, Server

SECRET = "hunter2hunter2"  # noqa: S105


@pytest.mark.parametrize(
    "make",
    [
        lambda: PublisherKeys(SECRET, {"public": Grant("w0")}),
        lambda: WorkerKeys("w0", "public", SECRET, "publisher"),
        lambda: Http("127.0.0.1:0", token=SECRET),
        lambda: PageOptions("127.0.0.1:0", None, SECRET),
        lambda: BridgeOptions(
            [], "vllm", Path(), None, None, None, None, 1.0, SECRET, unchecked=False
        ),
        lambda: GroupKey(SECRET.encode().ljust(KEY_BYTES)),
    ],
    ids=["publisher", "worker", "page", "command", "bridge", "group"],
)
def test_no_secret_is_in_a_repr(make: Callable[[], object]) -> None:
    assert SECRET not in repr(make())


def test_a_password_in_the_url_of_a_server_is_in_no_error() -> None:
    server = Server(f"http://user:{SECRET}@127.0.0.1:1/", tries=1)
    assert server.url == "http://127.0.0.1:1"
    with pytest.raises(CallError) as caught:
        server.get("/health", 1.0)
    assert SECRET not in str(caught.value)
    sent = server._client.auth  # noqa: SLF001
    assert sent is not None
