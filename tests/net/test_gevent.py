"""The bus in a process where gevent has patched selectors, not threads (`patch_all(thread=False)`).

The tests do not depend on gevent. They have stand-ins for two parts of it: a selector that works
only in the thread that made it (gevent's ends the process by SIGSEGV in another thread), and the
place where gevent keeps the original selector. Tried with gevent 26.9, too: 140 versions in 30 s.
"""

import selectors
import sys
import threading
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from weightbus import Publisher, Subscriber
from weightbus.bus.net.threads import new_selector

SECONDS = 30.0
UNPATCHED = selectors.DefaultSelector


class OfOneThread(selectors.BaseSelector):
    """A selector like gevent's, which works only in the thread that made it."""

    def __init__(self) -> None:
        self._own, self._inner = threading.get_ident(), UNPATCHED()

    def _check(self) -> None:
        assert threading.get_ident() == self._own, "here gevent ends the process"

    def select(self, timeout: float | None = None) -> Any:
        self._check()
        return self._inner.select(timeout)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._check()
        return self._inner.register(fileobj, events, data)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._check()
        return self._inner.modify(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self._check()
        return self._inner.unregister(fileobj)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


def patch_all(monkeypatch: pytest.MonkeyPatch, *, thread: bool) -> None:
    """Patch as gevent does."""
    patched = {"selectors", "select", "socket", *(["threading"] if thread else [])}
    monkey: Any = ModuleType("gevent.monkey")
    monkey.is_module_patched = patched.__contains__

    def original(module: str, name: str) -> object:
        return {("selectors", "DefaultSelector"): UNPATCHED}[module, name]

    monkey.get_original = original
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    monkeypatch.setattr(selectors, "DefaultSelector", OfOneThread)


def test_threads_of_the_system_do_not_wait_with_selectors_of_greenlets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch_all(monkeypatch, thread=False)
    target = {"w": np.zeros(3, np.float32)}
    with (
        Publisher(dashboard="127.0.0.1:0") as publisher,
        Subscriber(publisher.address, {"m": target}, name="w").start(),
    ):
        for version in (1, 2):
            weights = {"w": np.full(3, version, np.float32)}
            receipt = publisher.publish("m", weights, expect=1, timeout=SECONDS)
            assert receipt.in_state("applied") == ["w"]
            assert target["w"][0] == version
        with urlopen(f"{publisher.shown.dashboard}state", timeout=SECONDS) as page:  # noqa: S310
            assert page.status == 200


def test_greenlets_wait_with_selectors_of_greenlets(monkeypatch: pytest.MonkeyPatch) -> None:
    """If threads are patched as well, an unpatched selector would block all greenlets."""
    patch_all(monkeypatch, thread=True)
    with new_selector() as selector:
        assert isinstance(selector, OfOneThread)
