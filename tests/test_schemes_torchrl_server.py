"""TorchRL's inference server polls a scheme for weights, and counts what it gets."""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import pytest

pytest.importorskip("torchrl")

from tensordict import TensorDict, TensorDictBase
from torchrl.modules.inference_server import InferenceServer, ThreadingTransport

from weightbus import PublishError, Timing, ZMQWeightSyncScheme
from weightbus.tests.torchrl_parts import fill, policy


@pytest.mark.parametrize("background", [False, True], ids=["between-batches", "background"])
@pytest.mark.parametrize("model_id", ["policy", "critic"])
def test_an_inference_server_gets_weights_and_counts_them(background: bool, model_id: str) -> None:
    trained = policy()
    sender = ZMQWeightSyncScheme(liveness=Timing(ping=0.2, lost_after=1.0))
    sender.init_on_sender(model_id, num_workers=1)
    receiver = ZMQWeightSyncScheme(sender.address, background=background)
    transport = ThreadingTransport()
    with InferenceServer(
        policy(), transport, weight_sync=receiver, weight_sync_model_id=model_id, timeout=0.005
    ) as server:
        client = transport.client()
        sender.connect()
        for version, value in enumerate((2.0, 3.0), start=1):
            sender.send(fill(trained, value), timeout=20.0)
            with pytest.raises(PublishError, match="worker 0 failed"):
                sender.send({"module.wrong": trained.module.weight}, timeout=20.0)
            acted: TensorDictBase = client(TensorDict(observation=[1.0]))
            assert acted["action"].item() == value
            assert server.policy_version == version, "each version counts once"
    receiver.shutdown()
    sender.shutdown()
