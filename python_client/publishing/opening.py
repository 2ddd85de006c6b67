"""Binds the sockets of a publisher (or of a relay's publisher side), and makes its loop."""

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection
from functools import partial

from ...bus.headers import TOKEN_BYTES
from ...bus.messages import Hello, Shared
from ...bus.net import endpoints
from ...bus.net.publisher_loop import PublisherLoop
from ...bus.net.publisher_sockets import PublisherSockets
from ...bus.publisher.machine import PublisherMachine
from ...bus.publisher.state import PublisherState
from ...bus.publisher.version import VersionOffer
from ...bus.trust.curve import public_of
from ...bus.trust.grants import Grant, Grants
from ...bus.trust.keys import PublisherKeys
from ..keys import group_keys, new_sealer
from ..settings import Settings
from .parts import RANK
from .state_writer import StateWriter

log = logging.getLogger("weightbus.publisher")

_LOOPBACK = (
    "{given} is {bound} on this host (/etc/hosts often maps a host's own name so), to which only "
    "this host can connect: for workers elsewhere bind tcp://0.0.0.0:PORT, or this host's address"
)


def open_loop(
    address: str,
    settings: Settings,
    keys: PublisherKeys | None,
    epoch: int,
    writer: StateWriter | None = None,
    restored: Collection[VersionOffer] = (),
    *,
    age: Callable[[], float] | None = None,
    shared: Shared | None = None,
    above: Hello | None = None,
) -> PublisherLoop:
    """Bind a publisher's sockets, and return its loop, which the caller starts.

    Args:
        address: The address of the control socket.
        settings: The times, the data socket's address and its queue.
        keys: The keys; None: the publisher has none.
        epoch, age, shared: See `PublisherState`.
        writer: Stores versions and epochs; None: they are not stored.
        restored: Versions of an earlier publisher, which are offered first.
        above: A relay's hello to the publisher above. None: this is a publisher, which numbers its
            own versions.

    Raises:
        AddressError: An address is invalid or in use.
        OSError: Too few file descriptors are left for sockets.
    """
    grants: Grants | None = None
    if keys is not None:
        grants = Grants(keys.grants, {public_of(keys.secret): Grant(RANK)})
    secret = keys.secret if keys else ""
    with contextlib.ExitStack() as undo:
        own = PublisherSockets(address, settings.data, settings.queue, secret, grants)
        sockets = undo.enter_context(contextlib.closing(own))
        if endpoints.is_local(sockets.address) and not endpoints.is_local(address):
            log.warning("%s", _LOOPBACK.format(given=address, bound=sockets.address))
        data = settings.advertise or endpoints.advertised(sockets.address, sockets.data_address)
        sealer = None if keys is None else new_sealer(settings.rekey)
        state = PublisherState(
            epoch,
            data,
            settings.timing,
            shared,
            age,
            secret=partial(secrets.token_hex, TOKEN_BYTES // 2),
            keys=group_keys(sealer),
            grants=grants,
            clock=time.time,
            recorded=None if writer is None else writer.recorded,
            queue=settings.queue,
            origin=above is None,
            above=above,
        )
        loop = PublisherLoop(PublisherMachine(state), sockets, writer, restored, sealer)
        undo.pop_all()
    if writer is not None:
        writer.pause_while(lambda: loop.busy)
    return loop
