"""Applies versions between forward passes of a receiver's model, never during one.

A collector may call its policy while another thread wants to apply a version. The apply takes a
lock (`reading.py`); hooks on the module make each forward pass hold the lock as a reader.

Hooks belong to one process and one receiver. In deep copies and pickles of the module, functions
that do nothing replace the hooks; such a pickle can be loaded without weightbus.
"""

import asyncio
import inspect
import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from types import FrameType
from typing import Any, cast

from ...codecs.state import is_module
from ..applying.reading import READING_SECONDS, Holder, Reading, ReadingLock

log = logging.getLogger("weightbus.schemes")

# longest wait for passes that began before the hooks were registered, in seconds
EARLIER_SECONDS = 1.0

_nothing = nullcontext().__exit__  # accepts any arguments and returns None


def _none() -> None:
    """Return None instead of the running version, which a forward pass does not need."""


class _Hook(partial[None]):
    """A hook that does nothing in copies of its module.

    A hook is a `partial`, because calling a `partial` adds no Python frame for torch.compile to
    trace.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class ForwardPasses:
    """Makes each forward pass of a module hold a lock.

    Args:
        lock: The lock that an apply takes exclusively.
        timeout: Seconds that a pass waits for an apply before it raises TimeoutError.
    """

    def __init__(self, lock: ReadingLock, timeout: float = READING_SECONDS) -> None:
        self.lock, self._timeout = lock, timeout
        # the readers of the running passes, by thread id
        self._inside: dict[int, list[Reading[None]]] = {}
        self._own = threading.local()  # `last`: a reader that this thread can reuse
        self._hooked: list[weakref.ref[Any]] = []  # the modules on which hooks are registered
        self._handles: list[Any] = []
        self._turn = threading.Lock()

    def guard(self, model: object) -> None:
        """Register hooks on a module, remove the previous hooks, and wait for running passes.

        Without TorchRL, or if the model is not a module, no hooks are registered: then only the
        user's own code calls the model, and that code can use `reading()`.
        """
        with self._turn:
            guarded = is_module(model) and "torchrl" in sys.modules
            modules = [*_modules_to_hook(model)] if guarded else []
            if [module() for module in self._hooked] == modules:
                # TorchRL wraps a transform in a new object at each access, around the same modules
                return
            self._release()
            _keep_from_compiler()
            before, after = self._before, self._after
            for module in modules:
                if _has_own_call(module):
                    _warn_of_own_call(type(module).__qualname__)
                first = module.register_forward_pre_hook(_Hook(before), prepend=True)
                last = module.register_forward_hook(_Hook(after), always_call=True)
                self._handles += [first, last]
                self._hooked.append(weakref.ref(module))
        self._await_earlier()

    def release(self) -> None:
        """Remove the hooks. Running passes keep the lock until they end."""
        with self._turn:
            self._release()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._hooked, self._handles = [], []
        self._end_lost(0)

    # Runs in the thread that calls the module.

    def _before(self, _module: object, _args: object) -> None:
        # Run before a forward pass: acquire the lock as a reader.
        me = threading.get_ident()
        last: Reading[None] | None = getattr(self._own, "last", None)
        free = me not in self._inside and asyncio._get_running_loop() is None  # noqa: SLF001
        # reusing a reader costs half as much as a new one
        if last is not None and free and last.begin_again():
            self._inside[me] = [last]
            return
        if self._inside.setdefault(me, []):
            # Either this pass is nested in an earlier pass of this thread, or that earlier pass has
            # ended: torch calls no hook after a KeyboardInterrupt, so end such passes here.
            self._end_lost(self._count_passes(inspect.currentframe()) - 1)
        alive = self._is_in_pass
        reader = Reading(self.lock, self._timeout, _none, activity="a forward pass", alive=alive)
        reader.__enter__()
        self._inside.setdefault(me, []).append(reader)

    def _after(self, _module: object, _args: object, _result: object) -> None:
        # Run after a forward pass: release its reader.
        me = threading.get_ident()
        readers = self._inside.get(me)
        if not readers:
            return  # the pre-hook raised, or was registered after this pass began
        reader = readers.pop()
        if reader.loop is None:
            self.lock.leave(reader)
            self._own.last = reader
        else:
            reader.__exit__()
        if not readers:
            del self._inside[me]

    def _end_lost(self, under_way: int) -> None:
        me = threading.get_ident()
        for _ in range(under_way, len(self._inside.get(me, ()))):
            self._after(None, None, None)

    # Runs in any thread.

    def _is_in_pass(self, thread: int) -> bool:
        """Return whether the thread with this id is still in a pass."""
        return self._count_passes(_stacks().get(thread)) > 0

    def _count_passes(self, frame: FrameType | None) -> int:
        """Return the number of passes on the stack whose innermost frame is `frame`."""
        modules = {id(module()) for module in self._hooked}
        code = sys.modules["torch"].nn.Module._call_impl.__code__  # noqa: SLF001
        count = 0
        while frame is not None:
            count += frame.f_code is code and id(frame.f_locals.get("self")) in modules
            frame = frame.f_back
        return count

    def _await_earlier(self) -> None:
        """Wait for passes that began before the hooks were registered; at most EARLIER_SECONDS."""
        deadline, me = time.monotonic() + EARLIER_SECONDS, threading.get_ident()
        earlier = [t for t in _stacks() if t != me and t not in self._inside]
        while any(self._is_in_pass(t) and t not in self._inside for t in earlier):
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)


@cache
def _keep_from_compiler() -> None:
    """Make torch.compile break its graph at the hooks, and not trace them.

    `torch.compiler.disable` would do the same, but its wrapper costs each pass more than the lock.
    """
    from torch._dynamo.decorators import skip  # pyright: ignore[reportPrivateImportUsage]

    for owner in (ForwardPasses, Reading, Holder, ReadingLock):
        for each in vars(owner).values():
            if inspect.isfunction(each):
                skip(inspect.unwrap(each))


def _stacks() -> dict[int, FrameType]:
    return sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _modules_to_hook(model: Any) -> Iterator[Any]:
    """Yield the modules to register hooks on: the model, or the parts of a container.

    Containers are lists of modules. Environments and transforms also count as containers, since
    they have other methods than `forward` for each step. If a class has its own `__call__`, hooks
    are registered on the model and on its parts: that `__call__` may call torch's (which calls the
    model's hooks) or only the parts.
    """
    envs, nn = sys.modules.get("torchrl.envs"), sys.modules["torch"].nn
    kinds = tuple(kind for name in ("EnvBase", "Transform") if (kind := getattr(envs, name, None)))
    own_call = _has_own_call(model)
    own: dict[str, object] = getattr(model, "__dict__", {})
    forward = own.get("forward", cast("Any", type(model)).forward)
    holds_only = isinstance(model, kinds) or forward is nn.Module.forward
    if holds_only or own_call:
        for part in model.children():
            yield from _modules_to_hook(part)
    if own_call or not holds_only:
        yield model


@cache
def _warn_of_own_call(kind: str) -> None:
    log.warning(
        "%s has a __call__ of its own, which calls no hooks: a version may be applied during a "
        "call. Move its code to forward(), or call the model within reading() of its receiver",
        kind,
    )


def _has_own_call(model: object) -> bool:
    """Return whether a module's `__call__` is neither torch's nor TensorDict's."""
    call: Any = type(model).__call__
    module: str = getattr(call, "__module__", None) or ""
    return module.partition(".")[0] not in ("torch", "tensordict")
