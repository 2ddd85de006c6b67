"""Forward passes of a receiver's model: a version goes between two of them, never into one.

A collector calls its policy when it likes, and versions are applied in another thread, under a lock
(`reading.py`). Hooks on the module have each call of it take that lock as a reader.

Hooks are of this process and this receiver: a copy of the module, deep or pickled, has in their
place something that does nothing and needs nothing of ours where it is loaded.
"""

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
from ..reading import READING_SECONDS, Holder, Reading, ReadingLock

log = logging.getLogger("weightbus.schemes")

EARLIER_SECONDS = 1.0  # that passes which began before there were hooks are waited for

_nothing = nullcontext().__exit__  # takes any arguments, and returns None


def _none() -> None:
    """Return what a pass is told: nothing."""


class _Hook(partial[None]):
    """A hook that stays behind when its module is copied.

    A `partial` since it is called without a frame of Python's, which torch.compile would look at.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class ForwardPasses:
    """Has the forward passes of a module, and of another that takes its place, take a lock.

    Args:
        lock: What an apply takes alone.
        timeout: Seconds that a pass waits for an apply before it raises TimeoutError.
    """

    def __init__(self, lock: ReadingLock, timeout: float = READING_SECONDS) -> None:
        self.lock, self._timeout = lock, timeout
        self._inside: dict[int, list[Reading[None]]] = {}  # by thread, the passes under way
        self._called: list[weakref.ref[Any]] = []  # the modules that have the hooks
        self._handles: list[Any] = []
        self._turn = threading.Lock()

    def guard(self, model: object) -> None:
        """Hook a module, in place of the one before; passes that are under way are waited for.

        Anything but a module, and any in a process without TorchRL, is left alone: there nobody
        but the user calls it, who knows `reading()`.
        """
        with self._turn:
            guarded = is_module(model) and "torchrl" in sys.modules
            called = [*_called(model)] if guarded else []
            if [module() for module in self._called] == called:
                return  # TorchRL shows a transform as another object each time; not its parts
            self._release()
            _keep_from_compiler()
            before, after = self._before, self._after
            for module in called:
                if _has_own_call(module):
                    _warn_of_own_call(type(module).__qualname__)
                first = module.register_forward_pre_hook(_Hook(before), prepend=True)
                last = module.register_forward_hook(_Hook(after), always_call=True)
                self._handles += [first, last]
                self._called.append(weakref.ref(module))
        self._await_earlier()

    def release(self) -> None:
        """Take the hooks away. Passes that are under way end as they began."""
        with self._turn:
            self._release()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._called, self._handles = [], []
        self._end_lost(0)

    # In whatever thread calls the module.

    def _before(self, _module: object, _args: object) -> None:
        me = threading.get_ident()
        if self._inside.setdefault(me, []):
            # This pass is inside another, or that one has ended without a word: torch calls no
            # hook on KeyboardInterrupt.
            self._end_lost(self._passes_of(inspect.currentframe()) - 1)
        alive = self._is_under_way
        begun = Reading(self.lock, self._timeout, _none, doing="a forward pass", alive=alive)
        begun.__enter__()
        self._inside.setdefault(me, []).append(begun)

    def _after(self, _module: object, _args: object, _result: object) -> None:
        me = threading.get_ident()
        begun = self._inside.get(me)
        if not begun:
            return  # it was the hook before that failed, or it was not there yet
        begun.pop().__exit__()
        if not begun:
            del self._inside[me]

    def _end_lost(self, under_way: int) -> None:
        me = threading.get_ident()
        for _ in range(under_way, len(self._inside.get(me, ()))):
            self._after(None, None, None)

    # In any thread.

    def _is_under_way(self, thread: int) -> bool:
        """Tell whether a thread is still in a pass."""
        return self._passes_of(_stacks().get(thread)) > 0

    def _passes_of(self, frame: FrameType | None) -> int:
        """Count the passes on a thread's stack."""
        modules = {id(module()) for module in self._called}
        code = sys.modules["torch"].nn.Module._call_impl.__code__  # noqa: SLF001
        count = 0
        while frame is not None:
            count += frame.f_code is code and id(frame.f_locals.get("self")) in modules
            frame = frame.f_back
        return count

    def _await_earlier(self) -> None:
        """Wait until passes are over that began when there were no hooks yet."""
        deadline, me = time.monotonic() + EARLIER_SECONDS, threading.get_ident()
        earlier = [t for t in _stacks() if t != me and t not in self._inside]
        while any(self._is_under_way(t) and t not in self._inside for t in earlier):
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)


@cache
def _keep_from_compiler() -> None:
    """Have torch.compile leave its graph for what a hook does, and not look into that.

    A lock is no graph's. `torch.compiler.disable` says the same, by a wrapper that costs each pass
    more than the lock does.
    """
    from torch._dynamo.decorators import skip  # pyright: ignore[reportPrivateImportUsage]

    for owner in (ForwardPasses, Reading, Holder, ReadingLock):
        for each in vars(owner).values():
            if inspect.isfunction(each):
                skip(inspect.unwrap(each))


def _stacks() -> dict[int, FrameType]:
    return sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _called(model: Any) -> Iterator[Any]:
    """Return what is called of a model: itself, but of what only holds others, its parts.

    Such are environments and transforms, which have methods of their own for each step, and lists.
    A class with a `__call__` of its own may call torch's, which calls hooks, or its parts alone.
    """
    envs, nn = sys.modules.get("torchrl.envs"), sys.modules["torch"].nn
    kinds = tuple(kind for name in ("EnvBase", "Transform") if (kind := getattr(envs, name, None)))
    own_call = _has_own_call(model)
    own: dict[str, object] = getattr(model, "__dict__", {})
    forward = own.get("forward", cast("Any", type(model)).forward)
    holds_only = isinstance(model, kinds) or forward is nn.Module.forward
    if holds_only or own_call:
        for part in model.children():
            yield from _called(part)
    if own_call or not holds_only:
        yield model


@cache
def _warn_of_own_call(kind: str) -> None:
    log.warning(
        "%s has a __call__ of its own, which calls no hooks: a version may go into the middle of a "
        "call. Move what it does to forward(), or call the model within reading() of its receiver",
        kind,
    )


def _has_own_call(model: object) -> bool:
    """Tell whether a module is called by a `__call__` that is neither torch's nor TensorDict's."""
    call: Any = type(model).__call__
    module: str = getattr(call, "__module__", None) or ""
    return module.partition(".")[0] not in ("torch", "tensordict")
