"""LoRA adapters: published beside their base, and loaded by servers under a name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightbus.tests.serving.fake_engines import Arrays, Fault
from weightbus.tests.serving.test_bridge import KINDS, of, standing, told, versions

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
LOADS = {"sglang": "/load_lora_adapter", "vllm": "/v1/load_lora_adapter"}


def adapter(value: float) -> Arrays:
    """Return an adapter, named as PEFT names it."""
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    return {
        f"{layer}.lora_A.weight": np.full((4, 8), value, np.float32),
        f"{layer}.lora_B.weight": np.full((8, 4), value, np.float32),
    }


def said(**changes: object) -> dict[str, str]:
    return {"adapter_config.json": json.dumps({**CONFIG, **changes})}


def runs(engine: Any, weights: Arrays) -> bool:
    """Return whether a server has this adapter under its name."""
    _, found = engine.adapters["policy-lora"]
    return bool(
        found.keys() == weights.keys()
        and all(np.array_equal(found[name], array) for name, array in weights.items())
    )


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_loaded_under_their_name(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind, adapter="policy-lora") as (stand, (engine,)):
        folders: list[str] = []
        for value in (1, 2, 3):
            receipt, _ = stand.publish(adapter(value), metadata=said())
            assert told(receipt)[0] == "applied"
            assert runs(engine, adapter(value))
            path, _ = engine.adapters["policy-lora"]
            folders.append(Path(path).resolve().name)
            assert json.loads((Path(path) / "adapter_config.json").read_text()) == CONFIG
        assert len(set(folders)) == 3
        paths = {body["lora_path"] for route, body in engine.calls if route == LOADS[kind]}
        # One that stays, for requests that have it loaded again; or new ones, for a prefix cache.
        assert len(paths) == (1 if kind == "sglang" else 3)
        assert versions(stand.folder) == folders[1:]  # requests may read the one before again
        assert engine.weights.keys() == of(0).keys()
        assert (engine.version, engine.paused) == ("default", False)
        unloads = engine.routes().count("/unload_lora_adapter")
        assert unloads == (3 if kind == "sglang" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_is_refused(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind, adapter="policy-lora") as (stand, (engine,)):
        stand.publish(adapter(1), metadata=said())
        receipt, text = stand.publish(adapter(2), metadata=said(r=64))
        assert told(receipt)[0] == "failed"
        assert "LoRA rank 64 is greater than max_lora_rank 16" in told(receipt)[1]
        assert engine.url in text
        assert runs(engine, adapter(1))
        assert stand.worker.version("policy") == 1


def test_requests_that_have_an_adapter_loaded_again_get_the_new_one(tmp_path: Path) -> None:
    """SGLang loads what a request names from where it was, between our two calls."""
    with standing(tmp_path, "sglang", adapter="policy-lora") as (stand, (engine,)):
        engine.busy = True
        for value in (1, 2, 3):
            assert told(stand.publish(adapter(value), metadata=said())[0])[0] == "applied"
            assert runs(engine, adapter(value))
        engine.fail(LOADS["sglang"], Fault(500, {"error": {"message": "no room"}}))
        assert told(stand.publish(adapter(4), metadata=said())[0])[0] == "failed"
        assert runs(engine, adapter(3))


def test_an_adapter_from_elsewhere_is_what_a_server_goes_back_to(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(adapter(9), other / "adapter_model.safetensors")
    with standing(tmp_path, "sglang", adapter="policy-lora") as (stand, (engine,)):
        engine._read_adapter("policy-lora", str(other))  # noqa: SLF001 - as it was started
        receipt, _ = stand.publish(adapter(1), metadata=said(r=64))
        assert "it has loaded what it had before" in told(receipt)[1]
        assert runs(engine, adapter(9))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_adapter_is_refused(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind, adapter="policy-lora") as (stand, (engine,)):
        engine.fail(LOADS[kind], Fault(500, {"error": {"message": "no room"}}))
        receipt, text = stand.publish(adapter(1), metadata=said())
        assert told(receipt)[0] == "failed"
        assert "no version runs" not in text
        assert engine.adapters == {}
        assert told(stand.publish(adapter(2), metadata=said())[0])[0] == "applied"
        assert runs(engine, adapter(2))


@pytest.mark.parametrize(
    ("kind", "words"),
    [("sglang", "set `--enable-lora`"), ("vllm", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")],
)
def test_a_server_without_adapters(tmp_path: Path, kind: str, words: str) -> None:
    with standing(tmp_path, kind, adapter="policy-lora") as (stand, (engine,)):
        engine.lora = False
        receipt, _ = stand.publish(adapter(1), metadata=said())
        assert told(receipt)[0] == "failed"
        assert words in told(receipt)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_was_restarted_loads_its_adapter_again(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind, adapter="policy-lora") as (stand, (engine,)):
        stand.publish(adapter(1), metadata=said())
        engine.restart(of(0))
        (text,) = stand.target.sync() or []
        assert f"{engine.url} ran nothing, and has loaded" in text
        assert runs(engine, adapter(1))


@pytest.mark.parametrize(
    ("weights", "metadata", "words"),
    [
        (of(1), said(), "it is not a LoRA adapter as PEFT writes them (layers.0.weight"),
        (
            {name.replace("_A.", "_A.default."): array for name, array in adapter(1).items()},
            said(),
            "publish peft.get_peft_model_state_dict(model)",
        ),
        (adapter(1), {}, "the version has no adapter_config.json: publish it with metadata="),
        (adapter(1), {"adapter_config.json": "{"}, "a malformed"),
        (adapter(1), said(peft_type="IA3"), "that is not a LoRA's"),
    ],
    ids=["the base", "names of a module", "no configuration", "no JSON", "another method"],
)
def test_what_is_no_adapter(
    tmp_path: Path, weights: Arrays, metadata: dict[str, str], words: str
) -> None:
    with standing(tmp_path, "vllm", adapter="policy-lora") as (stand, (engine,)):
        receipt, _ = stand.publish(weights, metadata=metadata)
        assert told(receipt)[0] == "failed"
        assert words in told(receipt)[1]
        assert engine.routes() == []
        assert versions(stand.folder) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_the_model_has(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind, adapter="policy") as (stand, (engine,)):
        receipt, _ = stand.publish(adapter(1), metadata=said())
        assert "calls its own model 'policy': give another name with --lora" in told(receipt)[1]
        assert engine.routes() == []


def test_the_configuration_of_a_folder(tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    (like / "adapter_config.json").write_text(json.dumps(CONFIG))
    with standing(tmp_path, "vllm", adapter="policy-lora", like=like) as (stand, (engine,)):
        assert told(stand.publish(adapter(1))[0])[0] == "applied"
        assert runs(engine, adapter(1))
