"""Seed the fuzzers with the golden vectors: `corpus.py VECTORS CORPUS`."""

import json
import sys
from pathlib import Path


def main(vectors: Path, corpus: Path) -> None:
    """Write one file for each case of a table that a fuzzer can begin with."""

    def table(name: str) -> list[dict]:
        return json.loads((vectors / name).read_text())["cases"]

    def blob(value: dict) -> bytes:
        if "text" in value:
            return value["text"].encode()
        return (
            bytes.fromhex(value["hex"])
            if "hex" in value
            else (vectors / value["file"]).read_bytes()
        )

    def write(target: str, number: int, data: bytes) -> None:
        folder = corpus / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).write_bytes(data)

    for number, case in enumerate(table("messages.json")):
        frames = [blob(frame) for frame in case["frames"]]
        if case["direction"] == "from_publisher" and frames and len(frames[0]) < 4096:
            write("header", number, frames[0])
            topic = framed(b"m/ctl", more=True)
            rest = [framed(f, more=i + 1 < len(frames)) for i, f in enumerate(frames)]
            write("zmtp", number, bytes([number % 256]) + topic + b"".join(rest))
            write("machine", number, b"\xff" + frames[0])
    for number, case in enumerate(table("layouts.json")):
        data = blob(case["header"])
        if len(data) < 8192:
            write("layout", number, data)


def framed(body: bytes, *, more: bool) -> bytes:
    """Return a frame of ZMTP."""
    if len(body) < 256:
        return bytes([int(more), len(body)]) + body
    return bytes([2 | int(more)]) + len(body).to_bytes(8, "big") + body


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
