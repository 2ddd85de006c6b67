"""Options told flatly, as tables of cases have them; a small model; workers that have joined."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np

from weightbus import Publisher, Settings, Subscriber

_NAMES = {field.name for field in fields(Settings)} - {"rename"}  # a Subscriber has that itself


def settled(options: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of a Publisher, a Subscriber or a publish: what few need in `settings`."""
    if (timing := options.get("timing")) is not None:
        options = {**options, "ping": timing.ping, "lost_after": timing.lost_after}
        del options["timing"]
    told = {name: value for name, value in options.items() if name not in _NAMES}
    few = {name: options[name] for name in options.keys() & _NAMES}
    if few:
        told["settings"] = replace(told.get("settings") or Settings(), **few)
    return told


def arrays(size: int = 10) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.zeros(size, np.float32)}


@contextmanager
def joined(publisher: Publisher, **targets: object) -> Generator[list[Subscriber]]:
    """Run a worker by each name, which applies model `m` to a target in the background."""
    with ExitStack() as ends:
        made = [
            ends.enter_context(Subscriber(publisher.address, {"m": target}, name=name)).start()
            for name, target in targets.items()
        ]
        publisher.wait_for_workers(len(made), 60.0)
        yield made
