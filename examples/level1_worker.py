"""A worker of level 1 (docs/protocol/index.md): level1_worker.py ADDRESS MODEL FILE."""

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

HELLO, QUIET, PING, LOST, PATIENCE, SLOW = 0.25, 0.25, 1.0, 5.0, 1.0, 16.0  # seconds
WINDOW, CHUNKS_MAX, BYTES_MAX, INSTANCE = 16, 2**20, 2**34, os.urandom(16).hex()
ENDS = "unknown-worker name-taken stale-epoch limit protocol-version wrong-name revoked not-allowed"
PLAIN = {"commit": "auto", "encoding": "raw", "encryption": None}
TABLE = [reduce(lambda c, _: c >> 1 ^ 0x82F63B78 * (c & 1), range(8), b) for b in range(256)]


def crc32c(data: bytes) -> int:  # 10 MB a second in plain Python; a library does thousands
    return ~reduce(lambda crc, b: crc >> 8 ^ TABLE[(crc ^ b) & 255], data, 2**32 - 1) % 2**32


class Worker:
    def __init__(self, address: str, model: str, path: str) -> None:
        self.address, self.model, self.path, self.known = address, model, path, (0, 0)
        self.runs: dict[str, Any] = {}  # epoch, version and digest
        self.reports: dict[str, Any] = {"ping": {}}  # what is sent with every ping
        self.later, self.again, self.pause = (0, 0), 0.0, 0.0  # a failed version, and when to retry
        self.arriving, self.awaited = (0, 0), (0, 0)  # versions whose chunks, or layout, will come
        self.rejected = 0, 0  # a version that is not retried in this session
        self.said = -HELLO  # when the last hello was sent

    def session(self) -> str:  # has a connection of its own; returns why it ended
        with zmq.Context.instance().socket(zmq.DEALER) as self.dealer:  # type: ignore
            self.dealer.immediate, self.dealer.linger, self.dealer.maxmsgsize = 1, 0, 2**27
            self.dealer.connect(self.address)
            runs = {"models": {self.model: self.runs or None}, "epoch": self.runs.get("epoch", 0)}
            hello = {"hello": {"name": f"level1-{INSTANCE[:8]}", "instance": INSTANCE, **runs}}
            self.due, self.every = self.said + HELLO, HELLO
            self.epoch, self.asked, why = -1, -QUIET, ""
            self.until, self.patience, self.heard = 0.0, PATIENCE, time.monotonic()
            self.answered, self.fetched = 0.0, -SLOW  # when the last answered ping, fetch was sent
            while not why and (now := time.monotonic()) - self.heard < LOST:
                if now >= self.due:
                    self.due = now + self.every
                    self.said = now if self.epoch < 0 else self.said
                    for kind, fields in (hello if self.epoch < 0 else self.reports).items():
                        self.say(kind, **fields)
                late = self.answered > self.fetched or now >= self.fetched + SLOW
                if self.epoch >= 0 and now >= self.until and late:
                    self.ask()
                if self.dealer.poll(20):
                    header, *payload = self.dealer.recv_multipart()
                    with suppress(ValueError, TypeError, LookupError, ArithmeticError):  # malformed
                        why = self.hear({"wbp": 0} | json.loads(header), b"".join(payload))
            return why or "nothing was heard"

    def say(self, kind: str, **fields: Any) -> None:
        of = {"model": self.model, "epoch": self.epoch} if "version" in fields else {}
        of |= {"token": int(time.monotonic() * 1000)} if kind == "ping" else {}
        with suppress(zmq.Again):  # there is no connection
            self.dealer.send_json(of | fields | {"wbp": 1, "type": kind}, zmq.NOBLOCK)

    def hear(self, message: dict[str, Any], body: bytes) -> str:
        now = time.monotonic()
        match message if message["wbp"] == 1 else {}:  # pyright: ignore[reportMatchNotExhaustive]
            case {"type": "ping"}:
                self.say("pong", token=message.get("token", 0))
            case {"type": "refuse", "code": "gone" | "range", "version": int(v)}:
                if self.arriving == (message.get("epoch") or self.epoch, v):
                    self.arriving = 0, 0
                    self.latest()
                self.awaited = (0, 0) if v in (0, self.awaited[1]) else self.awaited
            case {"type": "refuse", "code": str(code)} if code in ENDS.split():
                return code
            case {"type": "welcome", "epoch": int(epoch), "ping_ms": int(ms), "models": models}:
                if epoch < self.runs.get("epoch", 0):
                    return "what runs here is of a later publisher"
                if epoch != self.epoch:
                    self.epoch, self.due, self.every = epoch, 0.0, min(PING, max(1, ms) / 1000)
                    self.arriving = self.arriving if self.arriving[0] == epoch else (0, 0)
                    self.awaited, self.until, self.fetched = (0, 0), 0.0, -SLOW
                    self.rejected = 0, 0
                self.news(models.get(self.model, 0))
            case {"epoch": int(epoch)} if epoch != self.epoch:
                return "another publisher took its place" if self.epoch >= 0 else ""
            case {"type": "pong"}:
                self.answered = message.get("token", 0) / 1000
                self.news(message.get("models", {}).get(self.model, 0))
            case {"type": "announce", "version": int(v)} if (self.epoch, v) > self.known:
                nbytes, size, key = message["nbytes"], message["chunk_bytes"], (self.epoch, v)
                if key == self.rejected or (key <= self.later and now < self.again):
                    pass  # an answer to an earlier fetch
                elif [message.get(each) for each in PLAIN] != [*PLAIN.values()]:
                    self.fail(key, "unsupported")
                elif nbytes > BYTES_MAX:
                    self.fail(key, "too-large")
                elif nbytes > CHUNKS_MAX * size:
                    self.fail(key, "too-many-chunks")
                elif body and sha256(body).hexdigest() != message["layout"]:
                    self.fail(key, "layout-invalid")
                elif body and not any(self.arriving):
                    self.arriving, self.awaited, self.patience = key, (0, 0), PATIENCE
                    self.reports.pop("failed", None)
                    self.head, self.data, self.crcs, self.proof = body, bytearray(), list[int](), ""
                    self.nbytes, self.size = nbytes, size
                    self.ask()
                elif not any(self.arriving) and key > self.awaited:
                    self.awaited, self.asked, self.until = key, now, now + SLOW
                    self.fetched = now
                    self.say("fetch", version=v, layout=True)
            case {"type": "end", "version": int(v), "digest": str(digest)}:
                if self.arriving == (self.epoch, v):
                    self.proof = digest
                    if len(self.data) == self.nbytes:
                        self.ask()
            case {"type": "chunk", "version": int(v), "index": int(i), "crc": int(crc)}:
                if self.arriving == (self.epoch, v) and i == len(self.crcs):
                    self.take(body, crc)
        self.heard = now if "epoch" in message else self.heard
        return ""

    def news(self, newest: int) -> None:  # fetch the publisher's newest version if it is needed
        key, now = (self.epoch, newest), time.monotonic()
        put_off = key <= self.later and now < self.again
        here = max(self.known, self.awaited, self.rejected)
        if newest and key > here and not any(self.arriving) and not put_off:
            self.latest()

    def latest(self) -> None:
        if time.monotonic() - self.asked >= QUIET:
            self.asked = time.monotonic()
            self.say("fetch", version=0, layout=True)

    def take(self, body: bytes, crc: int) -> None:  # store the next chunk
        fits = len(body) == min(self.size, self.nbytes - len(self.data))
        if not fits or crc32c(body) != crc:
            self.until, self.fetched = 0.0, -SLOW  # it is fetched again at once
            return
        self.data += body
        self.crcs.append(crc)
        self.until, self.patience = time.monotonic() + PATIENCE, PATIENCE
        if len(self.crcs) % WINDOW == 0 or len(self.data) == self.nbytes:
            self.ask()

    def ask(self) -> None:  # fetch the next chunks; or save the version, if it is complete
        self.until, self.patience = time.monotonic() + self.patience, min(2 * self.patience, SLOW)
        if not any(self.arriving):
            self.awaited = 0, 0  # no layout came: the next pong names the version again
            return
        epoch, version = self.arriving
        first, left = len(self.crcs), -((len(self.data) - self.nbytes) // self.size)
        if left or not self.proof:
            self.say("fetch", version=version, first=first, count=min(WINDOW, left))
            self.fetched = time.monotonic()
            return
        proof = sha256(self.head).digest() + struct.pack(f"<Q{first}I", self.size, *self.crcs)
        if sha256(proof).hexdigest() == self.proof:
            Path(self.path + ".part").write_bytes(self.head + self.data)
            os.replace(self.path + ".part", self.path)
            self.runs = {"epoch": epoch, "version": version, "digest": self.proof}
            self.known, self.reports = self.arriving, {"applied": self.runs, "ping": {}}
            self.due = 0.0
        else:
            self.fail(self.arriving, "digest-mismatch")
        self.arriving = 0, 0

    def fail(self, key: tuple[int, int], code: str) -> None:  # postpone or reject a version
        failed = {"epoch": key[0], "version": key[1], "code": code}
        self.reports["failed"] = failed | {"text": "a worker of level 1"}
        self.due, self.awaited = 0.0, (0, 0)
        if code.startswith("too-"):
            self.rejected = key
        else:
            self.pause = min(2 * self.pause, SLOW) if key == self.later else PATIENCE
            self.later, self.again = key, time.monotonic() + self.pause


worker = Worker(*sys.argv[1:])
while True:
    print(worker.session(), file=sys.stderr)
