"""Relays whose upstream addresses lead in a circle find it, and one of them is refused."""

from collections.abc import Generator
from contextlib import ExitStack

import pytest

from weightbus import Publisher, RefusedError, Relay
from weightbus.python_client.observing.observer import Observer
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.tests.relay.test_relay import SECONDS, SOON, WHOLE, Tree, arrays


@pytest.fixture(name="tree")
def _tree() -> Generator[Tree]:
    with ExitStack() as stack:
        yield Tree(stack)


def circle(stack: ExitStack, names: str) -> dict[str, Relay]:
    """Return relays of these names, each below the next one, and the last below the first."""
    places = {name: lasting_address() for name in names}
    above = dict(zip(names, names[1:] + names[0], strict=True))
    return {
        name: stack.enter_context(
            Relay(places[above[name]], places[name], ["m"], name=name, settings=SOON)
        )
        for name in names
    }


def refused(relays: dict[str, Relay]) -> dict[str, str]:
    """Return why relays are refused, by name."""
    why = dict[str, str]()
    for name, relay in relays.items():
        try:
            relay.wait_joined(0)
        except RefusedError as error:
            why[name] = str(error)
    return why


@pytest.mark.parametrize(
    ("names", "cut", "loop"),
    [
        ("ab", "b", "a > b > a"),
        ("ba", "b", "a > b > a"),
        ("abc", "c", "a > c > b > a"),
        ("cab", "c", "a > c > b > a"),
        ("cba", "b", "a > b > c > a"),
    ],
)
def test_one_session_of_a_loop_ends_and_names_it(names: str, cut: str, loop: str) -> None:
    with ExitStack() as stack:
        relays = circle(stack, names)
        why = wait_for(lambda: refused(relays), "the loop is found", SECONDS)
        assert set(why) == {cut}
        told = f"each below the one before it: {loop}; give {cut} another upstream"
        assert "(name-taken): these relays are in a loop" in why[cut]
        assert told in why[cut]
        others = [relay for name, relay in relays.items() if name != cut]
        wait_for(lambda: all(r.status().joined for r in others), "the others are joined", SECONDS)
        assert set(refused(relays)) == {cut}
        with Observer(relays["a"].address) as observer:
            assert observer.look(SECONDS)
            assert loop in "".join(e.text for e, _ in observer.view.events if e.kind == "refused")


def test_a_chain_passes_versions_on_when_the_refused_relay_has_another_upstream() -> None:
    with ExitStack() as stack:
        relays = circle(stack, "ab")
        wait_for(lambda: refused(relays), "the loop is found", SECONDS)
        place = relays["b"].address
        relays["b"].close()
        publisher = stack.enter_context(Publisher(settings=SOON))
        again = stack.enter_context(Relay(publisher.address, place, ["m"], name="b", settings=SOON))
        assert again.wait_joined(SECONDS)
        publisher.publish("m", arrays(1, WHOLE), require=0)
        wait_for(lambda: relays["a"].status().versions.get("m"), "it is there", SECONDS)
