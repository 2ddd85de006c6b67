"""What fits a server: it is known from the checkpoint that it serves, and else not loaded."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from weightbus.bus.receipt import Receipt
from weightbus.python_client.serving.served_target import ServersError
from weightbus.tests.serving.fake_engines import Arrays, engines
from weightbus.tests.serving.test_bridge import KINDS, Stand, of, same, standing, told, versions

CHANGES: dict[str, tuple[Arrays, str]] = {
    "lacks": ({}, "it lacks layers.1.weight"),
    "besides": ({"zzz": np.ones(2, np.float32)}, "it has besides zzz"),
    "shape": ({"layers.1.weight": np.ones(2, np.float32)}, "layers.1.weight is [2], not [4, 8]"),
    "dtype": ({"layers.1.weight": np.ones((4, 8), np.int8)}, "layers.1.weight is I8, not F32"),
}


def changed(change: str) -> tuple[Arrays, str]:
    """Return weights that do not fit, and what is said of them."""
    more, words = CHANGES[change]
    weights = of(2)
    if not more:
        del weights["layers.1.weight"]
    return {**weights, **more}, words


def refused(receipt: Receipt, words: str) -> bool:
    state, detail = told(receipt)
    return state == "failed" and words in detail


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("known", [True, False], ids=["known", "not yet known"])
def test_what_does_not_fit_is_not_loaded(
    tmp_path: Path, kind: str, change: str, known: bool
) -> None:
    weights, words = changed(change)
    with standing(tmp_path, kind) as (stand, (engine,)):
        if known:
            assert stand.target.check_servers() == ""
        receipt, _ = stand.publish(weights)
        assert refused(receipt, words)
        assert refused(receipt, f"{engine.home}, which {engine.url} serves")
        assert refused(receipt, "Publish it under its names, or give a checkpoint as the trainer")
        assert engine.routes() == []
        assert versions(stand.folder) == []
        assert told(stand.publish(of(3))[0])[0] == "applied"
        assert same(engine, of(3))
        assert refused(stand.publish(weights)[0], words)  # also after it has loaded one of ours
        assert same(engine, of(3))


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
def test_numbers_that_engines_convert_fit(tmp_path: Path, dtype: str) -> None:
    with standing(tmp_path, "vllm") as (stand, _):
        name = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
        weights = {key: array.astype(name) for key, array in of(1).items()}
        assert told(stand.publish(weights)[0])[0] == "applied"


def test_sglang_skips_what_it_does_not_know_if_nobody_checks(tmp_path: Path) -> None:
    """Why versions are compared: it says that it has loaded them."""
    with standing(tmp_path, "sglang", unchecked=True) as (stand, (engine,)):
        others = {f"model.{name}": array for name, array in of(1).items()}
        assert told(stand.publish(others)[0])[0] == "applied"
        assert same(engine, of(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_is_not_here(tmp_path: Path, kind: str) -> None:
    like = tmp_path / "like"
    like.mkdir()
    save_file(of(0), like / "model.safetensors")
    with engines(kind, of(0)) as made:
        made[0].home = made[0].path = str(tmp_path / "elsewhere")
        stand = Stand(tmp_path / "served", made)
        words = f"cannot check versions for {made[0].url}: its checkpoint .*elsewhere.*--unchecked"
        with pytest.raises(ServersError, match=words):
            stand.target.check_servers()
        receipt, _ = stand.publish(of(1))
        assert refused(receipt, "cannot check versions")
        assert refused(receipt, "--like")
        assert refused(receipt, "--unchecked")
        assert refused(receipt, "nothing was changed")
        assert made[0].routes() == []
        stand.close()
        ways: list[dict[str, Any]] = [{"like": like}, {"unchecked": True}]
        for number, options in enumerate(ways):
            stand = Stand(tmp_path / str(number), made, **options)
            assert stand.target.check_servers() == ""
            assert told(stand.publish(of(number + 1))[0])[0] == "applied"
            assert same(made[0], of(number + 1))
            stand.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_was_started_again_with_a_checkpoint_that_is_not_here(
    tmp_path: Path, kind: str
) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        stand.publish(of(1))
        engine.home = str(tmp_path / "elsewhere")
        engine.restart(of(0))
        engine.calls.clear()
        (text,) = stand.target.sync() or []
        assert f"cannot check versions for {engine.url}" in text
        receipt, _ = stand.publish(of(2))
        assert refused(receipt, "--like")
        assert refused(receipt, "--unchecked")
        assert engine.routes() == []
        assert same(engine, of(0))


@pytest.fixture(name="cached")
def _cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model in the hub's cache, as its client lays it out."""
    home = tmp_path / "cache" / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots" / commit).mkdir(parents=True)
    save_file(of(0), home / "snapshots" / commit / "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return "org/tiny"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_the_cache_of_the_hub(tmp_path: Path, kind: str, cached: str) -> None:
    weights, words = changed("lacks")
    with standing(tmp_path, kind) as (stand, (engine,)):
        engine.home = engine.path = cached
        assert stand.target.check_servers() == ""
        assert refused(stand.publish(weights)[0], words)
        assert told(stand.publish(of(1))[0])[0] == "applied"


def test_a_model_that_the_hub_has_not_cached(tmp_path: Path, cached: str) -> None:
    with standing(tmp_path, "vllm") as (stand, (engine,)):
        engine.home = f"{cached}-other"
        with pytest.raises(ServersError, match=r"'org/tiny-other' cannot be read here.*--like"):
            stand.target.check_servers()


def test_the_hubs_client_is_not_installed(
    tmp_path: Path, cached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with standing(tmp_path, "vllm") as (stand, (engine,)):
        engine.home = cached
        with pytest.raises(ServersError, match=r"pip install huggingface_hub.*--like"):
            stand.target.check_servers()


def test_buffers_that_engines_skip_need_not_come(tmp_path: Path) -> None:
    old: Any = {**of(0), "layers.0.rotary_emb.inv_freq": np.ones(4, np.float32)}
    with engines("sglang", old) as made:
        del made[0].weights["layers.0.rotary_emb.inv_freq"]
        stand = Stand(tmp_path / "served", made)
        assert told(stand.publish(of(1))[0])[0] == "applied"
        stand.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_was_started_with_another_model(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        assert told(stand.publish(of(1))[0])[0] == "applied"
        other = {"other.weight": np.zeros((2, 2), np.float32)}
        home = tmp_path / "other"
        home.mkdir()
        save_file(other, home / "model.safetensors")
        engine.home = str(home)
        engine.restart(other)
        (text,) = stand.target.sync() or []
        assert f"{engine.url} is not given" in text
        assert "it lacks other.weight" in text
        assert same(engine, other)
        assert told(stand.publish({"other.weight": np.ones((2, 2), np.float32)})[0])[0] == "applied"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("embed.weight", "tied weights"),
        ("layers.0.mlp.experts.0.up_proj.weight", "experts"),
        ("layers.0.mlp.up_proj.weight_scale", "quantised weights"),
        ("lm_head.weight", ""),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("given", ["like", "served"])
def test_what_vllm_on_a_processor_does_not_pack_anew(
    tmp_path: Path, name: str, words: str, device: str, given: str
) -> None:
    weights = {name: np.zeros((2, 2), np.float32)}
    like = tmp_path / "like"
    like.mkdir()
    save_file(weights, like / "model.safetensors")
    with engines("vllm", weights) as made:
        made[0].device = device
        stand = Stand(tmp_path / "served", made, like=like if given == "like" else None)
        receipt, _ = stand.publish({name: np.ones((2, 2), np.float32)})
        if words and device == "cpu":
            assert refused(receipt, f"packed copies of a model's {words}")
            assert made[0].routes() == []
        else:
            assert told(receipt)[0] == "applied"
        stand.close()
