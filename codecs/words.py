"""Escapes untrusted text for terminals and logs."""

CUT = "…"


def printable(text: str, most: int | None = None) -> str:
    r"""Return a text on one line, with every unprintable character escaped.

    As in Python's `repr`, a newline becomes \n, an escape \x1b, a right-to-left override \u202e.
    Printable characters are not changed.

    Args:
        text: The text.
        most: The largest number of characters to return; None: no limit.
    """
    if most is not None:
        text = text[: most + 1]  # enough, since escaping makes no character shorter
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if most is None or len(text) <= most else text[: most - len(CUT)] + CUT
