"""Valid addresses, the data endpoint beside a control endpoint, and the announced endpoint."""

import pytest

from weightbus.bus.errors import AddressError
from weightbus.bus.net import endpoints


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:0",
        "tcp://*:5555",
        "tcp://localhost:65535",
        "tcp://[::1]:1",
        "tcp://eth0:*",
        "ipc:///run/bus",
        "ipc://relative",
    ],
)
def test_addresses(endpoint: str) -> None:
    assert endpoints.check(endpoint) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:1",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:1\n",
        "tcp://a b:1",
        "tcp://::1:1:",
        "ipc://",
        "ipc://a b",
        "inproc://here",
        "udp://host:1",
        "127.0.0.1:1",
    ],
)
def test_no_addresses(endpoint: str) -> None:
    with pytest.raises(AddressError) as caught:
        endpoints.check(endpoint)
    assert repr(endpoint) in str(caught.value)


@pytest.mark.parametrize("first", ["/", "@", "é"])
def test_a_path_has_at_most_107_bytes(first: str) -> None:
    longest = "ipc://" + first.ljust(107 - len(first.encode()) + 1, "x")
    assert endpoints.check(longest) == longest
    with pytest.raises(AddressError, match="the path has 108 bytes"):
        endpoints.check(longest + "x")


@pytest.mark.parametrize(
    ("control", "data"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556"),
        ("tcp://[::1]:5555", "tcp://[::1]:5556"),
        ("tcp://0.0.0.0:65535", "tcp://0.0.0.0:0"),
        ("tcp://*:0", "tcp://*:0"),
        ("tcp://*:*", "tcp://*:0"),
        ("ipc:///run/bus", "ipc:///run/bus.data"),
    ],
)
def test_data_is_beside_control(control: str, data: str) -> None:
    assert endpoints.beside(control) == data


# Control and data as bound, the control address that a worker used, and where it finds the data.
SEEN = [
    ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
    ("tcp://0.0.0.0:1", "tcp://0.0.0.0:2", "tcp://trainer:1", "tcp://trainer:2"),
    ("tcp://0.0.0.0:1", "tcp://0.0.0.0:2", "tcp://gateway:9001", "tcp://gateway:2"),
    ("tcp://[::]:1", "tcp://[::]:2", "tcp://[fe80::1]:1", "tcp://[fe80::1]:2"),
    ("tcp://10.0.0.1:1", "tcp://10.1.0.1:2", "tcp://10.0.0.1:1", "tcp://10.1.0.1:2"),
    ("tcp://10.0.0.1:1", "tcp://0.0.0.0:2", "tcp://10.0.0.1:1", "tcp://10.0.0.1:2"),
    ("tcp://10.0.0.1:1", "ipc:///d", "tcp://10.0.0.1:1", "ipc:///d"),
    ("ipc:///c", "ipc:///c.data", "ipc:///c", "ipc:///c.data"),
    ("ipc:///c", "tcp://127.0.0.1:2", "ipc:///c", "tcp://127.0.0.1:2"),
]


@pytest.mark.parametrize(("control", "data", "used", "found"), SEEN)
def test_a_worker_finds_the_data(control: str, data: str, used: str, found: str) -> None:
    told = endpoints.advertised(control, data)
    assert endpoints.resolve(told, used, any_host=True) == found


def test_a_data_address_without_a_host_is_refused_where_none_is_known() -> None:
    with pytest.raises(AddressError, match="give the publisher an address to advertise"):
        endpoints.resolve("tcp://*:2", "ipc:///c")


def test_a_data_address_that_is_none_is_refused() -> None:
    with pytest.raises(AddressError):
        endpoints.resolve("nowhere", "tcp://a:1")


@pytest.mark.parametrize(
    ("bound", "own", "address"),
    [
        ("tcp://0.0.0.0:5555", "10.0.0.7", "tcp://10.0.0.7:5555"),
        ("tcp://*:5555", "trainer", "tcp://trainer:5555"),
        ("tcp://[::]:5555", "fd00::7", "tcp://[fd00::7]:5555"),
        ("tcp://10.0.0.8:5555", "10.0.0.7", "tcp://10.0.0.8:5555"),
        ("ipc://@weights", "10.0.0.7", "ipc://@weights"),
    ],
)
def test_other_hosts_get_an_address_that_is_one(bound: str, own: str, address: str) -> None:
    assert endpoints.for_other_hosts(bound, lambda: own) == address
