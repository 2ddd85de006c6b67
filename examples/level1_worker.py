"""A worker of level 1 (docs/PROTOCOL.md, first page): level1_worker.py ADDRESS MODEL FILE."""

import json
import os
import struct
import sys
import time
from contextlib import suppress
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import Any

import zmq

HELLO, PING, LOST, PATIENCE, SLOW = 0.25, 1.0, 5.0, 1.0, 16.0  # seconds
WINDOW, CHUNKS_MAX, BYTES_MAX, INSTANCE = 16, 2**20, 2**34, os.urandom(16).hex()
PLAIN = {"commit": "auto", "encoding": "raw", "encryption": None}
TABLE = [reduce(lambda c, _: c >> 1 ^ 0x82F63B78 * (c & 1), range(8), b) for b in range(256)]


def crc32c(data: bytes) -> int:  # 10 MB a second in plain Python; a library does thousands
    return ~reduce(lambda crc, b: crc >> 8 ^ TABLE[(crc ^ b) & 255], data, 2**32 - 1) % 2**32


class Worker:
    def __init__(self, address: str, model: str, path: str) -> None:
        self.address, self.model, self.path, self.known = address, model, path, (0, 0)
        self.runs: dict[str, Any] = {}  # epoch, version and digest
        self.reports: dict[str, Any] = {"ping": {}}  # what is said again and again
        self.later, self.again, self.pause = (0, 0), 0.0, 0.0  # what has failed, and is put off

    def session(self) -> str:  # on a connection of its own; returns why it is over
        with zmq.Context.instance().socket(zmq.DEALER) as self.dealer:  # type: ignore
            self.dealer.immediate, self.dealer.linger, self.dealer.maxmsgsize = 1, 0, 2**27
            self.dealer.connect(self.address)
            runs = {"models": {self.model: self.runs or None}, "epoch": self.runs.get("epoch", 0)}
            hello = {"hello": {"name": f"level1-{INSTANCE[:8]}", "instance": INSTANCE, **runs}}
            self.epoch, self.arriving, self.due, self.until, why = -1, 0, 0.0, 0.0, ""
            self.every, self.patience, self.heard = HELLO, PATIENCE, time.monotonic()
            while not why and (now := time.monotonic()) - self.heard < LOST:
                if now >= self.due:
                    self.due = now + self.every
                    for kind, fields in (hello if self.epoch < 0 else self.reports).items():
                        self.say(kind, **fields)
                if self.arriving and now >= self.until:
                    self.ask()
                if self.dealer.poll(20):
                    header, *payload = self.dealer.recv_multipart()
                    with suppress(ValueError, TypeError, LookupError, ArithmeticError):  # malformed
                        why = self.hear({"wbp": 0} | json.loads(header), b"".join(payload))
            return why or "nothing was heard"

    def say(self, kind: str, **fields: Any) -> None:
        of = {"model": self.model, "epoch": self.epoch} if "version" in fields else {}
        with suppress(zmq.Again):  # nobody is there
            self.dealer.send_json(of | fields | {"wbp": 1, "type": kind}, zmq.NOBLOCK)

    def hear(self, message: dict[str, Any], body: bytes) -> str:
        now = time.monotonic()
        match message if message["wbp"] == 1 else {}:  # pyright: ignore[reportMatchNotExhaustive]
            case {"type": "ping"}:
                self.say("pong", token=message.get("token", 0))
            case {"type": "refuse", "code": "gone" | "range"}:  # the next pong says what there is
                self.arriving = 0
            case {"type": "refuse", "text": str(text)}:
                return text
            case {"type": "welcome", "epoch": int(epoch), "ping_ms": int(ms)} if self.epoch < 0:
                if epoch < self.runs.get("epoch", 0):
                    return "what runs here is of a later publisher"
                self.epoch, self.due, self.every = epoch, 0.0, min(PING, max(1, ms) / 1000)
            case {"epoch": int(epoch)} if epoch != self.epoch:
                return "another publisher took its place" if self.epoch >= 0 else ""
            case {"type": "pong", "models": {self.model: int(newest)}}:
                put_off = (self.epoch, newest) <= self.later and now < self.again
                if (self.epoch, newest) > self.known and not self.arriving and not put_off:
                    self.say("fetch", version=0, layout=True)
            case {"type": "announce", "version": int(v)} if (self.epoch, v) > self.known:
                nbytes, size, self.due = message["nbytes"], message["chunk_bytes"], 0.0
                if [message.get(key) for key in PLAIN] != [*PLAIN.values()]:
                    self.fail(v, "unsupported")
                elif nbytes > min(BYTES_MAX, CHUNKS_MAX * size):
                    self.fail(v, "too-large")
                    self.known = self.epoch, v
                elif body and sha256(body).hexdigest() != message["layout"]:
                    self.fail(v, "layout-invalid")
                elif body and not self.arriving:
                    self.arriving, self.until, self.nbytes, self.size = v, now + 1, nbytes, size
                    self.head, self.data, self.crcs, self.proof = body, bytearray(), list[int](), ""
            case {"type": "end", "version": self.arriving, "digest": str(digest)}:
                self.proof = digest
                self.ask()
            case {"type": "chunk", "version": self.arriving, "index": int(i), "crc": int(crc)}:
                fits = len(body) == min(self.size, self.nbytes - len(self.data))
                if i == len(self.crcs) and fits and crc32c(body) == crc:
                    self.data += body
                    self.crcs.append(crc)
                    self.until, self.patience = now + PATIENCE, PATIENCE
                    if len(self.crcs) % WINDOW == 0 or len(self.data) == self.nbytes:
                        self.ask()
        self.heard = now if "epoch" in message else self.heard
        return ""

    def ask(self) -> None:  # for what comes next; or keep the version, if it is whole and sound
        first, left = len(self.crcs), -((len(self.data) - self.nbytes) // self.size)
        self.until, self.patience = time.monotonic() + self.patience, min(2 * self.patience, SLOW)
        if left or not self.proof:
            self.say("fetch", version=self.arriving, first=first, count=min(WINDOW, left))
            return
        proof = sha256(self.head).digest() + struct.pack(f"<Q{first}I", self.size, *self.crcs)
        runs = {"epoch": self.epoch, "version": self.arriving, "digest": self.proof}
        if sha256(proof).hexdigest() == self.proof:
            Path(self.path + ".part").write_bytes(self.head + self.data)
            os.replace(self.path + ".part", self.path)
            self.known, self.runs = (self.epoch, self.arriving), runs
            self.reports = {"applied": runs, "ping": {}}
        else:
            self.fail(self.arriving, "digest-mismatch")
        self.arriving, self.due = 0, 0.0

    def fail(self, version: int, code: str) -> None:  # it is left alone for ever longer
        key, of = (self.epoch, version), {"epoch": self.epoch, "version": version}
        self.reports["failed"] = of | {"code": code, "text": "a worker of level 1"}
        self.pause = min(2 * self.pause, SLOW) if key == self.later else PATIENCE
        self.later, self.again, self.due = key, time.monotonic() + self.pause, 0.0


worker = Worker(*sys.argv[1:])
while True:
    print(worker.session(), file=sys.stderr)
    time.sleep(HELLO)
