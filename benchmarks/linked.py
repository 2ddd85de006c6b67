"""The worker's process of `links.py`: `python -m weightbus.benchmarks.linked TOLD`.

TOLD is an object: `ways`, by name the publisher's address and the options of the subscriber;
`elements` of the model; `address`, if it is to have a network of its own, where it is that.
"""

import ctypes
import functools
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightbus import Settings, Subscriber
from weightbus.codecs.native import crc32c

from . import memory
from .process import Answer, Answers

MODEL, WIDE = "policy", "wide"  # in 16 bits, and in 32
TENSORS = 16
FAR = "wb1"  # the end of the link that is the worker's
JOIN_SECONDS = 30.0
_CLONE_NEWNET = 0x40000000


def own_network() -> None:
    """Have this process, and what it starts from now on, see a network of its own.

    Raises:
        OSError: This needs root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"a network of its own: {os.strerror(code)}")
    run("ip", "link", "set", "lo", "up")


def run(*words: str) -> None:
    """Run a program of iproute2."""
    subprocess.run(words, check=True, timeout=10.0)  # noqa: S603 - our own words


def tensors(data: NDArray[np.uint8], *, wide: bool = False) -> dict[str, Any]:
    """Return bytes as tensors of a model, which share their memory."""
    import torch

    dtype = torch.float32 if wide else torch.bfloat16
    flat = torch.from_numpy(data.view(np.uint8)).view(dtype)
    return {f"w{index}": part for index, part in enumerate(flat.chunk(TENSORS))}


class Questions:
    """What the worker can be asked."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told, self._ways = told, dict[str, Any]()
        self._models: dict[str, dict[str, dict[str, Any]]] = {}
        self._scratch: list[NDArray[np.uint8]] = []  # two models, to be copied plainly

    def ready(self) -> Answer:
        """Say that this process is there."""
        return {}

    def link(self) -> Answer:
        """Take the end of the link, which is here by now."""
        run("ip", "address", "add", f"{self._told['address']}/24", "dev", FAR)
        run("ip", "link", "set", FAR, "up")
        return {}

    def join(self) -> Answer:
        """Have a subscriber for each way."""
        for name in self._told["ways"]:
            self.rejoin(name)
        return {}

    def rejoin(self, name: str) -> Answer:
        """Have a new subscriber, of which its publisher knows nothing."""
        ran: dict[str, int] = {}
        if name in self._ways:
            with self._ways.pop(name) as before:
                ran = {model: before.version(model) for model in self._models[name]}
        address, options, wide = self._told["ways"][name]
        zeros = np.zeros(2 * self._told["elements"], np.uint8)
        models = {
            model: {n: tensor.clone() for n, tensor in tensors(zeros, wide=model == WIDE).items()}
            for model in ((MODEL, WIDE) if wide else (MODEL,))
        }
        worker = Subscriber(
            address, models, name=name, settings=Settings(shared_memory=False, **options)
        )
        if not worker.wait_joined(JOIN_SECONDS):
            raise TimeoutError(f"{name}: {address} has not let this worker in")
        self._ways[name], self._models[name] = worker.start(), models
        for model, version in ran.items():
            worker.wait_for_version(model, version, timeout=JOIN_SECONDS)
        return {}

    def digest(self, name: str) -> Answer:
        """Hash what runs."""
        import torch

        value = 0
        for tensor in self._models[name][MODEL].values():
            value = crc32c(tensor.view(torch.uint8).numpy(), value)
        return {"crc": value}

    def pauses(self) -> Answer:
        """Tell how long the last apply of each way took, and a plain copy of as many bytes."""
        if not self._scratch:
            self._scratch = [np.ones(2 * self._told["elements"], np.uint8) for _ in range(2)]
        to, from_ = self._scratch
        begun = time.perf_counter()
        np.copyto(to, from_)
        memcpy = time.perf_counter() - begun
        return {n: w.update(MODEL).seconds for n, w in self._ways.items()} | {"memcpy": memcpy}

    def memory(self) -> Answer:
        """Tell the most memory since this was asked last."""
        peak = memory.peak()
        memory.reset_peak()
        return {"peak": peak}


def main(text: str) -> None:
    """Answer until the parent closes our standard input."""
    told = json.loads(text)
    if told["address"]:
        own_network()
    asked = Questions(told)
    each = {
        f"{what} {name}": functools.partial(getattr(asked, what), name)
        for what in ("rejoin", "digest")
        for name in told["ways"]
    }
    plain = {what: getattr(asked, what) for what in ("ready", "link", "join", "pauses", "memory")}
    Answers({**plain, **each}).serve()


if __name__ == "__main__":
    main(sys.argv[1])
