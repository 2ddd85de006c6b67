"""Options told flatly, as tables of cases and publishers in other languages have them."""

from dataclasses import fields, replace
from typing import Any

from weightbus import Settings

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
