"""Judges how a worker played a sequence of the golden vectors."""

from collections.abc import Mapping
from typing import Any, cast

from weightbus.tests.vectors.parts import filled

Case = dict[str, Any]


def fault_of_sequence(case: Case, answer: Case) -> str:
    """Return what is wrong with what a worker did."""
    steps, played = case["steps"], answer["steps"]
    if len(steps) != len(played):
        return f"{len(played)} steps were played, not {len(steps)}"
    asked: set[int] = set()
    answer_to_pong: list[Case] = []  # it may come at once, or when time has passed
    for number, (step, told) in enumerate(zip(steps, played, strict=True)):
        done = {**told, "sent": answer_to_pong + told["sent"]}
        answer_to_pong = told["sent"] if "pong" in step else []
        asked |= _asked(told["sent"])
        if fault := _fault(step["expect"], done, asked):
            return f"step {number}: {fault}"
        if "asks" in step["expect"]:
            asked.clear()
    return ""


def _asked(sent: list[Case]) -> set[int]:
    """Return the chunks that were asked for."""
    return {
        index
        for header in sent
        if header["type"] == "fetch"
        for index in range(header.get("first", 0), header.get("first", 0) + header.get("count", 0))
    }


def _fault(expect: Case, done: Case, asked: set[int]) -> str:
    sent: list[Case] = [filled(header["type"], header) for header in done["sent"]]
    for wanted in expect.get("sends", []):
        if not any(_contains(header, wanted) for header in sent):
            return f"no {wanted} among what was sent: {sent}"
    types = {header["type"] for header in sent}
    if loud := types & set(expect.get("silent", [])):
        return f"{', '.join(sorted(loud))} must not be sent: {sent}"
    if "asks" in expect and asked != set(expect["asks"]):
        return f"chunks {sorted(asked)} were asked for, not {expect['asks']}"
    runs = {model: done["runs"].get(model, 0) for model in expect.get("runs", {})}
    if runs != expect.get("runs", {}):
        return f"runs {runs}, not {expect['runs']}"
    return ""


def _contains(value: object, wanted: object) -> bool:
    """Return whether a value is the one wanted; an object may have other fields beside."""
    if isinstance(value, Mapping) and isinstance(wanted, Mapping):
        some, fields = cast("Case", value), cast("Case", wanted)
        return all(n in some and _contains(some[n], w) for n, w in fields.items())
    return type(value) is type(wanted) and value == wanted
