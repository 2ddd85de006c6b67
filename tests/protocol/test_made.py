"""What is made from the description of the protocol is what stands in the repository."""

from weightbus.protocol import __main__ as protocol


def test_the_made_files_are_those_of_the_description() -> None:
    assert protocol.made()
    assert list(protocol.stale()) == [], "run `make protocol`"
