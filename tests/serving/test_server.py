"""The client of vLLM's routes: what it asks, and what it says of servers that are none."""

from collections.abc import Iterator

import pytest

from weightbus.python_client.serving.calls import ServerError
from weightbus.python_client.serving.server import VllmServer, VllmServers
from weightbus.tests.serving.standin import Local, Server


class Deaf:
    """A rank that does whatever it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def __getattr__(self, name: str) -> object:
        return lambda **given: self.told.append((name, given))


@pytest.fixture(name="server")
def _server() -> Iterator[Server]:
    server = Server([Local(Deaf()), Local(Deaf())])
    yield server
    server.close()


def test_all_phases_reach_all_ranks_of_all_servers(server: Server) -> None:
    other = Server([Local(Deaf())])
    servers = VllmServers([server.url, other.url], 5.0)
    assert servers.ranks("v") == ["v0-dp0-rank0", "v0-dp0-rank1", "v1-dp0-rank0"]
    servers.init_weight_transfer_engine({"address": "tcp://x:1", "deployment": "v"})
    with servers.paused():
        assert server.paused
        servers.start_weight_update()
        servers.update_weights({"version": 3})
        servers.finish_weight_update("7.3")
    assert not server.paused
    assert servers.weight_versions() == {server.url: "7.3", other.url: "7.3"}
    for s, name in ((server, "v0"), (other, "v1")):
        for rank in s.executor.ranks:
            assert isinstance(rank, Local)
            assert rank.worker.told[0][1]["init_info"]["deployment"] == name
            assert rank.worker.told[2] == ("update_weights", {"update_info": {"version": 3}})
    servers.close()
    other.close()


def test_they_resume_whatever_happens(server: Server) -> None:
    servers = VllmServers(server.url, 5.0)
    with pytest.raises(KeyError), servers.paused():
        raise KeyError
    assert server.calls == ["pause keep", "resume"]


def test_a_server_that_is_no_vllm_is_said_so() -> None:
    server = Server(vllm=False)
    with pytest.raises(ServerError, match="it is not a vLLM server; check the address"):
        VllmServers(server.url, 5.0).ranks("v")
    server.close()


def test_a_server_without_the_routes_is_told_what_to_start_it_with() -> None:
    server = Server(dev=False)
    with pytest.raises(ServerError, match=r"vLLM 0.33.0 without.*VLLM_SERVER_DEV_MODE=1"):
        VllmServer(server.url, 5.0).world_size()
    server.close()


def test_nobody_there_is_said_within_the_deadline(server: Server) -> None:
    server.close()
    with pytest.raises(ServerError, match="cannot be reached"):
        VllmServer(server.url, 5.0).resume()


def test_another_engine_is_told_what_to_install(server: Server) -> None:
    class Nccl(Deaf):
        def init_weight_transfer_engine(self, init_info: dict[str, str]) -> None:
            said = f"Invalid init_info for NCCLWeightTransferEngine: unexpected {[*init_info]}"
            raise ValueError(said)

    server.executor.ranks = [Local(Nccl())]
    with pytest.raises(ServerError, match=r"weightbus\[vllm\].*VLLM_PLUGINS"):
        VllmServer(server.url, 5.0).init_weight_transfer_engine({"address": ""})


def test_one_server_of_two_that_fails_is_named_and_the_other_is_called(server: Server) -> None:
    other = Server(dev=False)
    with pytest.raises(ServerError, match=other.url):
        VllmServers([other.url, server.url], 5.0).resume()
    assert server.calls == ["resume"]
    other.close()
