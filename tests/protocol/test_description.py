"""Each mistake in the description is refused, with its file and line."""

import re
import shutil
from pathlib import Path

import pytest

from weightbus.protocol import document
from weightbus.protocol.__main__ import ROOT
from weightbus.protocol.description import FOLDER, DescriptionError, read

# By file: a text, of which the first is replaced, by which text, and what the error says. Its line
# is that of the edit, or of the mark in it.
Mistake = tuple[str, str, str]
MARK = "\N{SECTION SIGN}"

VALUES: list[Mistake] = [
    ("token = { t", "token = { t = 1, t", "unknown key 't'"),
    ("token = { ", "token = 1 # { ", "is not a table"),
    ("token =", "token token =", "Expected '='"),
    ("token = {", "to-ken = {", "the field 'to-ken' does not match"),
    ("token = {", "type = {", "every message has 'type' already"),
    ("follows = {", "la_test = {", "but roster has 'latest': use one name for one thing"),
    ('"0 to CHUNKS_MAX-1"', '"0 to CHUNKS-1"', "no limit has the name CHUNKS"),
    ('"0 to CHUNKS_MAX-1"', '"CHUNKS_MAX to 1"', "are reversed: 1,048,576 is above 1"),
    ('"0 to CHUNKS_MAX-1"', '"0 to 2^20-2"', "'2^20-2' is not a number"),
    ('"0 to CHUNKS_MAX-1"', '"index"', "unknown type 'index'"),
    ('"0 to CHUNKS_MAX-1", default = 0', '"text", default = 0', "the default 0 is not of the type"),
    ('"0 to CHUNKS_MAX-1", default = 0', '"boolean", default = 0', "the default 0 is not of the"),
    ('"0 to CHUNKS_MAX-1", default = 0', '"integer", default = false', "the default False is not"),
    ('"0 to CHUNKS_MAX-1", default = 0', '"integer", default = -1', "the default -1 is not of the"),
    ('"name or null", ', '"name or null", default = "", ', "null is null; leave it out"),
    ('"name or null", ', '"name or null or null", ', "has null twice"),
    ('type = "name or null", ', "", "announce.fields.encryption has no 'type'"),
    ('"one of auto, together"', '"one of auto"', "needs at least two different words"),
    ('"one of auto, together"', '"one of auto, auto"', "needs at least two different words"),
    ("MODELS_MAX: name ->", "MODELS_MAX: integer ->", "a key of an object is a string"),
    ('meaning = "the model"', "meaning = 1", "'meaning' is 1, which is not a text"),
    ('default = "", page = "patches"', 'default = "", page = "patch"', "'patch' is not one of"),
    ("index = {", "epoch = {", "'epoch' is a field of each version already"),
]
STRUCTS: list[Mistake] = [
    ("[message.bye]", "[message.By]", "the message 'By' does not match"),
    ("[object.shared]", "[object.Shared]", "the object 'Shared' does not match"),
    ("[object.shared]", "[object.ping]", "ping is a message and an object"),
    (
        "[object.shared]",
        f'{MARK}[object.idle]\npage = "keys"\nsummary = ""\nfields = {{}}\n[object.shared]',
        "no message has the object 'idle'",
    ),
    (
        '"the token in the segment" }',
        f'"" }}\n{MARK}inner = {{ type = "shared", meaning = "" }}',
        "the object 'shared' contains itself",
    ),
    ("[message.bye]", "[message.bye]\nsize = 1", "unknown key 'size'"),
    ('[message.bye]\npage = "index"', "[message.bye]", "message.bye has no 'page'"),
    (
        '[message.bye]\npage = "index"',
        f'[message.bye]\n{MARK}page = "idex"',
        "page 'idex' is not one of",
    ),
    ('from = "worker"', 'from = "workers"', "sender 'workers' is not one of"),
    ('to = "publisher"', 'to = "all"', "receiver 'all' is not one of"),
    ('over = "data"', 'over = "dat"', "channel 'dat' is not one of"),
    ("payloads = [0, 1]", "payloads = [0, 2]", "payloads [0, 2] is not one of"),
    ("payloads = [0, 1]", "payloads = 1", "payloads 1 is not one of"),
    ("[message.bye]\n", '[message.bye]\nclass = "Hello"\n', "have the class Hello"),
]
OTHERS: dict[str, list[Mistake]] = {
    "limits": [
        ("WINDOW_CHUNKS =", "window =", "the limit 'window' does not match"),
        ('value = "2^20"', 'value = "2^20-7"', "'2^20-7' is not a number"),
        ("value = 65536", "value = -1", "'-1' is not a number"),
        ('page = "index"', 'page = "limits"', "page 'limits' is not one of"),
        ("RANK_MAX =", "TENSORS_MAX =", "Cannot overwrite a value"),
    ],
    "timers": [
        ("default = 0.25", "default = 0", "a time must be above zero"),
        ('side = "both"', 'side = "all"', "side 'all' is not one of"),
        ('page = "worker"', 'page = "workers"', "page 'workers' is not one of"),
    ],
    "codes": [
        ("gone = {", "Gone = {", "the code 'Gone' does not match"),
        ('answers = "`fetch`", ', "", "refuse.gone has no 'answers'"),
        ("[failed]", "[fail]", "the message of the codes, 'fail' is not one of"),
    ],
    "features": [
        ("mapping =", "Mapping =", "the feature 'Mapping' does not match"),
        ('side = "publisher"', 'side = "both ways"', "side 'both ways' is not one of"),
        ('page = "extras"', 'page = "extra"', "page 'extra' is not one of"),
    ],
    "phases": [
        ('open = "is not', 'Open = "is not', "the state 'Open' does not match"),
        ('taken = "the', 'Taken = "the', "the event 'Taken' does not match"),
        ('page = "worker"', 'page = "work"', "page 'work' is not one of"),
        ('initial = "announced"', 'initial = "begin"', "there is no state 'begin'"),
        ('final = ["dropped", "rejected"]', 'final = ["lost"]', "there is no state 'lost'"),
        ("ready = { taken", "idle = { taken", "there is no state 'idle'"),
        ("ready = { taken", "ready = { take", "there is no event 'take'"),
        ('taken = "applying", newer', 'taken = "apply", newer', "'apply', which is not a state"),
        ('dropped = "is not', 'idle = ""\ndropped = "is not', "no event leaves 'idle'"),
        (
            "pulled = { patched",
            'decoded = { patched = "copied" }\npulled = { patched',
            "'decoded' is final, but an event leaves it",
        ),
        ('stale = "its', f'{MARK}idle = ""\nstale = "its', "no state has a transition by 'idle'"),
        ("[worker.model]", "[observer.model]\n[worker.model]", "side 'observer' is not one of"),
        ("[worker.model]", "[worker.model]\ncount = 1", "unknown key 'count'"),
    ],
}
MISTAKES = [
    (file, *mistake)
    for file, mistakes in {"messages": [*VALUES, *STRUCTS], **OTHERS}.items()
    for mistake in mistakes
]


def edit(path: Path, old: str, new: str) -> int:
    """Replace the first such text; return the line of the mark, or of the edit."""
    before, found, after = path.read_text().partition(old)
    assert found
    marked = before + (new if MARK in new else MARK + new) + after
    path.write_text(marked.replace(MARK, ""))
    return marked[: marked.index(MARK)].count("\n") + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in FOLDER.glob("*.toml"):
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    for name in document.PATHS.values():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(("file", "old", "new", "says"), MISTAKES)
def test_a_mistake_is_refused_with_its_line(
    folder: Path, file: str, old: str, new: str, says: str
) -> None:
    line = edit(folder / f"{file}.toml", old, new)
    with pytest.raises(DescriptionError) as caught:
        read(folder)
    assert str(caught.value).startswith(f"{file}.toml:{line}: ")
    assert says in str(caught.value)


def test_a_state_that_no_arrow_reaches_is_refused(folder: Path) -> None:
    path = folder / "phases.toml"
    text = path.read_text()
    path.write_text(text.replace('memory = { full = "buffer" }', 'memory = { full = "memory" }'))
    line = text[: text.index('buffer = "a buffer')].count("\n") + 1
    with pytest.raises(DescriptionError, match=f"^phases.toml:{line}: .* to 'buffer'$"):
        read(folder)


# A page that says something else than the description: an edit of the page as above.
HEAD = "| field | type | default | meaning |"
PAGES: dict[str, list[Mistake]] = {
    "docs/protocol/index.md": [
        ("| `pid` |", "| `pid2` |", "the description has no row `pid2`; delete it"),
        ("| `pid` |", "| `pid2` | | | |\n| `pid` |", "no row `pid2`"),
        ("| [`bye`](#bye) |", "| [`leave`](#leave) |", "no row [`leave`](#leave)"),
        (
            "### `pong`",
            f"# X\n{MARK}{HEAD}\n|-|\n\n### `pong`",
            "no such table",
        ),
        ("| `ping` | 1 |", "| `pang` | 1 |", "no row `pang`"),
        ("| `TRIES_MAX` |", "| `TRIES` |", "no row `TRIES`"),
        ("| `revoked` |", "| `revoke` |", "no row `revoke`"),
    ],
    "docs/protocol/worker.md": [
        ("64 (`RANK_MAX`)", "65 (`RANK_MAX`)", "RANK_MAX is 65; limits.toml: 64"),
        ("64 (`RANK_MAX`)", "64 (`RANKS_MAX`)", "limits.toml has no RANKS_MAX"),
        ("| announced | arriving |", "| announced | arrived |", "no row announced arrived"),
        ("| torn | an", "| turn | an |\n| torn | an", "no row turn"),
    ],
}


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [(path, *mistake) for path, mistakes in PAGES.items() for mistake in mistakes],
)
def test_a_page_that_differs_is_refused_with_its_line(
    pages: Path, path: str, old: str, new: str, says: str
) -> None:
    line = edit(pages / path, old, new)
    with pytest.raises(DescriptionError) as caught:
        document.files(read(), pages)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("path", "removed", "says"),
    [
        ("docs/protocol/index.md", "### `hello`", "section '`hello`': no table | field"),
        ("docs/protocol/worker.md", "64 (`RANK_MAX`)", "no sentence defines `RANK_MAX`"),
        ("docs/protocol/worker.md", "*following*", "no table explains 'following' of model"),
        ("docs/protocol/extras.md", "feature `renaming`", "does not mention the feature"),
    ],
)
def test_what_no_page_says_is_refused(pages: Path, path: str, removed: str, says: str) -> None:
    text = (pages / path).read_text()
    (pages / path).write_text(text.replace(removed, ""))
    with pytest.raises(DescriptionError, match=f"^{path}.*{re.escape(says)}"):
        document.files(read(), pages)


def test_a_new_row_gets_its_place(folder: Path, pages: Path) -> None:
    edit(
        folder / "messages.toml",
        "pid = {",
        'rank = { type = "integer", default = 0, meaning = "x" }\npid = {',
    )
    edit(
        folder / "messages.toml",
        "keys = {",
        'seal = { type = "boolean", default = false, page = "keys", meaning = "y" }\nkeys = {',
    )
    made = document.files(read(folder), pages)
    index, keys = (made[f"docs/protocol/{page}.md"] for page in ("index", "keys"))
    assert "for operators |\n| `rank` | integer | `0` | x |\n| `pid` |" in index
    assert "| `welcome` | `seal` | boolean | `false` | y |\n| `welcome` | `keys` |" in keys
