"""Count the comparisons with peers that weightbus loses, of a fixed list.

The list is `peers.txt`. A share of all measured cases would improve with every easy case that is
added, and with every peer that is not installed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .contender import RESIDENT, load

FILE = Path(__file__).with_name("peers.txt")

CASE = ("shape", "workers", "peer", "pause")
Against = Literal["over_weightbus", "over_resident"]
Case = tuple[str, int, str, float]  # the shape, workers, the peer, and the pause


@dataclass(frozen=True, slots=True)
class Losses:
    """The measured ratios, compared with the list.

    Attributes:
        ratios: The ratio of the peer's time to weightbus's (median, quartiles), by case.
        listed: The cases of the list.
    """

    ratios: dict[Case, dict[str, float]]
    listed: list[Case]

    @property
    def lost(self) -> list[Case]:
        """The cases in which the peer was faster, in the list or not."""
        return [case for case, ratio in self.ratios.items() if ratio["median"] < 1]

    @property
    def count(self) -> int:
        """How many cases of the list are lost."""
        return len({*self.lost} & {*self.listed})

    @property
    def text(self) -> str:
        """The counts of lost, listed and unmeasured cases, as text."""
        missing = {*self.listed} - {*self.ratios}
        unknown = f", {len(missing)} were not measured" if missing else ""
        return f"of {len(self.listed)} listed comparisons with a peer{unknown}"


def listed(against: Against = "over_weightbus") -> list[Case]:
    """Return the list; for resident workers, only cases of the transport that they affect."""
    lines = (line.split() for line in FILE.read_text().splitlines())
    cases = [(shape, int(workers), peer, 0.0) for shape, workers, peer in lines]
    return [c for c in cases if against == "over_weightbus" or load(c[2]).LIMIT in RESIDENT]


def losses(comparisons: Iterable[dict[str, Any]], against: Against = "over_weightbus") -> Losses:
    """Return the losses in the contents of a file of results."""
    ratios: dict[Case, dict[str, float]] = {}
    for comparison in comparisons:
        for result in comparison["results"]:
            if result["name"] == comparison["peer"] and result[against] is not None:
                shape, workers, peer, pause = (comparison[each] for each in CASE)
                ratios[shape, workers, peer, pause] = result[against]
    return Losses(ratios, listed(against))
