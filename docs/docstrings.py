"""How docstrings become the reference: what they say as Markdown does, as reStructuredText.

Ours are in Google's style, with `code` between backticks and nothing else that is markup: an
asterisk is an asterisk. Where one names a page of the documentation, the reference has a link.
"""

import re
from collections.abc import Iterator, Sequence

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")
MARKUP = re.compile(r"[\\*|]|(?<=\w)_(?!\w)")  # what would be markup there
STARRED = re.compile(r"(?m)^( *)(\*{1,2})(\w+:)")  # an argument, which may have asterisks
SHARED = re.compile(r" *\w+(?:, \w+)+: ")  # an attribute's line that is of several
RETURNED = re.compile(r"(?m)(?<=^Returns:\n)[^\n]+|(?<=^Yields:\n)[^\n]+")
COLON = "\ue000"  # for one that ends no type
ANNOTATED = re.compile(r"Annotated\[([^()]+?), msgspec\.Meta\([^)]*\)\]")
CONFIG = Config(napoleon_use_ivar=True, napoleon_use_rtype=False)


def converted(lines: Sequence[str], what: str = "method", value: object = None) -> list[str]:
    """Return a docstring as reStructuredText.

    Args:
        lines: The docstring's.
        what: Of what it is, as Sphinx says it.
        value: That; a class's annotations are told with its attributes.
    """
    text = RETURNED.sub(lambda m: m[0].replace(":", COLON), "\n".join(_each_attribute(lines)))
    parts, end = list[str](), 0
    for code in CODE.finditer(text):
        parts += _plain(text[end : code.start()]), _code(code[2])
        end = code.end()
    marked = "".join([*parts, _plain(text[end:])])
    if what not in (
        "class",
        "exception",
    ):  # of a property it would take what stands before a colon as the type
        what = "method"
    made = GoogleDocstring(marked.split("\n"), CONFIG, what=what, obj=value).lines()
    return [line.replace(COLON, ":") for line in made]


def _plain(text: str) -> str:
    starred = {match.start(2) + n for match in STARRED.finditer(text) for n in range(len(match[2]))}
    text = MARKUP.sub(lambda m: m[0] if m.start() in starred else f"\\{m[0]}", text)
    return PAGE.sub(r":doc:`/docs/\1`", text)


def _code(text: str) -> str:
    return _plain(text) if PAGE.fullmatch(text) else f"``{text}``"


def _each_attribute(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines, where `a, b: Text` below `Attributes:` is said of each of them."""
    inside, item = False, list[str]()
    for line in [*lines, ""]:
        indent = len(line) - len(line.lstrip())
        if item and (not line.strip() or indent <= len(item[0]) - len(item[0].lstrip())):
            yield from _of_each(item)
            item = []
        if line.strip() and not indent:
            inside = line.strip() == "Attributes:"
        if item or (inside and SHARED.match(line)):
            item.append(line)
        else:
            yield line


def _of_each(item: Sequence[str]) -> Iterator[str]:
    names, _, text = item[0].partition(": ")
    indent = " " * (len(names) - len(names.lstrip()))
    for name in names.split(", "):
        yield f"{indent}{name.strip()}: {text}"
        yield from item[1:]


def on_docstring(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Convert what Sphinx is about to read."""
    del app, name, options
    lines[:] = converted(lines, what, value)


def on_signature(
    app: Sphinx, what: str, name: str, value: object, options: object,
    signature: str | None, returned: str | None,
) -> tuple[str | None, str | None]:  # fmt: skip
    """Show of a type what users write, without the bounds that decoders hold it to."""
    del app, what, name, value, options
    if signature is not None:
        signature = ANNOTATED.sub(r"\1", signature).replace("<factory>", "...")
    return signature, returned
