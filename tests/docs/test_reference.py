"""The reference says what docstrings say: every word, asterisk and quote, and links for pages."""

import html
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.core import publish_doctree
from docutils.parsers.rst import roles

import weightbus
from weightbus.tests.cli.starting import python
from weightbus.tests.repository.scripts import loaded

docstrings = loaded("docs/docstrings.py")
converted = docstrings.converted
ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # far more than a page takes
HEADS = re.compile(r"^\s*(Args|Attributes|Returns|Raises|Yields|Keyword Args):\s*$", re.MULTILINE)
FIELD = re.compile(r"(param|ivar|raises|returns?|Yields|keyword)( |$)")


def documented() -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the docstring of what the reference has."""
    page = (ROOT / "docs" / "API.md").read_text()
    for name in re.findall(r"^\.\. auto\w+:: weightbus\.([\w.]+)$", page, re.MULTILINE):
        value: Any = reduce(getattr, name.split("."), weightbus)
        yield name, lines_of(value)
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            about = inspect.isroutine(getattr(member, "__func__", member))
            if not key.startswith("_") and (about or isinstance(member, property)):
                yield f"{name}.{key}", lines_of(member)


def lines_of(value: object) -> list[str]:
    return (inspect.getdoc(value) or "").split("\n")


def shown(lines: list[str]) -> tuple[str, list[str]]:
    """Return what a docstring comes to as text, and where it links to."""
    links = list[str]()

    def link(_name: str, _raw: str, text: str, *_rest: Any, **_more: Any) -> Any:
        links.append(text)
        return [nodes.inline(text, f"{text.removeprefix('/')}.md")], []

    roles.register_local_role("doc", link)
    settings = {"report_level": 5, "halt_level": 5, "smart_quotes": False}
    tree = publish_doctree("\n".join(lines), settings_overrides=settings)
    wrong = [node.astext() for node in tree.findall(nodes.system_message)]
    assert not wrong
    for name in list(tree.findall(nodes.field_name)):
        field = FIELD.sub("", name.astext())
        name.replace_self(nodes.field_name("", field))
    return tree.astext(), links


@cache
def all_shown() -> list[tuple[str, list[str], tuple[str, list[str]]]]:
    """Return what is documented, and what it comes to; parsing all of it takes seconds."""
    return [(name, lines, shown(converted(lines))) for name, lines in documented()]


def words(text: str) -> Counter[str]:
    """Return what stands in a text, with what belongs to it: `{"*.bias":` is a word."""
    return Counter(re.findall(r"[^\s:,()]+", text.replace("`", "")))


def test_every_word_of_every_docstring_is_in_the_reference_as_it_stands() -> None:
    count = 0
    for name, lines, (converted_text, _) in all_shown():
        told, text = words(HEADS.sub("", "\n".join(lines))), words(converted_text)
        assert not told - text, f"{name} lacks {told - text}"
        assert text.keys() <= told.keys(), f"{name} has more: {text.keys() - told.keys()}"
        count += 1
    assert count > 100


def test_of_a_property_nothing_is_taken_for_its_type() -> None:
    text, _ = shown(converted(["The port; 0: any free one."], "property"))
    assert text == "The port; 0: any free one."


def test_of_what_is_returned_nothing_is_taken_for_its_type() -> None:
    text, _ = shown(converted(["Do.", "", "Returns:", "    It: `a: b`. Or", "    c: d."]))
    assert text.split() == ["Do.", "It:", "a:", "b.", "Or", "c:", "d."]


def test_asterisks_bars_and_underscores_are_what_they_are() -> None:
    said = 'Such as {"*.bias": "f32", "encoder.*": "bf16"}, a|b, name_ and \\x1b; **not bold**.'
    assert shown(converted([said]))[0] == said
    text, _ = shown(converted(["Do.", "", "Args:", "    *words: Some.", "    **more: Of `f(*x)`."]))
    assert text.split() == ["Do.", "*words", "Some.", "**more", "Of", "f(*x)."]


def test_attributes_that_share_a_line_are_told_one_by_one() -> None:
    lines = ["Both.", "", "Attributes:", "    a, b: One", "        thing.", "    c: Other: it."]
    text, _ = shown(converted(lines))
    assert text.split() == [
        "Both.",
        "a",
        "One",
        "thing.",
        "b",
        "One",
        "thing.",
        "c",
        "Other:",
        "it.",
    ]


def test_a_page_that_is_named_is_a_link() -> None:
    for said in ("See docs/guides/deltas.md.", "See `docs/guides/deltas.md`."):
        assert shown(converted([said]))[1] == ["/docs/guides/deltas"]
    missing = {
        link
        for _, _, (_, links) in all_shown()
        for link in links
        if not (ROOT / f"{link.removeprefix('/')}.md").is_file()
    }
    assert not missing


def test_the_site_shows_quotes_asterisks_and_links(tmp_path: Path) -> None:
    """As `make site` does, of one page with one function and two classes."""
    what = ("method:: weightbus.Publisher.publish", "class:: weightbus.Settings")
    lines = [f".. auto{each}\n" for each in (*what, "class:: weightbus.Publisher\n   :no-members:")]
    (tmp_path / "index.md").write_text(f"# A\n\n```{{eval-rst}}\n{''.join(lines)}```\n")
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    for page in (ROOT / "docs" / "guides").glob("*.md"):
        (tmp_path / "docs" / "guides" / page.name).write_text(
            f"---\norphan: true\n---\n# {page.name}!\n"
        )
    settings = {"root_doc": "index", "html_extra_path": ""}
    settings["include_patterns"] = "index.md,docs/guides/*.md"
    words = [word for pair in settings.items() for word in ("-D", "=".join(pair))]
    words += [str(tmp_path), str(tmp_path / "out")]
    sphinx = ("-m", "sphinx", "-q", "-W", "-c", ROOT / "docs")
    python(*sphinx, *words, timeout=SECONDS, cwd=ROOT)
    shown = (tmp_path / "out" / "index.html").read_text()
    text = html.unescape(re.sub(r"<[^>]+>", "", shown))
    assert '{"*.bias": "f32"}' in text
    assert '"together": no worker applies it before' in " ".join(text.split())
    assert re.search(r'<a [^>]*href="docs/guides/operating\.html"[^>]*>.*?operating\.md!', shown)
    assert "docs/guides/operating.md" not in text


def test_types_are_shown_without_the_bounds_of_decoders() -> None:
    bounded = "msgspec.Meta(pattern='^[a-z]{1,8}$')"
    given = f"(a: Annotated[str, {bounded}], b: Annotated[dict[str, str], {bounded}] = <factory>)"
    told, _ = docstrings.on_signature(None, "", "", None, None, given, None)
    assert told == "(a: str, b: dict[str, str] = ...)"
