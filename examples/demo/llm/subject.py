"""The demo's subject with a language model: its learner, its workers, and its tally."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..subject import Learner, Subject
from ..tally import Played, Tally
from .answers import Answers, from_line
from .transformer import ASKED

# The worker in TypeScript, which `make -C node_client worker` builds in a checkout; wheels lack it.
TYPESCRIPT = Path(__file__).resolve().parents[3] / "node_client" / "build" / "generation_worker"
IN_TYPESCRIPT = "w2"  # the third of three


class AnswersTally(Tally):
    """A tally that also checks whether all workers give the same answers with the same version."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._greedy: dict[int, dict[str, list[str]]] = {}  # by version and worker
        self._said = ""

    def played(self, played: Played, now: float) -> None:
        """Record a batch."""
        super().played(played, now)
        if isinstance(played, Answers) and played.greedy:
            self._greedy.setdefault(played.version, {})[played.worker] = played.greedy
            self._said = f"{ASKED[0]} > {played.greedy[0]}"

    def says(self) -> str:
        """Return the newest greedy answer to the first question."""
        return self._said

    def agreed(self) -> dict[str, int]:
        """Return for how many versions each worker gave the same answers as all other workers."""
        found = dict.fromkeys(self.workers, 0)
        for told in self._greedy.values():
            if len(told) > 1 and len({tuple(answers) for answers in told.values()}) == 1:
                found |= {name: found[name] + 1 for name in told}
        return found

    def faults(self) -> list[str]:
        """Return the versions with which two workers gave different answers."""
        return [
            f"version {version} is answered differently: {told}"
            for version, told in self._greedy.items()
            if len({tuple(answers) for answers in told.values()}) > 1
        ]


def _learner(seed: int) -> Learner:
    from .learner import LanguageLearner  # takes seconds, while the workers start

    return LanguageLearner(seed)


def _program(name: str) -> list[str]:
    if name == IN_TYPESCRIPT and TYPESCRIPT.exists() and shutil.which("node") is not None:
        return [str(TYPESCRIPT)]
    return [sys.executable, "-m", f"{__package__}.worker"]


LANGUAGE = Subject(
    title="a tiny language model",
    plural="batches",
    highest=1.0,
    update_steps=256,
    window_steps=256,
    needs=("torch",),
    learner=_learner,
    read=from_line,
    program=_program,
    tally=AnswersTally,
)
