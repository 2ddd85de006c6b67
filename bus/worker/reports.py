"""What a worker says of the versions of one model: at once, and again with every ping. (W17)"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from ..effects import Effect, Send
from ..messages import Applied, Failed, Fetch, Progress, Running, Staged
from .holdings import Held, Holdings
from .transfer import Transfer


def standing(model: str, holds: Holdings, failures: Iterable[Effect]) -> list[Effect]:
    """Say how things stand, the last failure included."""
    effects: list[Effect] = []
    arriving, applying = holds.at("arriving"), holds.at("applying")
    if arriving is not None and applying is None:
        effects.append(progress(arriving))
    effects += staged(holds.all("ready", "applying", "staged"))
    running = holds.at("running")
    if running is not None and running.running is not None:
        effects.append(applied(model, running.running))
    effects += failures
    ready = [applying] if applying is not None else holds.all("ready")
    if ready and (applying is not None or arriving is None):
        effects.append(progress(max(ready, key=lambda held: held.key)))
    return effects


def fetches(transfer: Transfer, now: float) -> list[Effect]:
    """Ask for what is missing and due. (W10, W11)"""
    model, (epoch, version) = transfer.announce.model, transfer.key
    return [
        Send(Fetch(model=model, epoch=epoch, version=version, first=first, count=count))
        for first, count in transfer.wants(now)
    ]


def progress(held: Held) -> Effect:
    """Say how far a version is. One may hang in an apply, and others become ready behind it."""
    phase: Literal["receiving", "applying", "staged"] = "staged"
    chunks = 0
    if held.phase == "arriving" and held.transfer is not None:
        phase, chunks = "receiving", held.transfer.progress
    elif held.phase == "applying":
        phase = "applying"
    model, (epoch, version) = held.announce.model, held.key
    return Send(Progress(model=model, epoch=epoch, version=version, chunks=chunks, phase=phase))


def staged(some: Iterable[Held]) -> list[Effect]:
    """Say which of some versions are staged, where that is due. (W14)"""
    whole = [held.staged for held in some if held.fate is None]  # else it has failed
    due = [staged for staged in whole if staged is not None and staged.say_staged]
    return [
        Send(Staged(model=s.model, epoch=s.epoch, version=s.version, digest=s.digest)) for s in due
    ]


def applied(model: str, running: Running, *, at_once: bool = False) -> Effect:
    """Say what runs; `at_once`: for the first time. (W16)"""
    epoch, version = running.epoch, running.version
    said = Applied(model=model, epoch=epoch, version=version, digest=running.digest)
    return Send(said, upstream=at_once)


def failed(failure: Failed, *, torn: bool) -> Effect:
    """Say what could not be applied; `torn`: and that no version runs. (W24)"""
    return Send(msgspec.structs.replace(failure, intact=not torn))
