"""The benchmark over shaped links judges what it has measured."""

import io
import os
import shutil

import pytest
from rich.console import Console

from weightbus.benchmarks import links
from weightbus.tests.cli.starting import python

BEST = {"raw": 3.6, "flat": 1.0, "class": 2.0, "auto": 1.05}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"flat": 1.3, "auto": 1.3}, ["speedup"]),
        ({"auto": 1.2}, ["auto"]),
        ({"flat": 3.0, "class": 1.0}, []),
    ],
)
def test_a_row_that_breaks_its_bound_is_noted(changed: dict[str, float], missed: list[str]) -> None:
    text = io.StringIO()
    rows = links.Rows(Console(file=text, width=160), judged=True)
    links.show("1 Gb/s", 0.01, BEST | changed, "flat", rows)
    assert [name.rpartition(": ")[2] for name in rows.missed] == missed
    assert text.getvalue().count("MISSED") == len(missed)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="needs root, and tc of iproute2"
)
def test_a_chunk_that_is_long_on_its_way_to_a_late_joiner_is_sent_once() -> None:
    python(links.__file__, "--joining", timeout=120)


def test_without_root_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert links.main([]) == 2
    assert "needs root" in capsys.readouterr().out
