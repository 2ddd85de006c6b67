"""What a worker says: who it is; of the versions of a model, at once and with every ping. (W17)"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from ..effects import Effect, Notice, Send
from ..messages import Failed, Fetch, Hello, Ping, Progress, Running, Staged
from .transfer import Transfer
from .version_store import VersionEntry


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker is.

    Attributes:
        name: What it is called; one living worker per name and publisher.
        instance: 32 hexadecimal digits, drawn anew at each start.
        client, host, pid: For operators.
        features: What it can do beyond what every worker can.
    """

    name: str
    instance: str
    client: str = ""
    host: str = ""
    pid: int = 0
    features: tuple[str, ...] = ()

    def hello(self, models: dict[str, Running | None], epoch: int, age_ms: int) -> Hello:
        """Say who it is, and what it runs of an epoch that has been running for so long."""
        return Hello(
            name=self.name,
            instance=self.instance,
            models=models,
            epoch=epoch,
            age_ms=age_ms,
            client=self.client,
            host=self.host,
            pid=self.pid,
            features=list(self.features),
        )


def fetches(transfer: Transfer, wanted: Iterable[tuple[int, int]]) -> list[Effect]:
    """Ask for what is missing and due. (W10, W11, D10)"""
    said: list[Effect] = []
    for first, count in wanted:
        epoch, version = transfer.key
        fetch = Fetch(
            model=transfer.announce.model,
            epoch=epoch,
            version=version,
            first=first,
            count=count,
            patch=transfer.patch,
            unpatched=transfer.why,
        )
        said.append(Send(fetch))
    return said


def progress(entry: VersionEntry) -> Effect:
    """Say how far a version is. One may hang in an apply, and others become ready behind it."""
    phase: Literal["receiving", "applying", "staged"] = "staged"
    chunks, patch = 0, None
    if entry.phase == "arriving":
        phase, chunks, patch = "receiving", entry.transfer.progress, entry.transfer.patch
    elif entry.phase == "applying":
        phase = "applying"
    model, (epoch, version) = entry.announce.model, entry.key
    said = Progress(
        model=model,
        epoch=epoch,
        version=version,
        chunks=chunks,
        phase=phase,
        patch=patch,
        waits=entry.blocked_by if phase == "staged" else "",
    )
    return Send(said)


def staged(some: Iterable[VersionEntry]) -> list[Effect]:
    """Say which of some versions are staged, where that is due. (W14)"""
    said: list[Effect] = []
    for entry in some:
        s = entry.staged
        if s.say_staged and entry.time == "in-time":  # else it has failed
            about = Staged(
                model=s.model, epoch=s.epoch, version=s.version, digest=s.digest, patch=s.patch
            )
            said.append(Send(about))
    return said


def failed(failure: Failed, *, torn: bool) -> Effect:
    """Say what could not be applied; `torn`: and that no version runs. (W24)"""
    return Send(msgspec.structs.replace(failure, intact=not torn))


def ping(now: float, *, subscribed: bool, shared: bool) -> Effect:
    """Ask for a pong, which says again when that was. (W12, W18)"""
    return Send(Ping(token=int(now * 1000), subscribed=subscribed, shared=shared))


def unheard(address: str, seconds: float) -> Effect:
    """Tell the user that nothing published has come for so long. (W33)"""
    text = (
        f"nothing published has come for {seconds:g} s, though this worker has subscribed; "
        f"everything is fetched, which is slower: is {address} let through from here, by firewalls "
        "and in containers? It is not the address of the control channel"
    )
    return Notice("unheard", text, warning=True)
