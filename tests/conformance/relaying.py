"""A relay between the publisher and the workers of a scenario.

    worker ── proxy (rules) ── relay ── another proxy ── publisher

The relay stays while publishers come and go: the proxy above it leads to the publisher of now.
"""

import fnmatch
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from weightbus import Relay, Settings
from weightbus.bus.limits import Timing
from weightbus.bus.publisher.status import WorkerStatus
from weightbus.tests.conformance.proxy import Proxy

RELAY = "relay"  # its name
WITH_KEYS = "keys-"  # so the names of scenarios with keys begin
MODELS = ("m", "policy", "critic.v2")  # all that scenarios publish

# What is not played behind a relay, with keys or without: patterns of the names of scenarios, and
# why.
LACKS: Mapping[str, str] = {
    "source*": "a relay takes chunks from sources itself, and is their worker's only publisher",
    "patched-missed-versions": "a relay offers the patch that it has got, and no other",
    "patched-apply-fails": "a relay offers the patch that it has got, and no other",
    "cast-target": "a relay does not report which values a worker's dtype cannot hold",
    "stale-publisher": "the relay turns a publisher of a lower epoch away itself",
    "publisher-restart-while-receiving": "a relay sends what it has when the publisher is gone",
    "no-mixture": "a relay's workers need keys if the relay has some, whatever the publisher has",
}
# And where the Rust core publishes.
CORE_LACKS: Mapping[str, str] = {
    "partial-target": "the core does not have workers verify what they copy from a relay's memory",
}


def lacking(scenario: str, publisher: str = "python") -> str:
    """Return why a scenario is not played behind a relay of a publisher; nothing if it is."""
    lacks = {**LACKS, **(CORE_LACKS if publisher == "rust" else {})}
    plain = scenario.removeprefix(WITH_KEYS)
    return next((why for name, why in lacks.items() if fnmatch.fnmatch(plain, name)), "")


class Above(Protocol):
    """The publisher above a relay, in this process or in another one."""

    @property
    def address(self) -> str: ...

    @property
    def data_address(self) -> str: ...

    def wait_until(
        self, wrong: Callable[[Mapping[str, WorkerStatus]], str], patience: float
    ) -> None: ...


class Between:
    """The relay of a scenario, and the proxy above it.

    Args:
        patience: Seconds for anything that must come.

    Attributes:
        proxy: Above the relay, with no rules.
        relay: The relay, once there was a publisher.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.proxy = Proxy(patience)
        self.relay: Relay | None = None

    def put_below(
        self,
        above: Above,
        timing: Timing,
        address: str,
        advertise: str | None,
        *,
        keys: Path | None,
        rekey: float,
    ) -> None:
        """Put the relay below a publisher; return once the relay receives from it.

        Args:
            above: The publisher, which advertises the proxy's data port.
            timing: The times of the publisher, and of the relay.
            address: The address for workers.
            advertise: The data address that workers receive.
            keys: The folder of all keys, if there are any.
            rekey: The lifetime of a group key.
        """
        self.proxy.lead_to(above.address, above.data_address)
        if self.relay is None:
            settings = Settings(
                ping=timing.ping, lost_after=timing.lost_after, advertise=advertise, rekey=rekey
            )
            at = self.proxy.address, address, MODELS
            self.relay = Relay(*at, name=RELAY, keys=keys, settings=settings)

        def wrong(known: Mapping[str, WorkerStatus]) -> str:
            return "" if RELAY in known else "the relay has not joined"

        above.wait_until(wrong, self._patience)

    def addresses(self) -> tuple[str, str]:
        """Return the control address and the data address of the relay."""
        assert self.relay is not None
        return self.relay.address, self.relay.data_address

    def close(self) -> None:
        """End the relay and the proxy."""
        if self.relay is not None:
            self.relay.close()
        self.proxy.close()
