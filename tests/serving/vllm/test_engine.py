"""The engines in a real vLLM, as far as a processor goes: its factories, Worker, reload, Llama.

Run by `make serving` with the wheel of each version unpacked on the path.
"""

import importlib
import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.model_executor.model_loader.reload import layerwise
from vllm.plugins import load_plugins_by_group

import weightbus
from weightbus.python_client.serving import vllm_loading, vllm_plugin, vllm_worker
from weightbus.tests.serving import standin
from weightbus.tests.serving.vllm import llama
from weightbus.vllm import ServerError, TrainerInit, UnsupportedVllmError, VllmServers, register

SECONDS = 20.0


class Bench:
    """A server of one rank, and a trainer of its model."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, llama.trained(folder, 1)
        self.worker = llama.served(folder)
        self.served = self.worker.model_runner.model
        self.server = standin.Server([standin.Local(self.worker)])
        self.engines: list[Any] = []

    def trainer(self, source: Any = None, client: Any = None, **given: Any) -> Any:
        made = WeightTransferTrainerFactory.trainer_init(
            TrainerInit(rank=0, timeout=SECONDS, pause_timeout=SECONDS, **given),
            client=VllmServers(self.server.url) if client is None else client,
            source=base.ModuleSource(self.model) if source is None else source,
        )
        self.engines.append(made)
        return made

    @property
    def here(self) -> dict[str, torch.Tensor]:
        return llama.parameters(self.worker)

    @property
    def wanted(self) -> dict[str, torch.Tensor]:
        return llama.loaded(self.folder, self.model.state_dict().items())

    def close(self) -> None:
        for engine in self.engines:
            engine.shutdown()
        self.worker.weight_transfer_engine.shutdown()
        self.server.close()


@pytest.fixture(name="bench", params=[False, True], ids=["untied", "tied"])
def _bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(llama.config(tmp_path, tied=request.param))
    yield bench
    bench.close()


@pytest.fixture(name="plain")
def _plain(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(llama.config(tmp_path))
    yield bench
    bench.close()


def source_of(pairs: dict[str, torch.Tensor]) -> Any:
    """Return a source of whatever, in the form that the vLLM here has."""
    metas = [base.ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in pairs.items()]
    members: dict[str, Any]
    if hasattr(base.WeightSource, "iter_full"):
        metadata = cached_property(lambda _: metas)
        members = {"metadata": metadata, "iter_full": lambda _: iter(pairs.items())}
    else:
        members = {"metadata": lambda _: metas, "__iter__": lambda _: iter(pairs.items())}
    return type("Source", (base.WeightSource,), members)()


def test_a_real_worker_loads_what_is_sent_into_the_same_memory(bench: Bench) -> None:
    trainer = bench.trainer()
    before = {n: p.data_ptr() for n, p in bench.served.named_parameters()}
    for _ in range(2):
        with torch.no_grad():
            for parameter in bench.model.parameters():
                parameter.mul_(1.5)
        trainer.send_weights()
        assert llama.equal(bench.here, bench.wanted)
        assert trainer.receipt.in_state("applied") == ["vllm-dp0-rank0"]
    assert before == {n: p.data_ptr() for n, p in bench.served.named_parameters()}
    assert bench.server.version == f"{trainer.receipt.epoch}.{trainer.receipt.version}"
    assert not bench.server.paused


def test_vllms_own_client_and_names_with_the_wrappers_prefix_will_do(plain: Bench) -> None:
    wrapped = {f"module.{name}": tensor for name, tensor in plain.model.state_dict().items()}
    trainer = plain.trainer(source_of(wrapped), HTTPVLLMWeightSyncClient(plain.server.url))
    trainer.send_weights()
    assert llama.equal(plain.here, plain.wanted)


def test_ranks_of_the_trainer_that_do_not_send_gather_and_say_nothing(plain: Bench) -> None:
    passes: list[int] = []

    class ServedWeights(dict[str, torch.Tensor]):
        def items(self) -> Any:
            passes.append(1)
            return super().items()

    init = TrainerInit(rank=1)
    made = WeightTransferTrainerFactory.trainer_init(
        init, client=object(), source=source_of(ServedWeights(plain.model.state_dict()))
    )
    passes.clear()
    made.send_weights()
    assert passes == [1]
    assert plain.server.calls == []


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("unknown", r"'model.layers.0.extra.weight'.*names and dtypes of its checkpoint"),
        ("shape", r"'model.norm.weight' \(torch.float32, \[65\]\)"),
        ("dtype", r"'model.norm.weight'.*torch.int32 is published where the model holds"),
        ("missing", r"1 of \d+ parameters .*model.norm.weight"),
        ("another", r"parameters of LlamaForCausalLM are in none of the .* tensors"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_anything_is_touched(
    plain: Bench, tmp_path: Path, what: str, why: str
) -> None:
    good = plain.trainer()
    good.send_weights()
    before, weights, calls = plain.here, dict(plain.model.state_dict()), len(plain.server.calls)
    match what:
        case "unknown":
            weights["model.layers.0.extra.weight"] = torch.zeros(2)
        case "shape":
            weights["model.norm.weight"] = torch.zeros(65)
        case "dtype":
            weights["model.norm.weight"] = torch.zeros(64, dtype=torch.int32)
        case "missing":
            del weights["model.norm.weight"]
        case _:
            smaller = llama.config(tmp_path / "smaller", layers=1)
            weights = llama.trained(smaller, 2).state_dict()
    trainer = plain.trainer(source_of(weights))
    with pytest.raises(weightbus.PublishError, match=why) as failed:
        trainer.send_weights()
    assert "vllm-dp0-rank0" in str(failed.value)
    assert llama.equal(plain.here, before)
    assert "pause keep" not in plain.server.calls[calls:]
    again = plain.trainer()
    again.send_weights()
    assert llama.equal(plain.here, plain.wanted)


def test_a_layout_that_was_not_agreed_on_is_refused(plain: Bench) -> None:
    weights = dict(plain.model.state_dict())
    source = source_of(weights)
    trainer = plain.trainer(source)
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    with pytest.raises(weightbus.PublishError, match=r"model.norm.weight: dtype BF16 published"):
        trainer.send_weights()
    assert "pause keep" not in plain.server.calls


@pytest.mark.parametrize("after", [0, 5, 99], ids=["first", "middle", "last"])
def test_a_load_that_fails_is_said_plainly_and_a_full_publish_repairs_it(
    plain: Bench, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    trainer = plain.trainer()
    trainer.send_weights()
    before, places = plain.here, {n: p.data_ptr() for n, p in plain.served.named_parameters()}
    with torch.no_grad():
        for parameter in plain.model.parameters():
            parameter.add_(1.0)
    own = type(plain.served).load_weights

    def failing(self: Any, weights: Any) -> Any:
        def some() -> Any:
            for n, pair in enumerate(weights):
                if n == after:
                    raise RuntimeError("out of luck")
                yield pair
            raise RuntimeError("out of luck")

        return own(self, some())

    monkeypatch.setattr(type(plain.served), "load_weights", failing)
    broken = r"nothing was changed" if after == 0 else r"BROKEN: \d+ of its layers"
    with pytest.raises(weightbus.PublishError, match=f"vllm-dp0-rank0.*out of luck.*{broken}"):
        trainer.send_weights()
    assert llama.equal(plain.here, before) == (after == 0)
    assert not plain.server.paused
    assert not vars(plain.worker)["_weight_update_active"]
    assert not any(p.is_meta for p in plain.served.parameters())
    monkeypatch.undo()
    trainer.send_weights()
    assert llama.equal(plain.here, plain.wanted)
    assert places == {n: p.data_ptr() for n, p in plain.served.named_parameters()}


def test_a_rehearsal_leaves_no_trace(plain: Bench) -> None:
    config = plain.worker.vllm_config
    loader = vllm_loading.LayerwiseLoader(
        plain.served, config.model_config, config, torch.device("cpu")
    )
    parameters = {n: id(p) for n, p in plain.served.named_parameters()}
    attributes = {n: sorted(vars(p)) for n, p in plain.served.named_parameters()}
    tensors = {n: ("F32", tuple(t.shape)) for n, t in plain.model.state_dict().items()}
    assert loader.rehearse(tensors) == ""
    assert "cannot load" in loader.rehearse({"nonsense": ("F32", (2,))})
    assert parameters == {n: id(p) for n, p in plain.served.named_parameters()}
    assert attributes == {n: sorted(vars(p)) for n, p in plain.served.named_parameters()}


def test_it_is_acknowledged_once_it_is_loaded(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is told that a version runs may use it."""
    publisher = weightbus.Publisher()
    trainer = plain.trainer(publisher=publisher)
    said: list[bool] = []
    own = layerwise.finalize_layerwise_reload

    def finalize(*given: Any) -> None:
        said.append(any(w.running for w in publisher.workers().values()))
        own(*given)

    monkeypatch.setattr(layerwise, "finalize_layerwise_reload", finalize)
    trainer.send_weights()
    assert said == [False]
    assert all(w.running for w in publisher.workers().values())
    publisher.close()


def test_it_is_registered_once_in_every_process() -> None:
    register()
    register()
    for factory in (WeightTransferEngineFactory, WeightTransferTrainerFactory):
        assert "weightbus" in vars(factory)["_registry"]
    made = vars(WeightTransferEngineFactory)["_registry"]["weightbus"]()
    assert made is vllm_worker.WeightbusEngine
    assert load_plugins_by_group("vllm.general_plugins")["weightbus"] is register


def test_an_allow_list_that_leaves_us_out_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "weightbus" not in load_plugins_by_group("vllm.general_plugins")
    with caplog.at_level(logging.WARNING, "weightbus.serving"):
        register()
    assert "VLLM_PLUGINS=other,weightbus" in caplog.text


def test_a_server_with_another_engine_is_told_what_to_do(plain: Bench) -> None:
    nccl: Any = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
    engine = object.__new__(nccl.NCCLWeightTransferEngine)
    plain.worker.weight_transfer_engine.shutdown()
    plain.worker.weight_transfer_engine, mine = engine, plain.worker.weight_transfer_engine
    with pytest.raises(ServerError, match=r"weightbus\[vllm\].*VLLM_PLUGINS"):
        plain.trainer()
    plain.worker.weight_transfer_engine = None
    with pytest.raises(ServerError, match=r"--weight-transfer-config"):
        plain.trainer()
    plain.worker.weight_transfer_engine = mine


def test_another_vllm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(layerwise, "get_layerwise_info")
    with pytest.raises(UnsupportedVllmError, match=r"0.28 to 0.33.*layerwise.get_layerwise_info"):
        vllm_plugin.require(vllm_plugin.WORKER)
    vllm_plugin.require(vllm_plugin.TRAINER)


def test_unknown_words_and_a_draft_model_are_refused(plain: Bench) -> None:
    engine = plain.worker.weight_transfer_engine
    with pytest.raises(ValueError, match=r"Invalid init_info for WeightbusEngine.*nonsense"):
        engine.parse_init_info({"address": "tcp://127.0.0.1:1", "nonsense": 1})
    with pytest.raises(ValueError, match="Invalid update_info"):
        engine.parse_update_info({"epoch": 1})
    with pytest.raises(RuntimeError, match="does not support draft"):
        plain.worker.start_draft_weight_update()


def test_a_trainer_that_starts_again_takes_over(plain: Bench) -> None:
    plain.trainer().send_weights()
    plain.engines.pop().shutdown()
    with torch.no_grad():
        for parameter in plain.model.parameters():
            parameter.add_(1.0)
    plain.trainer().send_weights()
    assert llama.equal(plain.here, plain.wanted)


def test_the_stand_ins_flags_are_those_of_the_worker(plain: Bench) -> None:
    """What the tests without vLLM rest on."""

    class Failing:
        def __init__(self) -> None:
            self.fails = ""

        def reset_weight_update_target(self) -> None: ...

        supports_draft_weight_update = False

        def __getattr__(self, name: str) -> Any:
            def call(*_: object) -> None:
                if name == self.fails:
                    raise RuntimeError("told to fail")

            return call

    plain.worker.weight_transfer_engine.shutdown()
    for fails in ("", "start_weight_update", "update_weights", "finish_weight_update"):
        saids: list[list[str]] = []
        for kind in ("real", "stand-in"):
            engine = Failing()
            worker: Any = standin.Worker(engine)
            if kind == "real":
                worker = plain.worker
                worker.weight_transfer_engine = engine
                vars(worker)["_weight_update_active"] = False
            engine.fails = fails
            said: list[str] = []
            for _ in range(2):
                for phase in ("start", "update", "update", "finish", "finish"):
                    name = {"update": "update_weights"}.get(phase, f"{phase}_weight_update")
                    given: list[Any] = [{}] if phase == "update" else []
                    try:
                        getattr(worker, name)(*given)
                    except RuntimeError as error:
                        said.append(str(error))
                    else:
                        said.append("")
                engine.fails = ""
            saids.append(said)
        assert saids[0] == saids[1], fails
    plain.worker.weight_transfer_engine = Failing()


def test_a_client_of_the_trainers_own_keeps_what_it_overrides(plain: Bench) -> None:
    """As the one with which vLLM's own tests set a version."""
    posted: list[tuple[str, float]] = []

    class VersionedClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            posted.append((path, self.timeout))
            super()._post(path, json)

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            super().finish_weight_update(weight_version and f"mine-{weight_version}")

    client = VersionedClient(plain.server.url, timeout=7)
    trainer = plain.trainer(client=client)
    trainer.send_weights()
    assert llama.equal(plain.here, plain.wanted)
    assert plain.server.version == f"mine-{trainer.receipt.epoch}.{trainer.receipt.version}"
    assert [path for path, _ in posted] == [
        *("init_weight_transfer_engine", "start_weight_update", "update_weights"),
        *("pause?mode=keep", "update_weights", "finish_weight_update", "resume"),
    ]
    assert max(seconds for _, seconds in posted) <= 7
    assert client.timeout == 7
    assert not plain.server.paused


def test_a_float32_trainer_that_publishes_bfloat16_is_taken(plain: Bench) -> None:
    publisher = weightbus.Publisher(settings=weightbus.Settings(dtype="bf16"))
    trainer = plain.trainer(publisher=publisher)
    trainer.send_weights()
    short = {n: t.bfloat16().float() for n, t in plain.model.state_dict().items()}
    assert llama.equal(plain.here, llama.loaded(plain.folder, short.items()))
    publisher.close()


def test_a_worker_that_no_trainer_has_joined_loads_nothing_and_claims_nothing(plain: Bench) -> None:
    servers = VllmServers(plain.server.url)
    servers.start_weight_update()
    with pytest.raises(ServerError, match="no trainer has joined"):
        servers.update_weights({"epoch": 77, "version": 5})
    with pytest.raises(ServerError, match="without a matching start_weight_update"):
        servers.finish_weight_update("77.5")
    servers.start_weight_update()
    with pytest.raises(ServerError, match="no trainer has joined"):
        servers.finish_weight_update("77.5")
    assert plain.server.version == "default"
    servers.close()
    plain.trainer().send_weights()
    assert llama.equal(plain.here, plain.wanted)
