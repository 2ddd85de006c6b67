"""Everything on the documented pages exists, on every scheme, and does what they say.

The table is `documented_api.py`. Its rows are compared with our signatures: a documented call must
be possible, and mean the same. What ours take in addition must have defaults.
"""

import inspect
import logging
import pickle
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from weightbus import torchrl
from weightbus.bus.errors import TornError
from weightbus.codecs.state import state_of, write_into
from weightbus.python_client.schemes import transport
from weightbus.python_client.schemes.model import ModelReference
from weightbus.python_client.schemes.receiver import Destination
from weightbus.python_client.schemes.scheme import Scheme
from weightbus.python_client.schemes.sender import Sources
from weightbus.tests.schemes.documented_api import (
    BOTH_VINTAGES,
    DOCUMENTED,
    REQUIRED,
    SCHEMES,
    Member,
    Parameters,
)
from weightbus.torchrl import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSender,
    WeightStrategy,
    WeightSyncScheme,
    ZMQWeightSyncScheme,
    register_weight_sync_backend,
)

PAGES = Path(__file__).parents[3] / "shared" / "reference" / "documented-api"
BUS = [ZMQWeightSyncScheme, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme]


def values(parameters: Parameters) -> dict[str, Any]:
    """Return something to pass for each parameter that has a name."""
    return {name: object() for name, _ in parameters if not name.startswith("*")}


@pytest.mark.parametrize("member", [*DOCUMENTED, *BOTH_VINTAGES], ids=str)
def test_every_documented_member_exists(member: Member) -> None:
    kind = getattr(torchrl, member.of)
    found = inspect.getattr_static(kind, member.name)
    if member.kind == "property":
        assert isinstance(found, property)
        return
    if member.kind == "hook":
        assert inspect.isfunction(found)
        return
    assert isinstance(found, classmethod) == (member.kind == "classmethod")
    signature = inspect.signature(getattr(kind, member.name))
    me = () if member.kind == "classmethod" else (object(),)
    by_position = values(member.parameters)
    keywords = values(member.keywords)
    for bound in (
        signature.bind(*me, *by_position.values(), **keywords),
        signature.bind(*me, **by_position, **keywords),
    ):
        took = {n: v for n, v in bound.arguments.items() if n in by_position or n in keywords}
        flat = {**took, **bound.arguments.get("kwargs", {})}
        assert flat == {**by_position, **keywords}
    ours = signature.parameters
    for name, default in (*member.parameters, *member.keywords):
        if default is not REQUIRED:
            assert ours[name].default == default, f"{name}={ours[name].default!r}"
    if any(name == "**kwargs" for name, _ in (*member.parameters, *member.keywords)):
        signature.bind(*me, **by_position, **keywords, whatever_a_collector_passes=1)
    if any(name == "*args" for name, _ in member.parameters):
        signature.bind(*me, object(), object())


@pytest.mark.skipif(not PAGES.is_dir(), reason="the documented pages are not beside this checkout")
@pytest.mark.parametrize("page", ["NoWeightSyncScheme", "RPCWeightSyncScheme", "WeightSender"])
def test_the_table_is_the_pages(page: str) -> None:
    text = (PAGES / f"{page}.txt").read_text()
    methods = re.findall(r"^(?:- )?(?:classmethod )?([a-z_]+)\(", text, re.M)
    properties = re.findall(r"^property ([a-z_]+):", text, re.M)
    table = {(m.name, m.kind == "property") for m in DOCUMENTED if m.of == page}
    assert {(n, False) for n in methods} | {(n, True) for n in properties} == {
        row for row in table if row[0] != "__init__"
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_what_no_original_has_is_on_every_scheme(name: str) -> None:
    kind = getattr(torchrl, name)
    for method in ("send", "send_async"):
        assert inspect.signature(getattr(kind, method)).parameters["timeout"].default is None
    for member in ("wait_async", "versions", "receipt", "reading", "from_backend"):
        assert hasattr(kind, member)
    assert inspect.getattr_static(kind, "initialized_on_sender").fset is None
    assert inspect.getattr_static(kind, "synchronized_on_sender").fset is not None


def test_the_older_vintage_is_in_one_place_of_which_the_newer_knows_nothing() -> None:
    newer = {member.name for member in DOCUMENTED if member.of == "NoWeightSyncScheme"}
    older = {member.name for member in BOTH_VINTAGES} - newer
    assert older >= {"init_on_worker", "get_sender", "get_receiver", "create_sender"}
    assert older <= vars(WeightSyncScheme).keys()
    assert not older & set(dir(Scheme))


# Construction.


@pytest.mark.parametrize("kind", [*BUS, NoWeightSyncScheme])
def test_a_new_scheme(kind: type[Any]) -> None:
    scheme = kind(strategy="state_dict")
    assert scheme.strategy_str == scheme.strategy == "state_dict"
    assert scheme.timeout == 60.0
    assert scheme.model_id is scheme.context is scheme.model is scheme.weights is None
    assert scheme.worker_idx is scheme.receipt is scheme.receiver_transport is None
    assert scheme.shared_transport is None
    assert scheme.sender_transports == scheme.versions() == {}
    assert not scheme.initialized_on_sender
    assert not scheme.initialized_on_receiver
    assert not scheme.synchronized_on_sender
    assert not scheme.synchronized_on_receiver
    assert kind().strategy == "tensordict"
    with pytest.raises(ValueError, match=r"Unknown strategy: x\. Must be 'tensordict' or 'state"):
        kind(strategy="x")
    with pytest.raises(ValueError, match="seconds above 0"):
        kind(timeout=0)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("none", NoWeightSyncScheme),
        ("direct", NoWeightSyncScheme),
        ("shared", SharedMemWeightSyncScheme),
        ("thread", SharedMemWeightSyncScheme),
        ("process", MultiProcessWeightSyncScheme),
        ("multiprocessing", MultiProcessWeightSyncScheme),
        ("distributed", DistributedWeightSyncScheme),
        ("zmq", ZMQWeightSyncScheme),
    ],
)
def test_from_backend(backend: str, kind: type[Any]) -> None:
    scheme = WeightSyncScheme.from_backend(backend, strategy="state_dict")
    assert type(scheme) is kind
    assert scheme.strategy == "state_dict"


def test_backends_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_registered", {})

    @register_weight_sync_backend("mine")
    class Mine(NoWeightSyncScheme):
        pass

    assert type(WeightSyncScheme.from_backend("mine")) is Mine
    with pytest.raises(ValueError, match=r"Unsupported weight-sync backend 'x'\. Expected.*'mine'"):
        WeightSyncScheme.from_backend("x")


# Order of calls, and exact errors.


@pytest.mark.parametrize("kind", BUS)
def test_calls_before_their_time(kind: type[Any]) -> None:
    scheme = kind()
    for call, error in [
        (lambda: scheme.connect(), "Neither init_on_sender nor init_on_receiver have been called."),
        (lambda: scheme.send(), "Must be initialized on sender before sending weights"),
        (lambda: scheme.receive(), "Must be initialized on receiver before receiving weights"),
        (lambda: scheme.apply_weights({}), "apply_weights() called before init_on_receiver has"),
        (lambda: scheme.reading(), "reading() needs a receiver"),
        (
            lambda: scheme.get_sender(),
            "Must call init_on_sender() before get_sender() on " + kind.__name__,
        ),
        (
            lambda: scheme.get_receiver(),
            "Must call init_on_worker() before get_receiver() on " + kind.__name__,
        ),
        (lambda: scheme.create_sender().send(), "Must be initialized on sender before sending"),
    ]:
        with pytest.raises(RuntimeError, match=re.escape(error)):
            call()
    assert scheme.create_receiver().receive() is False
    with pytest.raises(ValueError, match="No model registered"):
        scheme.create_receiver().apply_weights({})


@pytest.mark.parametrize("kind", BUS)
def test_calls_on_the_wrong_side(kind: type[Any]) -> None:
    net = nn.Linear(2, 2)
    sender = kind()
    sender.init_on_sender(model_id="policy", model=net, num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))  # noqa: S301
    assert not receiver.initialized_on_sender
    assert receiver.model_id == "policy"
    assert receiver.address == sender.address
    try:
        with pytest.raises(RuntimeError, match="Must be synchronized on sender before sending"):
            sender.send()
        with pytest.raises(RuntimeError, match="Cannot specify worker_idx on sender side"):
            sender.connect(worker_idx=0)
        with pytest.raises(RuntimeError, match="Worker index cannot be set after initialization"):
            sender.worker_idx = 0
        sender.connect()
        assert sender.synchronized_on_sender
        with pytest.raises(RuntimeError, match=r"Cannot synchronize weights on sender twice\."):
            sender.connect()
        with pytest.raises(RuntimeError, match=r"apply_weights\(\) called on a sender side\."):
            sender.apply_weights({})
        assert sender.get_sender() is sender.get_sender()
        assert isinstance(sender.get_sender(), WeightSender)
        with pytest.raises(RuntimeError, match="and shared transport cannot be used together"):
            sender.shared_transport = sender.sender_transports[0]

        receiver.init_on_receiver(model_id="policy")
        with pytest.raises(ValueError, match="worker_idx must be provided via context or kwargs"):
            receiver.connect()
        with pytest.raises(ValueError, match="No model registered"):
            receiver.apply_weights({})
        receiver.model = target = nn.Linear(2, 2)
        receiver.apply_weights(net.state_dict())
        assert torch.equal(target.weight, net.weight)
        with pytest.raises(RuntimeError, match="Must be synchronized on receiver before receiving"):
            receiver.receive()
        with pytest.raises(RuntimeError, match="Cannot specify weights on receiver side"):
            receiver.connect(weights={})
        receiver.connect(worker_idx=0)
        assert receiver.worker_idx == 0
        assert receiver.synchronized_on_receiver
        with pytest.raises(RuntimeError, match=r"Cannot synchronize weights on sender twice\."):
            receiver.connect()
        assert receiver.receive(20.0) is not None, "else they might come at any moment"
        receiver.apply_weights({k: v + 1 for k, v in net.state_dict().items()})
        assert torch.equal(target.weight, net.weight + 1)
    finally:
        receiver.shutdown()
        sender.shutdown()


@pytest.mark.parametrize("kind", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "Either params_map, model_id + context or model/weights + devices must be provided."),
        ({"model_id": "m"}, "pipes must be provided via context or kwargs"),
        ({"params_map": []}, "params_map must be a dict[int, TensorDictBase]"),
        ({"params_map": {}, "model": 1}, "model_id, weights, and model cannot be provided if"),
        ({"params_map": {}, "context": 1}, "context cannot be provided if params_map"),
        ({"params_map": {}, "devices": []}, "devices cannot be provided if params_map"),
        ({"params_map": {}, "num_workers": 1}, "num_workers cannot be provided if params_map"),
        ({"context": 1}, "model_id must be provided if context is provided"),
        ({"model_id": "m", "context": 1, "model": 1}, "model cannot be provided if context"),
        ({"model_id": "m", "context": 1, "devices": []}, "devices cannot be provided if context"),
    ],
)
def test_what_may_be_given_together(kind: type[Any], given: dict[str, Any], error: str) -> None:
    scheme = kind()
    with pytest.raises(ValueError, match=re.escape(error)):
        scheme.init_on_sender(**given)
    assert not scheme.initialized_on_sender


@pytest.mark.parametrize("kind", BUS)
def test_the_number_of_workers_follows_from_what_is_given(kind: type[Any]) -> None:
    weights = {"a": torch.zeros(1)}
    for given in (
        {"params_map": {0: weights, 1: weights}},
        {"weights": weights, "devices": ["cpu", "cpu"]},
        {"weights": weights, "num_workers": 2, "device_map_fn": lambda _, w: w},
    ):
        scheme = kind()
        scheme.init_on_sender(**given)
        assert sorted(scheme.sender_transports) == [0, 1]
        scheme.shutdown()


def test_weights_are_mapped_for_each_device() -> None:
    given = {"weights": 10.0, "devices": ["cpu", "cpu"], "device_map_fn": lambda at, w: w + at}
    assert Sources.taken(given, None) == Sources(None, {0: 10.0, 1: 11.0}, 2)


# Names that older imports need.


def test_every_name_that_torchrl_has_is_there() -> None:
    theirs = pytest.importorskip("torchrl.weight_update")
    assert [name for name in theirs.__all__ if not hasattr(torchrl, name)] == []
    assert set(get_args(theirs.WeightSyncBackend)) <= set(get_args(torchrl.WeightSyncBackend))
    for backend in get_args(torchrl.WeightSyncBackend):
        assert isinstance(WeightSyncScheme.from_backend(backend), WeightSyncScheme)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SharedMemTransport", ({"policy": {}},)),
        ("SharedMemTransport", ()),
        ("DistributedTransport", (object(), 1)),
        ("MPTransport", (object(), object())),
    ],
)
def test_a_transport_that_leads_nowhere_here_says_what_to_write(
    name: str, given: tuple[Any, ...]
) -> None:
    with pytest.raises(TypeError, match=rf"{name}.*(sender_transports|MPTransport\(pipe)"):
        getattr(torchrl, name)(*given)


def test_the_distributed_scheme_is_made_as_torchrls_is() -> None:
    scheme = DistributedWeightSyncScheme("gloo", False, 30.0)
    assert (scheme.backend, scheme.sync, scheme.timeout) == ("gloo", False, 30.0)
    assert scheme.strategy == "tensordict"
    assert DistributedWeightSyncScheme().timeout == 3600.0
    with pytest.raises(ValueError, match="'mpi'"):
        DistributedWeightSyncScheme("mpi")
    with pytest.raises(TypeError, match=r"pipe to .*workers join at the scheme's address"):
        scheme.create_transport((object(), 1))


@pytest.mark.parametrize("name", SCHEMES)
def test_what_older_tests_look_at_is_there(name: str) -> None:
    scheme: Any = getattr(torchrl, name)()
    assert scheme._sender is scheme._receiver is None  # noqa: SLF001
    assert scheme._initialized_on_sender is scheme._initialized_on_worker is False  # noqa: SLF001
    if name in ("RayWeightSyncScheme", "RayModuleTransformScheme"):
        return
    scheme.init_on_sender("policy", workers=["w"], num_workers=1)
    assert scheme._sender is scheme.get_sender()  # noqa: SLF001
    assert scheme._initialized_on_sender is True  # noqa: SLF001
    copy = pickle.loads(pickle.dumps(scheme))  # noqa: S301
    assert copy._sender is None  # noqa: SLF001
    copy.init_on_receiver(model_id="policy", model=nn.Linear(1, 1), worker_idx=0)
    assert copy._receiver is copy.get_receiver()  # noqa: SLF001
    assert copy._initialized_on_worker is True  # noqa: SLF001
    copy.shutdown()
    scheme.shutdown()


# Preparing weights.


class Context:
    """A context by both of its ways to hand out models."""

    def __init__(self) -> None:
        self.policy, self.other = nn.Linear(1, 1), nn.Linear(2, 2)
        self._fallback_policy = nn.Linear(3, 3)

    def get_model(self, model_id: str) -> nn.Module:
        """Return a model that is not an attribute."""
        return {"hidden": self.other}[model_id]


def test_prepare_weights_takes_whatever_a_user_gives() -> None:
    scheme, strategy, context = ZMQWeightSyncScheme(), WeightStrategy("state_dict"), Context()

    def prepared(weights: Any, model_id: str = "policy", where: Any = context) -> Any:
        return scheme.prepare_weights(weights, model_id, strategy, where)

    own = context.policy.weight.data_ptr()
    assert prepared(None)["weight"].data_ptr() == own
    assert prepared("policy", "m")["weight"].data_ptr() == own
    assert prepared(context.policy)["weight"].data_ptr() == own
    assert prepared(None, "hidden")["weight"].shape == (2, 2)
    as_they_are = {"a": torch.zeros(1)}
    assert prepared(as_they_are) is as_they_are
    assert prepared(None, where=None) is None
    with pytest.raises(ValueError, match="Cannot resolve string reference 'x' without context"):
        prepared("x", where=None)
    with pytest.raises(AttributeError, match="'env': a Context has no attribute 'env'"):
        prepared("env")
    del context.policy
    assert prepared(None)["weight"].shape == (3, 3)  # the fallback policy


def test_a_dict_of_tensors_is_prepared_as_a_tensordict() -> None:
    scheme, strategy = ZMQWeightSyncScheme(), WeightStrategy("tensordict")

    def prepared(weights: Any) -> Any:
        return scheme.prepare_weights(weights, "policy", strategy)

    by_name = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
    for given in (by_name, {"0": {"weight": by_name["0.weight"]}, "1.bias": by_name["1.bias"]}):
        weights = prepared(given)
        assert isinstance(weights, TensorDict)
        assert weights["0", "weight"].data_ptr() == by_name["0.weight"].data_ptr()
    clash = {"a": by_name["0.bias"], "a.b": by_name["1.bias"]}
    for other in ({"a": np.zeros(1)}, {"a": object()}, clash):
        assert prepared(other) is other, "no TensorDict could hold it, or would need torch"


class Cache(Context):
    """A context of the older API, which keeps weights ready."""

    cached: Any = None
    policy_device: Any

    def get_cached_weights(self, model_id: str) -> Any:
        """Return them."""
        return {"policy": self.cached}.get(model_id)


@pytest.mark.parametrize("kind", [*BUS, RPCWeightSyncScheme])
def test_cached_weights_of_a_context_come_before_its_model(kind: type[Any]) -> None:
    scheme, strategy, context = kind(), WeightStrategy("tensordict"), Cache()

    def prepared(weights: Any = None, model_id: str = "policy") -> Any:
        return scheme.prepare_weights(weights, model_id, strategy, context)

    assert prepared()["weight"].shape == (1, 1)
    context.cached = TensorDict(kept=torch.ones(1))
    assert prepared() is context.cached
    assert prepared(model_id="hidden")["weight"].shape == (2, 2)
    assert prepared(context.policy)["weight"].shape == (1, 1), "what was given comes first"
    context.policy_device = [torch.device("cpu")]  # as TorchRL's have, whose caches may be old
    assert prepared()["weight"].shape == (1, 1)


# Applying, where a context has its part in it.


def test_a_version_that_a_context_does_not_take_leaves_none_running_until_the_next() -> None:
    class Refusing(Context):
        refuses = True

        def update_policy_weights_(self, **_: Any) -> None:
            if self.refuses:
                raise KeyError("no")

    subject, context = ModelReference(), Refusing()
    subject.context, subject.model_id = context, "policy"
    strategy = WeightStrategy("state_dict")
    destination = Destination(subject, strategy, strict=True, cast=False)
    state = state_of(nn.Linear(1, 1).state_dict())
    layout = state.layout()
    data = np.empty(layout.nbytes, np.uint8)
    write_into(state, layout, data)
    with pytest.raises(TornError, match=r"no version runs until.*no"):
        destination.deliver(1, 1, layout, data, timeout=1.0)
    assert destination.arrivals.newest is None
    with pytest.raises(TornError), destination.reading(1.0):
        pass
    context.refuses = False
    destination.deliver(1, 1, layout, data, timeout=1.0)
    with destination.reading(1.0):
        assert destination.arrivals.newest is not None


# The scheme that does nothing.


def test_no_sync_does_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scheme, net = NoWeightSyncScheme(), nn.Linear(2, 2)
    scheme.init_on_sender("policy", model=net, num_workers=2)
    for _ in range(2):
        assert scheme.connect() is None  # type: ignore[func-returns-value]
    assert scheme.synchronized_on_sender
    with caplog.at_level(logging.DEBUG, "weightbus"):
        assert scheme.send(net, worker_ids=[0, 5]) is None  # type: ignore[func-returns-value]
    assert "NoWeightSyncScheme sends nothing" in caplog.text
    sender = scheme.get_sender()
    sender.send(net)
    sender.send_async()
    with pytest.raises(RuntimeError, match="while a previous send is pending"):
        sender.send_async()
    sender.wait_async()
    with pytest.raises(RuntimeError, match="No async send is pending"):
        sender.wait_async()
    with pytest.raises(TypeError, match="takes no weights"):
        scheme.connect(weights=net)
    transport: Any = scheme.create_transport()
    transport.send_weights("policy", net)
    assert transport.receive_weights() is None
    assert transport.check_connection()
    scheme.shutdown()
    scheme.shutdown()


def test_no_sync_on_a_receiver() -> None:
    scheme, net = NoWeightSyncScheme(), nn.Linear(2, 2)
    scheme.init_on_receiver(model_id="policy", model=net, worker_idx=0)
    scheme.connect(worker_idx=0)
    scheme.connect(worker_idx=0)
    assert scheme.receive() is None  # type: ignore[func-returns-value]
    assert scheme.get_receiver().receive() is False
    with scheme.reading():
        scheme.apply_weights({k: torch.ones_like(v) for k, v in net.state_dict().items()})
    assert net.weight.detach().unique().tolist() == [1.0]
    assert scheme.model is net


def test_no_sync_refuses_a_model_without_weights() -> None:
    scheme, net = NoWeightSyncScheme(), nn.Linear(2, 2, device="meta")
    scheme.init_on_receiver(model_id="policy", model=net, worker_idx=3)
    with pytest.raises(RuntimeError, match=r"worker 3: .*meta device.*policy_factory"):
        scheme.connect()
    assert not scheme.synchronized_on_receiver


# TorchRL.


def test_torchrl_takes_our_schemes_for_its_own() -> None:
    theirs = pytest.importorskip("torchrl.weight_update").WeightSyncScheme
    scheme = ZMQWeightSyncScheme()
    assert isinstance(scheme, theirs)
    assert isinstance(pickle.loads(pickle.dumps(scheme)), theirs)  # noqa: S301
    assert not isinstance(object(), theirs)
