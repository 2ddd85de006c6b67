"""`weightbus verify`: compares workers' weights with the published weights, tensor by tensor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from ...bus.errors import RefusedError
from ...bus.messages import Verified
from ..observing.observer import Observer
from ..observing.view import Standing
from .outcome import DONE, NOT_ACHIEVED
from .screen import BAD, DIM, GOOD, Screen, counted, plain, table
from .status import ROWS_SHOWN, UNREACHABLE, observer_of, unread

UNKNOWN = 3  # the exit code if some result is unknown
NAMES_SHOWN = 5  # the most tensors named in one row of the table; --json has more

Verdict = Literal["same", "differs", "unknown"]
STYLES: dict[Verdict, str] = {"same": GOOD, "unknown": "yellow", "differs": BAD}


@dataclass(frozen=True)
class WorkerVerdict:
    """The result for one worker and one of its models."""

    standing: Standing
    answer: Verified  # the publisher's answers about this worker and model, merged

    @property
    def verdict(self) -> Verdict:
        """Whether the worker's weights equal the published weights, or whether that is unknown."""
        if self.answer.differing:
            return "differs"
        # At least one tensor was compared, or the version has no tensors.
        compared = self.answer.unlike < self.answer.count or not self.answer.names
        return "same" if compared and self.answer.code is None and not self._missing else "unknown"

    @property
    def _missing(self) -> int:
        """The number of tensors for which the worker sent no checksum."""
        return self.answer.names - self.answer.count

    @property
    def why(self) -> str:
        """A text that names the tensors that differ, or says why the result is unknown."""
        answer = self.answer
        if answer.differing:
            names = [each.name for each in answer.differences[:NAMES_SHOWN]]
            more = answer.differing - len(names)
            return ", ".join(names) + (f" and {more:,} more" if more else "")
        if answer.code is not None:
            return f"{answer.code}: {answer.text}"
        if self._missing:
            return f"it sent checksums of only {answer.count:,} of {answer.names:,} tensors"
        if answer.unlike:
            return f"{answer.unlike:,} cannot be compared: their dtypes differ, or it lacks them"
        return ""


def verify(
    screen: Screen,
    address: str,
    worker: str | None,
    model: str | None,
    timeout: float,
    keys: Path | None = None,
) -> int:
    """Compare the weights of workers with the published ones; return the exit code."""
    found: list[WorkerVerdict] = []
    with observer_of(address, keys) as observer:
        try:
            why = "" if observer.look(timeout) else unread(observer, address, timeout)
            if not why:
                found = _verify_all(observer, worker, model, timeout)
        except RefusedError as error:
            earlier = (
                " (it runs an earlier release: upgrade it)" if error.code == "malformed" else ""
            )
            why = f"{error}{earlier}"
    if not why and not found:
        named = " ".join(each for each in (worker, model) if each)
        why = f"no worker {named} is connected".replace("  ", " ")
    if why:
        screen.error(why)
        screen.emit("verify", achieved=False, text=why, workers=[])
        return UNREACHABLE
    found.sort(key=lambda each: [*STYLES].index(each.verdict), reverse=True)
    screen.show(rows_of(found[:ROWS_SHOWN]))
    verdicts = [each.verdict for each in found]
    code = NOT_ACHIEVED if "differs" in verdicts else UNKNOWN if "unknown" in verdicts else DONE
    counts = ((verdict, verdicts.count(verdict)) for verdict in STYLES)
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
    screen.say(f"{counted(len(found), 'worker')} verified: {text}", DIM)
    screen.emit("verify", achieved=not code, text=text, workers=[*map(_fields, found)])
    return code


def _verify_all(
    observer: Observer, worker: str | None, model: str | None, timeout: float
) -> list[WorkerVerdict]:
    wanted = [
        s
        for s in sorted(observer.view.standings(0), key=lambda s: (s.worker, s.model))
        if worker in (None, s.worker) and model in (None, s.model)
    ]
    return [WorkerVerdict(s, observer.verify(s.worker, s.model, timeout)) for s in wanted]


def rows_of(found: list[WorkerVerdict]) -> Table:
    # Return a table with a row for each result.
    rows = table(
        "worker", "model", "version", "weights", "tensors", "language", "",
        right=("version", "tensors"),
    )  # fmt: skip
    for each in found:
        s, answer = each.standing, each.answer
        rows.add_row(
            plain(s.worker),
            plain(s.model),
            str(answer.version or s.version or "none"),
            Text(each.verdict, STYLES[each.verdict]),
            f"{answer.count - answer.unlike:,} of {answer.names:,}" if answer.names else "",
            plain(s.language),
            plain(each.why),
        )
    return rows


def _fields(found: WorkerVerdict) -> dict[str, object]:
    # Return a result as a dict, for JSON.
    answer = found.answer
    return {
        "worker": found.standing.worker,
        "model": found.standing.model,
        "verdict": found.verdict,
        "version": answer.version or found.standing.version,
        "tensors": answer.names,
        "compared": answer.count - answer.unlike,
        "differing": answer.differing,
        "differences": [
            {"name": d.name, "published": f"{d.published:08x}", "runs": f"{d.runs:08x}"}
            for d in answer.differences
        ],
        "code": answer.code or "",
        "text": answer.text,
        "language": found.standing.language,
    }
