"""Compare forward passes of a resident and an ordinary model: `... forward KIND ROUNDS`.

The kinds differ in the alignment of the resident model's memory, and in the use of huge pages. Both
models are in one process and take turns. Before each round both get new values; the resident model
gets them by an exchange of pages, as in a worker. Prints one line of JSON.
"""

import mmap
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from weightbus.bus.memory import pages
from weightbus.codecs.state import state_of, write_into
from weightbus.python_client.applying import resident

from .comparison import WARM_UP
from .process import Answers

DEPTH, BATCH = 12, 8
WIDTH = 2048  # number of layers; they have 192 MiB of float32, more than a cache
PASSES = 9  # passes of each model in a round, of which the median counts


def measure(kind: str, rounds: int, width: int = WIDTH) -> dict[str, Any]:
    """Return the seconds of a forward pass of each model, round by round."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    beginning, _, huge = kind.partition(", ")
    _lie(pages.TABLE_BYTES if beginning == "2 MiB" else mmap.PAGESIZE, huge=bool(huge))
    ordinary, moved = (_model(width) for _ in range(2))
    layout = state_of(moved).layout()
    residence = resident.residence_of(moved, layout)
    staged = pages.memory_of(layout.nbytes)
    inputs, models = torch.randn(BATCH, width), {"ordinary": ordinary, "resident": moved}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(-WARM_UP, rounds):
        with torch.no_grad():
            for parameter in ordinary.parameters():
                parameter.mul_(1.01)
        write_into(state_of(ordinary), layout, staged)
        residence.exchange(staged)
        for name, taken in _passes(models, inputs).items():
            if number >= 0:
                seconds[name].append(taken)
        with torch.no_grad():
            assert torch.equal(ordinary(inputs), moved(inputs))
    return {"kind": kind, **seconds}


def _model(width: int) -> nn.Module:
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(DEPTH))
    return nn.Sequential(*layers)


def _passes(models: dict[str, nn.Module], inputs: torch.Tensor) -> dict[str, float]:
    """Return the processor seconds of one pass of each model, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.no_grad():
        for _ in range(PASSES):
            for name, model in models.items():
                before = time.thread_time()
                model(inputs)
                times[name].append(time.thread_time() - before)
    return {name: statistics.median(each) for name, each in times.items()}


def _lie(multiple: int, *, huge: bool) -> None:
    """Align exchanged memory to a multiple of `alignment`, but to no larger power of two."""

    def memory_of(nbytes: int) -> NDArray[np.uint8]:
        mapping = pages.Pages(max(nbytes, pages.TABLE_BYTES))
        mapping.nbytes = nbytes
        mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
        begin = (multiple % pages.TABLE_BYTES - pages.address_of(whole)) % pages.TABLE_BYTES
        return whole[begin : begin + nbytes]

    for module in (pages, resident):
        setattr(module, "memory_of", memory_of)  # noqa: B010 - it is not for others to change


if __name__ == "__main__":
    answers = Answers({})
    answers.say(measure(sys.argv[1], *map(int, sys.argv[2:])))
