"""Servers that load from a folder: what they run in the end, whatever fails, and who is told."""

import contextlib
import errno
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightbus
from weightbus.bus.receipt import Receipt
from weightbus.python_client.files.file_target import FileTarget
from weightbus.python_client.serving.calls import CallError, Server, SilentError
from weightbus.python_client.serving.engines import ENGINES, EngineSettings
from weightbus.python_client.serving.served_target import ServedTarget
from weightbus.tests.serving.fake_engines import Arrays, FakeEngine, Fault, engines

KINDS = ("sglang", "vllm")
NO_ROOM = Fault(500, {"error": {"message": "no room"}})
LOADS = {"sglang": "/update_weights_from_disk", "vllm": "/collective_rpc"}
PAUSES = {"sglang": "/pause_generation", "vllm": "/pause"}
RESUMES = {"sglang": "/continue_generation", "vllm": "/resume"}
TRIES = 3  # of a version that may have been loaded in part
WAIT_SECONDS = 0.3  # for what must not come
SECONDS = 1.0  # that a server may take to load, where one takes for ever


def of(value: float) -> Arrays:
    """Return weights that all have one value."""
    return {f"layers.{n}.weight": np.full((4, 8), value, np.float32) for n in range(4)}


class Stand:
    """A publisher, a bridge to some servers, and what becomes of what is published."""

    def __init__(self, folder: Path, made: list[FakeEngine], **options: Any) -> None:
        self.engines, self.folder = made, folder
        kind, seen = made[0].kind, options.pop("seen", str(folder))
        self.settings = EngineSettings(
            options.pop("pause", None), options.pop("seconds", 20.0), folder, seen
        )
        self.servers = [Server(engine.url, options.pop("token", ""), pause=0.01) for engine in made]
        bridged = [ENGINES[kind](server, self.settings) for server in self.servers]
        self.target = ServedTarget(bridged, self.settings, **options)
        self.publisher = weightbus.Publisher()
        self.worker = weightbus.Subscriber(
            self.publisher.address, {"policy": self.target}, name="bridge"
        )
        self.publisher.wait_for_workers(1, timeout=20)

    def publish(self, weights: Mapping[str, Any], **options: Any) -> tuple[Receipt, str]:
        """Publish something, and have the bridge apply it; return the receipt, and what it says."""
        future, said = self.publisher.publish_async("policy", weights, timeout=20, **options), ""
        while not future.done():  # what failed half-way is tried again, and may come first
            try:
                self.worker.receive(0.05)
            except weightbus.ApplyError as error:
                said = said or str(error)
        try:
            return future.result(20), said
        except weightbus.PublishError as error:
            return error.receipt, said

    def close(self) -> None:
        self.worker.close()
        self.publisher.close()
        self.target.close()
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def standing(
    tmp_path: Path, kind: str, count: int = 1, **options: Any
) -> Generator[tuple[Stand, list[FakeEngine]]]:
    with engines(kind, of(0), count) as made:
        stand = Stand(tmp_path / "served", made, **options)
        try:
            yield stand, made
        finally:
            stand.close()


def same(engine: FakeEngine, weights: Arrays) -> bool:
    """Return whether a server has these weights, bit for bit."""
    return engine.weights.keys() == weights.keys() and all(
        engine.weights[name].tobytes() == array.tobytes() for name, array in weights.items()
    )


def told(receipt: Receipt) -> tuple[str, str]:
    worker = receipt.workers["bridge"]
    return worker.state, worker.detail


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def marks(folder: Path) -> list[Path]:
    return list(folder.glob(".paused-*"))


@pytest.mark.parametrize("kind", KINDS)
def test_versions_are_loaded_and_told(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        for value in (1, 2):
            receipt, said = stand.publish(of(value))
            assert (said, told(receipt)[0]) == ("", "applied")
            assert same(engine, of(value))
            assert engine.version == f"{receipt.epoch}.{receipt.version}"
            assert versions(stand.folder) == [engine.version]  # the earlier one is gone
        assert (engine.paused, engine.stale, marks(stand.folder)) == (False, False, [])
        assert engine.served_broken == []
        around = [PAUSES[kind], LOADS[kind], RESUMES[kind]]
        assert [route for route in engine.routes() if route in around] == around * 2


def test_what_is_committed_together(tmp_path: Path) -> None:
    with standing(tmp_path, "vllm") as (stand, (engine,)):
        receipt, _ = stand.publish(of(1), commit="together", require=1)
        assert told(receipt)[0] == "applied"
        engine.fail(LOADS["vllm"], Fault(500, {"error": {"message": "no room"}}))
        receipt, _ = stand.publish(of(2), commit="together", require=1)
        assert told(receipt)[0] == "failed"
        assert "500 no room; it has loaded what it had before" in told(receipt)[1]
        assert same(engine, of(1))


def test_a_server_that_loads_neither_version(tmp_path: Path) -> None:
    with standing(tmp_path, "sglang") as (stand, (engine,)):
        stand.publish(of(1))
        engine.fail(LOADS["sglang"], *[NO_ROOM] * 99)
        receipt, said = stand.publish(of(2))
        assert told(receipt)[0] == "failed"
        stays = "it may hold parts of both, so it stays paused until it loads a version"
        assert stays in told(receipt)[1]
        assert "publish again, or restart it" in told(receipt)[1]
        assert "no version runs until the next one is applied" in said
        assert engine.paused
        (text,) = stand.target.sync() or []  # it tries again, and still leaves it paused
        assert stays in text
        assert engine.paused
        for _ in range(TRIES - 1):
            with pytest.raises(weightbus.ApplyError, match="it stays paused"):
                stand.worker.receive(20)
        assert stand.worker.receive(WAIT_SECONDS) is None
        assert engine.paused


def test_sglang_waits_for_its_requests_by_itself(tmp_path: Path) -> None:
    with standing(tmp_path, "sglang", pause="none") as (stand, (engine,)):
        assert told(stand.publish(of(1))[0])[0] == "applied"
        assert engine.routes() == ["/update_weights_from_disk"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(400, {"success": False, "message": "out of memory on rank 3"}), "rank 3"),
        (Fault(500, {"error": {"message": "CUDA error"}}), "500 CUDA error"),
        (Fault(200, {"success": False, "message": "not on rank 1"}), "not on rank 1"),
        (Fault(200, "all is well"), "all is well"),
    ],
    ids=["400", "500", "no success", "no answer of its kind"],
)
def test_a_refusal_is_in_the_receipt(tmp_path: Path, kind: str, fault: Fault, words: str) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        stand.publish(of(1))
        engine.fail(LOADS[kind], fault)
        receipt, said = stand.publish(of(2))
        assert told(receipt)[0] == "failed"
        for text in (told(receipt)[1], said):
            assert engine.url in text
            assert words in text
            assert "it has loaded what it had before" in text
        assert same(engine, of(1))
        assert stand.worker.version("policy") == 1  # that it runs on
        assert not engine.paused
        assert engine.served_broken == []
        assert told(stand.publish(of(3))[0])[0] == "applied"
        assert same(engine, of(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fault",
    [Fault(503, "warming up"), Fault(), Fault(half=True), Fault(after=True)],
    ids=["503", "hangs up", "breaks off", "dies after its work"],
)
def test_who_does_not_answer_is_asked_again(tmp_path: Path, kind: str, fault: Fault) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        for route in (LOADS[kind], PAUSES[kind], RESUMES[kind]):
            engine.fail(route, fault)
        assert told(stand.publish(of(1))[0])[0] == "applied"
        assert same(engine, of(1))
        assert not engine.paused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(503, "warming up"), "is not ready (503 warming up)"),
        (Fault(), "broke off"),
        (Fault(half=True), "broke off"),
    ],
    ids=["503", "hangs up", "breaks off"],
)
def test_asking_again_has_a_bound(tmp_path: Path, kind: str, fault: Fault, words: str) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        stand.publish(of(1))
        engine.calls.clear()
        engine.fail(LOADS[kind], *[fault] * 4)
        receipt, _ = stand.publish(of(2))
        assert told(receipt)[0] == "failed"
        assert words in told(receipt)[1]
        assert engine.routes().count(LOADS[kind]) == 5  # four times this one, once the one before
        assert same(engine, of(1))
        assert not engine.paused


@pytest.mark.parametrize(("kind", "after"), [("sglang", False), ("sglang", True), ("vllm", True)])
def test_a_server_that_hangs(
    tmp_path: Path, kind: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightbus.python_client.serving.engines.ANSWER_SECONDS", SECONDS)
    with standing(tmp_path, kind, seconds=SECONDS) as (stand, (engine,)):
        stand.publish(of(1))
        engine.fail(LOADS[kind], Fault(hang=True, after=after))
        receipt, _ = stand.publish(of(2))
        assert told(receipt)[0] == "failed"
        assert f"{engine.url} gave no answer within" in told(receipt)[1]
        assert same(engine, of(1))
        assert not engine.paused


def test_a_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    kind = "vllm"
    with standing(tmp_path, kind, seconds=SECONDS) as (stand, (engine,)):
        stand.publish(of(1))
        engine.fail(LOADS[kind], Fault(die=True))
        receipt, said = stand.publish(of(2))
        assert told(receipt)[0] == "failed"
        assert engine.url in said
        assert "cannot be reached" in said
        engine.restart(of(0))
        summary_of = stand.target.sync()
        assert summary_of is not None
        assert not marks(stand.folder)
        assert not engine.paused
        assert told(stand.publish(of(3))[0])[0] == "applied"
        assert same(engine, of(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_was_restarted_loads_again(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        stand.publish(of(1))
        running, believed = engine.version, stand.publisher.workers()["bridge"].running
        engine.restart(of(0))
        assert stand.target.sync() == [f"{engine.url} ran default, and has loaded {running} again"]
        assert stand.target.sync() is None  # it was not yet time
        assert same(engine, of(1))
        assert engine.version == running
        assert stand.worker.flush(20)
        assert stand.publisher.workers()["bridge"].running == believed


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_not_there(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        engine.close()
        receipt, said = stand.publish(of(1))
        assert told(receipt)[0] == "failed"
        assert f"{engine.url} cannot be reached" in told(receipt)[1]
        assert "nothing was changed" in said
        assert versions(stand.folder) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("gone", "cannot be reached"),
        ("kind", "it is a server of sglang, by its /model_info: --kind sglang"),
        ("route", "start it with VLLM_SERVER_DEV_MODE=1"),
        ("key", "give its key with --token"),
    ],
)
def test_of_two_servers_one_can_be_given_nothing(tmp_path: Path, wrong: str, words: str) -> None:
    with standing(tmp_path, "vllm", count=2) as (stand, (one, two)):
        if wrong == "gone":
            two.close()
        elif wrong == "kind":
            two.kind = "sglang"
        elif wrong == "route":
            two.dev = False
        else:
            two.token = "secret"  # noqa: S105
        receipt, _ = stand.publish(of(1))
        assert told(receipt)[0] == "failed"
        assert words in told(receipt)[1]
        assert two.url in told(receipt)[1]
        assert versions(stand.folder) == []
        for engine in (one, two):
            assert engine.routes() == []
            assert same(engine, of(0))


def test_a_load_that_fails_in_the_middle_is_taken_back(tmp_path: Path) -> None:
    with standing(tmp_path, "sglang", unchecked=True) as (stand, (engine,)):
        stand.publish(of(1))
        receipt, _ = stand.publish({**of(2), "layers.2.weight": np.ones(3, np.float32)})
        assert told(receipt)[0] == "failed"
        assert "size mismatch for layers.2.weight" in told(receipt)[1]
        assert "it has loaded what it had before" in told(receipt)[1]
        assert same(engine, of(1))
        assert not engine.paused
        assert engine.served_broken == []


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_servers_one_fails(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind, count=2) as (stand, (one, two)):
        stand.publish(of(1))
        two.fail(LOADS[kind], Fault(400, {"message": "no room"}))
        receipt, said = stand.publish(of(2))
        state, detail = told(receipt)
        assert state == "failed"
        assert f"{two.url} refuses" in detail
        assert "no room" in detail
        assert f"({one.url}: as before)" in detail
        assert stand.worker.version("policy") == 1
        for engine in (one, two):
            assert same(engine, of(1))
            assert not engine.paused
            assert engine.served_broken == []
        assert said


def test_what_cannot_be_brought_back_is_said(tmp_path: Path) -> None:
    """The other one has gone on to the new version, and refuses the way back."""
    kind = "vllm"
    with standing(tmp_path, kind, count=2) as (stand, (one, two)):
        stand.publish(of(1))
        one.fail(LOADS[kind], None, *[Fault(500, {"message": "out of memory"})] * 99)
        two.fail(LOADS[kind], *[Fault(400, {"message": "no room"}), None] * 99)
        receipt, said = stand.publish(of(2))
        assert told(receipt)[0] == "failed"
        assert f"{one.url} has the new version; nor has it loaded what it" in told(receipt)[1]
        assert "as before" not in told(receipt)[1]
        assert "no version runs until the next one is applied" in said  # so this one is tried again
        assert (one.paused, two.paused) == (True, False)
        for engine in (one, two):
            engine.faults.clear()
        one.restart(of(0))
        assert told(stand.publish(of(3))[0])[0] == "applied"
        assert same(one, of(3))
        assert same(two, of(3))


# Pauses.


@pytest.mark.parametrize("kind", KINDS)
def test_a_pause_that_fails_touches_nothing(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        stand.publish(of(1))
        engine.fail(PAUSES[kind], Fault(500, {"error": "no"}, after=False))
        engine.calls.clear()
        receipt, said = stand.publish(of(2))
        assert told(receipt)[0] == "failed"
        assert "its pause: 500 no" in said
        assert LOADS[kind] not in engine.routes()
        assert not engine.paused
        assert same(engine, of(1))
        assert stand.worker.version("policy") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_others_have_paused_stays_so(tmp_path: Path, kind: str) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        engine.paused = True
        assert told(stand.publish(of(1))[0])[0] == "applied"
        assert same(engine, of(1))
        assert engine.paused  # whoever paused it has it go on
        assert RESUMES[kind] not in engine.routes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["a look", "a version"])
def test_a_server_that_does_not_go_on_is_told_again(tmp_path: Path, kind: str, by: str) -> None:
    with standing(tmp_path, kind) as (stand, (engine,)):
        engine.fail(RESUMES[kind], *[Fault(500, {"error": "busy"})] * 10)
        receipt, said = stand.publish(of(1))
        engine.faults.clear()
        assert told(receipt)[0] == "failed"
        assert f"{engine.url} may still be paused" in said
        assert f"curl -X POST {engine.url}{RESUMES[kind]}" in said
        assert engine.paused
        assert marks(stand.folder)
        if by == "a look":
            stand.target.sync()
        else:
            assert told(stand.publish(of(2))[0])[0] == "applied"
        assert not engine.paused
        assert not marks(stand.folder)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_bridge_has_left_paused_goes_on(tmp_path: Path, kind: str) -> None:
    with engines(kind, of(0)) as (engine,):
        folder = tmp_path / "served"
        folder.mkdir()
        engine.paused = True
        settings = EngineSettings(None, 5.0, folder, str(folder))
        server = Server(engine.url)
        dead = ENGINES[kind](server, settings)
        dead._mark.write_text(engine.url)  # noqa: SLF001 - as it does before it pauses
        stand = Stand(folder, [engine])
        assert stand.target.check_servers() == ""
        assert not engine.paused
        assert marks(folder) == []
        stand.close()
        server.close()


# What comes is not what they take; what they are is not what was said.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lacks": "layers.1.weight"}, "it lacks layers.1.weight"),
        ({"extra": "module.layers.0.weight"}, "it has besides module.layers.0.weight"),
        ({"shape": "layers.2.weight"}, "layers.2.weight is [2], not [4, 8]"),
    ],
    ids=["lacks", "extra", "shape"],
)
def test_what_is_unlike_the_served_checkpoint_never_travels(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    like = tmp_path / "like"
    like.mkdir()
    save_file(of(0), like / "model.safetensors")
    (like / "config.json").write_text('{"model_type": "tiny"}')
    weights = of(1)
    for what, name in change.items():
        if what == "lacks":
            del weights[name]
        else:
            weights[name] = np.ones(2, np.float32)
    with standing(tmp_path, "sglang", like=like) as (stand, (engine,)):
        receipt, _ = stand.publish(weights)
        assert words in told(receipt)[1]
        assert engine.routes() == []
        assert told(stand.publish(of(2))[0])[0] == "applied"
        home = stand.folder / engine.version
        assert sorted(path.name for path in home.iterdir()) == ["config.json", "model.safetensors"]
        assert (home / "config.json").read_text() == '{"model_type": "tiny"}'


def test_tied_tensors_fit_a_checkpoint_with_one_of_them(tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    save_file({"embed": np.zeros((2, 2), np.float32)}, like / "model.safetensors")
    shared = np.ones((2, 2), np.float32)
    with engines("sglang", {"embed": shared * 0, "lm_head": shared * 0}) as made:
        stand = Stand(tmp_path / "served", made, like=like)
        assert told(stand.publish({"embed": shared, "lm_head": shared})[0])[0] == "applied"
        assert same(made[0], {"embed": shared, "lm_head": shared})
        stand.close()


@pytest.mark.parametrize(
    ("asked", "is_really", "words"),
    [
        ("vllm", "sglang", "it is a server of sglang, by its /model_info: --kind sglang"),
        ("sglang", "vllm", "it is a server of vllm, by its /version: --kind vllm"),
        ("vllm", "vllm", "start it with VLLM_SERVER_DEV_MODE=1"),
        ("vllm", "other", "it is not a server of vllm"),
        ("sglang", "other", "it is not a server of sglang"),
    ],
)
def test_a_server_of_another_kind(tmp_path: Path, asked: str, is_really: str, words: str) -> None:
    engine = FakeEngine("vllm" if is_really == "other" else is_really, of(0), dev=False)
    if is_really == "other":
        engine._do = lambda *_: (404, {"detail": "Not Found"})  # type: ignore[method-assign] # noqa: SLF001
    server = Server(engine.url)
    found = ENGINES[asked](server, EngineSettings(None, 5.0, tmp_path, ""))
    with pytest.raises(CallError, match=words.replace("/", ".")) as refused:
        found.version()
    assert refused.value.harmless
    server.close()
    engine.close()


def test_a_server_that_wants_a_key(tmp_path: Path) -> None:
    with engines("sglang", of(0)) as (engine,):
        engine.token = "secret"  # noqa: S105
        for token, fits in (("", False), ("secret", True)):
            server = Server(engine.url, token)
            asked = ENGINES["sglang"](server, EngineSettings(None, 5.0, tmp_path, ""))
            if fits:
                assert asked.version() == "default"
            else:
                with pytest.raises(CallError, match="give its key with --token"):
                    asked.version()
            server.close()


def test_a_cache_that_is_flushed_later(tmp_path: Path) -> None:
    """SGLang says that it has failed where it has the new weights, and only its cache is old."""
    with standing(tmp_path, "sglang", pause="none") as (stand, (engine,)):
        stand.publish(of(1))
        engine.busy = True
        receipt, said = stand.publish(of(2))
        assert (told(receipt)[0], said) == ("applied", "")
        assert same(engine, of(2))
        assert engine.version == f"{receipt.epoch}.2"
        assert not engine.stale


def test_a_cache_that_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightbus.python_client.serving.engines.FLUSH_SECONDS", 0.3)
    with standing(tmp_path, "vllm") as (stand, (engine,)):
        engine.busy = True
        receipt, said = stand.publish(of(1))
        assert told(receipt)[0] == "failed"
        assert "its prefix cache still has results of the old" in said
        assert engine.paused  # with the old weights neither: its cache may have blocks of both


def test_requests_that_go_on_where_they_were_keep_their_cache(tmp_path: Path) -> None:
    with standing(tmp_path, "sglang", pause="in_place") as (stand, (engine,)):
        engine.busy = True
        assert told(stand.publish(of(1))[0])[0] == "applied"
        assert engine.routes() == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
        ]


def test_a_version_that_is_not_named(tmp_path: Path) -> None:
    with standing(tmp_path, "vllm") as (stand, (engine,)):
        engine.fail("/update_weight_version", Fault(500, {"error": {"message": "no"}}))
        assert "/update_weight_version: 500 no" in told(stand.publish(of(1))[0])[1]


# The folder.


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with standing(tmp_path, "sglang") as (stand, (engine,)):
        stand.publish(of(1))
        full = OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

        def fails(*_: object) -> None:
            raise full

        with monkeypatch.context() as patch:
            patch.setattr(FileTarget, "apply", fails)
            receipt, said = stand.publish(of(2))
        assert told(receipt)[0] == "failed"
        assert "no-memory" in told(receipt)[1]
        assert "No space left on device" in said
        assert same(engine, of(1))
        assert not engine.paused
        assert engine.routes().count(LOADS["sglang"]) == 1
        assert len(versions(stand.folder)) == 1
        assert stand.worker.receive(20) is not None  # so it is tried again
        assert same(engine, of(2))


def test_folders_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with engines("sglang", of(0)) as made:
        for folder in (tmp_path / "no" / "such", tmp_path / "file"):
            with pytest.raises(OSError, match=folder.name):
                ServedTarget([], EngineSettings(None, 1.0, folder, str(folder)))
        stand = Stand(tmp_path / "served", made)
        with pytest.raises(OSError, match="another bridge writes there"):
            ServedTarget([], stand.settings)
        stand.close()


def test_servers_that_call_the_folder_otherwise(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    other = tmp_path / "mounted"
    other.symlink_to(tmp_path / "served")
    with standing(tmp_path, "sglang", seen=str(other)) as (stand, (engine,)):
        assert told(stand.publish(of(1))[0])[0] == "applied"
        assert engine.path == f"{other}/{engine.version}"
        engine.fail(LOADS["sglang"], Fault(400, {"message": "no"}))
        stand.publish(of(2))
        assert same(engine, of(1))


# Calls.


def test_an_answer_is_bounded() -> None:
    with engines("sglang", of(0)) as (engine,):
        engine.fail("/model_info", Fault(200, "x" * 300_000))
        server = Server(engine.url)
        with pytest.raises(CallError, match="more than 262144 bytes"):
            server.get("/model_info", 5.0)
        server.close()


def test_nothing_that_is_no_url() -> None:
    for url in ("", "gpu-1:8000", "ftp://gpu-1", "http://"):
        with pytest.raises(ValueError, match="URL"):
            Server(url)


def test_a_call_is_harmless_if_nobody_heard_it() -> None:
    with engines("sglang", of(0)) as (engine,):
        url = engine.url
    server = Server(url, tries=2, pause=0.01)
    with pytest.raises(SilentError, match="2 times") as refused:
        server.post("/update_weights_from_disk", {}, 5.0)
    assert refused.value.harmless
    server.close()
