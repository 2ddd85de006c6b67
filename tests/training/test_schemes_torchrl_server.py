"""TorchRL's inference servers and evaluators run the weights that a scheme brings them."""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torchrl")

from tensordict import TensorDict, TensorDictBase
from torchrl.modules.inference_server import (
    InferenceServer,
    MPTransport,
    ProcessInferenceServer,
    ThreadingTransport,
)

from weightbus import PublishError, Settings
from weightbus.tests.training.torchrl_parts import Echo, collectors, fill, policy
from weightbus.torchrl import MultiProcessWeightSyncScheme, ZMQWeightSyncScheme

Evaluator: Any = collectors.Evaluator


SECONDS = 20.0  # what anything here may take on a busy machine


@pytest.mark.parametrize(("background", "model_id"), [(False, "policy"), (True, "critic")])
def test_an_inference_server_gets_weights_and_counts_them(background: bool, model_id: str) -> None:
    trained = policy()
    sender = ZMQWeightSyncScheme(liveness=Settings(ping=0.2, lost_after=1.0))
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


def test_an_inference_server_in_a_process_of_its_own_gets_weights() -> None:
    sender = ZMQWeightSyncScheme(num_workers=1, timeout=SECONDS)
    sender.init_on_sender("policy")
    transport = MPTransport()
    client = transport.client()
    make: Any = ProcessInferenceServer
    with make(
        policy_factory=partial(policy, 1.0),
        transport=transport,
        weight_sync=ZMQWeightSyncScheme(sender.address),
    ):
        sender.connect()
        for value in (2.0, 3.0):
            sender.send(fill(policy(), value))
            acted: TensorDictBase = client(TensorDict(observation=[1.0]))
            assert acted["action"].item() == value
    sender.shutdown()


@pytest.mark.filterwarnings("ignore")  # of its own ways, in words that change
def test_an_evaluator_in_a_process_of_its_own_runs_what_it_is_given() -> None:
    scheme = MultiProcessWeightSyncScheme(timeout=SECONDS)
    make: Any = Evaluator
    evaluator = make(
        Echo,
        policy_factory=partial(policy, 1.0),
        num_trajectories=1,
        max_steps=2,
        frames_per_batch=2,
        backend="process",
        weight_sync_schemes={"policy": scheme},
        metrics_fn=lambda batch: {"acted": batch["action"].mean().item()},
    )
    try:
        for value in (2.0, 3.0):
            found = evaluator.evaluate(fill(policy(), value))
            assert found["eval/acted"] == value
        assert scheme.receipt is not None
        assert scheme.receipt.in_state("applied") == ["0"]
    finally:
        evaluator.shutdown()
        scheme.shutdown()
