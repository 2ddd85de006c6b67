"""What is made from the description of the protocol is what stands in the repository."""

import pytest

from weightbus.protocol import __main__ as protocol


def test_the_made_files_are_those_of_the_description() -> None:
    assert protocol.generate()
    assert list(protocol.stale_files()) == [], "run `make protocol`"


@pytest.mark.parametrize(
    ("made", "formatted", "same"),
    [
        ("f(a, b)", "f(\n    a,\n    b,\n)", True),
        ('type A = "b" | "c";', 'type A =\n  | "b"\n  | "c";', True),
        ("a: 1<<2, // two", "a:   1 << 2, // two", True),
        ("f(a, b)", "f(a, b, c)", False),
        ("f(a, b)", "f(a b)", False),
        ("// two words", "// twowords", False),
        ('type A = "b" | "c";', 'type A = "b" & "c";', False),
    ],
)
def test_a_formatter_changes_no_words_and_signs(made: str, formatted: str, same: bool) -> None:
    assert (protocol.tokens(made) == protocol.tokens(formatted)) == same
