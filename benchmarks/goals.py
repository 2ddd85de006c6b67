"""The targets of weightbus: the bounds of each measured number."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .comparison import Spread

Better = Literal["less", "more"]
Shapes = Literal["model", "small"]
Unit = Literal["x", "MiB", "ms", "lost"]

PEERS_TCP = (
    "gloo_flat",
    "gloo_tensors",
    "redis_values",
    "torch_rpc",
    "zmq_buffers",
    "zmq_pickle",
    "zmq_torch_save",
)
PEERS_SHARED = ("ray_put", "torch_rpc_local", "torchrl_process", "torchrl_shared")


@dataclass(frozen=True, slots=True)
class Line:
    """One measured number and its bounds.

    Attributes:
        row: The row of the table that it belongs to.
        what: What was measured.
        workers: The number of workers; 0 if it does not matter.
        measured: Median and quartiles, over rounds or starts.
        must, reach: The bound to keep, and the goal; None if there is none.
        better: Whether less or more is better.
        unit: The unit of the number; a ratio has none.
    """

    row: str
    what: str
    workers: int
    measured: Spread
    must: float | None
    reach: float | None
    better: Better = "less"
    unit: Unit = "x"

    @property
    def verdict(self) -> str:
        """The bounds that the median keeps."""
        if self.reach is not None and self._keeps(self.reach):
            return "reached"
        if self.must is None:
            return "not reached"
        return "met" if self._keeps(self.must) else "MISSED"

    def _keeps(self, bound: float) -> bool:
        median = self.measured.median
        return median <= bound if self.better == "less" else median >= bound

    def as_json(self) -> dict[str, Any]:
        """Return the line as an entry of a file of results."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio of two contenders' times, from one comparison.

    Attributes:
        row, what: As in `Line`.
        shape: The shape of the model.
        workers: The number of workers.
        mine, other: The contenders; the ratio is of the first to the second.
        better, must, reach: As in `Line`.
    """

    row: str
    what: str
    shape: Shapes
    workers: int
    mine: str
    other: str
    better: Better
    must: float | None
    reach: float | None


Bounds = tuple[float, float, float]  # for 1, 2 and 4 workers
WORKERS = (1, 2, 4)


def _model(
    row: str, what: str, ratio: tuple[str, str], better: Better, must: Bounds | None, reach: Bounds
) -> Iterator[Goal]:
    for n, least, good in zip(WORKERS, must or (None,) * 3, reach, strict=True):
        yield Goal(row, what, "model", n, *ratio, better, least, good)


def _small() -> Iterator[Goal]:
    mines = ("weightbus_receive", "weightbus_background")
    for mine in (*mines, "weightbus_shared", "weightbus_shared_background"):
        yield Goal(
            "small", f"small, {mine} over bare PUB", "small", 4, mine, "bare_zmq", "less", 2.0, 1.3
        )
    for peers, rival in (
        (PEERS_TCP, "weightbus_receive"),
        (PEERS_SHARED, "weightbus_shared"),
    ):
        for peer in peers:
            what = f"small, faster than {peer} by"
            yield Goal("small", what, "small", 4, peer, rival, "more", None, 1.0)


def _faster(row: str, peer: str, must: Bounds, reach: Bounds) -> Iterator[Goal]:
    rival = "weightbus_shared" if peer in PEERS_SHARED else "weightbus_receive"
    what = f"{rival}, faster than {peer} by"
    return _model(row, what, (peer, rival), "more", must, reach)


def _resident(row: str, peer: str, reach: Bounds) -> Iterator[Goal]:
    what = f"weightbus_resident, faster than {peer} by"
    return _model(row, what, (peer, "weightbus_resident"), "more", None, reach)


GOALS: tuple[Goal, ...] = (
    *_model(
        "shared",
        "shared memory over fill + copy",
        ("weightbus_shared", "fill_copy"),
        "less",
        (0.99, 1.08, 1.00),  # no worse than before: the upper quartiles of an earlier run
        (0.85, 0.85, 0.85),
    ),
    *_faster("ray", "ray_put", (1.05, 1.15, 1.05), (1.5, 1.4, 1.3)),
    Goal(
        "ray",
        "weightbus_shared, faster than torchrl_shared by",
        "model",
        1,
        "torchrl_shared",
        "weightbus_shared",
        "more",
        None,
        1.0,
    ),
    *_model(
        "tcp",
        "TCP over raw TCP, resident",
        ("weightbus_resident", "raw_tcp"),
        "less",
        (1.10, 1.20, 1.50),
        (0.95, 1.05, 1.35),
    ),
    *_model(
        "tcp",
        "TCP over raw TCP, copying",
        ("weightbus_receive", "raw_tcp"),
        "less",
        (1.45, 1.50, 1.95),
        (1.30, 1.35, 1.70),
    ),
    *_faster("gloo", "gloo_flat", (1.3, 1.3, 1.3), (2.0, 2.0, 2.0)),
    *_faster("gloo", "gloo_tensors", (1.2, 1.2, 1.2), (1.7, 1.7, 1.7)),
    *_faster("pickle", "zmq_pickle", (6.0, 6.0, 6.0), (8.0, 8.0, 8.0)),
    *_resident("gloo", "gloo_flat", (2.0, 2.0, 2.0)),
    *_resident("gloo", "gloo_tensors", (1.7, 1.7, 1.7)),
    *_resident("pickle", "zmq_pickle", (8.0, 8.0, 8.0)),
    *_small(),
)
