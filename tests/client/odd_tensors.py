"""Tensors whose elements are not in memory, in each place that takes an address, each in a process.

    python odd_tensors.py

prints a JSON object: what came of each kind of tensor in each place. Torch is imported once; each
case runs in a child that is forked before there is any thread.
"""

import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import weightbus
from weightbus import Publisher, Settings, StateError, Subscriber
from weightbus.codecs.apply import Reader, copy_into
from weightbus.codecs.state import state_of, write_into
from weightbus.python_client.schemes.strategy import WeightStrategy

SECONDS = 30.0
CASE_SECONDS = 60  # until a child that hangs is ended
SHAPE = 4, 3
LARGE = 2**19, 3  # its storage is measured in every publish
NETWORK = Settings(shared_memory=False, ping=0.05)


class Wrapper(torch.Tensor):
    """A subclass without memory, of which torch knows no more."""

    @staticmethod
    def __new__(cls: Any) -> "Wrapper":
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - there is no other way
        made: Wrapper = make(cls, SHAPE, dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # state_dict() does that
            return args[0]
        raise NotImplementedError(func)


def whole(shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


def part() -> torch.Tensor:
    return whole((9000, 3))[4000:4004]


def resized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Give the storage of a tensor, which stays as it is, another size."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(SHAPE)


def placeholder() -> torch.Tensor:
    """Return what DeepSpeed's ZeRO 3 leaves of a parameter between two passes."""
    left: Any = nn.Parameter(torch.empty(0))
    left.ds_id, left.ds_numel, left.ds_shape = 7, 12, torch.Size(SHAPE)
    return left


def ragged(layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


KINDS: Mapping[str, Callable[[], torch.Tensor]] = {
    "freed": lambda: resized(whole(), 0),
    "freed, from the middle": lambda: resized(part(), 0),
    "short": lambda: resized(whole(LARGE), 8),
    "short, not contiguous": lambda: resized(whole(LARGE).t(), 8),
    "fake": fake,
    "masked": lambda: masked_tensor(torch.ones(SHAPE), torch.ones(SHAPE, dtype=torch.bool)),
    "wrapper": Wrapper,
    "two tensors": lambda: TwoTensor(torch.ones(SHAPE), torch.ones(SHAPE)),
    "functional": lambda: vars(torch)["_to_functional_tensor"](torch.ones(SHAPE)),
    "zeros": lambda: vars(torch)["_efficientzerotensor"](SHAPE),
    "nested": lambda: ragged(torch.strided),
    "jagged": lambda: ragged(torch.jagged),
    "sparse": lambda: torch.ones(SHAPE).to_sparse(),
    "compressed": lambda: torch.ones(SHAPE).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(SHAPE), 1.0, 0, torch.qint8),
    "meta": lambda: torch.ones(SHAPE, device="meta"),
    "ZeRO 3": placeholder,
}


# Kinds that their layout or dtype gives away, without a look at memory: few places are enough.
SEEN = ("two tensors", "nested", "jagged", "sparse", "compressed", "quantised")
FEW = ("published", "published in a module", "target", "target in a module")


def module(**tensors: torch.Tensor) -> nn.Module:
    made = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            made.register_parameter(name, tensor)
        else:
            made.register_buffer(name, tensor)
    return made


# As a source.


def publish(weights: object) -> None:
    with Publisher("tcp://127.0.0.1:0", settings=NETWORK) as publisher:
        target = {"w": torch.zeros(SHAPE)}
        with Subscriber(publisher.address, {"m": target}, settings=NETWORK).start():
            publisher.wait_for_workers(1, SECONDS)  # so that it is hashed while it is copied
            publisher.publish("m", weights, timeout=SECONDS)


def prepare(weights: object) -> None:
    with Publisher("tcp://127.0.0.1:0") as publisher:
        publisher.prepare("m", weights)


def as_scheme(weights: object) -> None:
    for names in ("tensordict", "state_dict"):
        strategy = WeightStrategy(names)
        strategy.apply_weights({"w": torch.zeros(SHAPE)}, strategy.tensors_of(weights))


SOURCES: Mapping[str, Callable[[torch.Tensor], object]] = {
    "published": lambda odd: publish({"w": odd}),
    "published in a module": lambda odd: publish(module(w=odd)),
    "published in a mapping of mappings": lambda odd: publish({"a": {"w": odd}}),
    "published in a TensorDict": lambda odd: publish(TensorDict({"w": odd}, [])),
    "prepared": lambda odd: prepare({"w": odd}),
    "made resident": lambda odd: weightbus.resident({"w": odd}),
    "sent by a scheme": lambda odd: as_scheme({"w": odd}),
    "sent by a scheme in a module": lambda odd: as_scheme(module(w=odd)),
}

# As a target.


def worker(target: object, **settings: Any) -> None:
    with Publisher("tcp://127.0.0.1:0") as publisher:
        given = Settings(ping=0.05, **settings)
        with Subscriber(publisher.address, {"m": target}, settings=given) as subscriber:
            weights = {name: whole() for name in (("w", "x") if "x" in names(target) else "w")}
            publisher.publish_async("m", weights, timeout=SECONDS)
            if subscriber.receive(SECONDS) is None:
                raise TimeoutError("nothing came")


def names(target: Any) -> Any:
    return dict(target.named_buffers()) if isinstance(target, nn.Module) else target


def load(target: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with Publisher("tcp://127.0.0.1:0", state=folder) as publisher:
            publisher.publish("m", {"w": whole()}, timeout=SECONDS)
        weightbus.load(folder, "m", into=target)


def scheme_into(target: object, *, inplace: bool) -> None:
    for form in ("tensordict", "state_dict"):
        strategy = WeightStrategy(form)
        strategy.apply_weights(target, {"w": whole()}, inplace=inplace)


TARGETS: Mapping[str, Callable[[torch.Tensor], None]] = {
    "target": lambda odd: worker({"w": odd}),
    "target beside another": lambda odd: worker({"w": odd, "x": KINDS["freed"]()}),
    "target in a module": lambda odd: worker(module(w=odd)),
    "target in a TensorDict": lambda odd: worker(TensorDict({"w": odd}, [])),
    "resident target": lambda odd: worker({"w": odd}, resident=True),
    "target of a sole writer": lambda odd: worker({"w": odd}, sole_writer=True),
    "loaded into": lambda odd: load({"w": odd}),
    "loaded into a module": lambda odd: load(module(w=odd)),
    "target of a scheme": lambda odd: scheme_into({"w": odd}, inplace=True),
    "target of a scheme in a module": lambda odd: scheme_into(module(w=odd), inplace=True),
    "target of a scheme that gives new tensors": lambda odd: scheme_into(
        module(w=odd), inplace=False
    ),
}

# Between two versions.


def expect_fault(does: Callable[[], object]) -> None:
    try:
        does()
    except (StateError, weightbus.ApplyError) as error:
        if "w: its " not in str(error):  # of extra state it is the last part of a name
            raise
        return
    raise AssertionError("nothing was said")


def between_publishes(make: Callable[[], torch.Tensor], nbytes: int, weights: Any) -> None:
    tensor = make()
    given, full = weights(tensor), tensor.untyped_storage().nbytes()
    with Publisher("tcp://127.0.0.1:0") as publisher:
        for turn in range(3):
            publisher.publish("m", given, timeout=SECONDS)
            resized(tensor, nbytes)
            expect_fault(lambda: publisher.publish("m", given, timeout=SECONDS))
            expect_fault(lambda: publisher.publish("m", given, timeout=SECONDS))
            resized(tensor, full)
            tensor.fill_(turn)
        publisher.publish("m", given, timeout=SECONDS)


def between_versions(
    make: Callable[[], torch.Tensor], nbytes: int, target: Any, **settings: Any
) -> None:
    tensor = make()
    given, full = target(tensor), tensor.untyped_storage().nbytes()
    values = {"w": whole(tuple(tensor.shape))}
    with Publisher("tcp://127.0.0.1:0") as publisher:
        how = Settings(ping=0.05, **settings)
        with Subscriber(publisher.address, {"m": given}, settings=how) as subscriber:

            def bring() -> None:
                values["w"] += 1
                publisher.publish_async("m", values, timeout=SECONDS)
                if subscriber.receive(SECONDS) is None:
                    raise TimeoutError("nothing came")

            for _ in range(2):
                bring()  # once for each of the buffers that versions arrive in
                bring()
                resized(tensor, nbytes)
                expect_fault(bring)
                resized(tensor, full)
            bring()
            assert torch.equal(tensor, values["w"])


def mapping(tensor: torch.Tensor) -> object:
    return {"w": tensor}


def in_module(tensor: torch.Tensor) -> object:
    return module(w=tensor)


def expect_short(does: Callable[[], object]) -> None:
    """Do it while each storage says that it has less memory, at the address where it was.

    What an allocator would give that address to again is not for a test to decide.
    """
    measured = torch.UntypedStorage.nbytes
    torch.UntypedStorage.nbytes = lambda _: 8  # type: ignore[method-assign,assignment]
    try:
        expect_fault(does)
    finally:
        torch.UntypedStorage.nbytes = measured  # type: ignore[method-assign]


def published_at_its_address() -> None:
    tensor = whole(LARGE)
    state = state_of({"w": tensor})
    assert state_of({"w": tensor}, state.form).form is state.form
    expect_short(lambda: state_of({"w": tensor}, state.form))


def applied_at_its_address() -> None:
    state, target = state_of({"w": whole(LARGE)}), {"w": torch.zeros(LARGE)}
    data = np.empty(state.layout().nbytes, np.uint8)
    write_into(state, state.layout(), data)
    reader = Reader(state.layout(), data)
    reader.copy_into(target)
    expect_short(lambda: reader.copy_into(target))
    reader.copy_into(target)


class Extra(nn.Module):
    """A module whose extra state is freed, which torch would copy from address null."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = whole()

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"w": self.kept}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.kept = state["w"]


def freed_extra_state() -> None:
    strategy, target = WeightStrategy("tensordict"), Extra()
    weights = strategy.extract_weights(Extra())
    strategy.apply_weights(target, weights)
    resized(target.kept, 0)
    expect_fault(lambda: strategy.apply_weights(target, weights))
    expect_fault(lambda: state_of(strategy.tensors_of(target)))


def freed_scratch() -> None:
    """A buffer that no version has, in a module that is given new tensors."""
    target = module(x=torch.zeros(2))
    target.register_buffer("w", whole(), persistent=False)
    resized(target.get_buffer("w"), 0)
    strategy, weights = WeightStrategy("state_dict"), {"x": torch.ones(2)}
    expect_fault(lambda: strategy.apply_weights(target, weights, inplace=False))
    assert not target.get_buffer("x").any(), "all of it or nothing"
    strategy.apply_weights(target, weights)
    assert target.get_buffer("x").all()


def is_taken() -> None:
    """What has memory is taken, however it lies there."""
    base = whole((6, 4))
    parameter: Any = nn.Parameter(whole())
    parameter.ds_id, parameter.ds_numel = 7, 12  # gathered
    sound = {
        "w": base.t()[1:, 2:],
        "x": base[:0],
        "y": torch.empty(0),
        "z": base[5, 3],
        "u": whole((1, 3)).expand(4, 3),
        "p": parameter,
    }
    state = state_of(sound)
    data = np.empty(state.layout().nbytes, np.uint8)
    write_into(state, state.layout(), data)
    into = {name: torch.zeros(tensor.shape) for name, tensor in sound.items()}
    copy_into(state.layout(), data, into)
    assert all(torch.equal(into[name], sound[name]) for name in sound)


BETWEEN: Mapping[str, Callable[[], None]] = {
    f"{role} {where}, {what} in between": (
        lambda does=does, make=make, nbytes=nbytes, put=put: does(make, nbytes, put)  # type: ignore[misc]
    )
    for role, does in (("published", between_publishes), ("applied", between_versions))
    for where, put in (("in a mapping", mapping), ("in a module", in_module))
    for what, make, nbytes in (
        ("freed", whole, 0),
        ("a freed part", part, 0),
        ("cut short", lambda: whole(LARGE), 2**21),
    )
}


def outcome(does: Callable[[], object]) -> str:
    try:
        does()
    except (StateError, weightbus.ApplyError) as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        return f"unexpected: {error!r}"
    return "done"


def in_a_child(does: Callable[[], object]) -> str:
    """Return what came of a case; of a child that a signal has ended, which."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(CASE_SECONDS)
        os.write(writes, outcome(does)[:4000].encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else text


def _try(does: Callable[[Any], object], make: Callable[[], object]) -> object:
    return does(make())


def cases() -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        f"{kind} | {place}": partial(_try, does, make)
        for kind, make in KINDS.items()
        for place, does in (*SOURCES.items(), *TARGETS.items())
        if kind not in SEEN or place in FEW
    }
    alone: dict[str, Callable[[], object]] = {
        "published at its address": published_at_its_address,
        "applied at its address": applied_at_its_address,
        "freed extra state": freed_extra_state,
        "freed scratch": freed_scratch,
        "is taken": is_taken,
    }
    return {**found, **{f"between | {name}": does for name, does in BETWEEN.items()}, **alone}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:]
    chosen = {name: does for name, does in cases().items() if not wanted or name in wanted}
    json.dump({name: in_a_child(does) for name, does in chosen.items()}, sys.stdout)
