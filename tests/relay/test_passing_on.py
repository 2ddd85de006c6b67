"""What a relay passes on after each turn of its worker, without sockets."""

from collections.abc import Callable
from typing import Any

import pytest

from weightbus.bus.messages import Refuse
from weightbus.bus.net.ready_queue import ReadyQueue
from weightbus.bus.publisher.effects import Effect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.python_client.relay import _Forwarder  # pyright: ignore[reportPrivateUsage]
from weightbus.tests.protocol.test_passed_on import CHUNKS, EPOCH, TIMING, Chain, version


class Passing(Chain):
    """A relay: a worker's machine and a publisher's, and what passes on from one to the other."""

    def __init__(self, *below: str) -> None:
        super().__init__(*below)
        loop: Any = self  # the publisher's thread, as far as it matters
        self.pass_on = _Forwarder(self.above.machine, ReadyQueue(), loop, lambda: "tcp://above:1")

    def decide(self, how: Callable[[PublisherMachine, float], list[Effect]]) -> None:
        """Call the function, as the publisher's thread does."""
        self.does(how(self.publisher, self.now))
        while self.publisher.ready:
            self.does(self.publisher.push(self.now))

    def keys(self) -> list[tuple[int, int]]:
        """Return the versions that the relay has for workers."""
        return [each.key for each in self.publisher.state.store["a"]]


@pytest.mark.parametrize("listens", [True, False])
def test_workers_do_not_wait_for_a_version_that_a_newer_one_replaces_on_its_way(
    listens: bool,
) -> None:
    relay = Passing("below")
    relay.joins("below", listens=listens)
    for number in (1, 2):  # the second one replaces the first: workers will not replace it again
        relay.begins(version(number))
        relay.pass_on()
        relay.passes(TIMING.quiet)
    below, third = relay.below["below"], version(3)
    assert below.versions.mode == "catching-up"
    relay.above.hears(Refuse(code="gone", text="", model="a", epoch=EPOCH, version=2), relay.now)
    relay.begins(third)
    relay.arrives(third, range(CHUNKS))
    relay.ends(third)
    relay.pass_on()
    assert relay.keys() == [(EPOCH, 3)]
    relay.talk()
    assert [staged.key for staged in below.ready] == [(EPOCH, 3)], "at once"


def test_workers_get_the_rest_of_a_version_that_became_whole_just_before_the_next() -> None:
    relay = Passing("below")
    relay.joins("below")
    first, second = version(1), version(2)
    relay.begins(first)
    relay.pass_on()
    relay.passes(TIMING.quiet)
    relay.arrives(first, range(CHUNKS))
    relay.ends(first)
    relay.above.ends("applied", relay.now)
    relay.begins(second)
    relay.pass_on()  # one turn of the worker above
    below = relay.below["below"]
    relay.talk()
    assert [staged.key for staged in below.ready] == [(EPOCH, 1)]


def test_who_receives_a_version_that_does_not_arrive_is_refused_it() -> None:
    relay = Passing("below")
    relay.joins("below")
    first = version(1)
    relay.begins(first)
    relay.pass_on()
    relay.passes(TIMING.quiet)
    versions = relay.above.versions
    versions.move(versions.in_phase["arriving"], "gone")
    told = list[Any]()
    hears = relay.below["below"].hears

    def recorded(message: Any, *rest: Any) -> None:
        told.append(message)
        hears(message, *rest)

    relay.below["below"].hears = recorded  # type: ignore[assignment,method-assign]
    relay.pass_on()
    assert relay.keys() == []
    refused = [message for message in told if isinstance(message, Refuse)]
    assert [(r.code, r.epoch, r.version) for r in refused][:1] == [("gone", EPOCH, 1)]
    assert relay.below["below"].versions.in_phase["arriving"] is None
