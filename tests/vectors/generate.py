"""Write the golden vectors, or check that the committed ones are what this writes.

    python tests/vectors/generate.py            write
    python tests/vectors/generate.py --check    compare; exit status 1 if they differ

The same bytes come out on every machine: there is no clock and no chance in here.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from weightbus.tests.vectors import (
    arrow_cases,
    cast_cases,
    companion_cases,
    delta_cases,
    layout_cases,
    levels,
    message_cases,
    phase_cases,
    piece_cases,
    publisher_sequence_cases,
    relay_sequence_cases,
    sealing_cases,
    segment_cases,
    sequence_cases,
    sum_cases,
    tie_cases,
)
from weightbus.tests.vectors.parts import Json

HERE = Path(__file__).parent
IN_LINE_MAX = 400  # bytes; what is longer stands in a file of its own
FORMAT = 1
CHANNELS = ("control", "data")


class Files:
    """What is to be written, by path below this folder."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    def keep(self, data: bytes, name: str, suffix: str = "bin") -> str:
        """Put bytes into a file named after the first case that has them; return its path."""
        same = next((p for p, kept in self.contents.items() if kept == data), "")
        if same.startswith("files/") and same.endswith(suffix):
            return same
        path = f"files/{re.sub('[^a-z0-9]+', '-', name.lower())}.{suffix}"
        if self.contents.setdefault(path, data) != data:
            raise ValueError(f"two cases want {path}; give one of them another name")
        return path

    def blob(self, data: bytes, name: str) -> Json:
        """Return bytes as text if they are UTF-8, else as hexadecimal digits, many as a file."""
        if len(data) > IN_LINE_MAX:
            return {"file": self.keep(data, name)}
        try:
            return {"text": data.decode()}
        except UnicodeDecodeError:
            return {"hex": data.hex()}

    def table(self, path: str, **tables: Iterable[Json]) -> None:
        """Write tables of cases, one case to a line."""
        parts = [f'"format": {FORMAT}']
        for key, cases in tables.items():
            lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
            parts.append(f'"{key}": [\n{lines}\n]')
        self.contents[path] = ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def files() -> dict[str, bytes]:
    """Return every file of the vectors."""
    out = Files()
    out.table("messages.json", cases=[_message(out, case) for case in message_cases.cases()])
    layouts = [
        {**case, "level": 1, "header": out.blob(case["header"], f"layout {case['name']}")}
        for case in layout_cases.cases()
    ]
    out.table("layouts.json", cases=layouts)
    out.table("chunks.json", cases=_simple(sum_cases.chunk_cases()))
    sums = _simple(sum_cases.crc_cases()), _simple(sum_cases.digest_cases())
    out.table("checksums.json", crc32c=sums[0], digests=sums[1])
    versions = [
        {**case, "level": 1, "file": out.keep(case["file"], case["name"], "safetensors")}
        for case in sum_cases.version_cases()
    ]
    out.table("versions.json", cases=versions)
    segments = [
        {**case, "level": 4, "file": out.keep(data, name)}
        for case in segment_cases.segment_cases()
        for name, data in [case["file"]]
    ]
    out.table("segments.json", cases=segments)
    in_sequence = (*sequence_cases.sequence_cases(), *arrow_cases.cases())
    sequences = [_sequence(out, case) for case in in_sequence]
    out.table("sequences.json", cases=sequences)
    parts = publisher_sequence_cases, relay_sequence_cases
    published = [case for part in parts for case in part.sequence_cases()]
    out.table("publisher_sequences.json", cases=published)
    out.table("phases.json", cases=phase_cases.worker_cases())
    out.table("publisher_phases.json", cases=phase_cases.publisher_cases())
    out.table(
        "renaming.json",
        messages=_of_feature(out, message_cases.feature_cases("extras")),
        sequences=[_sequence(out, each) for each in sequence_cases.renaming_cases()],
    )
    at_once = [_sequence(out, each) for each in companion_cases.cases()]
    out.table("companions.json", sequences=at_once)
    prepared = message_cases.feature_cases("shared-memory")
    out.table("mapping.json", cases=[{**_message(out, c), "level": 4} for c in prepared])
    _features(out)
    failing = [_message(out, each) for each in message_cases.applying_cases()]
    in_applying = (*sequence_cases.applying_cases(), *arrow_cases.applying_cases())
    applying = [_sequence(out, each) for each in in_applying]
    out.table("applying.json", messages=failing, sequences=applying)
    out.table("casts.json", cases=cast_cases.cast_cases())
    out.table("ties.json", cases=tie_cases.tie_cases())
    deltas = [
        {
            **case,
            **{key: out.blob(case[key], f"{case['name']} {key}") for key in ("layout", "patch")},
        }
        for case in delta_cases.delta_cases()
    ]
    out.table("deltas.json", cases=deltas)
    patched = message_cases.further_cases("note", page="patches")
    out.table("patching.json", headers=_of_feature(out, patched))
    texts = message_cases.further_cases("metadata", "cut_off_ms")
    texts = (case for case in texts if case["direction"] == "from_publisher")
    out.table("metadata.json", messages=_of_feature(out, texts))
    sealed = _of_feature(out, message_cases.sealing_cases())
    out.table("sealing.json", **sealing_cases.cases(), headers=sealed)
    return out.contents


def _message(out: Files, case: Json) -> Json:
    frames = [
        out.blob(frame, f"{case['name']} {number}" if number else case["name"])
        for number, frame in enumerate(case["frames"])
    ]
    return {**case, **levels.of_message(case), "frames": frames}


def _features(out: Files) -> None:
    """Write the messages of features that no level needs."""
    checked = message_cases.feature_cases("observing")
    out.table("checking.json", cases=_of_feature(out, checked))
    seen = message_cases.feature_cases("observing", "observer")
    out.table("observing.json", cases=_of_feature(out, seen))
    below = message_cases.feature_cases("relays")
    out.table("below.json", cases=_of_feature(out, below))
    named = message_cases.further_cases(page="sources")
    out.table("sources.json", cases=_of_feature(out, named))
    of_parts = *message_cases.feature_cases("parts"), *message_cases.further_cases(page="parts")
    pieces = piece_cases.cases()
    out.table("parts.json", messages=_of_feature(out, of_parts), pieces=pieces)


def _of_feature(out: Files, cases: Iterable[Json]) -> list[Json]:
    """Return messages of a feature, which are of no level."""
    return [{**_message(out, case), "level": None} for case in cases]


def _simple(cases: Iterable[Json]) -> Iterator[Json]:
    return ({**case, "level": 1} for case in cases)


def _sequence(out: Files, case: Json) -> Json:
    steps = [
        {k: [out.blob(f, case["name"]) for f in v] if k in CHANNELS else v for k, v in step.items()}
        for step in case["steps"]
    ]
    return {**case, "steps": steps}


def stale() -> list[str]:
    """Return the files that are missing, differ, or should not be there."""
    wanted = files()
    there = {
        path.relative_to(HERE).as_posix(): path.read_bytes()
        for path in [*HERE.glob("*.json"), *HERE.glob("files/*")]
    }
    return sorted(n for n in wanted.keys() | there.keys() if wanted.get(n) != there.get(n))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description="Write the golden vectors of the protocol.")
    parser.add_argument("--check", action="store_true", help="compare with what is committed")
    if parser.parse_args(arguments).check:
        names = stale()
        for name in names:
            print(f"{name} is not what generate.py writes; run it and look at the difference")
        return 1 if names else 0
    for path in HERE.glob("files/*"):
        path.unlink()
    for name, data in files().items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
