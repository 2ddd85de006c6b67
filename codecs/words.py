"""Words of others, as a person, a terminal or a log may be shown them."""

CUT = "…"


def printable(text: str, most: int | None = None) -> str:
    r"""Return a text on one line: what moves a cursor, hides letters or turns them is escaped.

    As in Python's `repr`, a new line is shown as \n, an escape as \x1b, a right-to-left mark as
    \u202e. What can be seen stays as it is, so that a text that is printable is not changed.

    Args:
        text: The text.
        most: Characters after which it is cut off.
    """
    if most is not None:
        text = text[: most + 1]  # no character gets shorter by this
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if most is None or len(text) <= most else text[: most - len(CUT)] + CUT
