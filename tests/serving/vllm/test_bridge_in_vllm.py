"""A bridge and vLLM's own routes, reload from a folder, and loader of adapters, without a GPU.

Between them stands what has no place here: the engine core, which would hand each call to ranks.
"""

import contextlib
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fastapi
import numpy as np
import pytest
import torch
import uvicorn
from vllm.config import set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.lora import lora_model
from vllm.lora.peft_helper import PEFTHelper
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from weightbus.tests.serving.test_adapters import CONFIG, adapter, said
from weightbus.tests.serving.test_bridge import Stand, told
from weightbus.tests.serving.vllm import llama

NAME = "org/model"


class Core:
    """What the routes call, with a worker whose model is real."""

    def __init__(self, folder: Path) -> None:
        self.worker = llama.served(folder)
        runner, config = self.worker.model_runner, self.worker.vllm_config
        runner.vllm_config, runner.model_config = config, config.model_config
        runner.load_config, runner.lora_config = LoadConfig(), None
        runner.reset_encoder_cache = runner.reset_mm_cache = lambda: None
        self.model_config = SimpleNamespace(model=NAME, max_model_len=128)
        self.renderer = self.input_processor = None
        self.paused, self.version, self.while_paused = False, "default", list[bool]()
        self.adapters: dict[str, Any] = {}

    async def pause_generation(self, *, mode: str, **_: object) -> None:
        assert mode == "keep"
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def collective_rpc(
        self, method: str, timeout: float, args: tuple[str, ...], kwargs: dict[str, str]
    ) -> list[None]:
        assert (method, args, timeout > 0) == ("reload_weights", (), True)
        self.while_paused.append(self.paused)
        with set_current_vllm_config(self.worker.vllm_config):
            GPUModelRunner.reload_weights(self.worker.model_runner, **kwargs)
        return [None]

    async def reset_prefix_cache(self, running: bool, external: bool) -> bool:
        assert (running, external) == (True, False)
        return True

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def get_weight_version(self) -> str:
        return self.version

    async def add_lora(self, request: Any) -> None:
        helper = PEFTHelper.from_local_dir(request.lora_path, None)
        helper.validate_legal(LoRAConfig(max_lora_rank=16))
        loader = lora_model.LoRAModel.from_local_checkpoint
        about = {"lora_model_id": request.lora_int_id, "device": "cpu"}
        self.adapters[request.lora_name] = loader(request.lora_path, {"q_proj"}, helper, **about)


def _hosting() -> None:
    """Stand in for a package that gives the routes of adapters further names elsewhere."""
    package = ModuleType("model_hosting_container_standards")
    names: Any = ModuleType(f"{package.__name__}.sagemaker")
    names.register_load_adapter_handler = lambda **_: lambda function: function
    names.register_unload_adapter_handler = names.register_load_adapter_handler
    vars(package)["sagemaker"] = names
    sys.modules.setdefault(package.__name__, package)
    sys.modules.setdefault(names.__name__, names)


def application(core: Core) -> Any:
    """Return an application with vLLM's own routes and handlers of errors."""
    _hosting()
    app = fastapi.FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False, enable_server_load_tracking=False)
    app.state.engine_client = core
    serve = "vllm.entrypoints.serve"
    named = [f"{serve}.dev.rpc.api_router", f"{serve}.dev.cache.api_router"]
    named += [f"{serve}.instrumentator.basic", "vllm.entrypoints.openai.models.api_router"]
    for name in named:
        app.include_router(importlib.import_module(name).router)
    with contextlib.suppress(ModuleNotFoundError):  # before 0.33 it was elsewhere
        app.include_router(importlib.import_module("vllm.entrypoints.rl.online.api_router").router)
    with contextlib.suppress(ModuleNotFoundError):
        app.include_router(importlib.import_module(f"{serve}.dev.rlhf.api_router").router)
    importlib.import_module(f"{serve}.exception_handling.register").init_exception_handler(app)
    importlib.import_module(f"{serve}.lora.api_router").attach_router(app)
    models = importlib.import_module("vllm.entrypoints.openai.models.serving")
    base = models.BaseModelPath(name="policy", model_path=NAME)
    app.state.openai_serving_models = models.OpenAIServingModels(core, [base])
    return app


@pytest.fixture(name="core")
def _core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setattr(lora_model, "PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(lora_model, "is_pin_memory_available", lambda: False, raising=False)
    core = Core(llama.config(tmp_path / "model"))
    server = uvicorn.Server(uvicorn.Config(application(core), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    begun = threading.Event()
    original = server.startup

    async def startup(*given: Any, **named: Any) -> None:
        await original(*given, **named)
        begun.set()

    monkeypatch.setattr(server, "startup", startup)
    thread.start()
    assert begun.wait(30)
    port = server.servers[0].sockets[0].getsockname()[1]
    vars(core)["kind"], vars(core)["url"] = "vllm", f"http://127.0.0.1:{port}"
    yield core
    server.should_exit = True
    thread.join(30)


def bridged(tmp_path: Path, core: Any, **options: Any) -> Stand:
    return Stand(tmp_path / "served", [core], **options)


def test_weights_are_what_vllm_loads_of_a_checkpoint(tmp_path: Path, core: Core) -> None:
    stand = bridged(tmp_path, core, unchecked=True)  # its checkpoint has no weights
    folder = tmp_path / "model"
    for seed in (1, 2):
        state = llama.trained(folder, seed).state_dict()
        receipt, text = stand.publish(state)
        assert (text, told(receipt)[0]) == ("", "applied")
        assert llama.equal(llama.parameters(core.worker), llama.loaded(folder, state.items()))
        assert core.version == f"{receipt.epoch}.{receipt.version}"
    receipt, _ = stand.publish({**state, "zzz.weight": torch.ones(2)})
    assert told(receipt)[0] == "failed"
    assert "zzz" in told(receipt)[1]
    assert "it has loaded what it had before" in told(receipt)[1]
    assert llama.equal(llama.parameters(core.worker), llama.loaded(folder, state.items()))
    assert core.while_paused == [True] * 4
    assert not core.paused
    stand.close()


def test_adapters_are_loaded_and_refused(tmp_path: Path, core: Core) -> None:
    stand = bridged(tmp_path, core, adapter="chat")
    for value in (1, 2):
        assert told(stand.publish(adapter(value), metadata=said())[0])[0] == "applied"
    receipt, _ = stand.publish(adapter(3), metadata=said(r=64))
    assert "LoRA rank 64 is greater than max_lora_rank 16" in told(receipt)[1]
    assert stand.worker.version("policy") == 2
    (layer,) = core.adapters["chat"].loras.values()
    assert layer.rank == CONFIG["r"]
    assert np.unique(layer.lora_a.numpy()).tolist() == [2]
    assert json.loads(said()["adapter_config.json"]) == CONFIG
    stand.close()
