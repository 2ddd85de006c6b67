"""Other names at either side: what they become, what is refused, and that nothing else changes."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import nn

from weightbus import Publisher, PublishError, Settings, StateError, Subscriber
from weightbus.codecs import native
from weightbus.codecs.apply import Reader, as_arrays, check
from weightbus.codecs.layout import Layout
from weightbus.codecs.renaming import Renaming, renaming_of
from weightbus.codecs.state import State, Writer, state_of
from weightbus.python_client.applying.loading import Pairs
from weightbus.python_client.observing.observer import Observer
from weightbus.tests.client.settling import settled
from weightbus.tests.client.test_bus import both
from weightbus.tests.codecs.test_wrapping import policy

SECONDS = 60.0


class Tied(nn.Module):
    """One tensor under two names, buffers and others."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        for tensor in self.state_dict().values():
            tensor.fill_(value)


def values_of(target: Any) -> dict[str, float]:
    tensors = target.state_dict() if isinstance(target, nn.Module) else target
    tensors = {name: each for name, each in tensors.items() if not name.endswith("extra_state")}
    return {name: float(tensor.flatten()[-1]) for name, tensor in tensors.items()}


def asked(asked: Any) -> Renaming:
    renaming = renaming_of(asked)
    assert renaming is not None
    return renaming


def test_what_names_become() -> None:
    names = ["m.a", "m.b.c", "n"]
    for given, became in (
        ("m.", ["a", "b.c", "n"]),
        ({"m.a": "x", "n": "m.a"}, ["x", "m.b.c", "m.a"]),
        ({"": "module."}, ["module.m.a", "module.m.b.c", "module.n"]),
        ({"m.": "q.", "m.b.": "", "m.a": "whole"}, ["whole", "c", "n"]),
        ({"m.": "q.r.", "": "p."}, ["q.r.a", "q.r.b.c", "p.n"]),
        (str.upper, ["M.A", "M.B.C", "N"]),
    ):
        assert [*asked(given).of(names).values()] == became, given
    assert renaming_of(None) is None
    assert renaming_of({}) is None
    assert asked({"": "module."}).of([]) == {}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("o.", "no name begins with 'o.'; there are m.a, m.b, n, ..."),
        ({"m": "o"}, "nothing is called 'm'; there are m.a"),
        ({"m.a": "x", "m.b.": ""}, "no name begins with 'm.b.'"),
        ({"m.a": "m.b"}, "'m.a' and 'm.b' become one name, 'm.b'"),
        ({"m.": "", "n": "a"}, "'m.a' and 'n' become one name, 'a'"),
        (lambda _: "x", "'m.a' and 'm.b' and 'n' become one name, 'x'"),
        (lambda name: name[2:], "'n' becomes '', which cannot name a tensor"),
        (lambda name: name.removeprefix("m"), "'m.a' becomes '.a', which cannot name"),
        (lambda _: "__metadata__", "'m.a' becomes '__metadata__', which cannot name a tensor"),
        (lambda _: None, "'m.a' becomes None, which is not text"),
    ],
)
def test_what_cannot_be_renamed_is_named(given: Any, text: str) -> None:
    with pytest.raises(StateError) as raised:
        asked(given).of(["m.a", "m.b", "n"])
    assert str(raised.value).startswith(f"rename: {text}")


def test_what_cannot_be_renamed_is_named_on_either_side() -> None:
    given, text = {"m.": "", "n": "a"}, "'m.a' and 'n' become one name, 'a'"
    weights = {name: np.ones(2) for name in ("m.a", "m.b", "n")}
    target = {"a": np.zeros(2)}
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": target}, rename=given, strict=False) as worker,
    ):
        for publish in (publisher.publish, publisher.prepare):
            with pytest.raises(StateError) as raised:
                publish("m", weights, settings=Settings(rename=given))
            assert str(raised.value).startswith(f"rename: {text}")
        assert worker.wait_joined(SECONDS)
        worker.start()
        with pytest.raises(PublishError) as refused:
            publisher.publish("m", weights, timeout=SECONDS)
        assert refused.value.receipt.version == 1, "what could not be renamed took no number"
        assert f"rename: {text}" in str(refused.value)
        assert not target["a"].any()


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ("module", ValueError, r"up to its dot, as 'module\.'"),
        ("", ValueError, "up to its dot"),
        (5, TypeError, "give a prefix that is taken off"),
        ({"a": 5}, TypeError, "must map a name to its new name"),
        ({5: "a"}, TypeError, "must map a name to its new name"),
        ({"a.": "b"}, ValueError, r"'b\.' in place of 'b'"),
        ({"": "b"}, ValueError, r"'b\.' in place of 'b'"),
        ({"a": "x", "b": "x"}, StateError, "'a' and 'b' become one name, 'x'"),
        ({"a": ""}, StateError, "'a' becomes '', which cannot name a tensor"),
    ],
)
def test_what_says_nothing_of_names_is_refused_before_anything_is_made(
    given: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        Subscriber("tcp://127.0.0.1:9", {"m": {"a": np.zeros(1)}}, rename=given)
    with Publisher() as publisher, pytest.raises(kind, match=text):
        publisher.publish("m", {"a": np.zeros(1)}, settings=Settings(rename=given))


def test_a_version_is_the_same_but_for_its_names() -> None:
    source = Tied()
    for value, tensor in enumerate(source.state_dict().values()):
        tensor.fill_(value)
    state = state_of(source)
    others = asked({"": "z.", "head.": "a.", "norm.": "b."})  # in another order
    renamed = State(others.form_of(state.form), state.leaves)
    data = np.zeros(renamed.layout().nbytes, np.uint8)
    Writer(renamed.layout(), data).write(renamed)
    arrays = as_arrays(renamed.layout(), data)
    became = others.of([*source.state_dict()])
    assert arrays.keys() == {*became.values()}
    for name, tensor in source.state_dict().items():
        np.testing.assert_array_equal(arrays[became[name]], tensor.numpy())
    assert renamed.layout().aliases == {"a.weight": "z.embed.weight"}


def test_texts_of_a_layout_stay_texts() -> None:
    texts = {"step": "5", "old": "b.w", "b.w": "word", "of": "a.w"}
    layout = Layout.plan(
        [("a.w", "F32", (2,)), ("c", "U8", (1,))], {"t": "a.w", "of": "a.w"}, texts
    )
    renamed = layout.renamed({"a.w": "b.w", "c": "c", "t": "t", "of": "u"})
    assert renamed.aliases == {"t": "b.w", "u": "b.w"}
    assert renamed.metadata == {"t": "b.w", "u": "b.w", "step": "5"}
    assert [(s.begin, s.end) for s in renamed.tensors] == [(s.begin, s.end) for s in layout.tensors]


def arrays_of(model: nn.Module, prefix: str = "") -> dict[str, np.ndarray[Any, Any]]:
    return {prefix + name: tensor.numpy() for name, tensor in model.state_dict().items()}


SOURCES: dict[str, Callable[[float], Any]] = {
    "module": lambda value: nn.ModuleDict({"module": Tied(value)}),
    "tensordict": lambda value: TensorDict({"module": TensorDict(dict(Tied(value).state_dict()))}),
    "tensors": lambda value: nn.ModuleDict({"module": Tied(value)}).state_dict(),
    "numpy": lambda value: arrays_of(Tied(value), "module."),
}


@pytest.mark.parametrize(
    ("kind", "at", "shared_memory"),
    [
        ("module", "trainer", True),
        ("tensordict", "worker", False),
        ("tensors", "trainer", False),
        ("numpy", "worker", True),
    ],
)
def test_every_source_goes_into_every_target_whoever_takes_the_prefix_off(
    tmp_path: Path,
    kind: str,
    at: str,
    *,
    shared_memory: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[dict[str, float]] = []

    def load(pairs: Pairs) -> None:
        seen.append(values_of(dict(pairs)))

    model, moved, numbers = Tied(), Tied(), arrays_of(Tied())
    plain = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    taken_apart: Any = TensorDict.from_module(Tied())
    nested = taken_apart.detach().clone()
    path = tmp_path / "m.safetensors"
    sent = Settings(rename="module." if at == "trainer" else None)
    taken: Any = {"rename": "module."} if at == "worker" else {}
    with (
        Publisher(settings=Settings(shared_memory=shared_memory)) as publisher,
        ExitStack() as stack,
    ):
        for target in (model, moved, plain, nested, numbers, path, load):
            options = taken | {"resident": target is moved}
            worker = Subscriber(publisher.address, {"m": target}, **settled(options))
            stack.enter_context(worker).start()
        publisher.wait_for_workers(7, SECONDS)
        publisher.prepare("m", SOURCES[kind](0), settings=sent)
        for value in (1.0, 2.0):
            publisher.publish("m", SOURCES[kind](value), timeout=SECONDS, settings=sent)
            written = load_file(path)
            flat = nested.flatten_keys(".")
            for found in (
                *map(values_of, (model, moved, plain, flat, numbers, written)),
                seen.pop(),
            ):
                assert {*found.values()} == {value}
                assert not any(name.startswith("module") for name in found)
        copied = any("exchanged" in message for message in caplog.messages)
        assert copied == (not native.BUILT and not shared_memory), "it is resident where it can be"


def test_a_worker_with_a_wrapped_model_puts_the_prefix_in_front_and_extra_state_goes_along() -> (
    None
):
    class Extra(nn.Linear):
        state = torch.zeros(1)

        def get_extra_state(self) -> torch.Tensor:
            return self.state

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.state = state

    source, target = Extra(2, 2), nn.ModuleDict({"module": Extra(2, 2)})
    source.state = torch.full((1,), 7.0)
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": target}, rename={"": "module."}) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", source, timeout=SECONDS)
        assert values_of(target) == {
            f"module.{name}": value for name, value in values_of(source).items()
        }
        assert target["module"].get_extra_state() == 7


def trained(value: float) -> dict[str, torch.Tensor]:
    w = torch.arange(300_000.0)
    w[::1000] += value
    return {"module.w": w, "module.tied": w}


@pytest.mark.parametrize(("at", "sole_writer"), [("trainer", True), ("worker", False)])
def test_patches_come_to_renamed_tensors(at: str, *, sole_writer: bool) -> None:
    sent = Settings(encoding="delta", rename="module." if at == "trainer" else None)
    taken: Any = {"rename": "module."} if at == "worker" else {}
    target = {"w": torch.zeros(300_000)}
    taken |= {"sole_writer": sole_writer, "shared_memory": False, "name": "w"}
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(publisher.address, {"m": target}, **settled(taken)) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        for value in range(4):
            receipt = publisher.publish("m", trained(value), settings=sent, timeout=SECONDS)
            assert receipt.workers["w"].encoding == ("delta-1" if value else "raw")
            assert torch.equal(target["w"], trained(value)["module.w"])


def test_what_differs_alone_is_written_though_it_is_renamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As without a renaming: the look ahead is of the version that is applied then."""
    found: list[bool] = []
    copy_into = Reader.copy_into

    def watched(self: Reader, *args: Any, **options: Any) -> None:
        found.append(options.get("only") is not None)
        copy_into(self, *args, **options)

    monkeypatch.setattr(Reader, "copy_into", watched)
    options: Any = {"rename": "module.", "sole_writer": True, "shared_memory": False}
    target = {"w": torch.zeros(300_000)}
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(publisher.address, {"m": target}, **settled(options)) as worker,
    ):
        assert worker.wait_joined(SECONDS)
        for value in range(6):
            both(publisher, worker, trained(value), encoding="delta")
            assert torch.equal(target["w"], trained(value)["module.w"])
    assert any(found)


def test_a_state_folder_has_the_names_that_were_published(tmp_path: Path) -> None:
    with Publisher(state=tmp_path, history=2) as publisher:
        publisher.publish("m", trained(1), settings=Settings(rename="module."))
        last = publisher.publish("m", trained(2), settings=Settings(rename="module."))
    target = {"x": torch.zeros(300_000)}
    with (
        Publisher(state=tmp_path, history=2) as publisher,
        Subscriber(publisher.address, {"m": target}, rename={"w": "x", "tied": "y"}) as worker,
    ):
        assert worker.receive(SECONDS) is not None
        assert torch.equal(target["x"], trained(2)["module.w"])
        to = last.epoch, last.version
        with pytest.raises(ValueError, match="leave out dtype= and rename="):
            publisher.rollback("m", to, settings=Settings(rename={"w": "x"}))
        future = publisher.publish_async(
            "m", trained(3), settings=Settings(rename="module.", wait="none")
        )
        future.result(SECONDS)
        assert worker.receive(SECONDS) is not None
        assert torch.equal(target["x"], trained(3)["module.w"])


def test_renamed_weights_are_verified_and_files_too(tmp_path: Path) -> None:
    target, path = {"w": torch.zeros(300_000)}, tmp_path / "m.safetensors"
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": target}, rename="module.", name="w") as one,
        Subscriber(publisher.address, {"m": path}, rename="module.", name="f") as other,
        Observer(publisher.address) as observer,
    ):
        for worker in (one, other):
            worker.start()
        publisher.wait_for_workers(2, SECONDS)
        publisher.publish("m", trained(1), timeout=SECONDS)
        for name in ("w", "f"):
            told = observer.verify(name, "m", SECONDS)
            assert (told.code, told.names, told.count, told.differing) == (None, 2, 2, 0)
            assert not told.unlike
        target["w"][5] += 1
        assert observer.verify("w", "m", SECONDS).differing == 2, "under both of its names"


def test_patterns_of_dtypes_are_of_the_names_that_are_published() -> None:
    target = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2)}
    weights = {"m.a": torch.ones(2), "m.b": torch.ones(2)}
    with Publisher() as publisher, Subscriber(publisher.address, {"x": target}) as worker:
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        for _ in range(2):
            publisher.publish(
                "x", weights, settings=Settings(rename="m.", dtype={"a": "bf16"}), timeout=SECONDS
            )
        assert values_of(target) == {"a": 1, "b": 1}
        with pytest.raises(StateError, match=r"'m\.a' matches no tensor"):
            publisher.publish("x", weights, settings=Settings(rename="m.", dtype={"m.a": "bf16"}))


def test_a_function_is_asked_once_for_each_name_while_nothing_changes() -> None:
    names: list[str] = []

    def rename(name: str) -> str:
        names.append(name)
        return name + ".z"

    target, weights = {"a.z.z": torch.zeros(2)}, {"a": torch.ones(2)}
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"x": target}, rename=rename) as worker,
    ):
        assert worker.wait_joined(SECONDS)
        publisher.prepare("x", weights, settings=Settings(rename=rename))
        for _ in range(3):
            publisher.publish_async("x", weights, settings=Settings(rename=rename))
            assert worker.receive(SECONDS) is not None
    assert sorted(names) == ["a", "a.z"]
    assert values_of(target) == {"a.z.z": 1}


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize(
    "longer",
    [
        lambda name: f"module.{name}",
        lambda name: f"{name}.ema",
        lambda name: f"{name}_ema",
        lambda name: f"deep.er.{name}",
    ],
)
def test_what_the_explanation_says_to_give_does_it(
    longer: Callable[[str], str], *, published: bool
) -> None:
    plain = policy()
    wrapped = {longer(name): tensor for name, tensor in plain.state_dict().items()}
    source, target = (wrapped, plain) if published else (plain, wrapped)
    layout = state_of(source).layout()
    first = check(layout, target)[0]
    (given,) = re.findall(r"rename=(.*) at ", first)
    became = asked(eval(given)).of(layout.names())  # noqa: S307 - ours
    assert check(layout.renamed(became), target) == []
