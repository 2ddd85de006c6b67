"""Sending each worker weights of its own: one worker after the other, each with its share of time.

Not all at once, since an engine holds few versions of a model at a time, and gives up the older
ones for the newer.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from ...bus.errors import PublishError
from ...bus.receipt import Receipt
from ...codecs.apply import as_arrays, as_tensors
from ...codecs.state import write_into
from .engine import ANSWER_SECONDS, Engine, Weights


def send_each(engine: Engine, weights: Mapping[int, Weights], timeout: float) -> "Future[Receipt]":
    """Copy the weights of every worker, start to send them, and return.

    Returns:
        A future of one receipt for all; its version is the one that was sent last.

    Raises:
        StateError: Some of them cannot travel; nothing was sent.
    """
    deadline = time.monotonic() + timeout
    copies = {worker: copied(own) for worker, own in weights.items()}
    whole: Future[Receipt] = Future()

    def send_all() -> None:
        receipts: list[Receipt] = []
        try:
            for done, (worker, own) in enumerate(copies.items()):
                share = max(0.001, deadline - time.monotonic()) / (len(copies) - done)
                future = engine.send(own, [worker], timeout=share)
                receipts.append(receipt_of(future, share + ANSWER_SECONDS))
            whole.set_result(merged(receipts))
        except BaseException as error:
            whole.set_exception(error)

    threading.Thread(target=send_all, name="weightbus-each", daemon=True).start()
    return whole


def merged(receipts: Sequence[Receipt]) -> Receipt:
    """Return one receipt for several that were sent in one call; its version is the last one."""
    last = receipts[-1]
    if len(receipts) == 1:
        return last
    return replace(
        last,
        nbytes=sum(r.nbytes for r in receipts),
        seconds=max(r.seconds for r in receipts),
        digest="",
        workers={name: w for r in receipts for name, w in r.workers.items()},
    )


def receipt_of(future: "Future[Receipt]", timeout: float) -> Receipt:
    """Wait for a receipt; an engine may also raise what it has to report."""
    try:
        return future.result(timeout)
    except PublishError as error:
        return error.receipt


def copied(weights: Weights) -> Weights:
    """Return a copy of weights in memory of its own, tied ones tied."""
    state = weights.state()
    layout = state.layout()
    data = np.empty(layout.nbytes, np.uint8)
    write_into(state, layout, data)
    on_numpy = all(isinstance(leaf, np.ndarray) for leaf in weights.tensors.values())
    tensors: Mapping[str, Any] = (as_arrays if on_numpy else as_tensors)(layout, data)
    return Weights(weights.model_id, tensors)
