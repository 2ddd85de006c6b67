"""No subject of the product or of the tests grows unless `benchmarks/lines.json` says so."""

import json

from weightbus.benchmarks.lines import KEPT, by_subject


def test_no_subject_has_more_lines_than_the_file_says() -> None:
    kept: dict[str, int] = json.loads(KEPT.read_text())
    risen = {
        subject: (kept.get(subject, 0), lines)
        for subject, lines in by_subject().items()
        if lines > kept.get(subject, 0)
    }
    assert not risen, "if they must: .venv/bin/python benchmarks/lines.py --write"
