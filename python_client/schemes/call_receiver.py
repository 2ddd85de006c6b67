"""Receives versions that senders deliver by calls (torch RPC, Ray).

`init_on_receiver()` registers a receiver in this process's registry, by a weak reference. A version
that arrives before the receiver's `connect()` is kept until then. A greeting (the sender's first
version) is also kept if no receiver is registered yet.

If no receiver is registered, the called object (a collector, for example) gets the weights through
one of its `METHODS`, if it has any.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...bus.errors import ApplyError, TornError
from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes
from ..applying.applier import Update
from ..applying.reading import READING_SECONDS, ReadingLock
from .forward_passes import ForwardPasses
from .model import POLICY, CallResult, Outcome, hand_over, model_in, weights_of
from .receiver import Destination
from .transport import Receiver

MARGIN = 0.8  # fraction of the sender's timeout in which a worker must answer


class Call(NamedTuple):
    """The attributes of a call and of the version in it, as plain values."""

    key: str  # key of the sender's scheme and of all its copies
    model_id: str
    worker: int  # id of the worker that is called
    epoch: int
    version: int
    seconds: float  # seconds that the worker may take
    # whether this is the sender's first version, which is kept if no receiver exists yet
    greeting: bool
    strategy: str  # "tensordict" or "state_dict"


@dataclass(eq=False)
class IncomingVersion:
    """One version that has arrived in this process: its call, its layout and its data."""

    call: Call
    header: bytes
    data: Bytes
    wait: float  # seconds to wait for a receiver; 0 if that would block its creation
    timeout: float  # seconds to wait for readers of the model before writing
    answer: CallResult | None = None  # the result; None until it is known

    @classmethod
    def of(cls, call: Call, header: bytes, data: Bytes, *, waits: bool) -> "IncomingVersion":
        """Return the version of a call.

        `waits`: whether the thread that runs the call may wait for a receiver to be registered.
        """
        wait = call.seconds if waits and not call.greeting else 0.0
        return cls(call, header, data, wait, call.seconds)

    @property
    def key(self) -> tuple[int, int]:
        """The epoch and version number."""
        return self.call.epoch, self.call.version


class CallReceiver(Receiver):
    """A receiver that gets versions by calls, and applies them in the call or in `receive()`.

    A scheme that is a copy of the sender's accepts only greetings with the sender's key. A scheme
    that was made in this process (not `copied`) accepts all greetings.
    """

    def __init__(
        self,
        destination: Destination,
        key: str,
        copied: bool,
        *,
        worker: int | None,
        background: bool,
    ) -> None:
        self.key, self.copied, self.worker = key, copied, worker
        self.model_id = destination.subject.model_id or POLICY
        self._destination, self._background = destination, background
        self._turn = threading.Lock()  # held by the thread that applies a version
        self._changed = threading.Condition()
        self._connected = False
        self._waiting: IncomingVersion | None = None
        self._applied = (0, 0)  # epoch and number of the version that was applied last
        self._poller = 0  # id of the thread that called `connect()` or `receive()` last
        self._layout: Layout | None = None
        registry.register(self)

    # The scheme's side.

    def connect(self, worker_idx: int | None, timeout: float) -> None:
        """Apply the version kept for this receiver, if any, and accept later versions.

        Raises:
            ApplyError: The kept version cannot be applied.
        """
        self.worker = worker_idx
        if self._background:
            self._destination.guard(self._destination.lock, timeout)
        kept = registry.claim(self)
        with self._changed:
            self._connected, self._poller = True, threading.get_ident()
            early, self._waiting = self._waiting or kept, None
        if early is not None:
            early.timeout = timeout
            self._apply(early)

    def receive(self, timeout: float) -> Update | None:
        """Return the newest update, or None after `timeout` seconds.

        Without `background`, this call first applies a version that waits.
        """
        if self._background:
            return self._destination.arrivals.take(timeout)
        with self._changed:
            self._poller = threading.get_ident()
            self._changed.wait_for(lambda: self._waiting is not None, max(0.0, timeout))
            version, self._waiting = self._waiting, None
        if version is not None:
            self._apply(version)
        return self._destination.arrivals.take(0.0)

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[object]:
        """Return a context manager within which no version is applied."""
        return self._destination.reading(timeout)

    def close(self) -> None:
        """Unregister this receiver, and report that a waiting version failed."""
        registry.leave(self)
        with self._changed:
            version, self._waiting = self._waiting, None
        if version is not None:
            self._settle(version, CallResult("failed", "the receiver was shut down"))

    # The sender's side.

    def accept(self, version: IncomingVersion) -> CallResult:
        """Apply a version, or keep it for `connect()` or `receive()`; return the result."""
        with self._changed:
            if version.key <= self._applied:
                return _stale(version, self._applied)
            if not self._connected:
                return self._keep(version, version.wait, "connect")
            # If the thread that calls `connect()` and `receive()` runs this call, waiting for
            # `receive()` would deadlock. But that thread does not run the model now, so the version
            # can be applied here.
            if not self._background and self._poller != threading.get_ident():
                if fault := self._destination.fault(self._layout_of(version)):
                    return CallResult("failed", fault)
                return self._keep(version, version.timeout, "receive")
        with suppress(ApplyError):  # `version.answer` contains the error
            self._apply(version)
        return version.answer or CallResult("failed", "it was not applied")

    def _keep(self, version: IncomingVersion, seconds: float, method: str) -> CallResult:
        """Keep a version, instead of an older one, until the method named `method` applies it.

        Wait for that at most `seconds` seconds. Return the result, or else "staged".
        """
        if self._waiting is not None:
            if version.key <= self._waiting.key:
                return _stale(version, self._waiting.key)
            self._waiting.answer = _stale(self._waiting, version.key)
        self._waiting = version
        self._changed.notify_all()
        self._changed.wait_for(lambda: version.answer is not None, seconds)
        staged = f"it will be applied when the worker calls {method}()"
        return version.answer or CallResult("staged", staged)

    def _apply(self, version: IncomingVersion) -> None:
        # Apply a version that is newer than the applied one; store the result.
        with self._turn:
            if version.key <= self._applied:
                answer = _stale(version, self._applied)
            else:
                layout, timeout = self._layout_of(version), version.timeout
                try:
                    self._destination.deliver(*version.key, layout, version.data, timeout=timeout)
                except ApplyError as error:
                    intact = not isinstance(error, TornError)
                    self._settle(version, CallResult("failed", str(error), intact))
                    raise
                self._applied, answer = version.key, CallResult("applied")
        self._settle(version, answer)

    def _settle(self, version: IncomingVersion, answer: CallResult) -> None:
        with self._changed:
            version.answer = answer
            self._changed.notify_all()

    def _layout_of(self, version: IncomingVersion) -> Layout:
        if self._layout is None or self._layout.header != version.header:
            self._layout = Layout.parse(version.header)
        return self._layout


class Registry:
    """The receivers of this process, and the versions kept for receivers that do not exist yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._receivers: list[weakref.ref[CallReceiver]] = []
        self._kept: list[IncomingVersion] = []

    def register(self, receiver: CallReceiver) -> None:
        """Add a receiver."""
        with self._changed:
            alive = [known for known in self._receivers if known() is not None]
            self._receivers = [*alive, weakref.ref(receiver)]
            self._changed.notify_all()

    def leave(self, receiver: CallReceiver) -> None:
        """Remove a receiver."""
        with self._changed:
            self._receivers = [r for r in self._receivers if r() not in (None, receiver)]

    def find(self, version: IncomingVersion, timeout: float) -> CallReceiver | None:
        """Return a version's receiver; None if none is registered within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._search(version.call) is not None, timeout)
            return self._search(version.call)

    def find_or_keep(self, version: IncomingVersion) -> CallReceiver | None:
        """Return the receiver of a version, or None after keeping the version.

        For each sender, model and worker, only the newest version is kept. If `version` is older,
        this method sets its `answer`.
        """
        with self._changed:
            found = self._search(version.call)
            if found is None:
                same = [kept for kept in self._kept if kept.call[:3] == version.call[:3]]
                newest = max([version, *same], key=lambda kept: kept.key)
                if newest is not version:
                    version.answer = _stale(version, newest.key)
                self._kept = [*(kept for kept in self._kept if kept not in same), newest]
            return found

    def claim(self, receiver: CallReceiver) -> IncomingVersion | None:
        """Remove the versions kept for a receiver; return the newest, or None if there are none."""
        with self._changed:
            kept = [v for v in self._kept if v.call.key == receiver.key or not receiver.copied]
            mine = [v for v in kept if self._search(v.call) is receiver]
            exact = [v for v in mine if v.call.worker == receiver.worker]
            self._kept = [v for v in self._kept if v not in (exact or mine)]
        return max(exact or mine, key=lambda version: version.key, default=None)

    def _search(self, call: Call) -> CallReceiver | None:
        """Return the receiver that a call is for; None if no receiver matches, or several.

        Candidates are the receivers of the call's model that also have the call's key; if there are
        none, all receivers of the model. Among several candidates, the call's worker id decides.
        """
        known = [r for r in (ref() for ref in self._receivers) if r is not None]
        of_model = [r for r in known if r.model_id == call.model_id]
        keyed = [r for r in of_model if r.key == call.key]
        for group in (keyed, of_model):
            indexed = [r for r in group if r.worker == call.worker]
            if len(indexed or group) == 1:
                return (indexed or group)[0]
        return None


registry = Registry()


def _stale(version: IncomingVersion, newer: tuple[int, int]) -> CallResult:
    if (epoch := version.call.epoch) < newer[0]:
        text = f"the worker follows a newer sender, of epoch {newer[0]}; this one has epoch {epoch}"
        return CallResult("failed", f"{text}: let one sender serve a model")
    return CallResult("skipped", f"it has version {newer[1]}")


# Runs in a worker's process when a sender calls it.


def deliver(
    version: IncomingVersion,
    called_object: Callable[[], object | None],
    call_method: Callable[..., Outcome] = hand_over,
) -> Outcome:
    """Pass a version to its receiver in this process, and return the result.

    Args:
        version: The version.
        called_object: Returns the object that gets the weights if no receiver is registered.
        call_method: Calls a method of that object with the weights; see `hand_over`.
    """
    try:
        return _deliver(version, called_object, call_method)
    except Exception as error:  # RPC or Ray would print and pickle an error
        return CallResult("failed", f"{type(error).__name__}: {error}")


def _deliver(
    version: IncomingVersion,
    called_object: Callable[[], object | None],
    call_method: Callable[..., Outcome],
) -> Outcome:
    call, receiver = version.call, registry.find(version, 0.0)
    if receiver is None:
        owner = called_object()
        if (name := _method_of(owner, call.strategy)) is not None:
            return _hand_to_method(version, owner, name, call_method)
        if call.greeting:
            receiver = registry.find_or_keep(version)
            if receiver is None:
                kept = CallResult("staged", "kept until a receiver connects")
                return version.answer or kept
    deadline = time.monotonic() + version.wait
    receiver = receiver or registry.find(version, version.wait)
    if receiver is None:
        return CallResult(
            "failed",
            f"process {os.getpid()} has no receiver of model {call.model_id!r} for worker "
            f"{call.worker}: call init_on_receiver(model_id={call.model_id!r}, ..., "
            f"worker_idx={call.worker}) and connect() there, and keep the scheme",
        )
    version.wait = max(0.0, deadline - time.monotonic())
    return receiver.accept(version)


# Methods of a called object that get the weights if no receiver is registered. The first method
# that the object has is called. Values: the strategy that the method needs (None: any), the
# possible names of its parameter for the weights, and whether it expects a TensorDict.
METHODS = {
    "_update_weights_tensordict": ("tensordict", ("params",), True),
    "_update_weights_state_dict": ("state_dict", ("state_dict",), False),
    "update_policy_weights_": (None, ("policy_or_weights", "policy_weights"), True),
}


def _method_of(owner: object | None, strategy: str) -> str | None:
    """Return the object's first method in `METHODS` for this strategy; None if it has none."""
    for name, (needed, _, _) in METHODS.items():
        if needed in (None, strategy) and callable(getattr(owner, name, None)):
            return name
    return None


def _hand_to_method(
    version: IncomingVersion, owner: object, method: str, call_method: Callable[..., Outcome]
) -> Outcome:
    needed, names, nested = METHODS[method]
    weights = weights_of(version.header, version.data, nested=nested)
    pass_id = needed is None and version.call.model_id != POLICY  # POLICY is the method's default
    more = {"model_id": version.call.model_id} if pass_id else {}
    with _between_passes(owner, version.call.model_id, version.timeout):
        return call_method(getattr(owner, method), weights, names, version.timeout, **more)


_passes: "weakref.WeakKeyDictionary[Any, dict[str, ForwardPasses]]" = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _between_passes(owner: Any, model_id: str, timeout: float) -> AbstractContextManager[object]:
    """Return a context manager within which no forward pass of the owner's module runs."""
    try:
        model = model_in(owner, model_id)
        with _making:
            of_owner = _passes.setdefault(owner, {})
            passes = of_owner.setdefault(model_id, ForwardPasses(ReadingLock(), timeout))
    except (AttributeError, TypeError):  # no such model, or the owner cannot be weakly referenced
        return nullcontext()
    passes.guard(model)
    return passes.lock.writing(timeout, f"{type(owner).__name__} gets weights of {model_id}")
