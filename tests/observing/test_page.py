"""What of the page's script needs no browser, in Node: what is said how, in which order."""

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

from weightbus.python_client.observing.history import Moment

SECONDS = 30.0
NODE = shutil.which("node")
RUN = """
const vm = require("vm"), fs = require("fs");
const [script, expression, given] = JSON.parse(fs.readFileSync(0, "utf-8"));
const context = vm.createContext({ given, URLSearchParams });
vm.runInContext(script, context);
process.stdout.write(JSON.stringify(vm.runInContext(expression, context)));
"""
WORKERS = [
    {"worker": worker, "model": model, "verdict": verdict, "lag": lag, "rate": rate, "took_s": rate,
     "host": "h", "language": "Go", "road": "pulled", "error": error}
    for worker, model, verdict, lag, rate, error in (
        ("good", "a", "current", 0, 3, ""),
        ("late", "b", "behind", 2, 2, ""),
        ("later", "a", "behind", 7, 1, ""),
        ("dead", "a", "lost", 1, 0, ""),
        ("narrow", "b", "failed", 1, 0, "layout-mismatch"),
    )
]  # fmt: skip


def in_the_page(expression: str, given: object) -> Any:
    """Return what an expression is in the page's script, but for what needs a document."""
    if NODE is None:
        pytest.skip("Node is not installed")
    script = files("weightbus").joinpath("python_client/observing/page.js").read_text("utf-8")
    pure, mark, _ = script.partition("// The page.\n")
    assert mark
    words = [NODE, "-e", RUN]
    told = json.dumps([pure, expression, given])
    done = subprocess.run(  # noqa: S603
        words, input=told, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rows_are_sorted_by_what_matters_and_filtered() -> None:
    wanted = {
        "": ["dead", "narrow", "later", "late", "good"],
        "#sort=worker": ["dead", "good", "late", "later", "narrow"],
        "#sort=lag": ["later", "late", "dead", "narrow", "good"],
        "#sort=applied": ["good", "late", "later", "dead", "narrow"],
        "#state=behind": ["later", "late"],
        "#model=b": ["narrow", "late"],
        "#filter=MISMATCH&model=b": ["narrow"],
        "#filter=nobody": [],
    }
    seen = "given[1].map(hash => chosen(given[0], viewOf(hash)).map(s => s.worker))"
    assert in_the_page(seen, [WORKERS, list(wanted)]) == list(wanted.values())


def test_a_link_has_what_is_seen_and_what_makes_no_sense_in_one_is_left_out() -> None:
    usual = in_the_page("viewOf('')", None)
    assert in_the_page("hashOf(viewOf(''))", None) == "#"
    view = {**usual, "filter": "a&b=# é", "state": "lost", "model": "m", "sort": "lag", "rows": 400}
    assert in_the_page("viewOf(hashOf(given))", view) == view
    odd = "#sort=constructor&state=x&rows=-1&__proto__=1&unknown=2"
    assert in_the_page(f"viewOf('{odd}')", None) == usual


def test_the_history_is_kept_by_moment_and_what_is_old_is_let_go() -> None:
    fields = ["at", "version", "applied_s"]
    told = [
        {"since": -1, "now": 10.5, "moment_s": 5, "moments": 4, "fields": fields,
         "models": {"a": [[6, 1, 0], [7, 1, 0.1], [10, 2, 0.2]], "gone": [[7, 1, 1]]}},
        {"since": 3, "now": 11.5, "moment_s": 5, "moments": 4, "fields": fields,
         "models": {"a": [[10, 2, 0.4], [11, 3, 0]]}},
    ]  # fmt: skip
    seen = (
        "given.forEach(told => remember(told, 0)),"
        "[...past.models].map(([name, m]) => [name, [...m.values()]])"
    )
    assert in_the_page(seen, told) == [
        [
            "a",
            [{"at": 10, "version": 2, "applied_s": 0.4}, {"at": 11, "version": 3, "applied_s": 0}],
        ]
    ]
    again = [*told, {**told[0], "models": {}}]
    assert in_the_page(seen, again) == [], "a publisher that has started again tells all it has"


def test_what_is_drawn_of_a_moment_is_in_the_picture() -> None:
    told = {"since": -1, "now": 179.5, "moment_s": 5, "moments": 180, "fields": ["at", "late"],
            "models": {"a": [[0, 2], [1, 0], [179, 1]]}}  # fmt: skip
    path = in_the_page(
        "remember(given, 0), bars([...past.models.get('a').values()], m => m.late / 2)", told
    )
    assert path == "M0.0 100V0.0h4.4V100ZM994.4 100V50.0h4.4V100Z"


def test_what_was_published_is_said_in_words() -> None:
    fields = Moment.__struct_fields__
    told = {"since": -1, "now": 20.5, "moment_s": 5, "moments": 180, "fields": fields,
            "models": {"a": [[19, 7, 3, 1, 0.0004, 2, 1, 4, 1.5, "slow", 9]]}}  # fmt: skip
    said = in_the_page("remember(given, 0), momentText(past.models.get('a').get(19))", told)
    assert said == (
        "5.0 s ago: version 7; 3 publishes, 1 fell short; applied within 0.4 ms; "
        "2 not up to date, of these 1 lost, failed or stuck; slow behind by 4, 1.5 s"
    )


def test_bytes_are_said_in_the_unit_that_fits() -> None:
    assert in_the_page("given.map(bytes)", [0, 999, 1000, 12_345, 999_600, 2.5e9, 3e13]) == [
        "0 B", "999 B", "1.0 kB", "12 kB", "1.0 MB", "2.5 GB", "30.0 TB",
    ]  # fmt: skip
