"""What became of the versions of one model that were applied here, or could not be. (W15, W24)"""

from ..effects import Effect, Rejected, Renamed
from ..limits import APPLIES_MAX
from ..messages import Failed, Rename, Running
from . import reports
from .asking import Asking
from .events import Report
from .holdings import Held, Holdings, Key
from .phases import Event

# What may be otherwise next time, since bytes were damaged or memory was short: it is tried again,
# after a while.
TRANSIENT = {"digest-mismatch", "layout-invalid", "no-memory", "unsupported"}


class Applying:
    """What runs, and what did not.

    Args:
        model: The model's name.
        holds: Its versions that are here.
        asking: Told which version to try again later.
        patches: Whether patches are taken, which build on what runs.
    """

    def __init__(self, model: str, holds: Holdings, asking: Asking, *, patches: bool) -> None:
        self._model, self._holds, self._asking = model, holds, asking
        self._patches = patches
        self.torn = 0  # applies in a row that failed half-way: while there is one, nothing runs
        self.epoch = 0  # the greatest of which bytes were written into the model
        self.stale: Key = (0, 0)  # was not to be had from shared memory: it is to be fetched
        self.failed: Failed | None = None  # the last one, until another version is begun

    def became(self, held: Held, report: Report, now: float) -> list[Effect]:
        """Take what the user did with a version that was ready; say what that means."""
        older = self._holds.at["running"]
        if report.kept:
            self._holds.let_go(held)
        if held.time == "overdue":
            self._holds.move(held, held.fate)
            return []
        match report.what:
            case "applied":
                staged = held.staged
                running = Running(*held.key, report.digest or staged.digest)
                sent = held.memory is None and staged.shared is None
                kept = report.bytes if held.announce.keep and self._patches and sent else None
                if kept is not None or self._holds.base is not None:
                    self._holds.rebase(held, running, kept)  # D3
                self._holds.move(held, "applied", running)
                if older is not None:
                    self._holds.move(older, "newer")
                return [self.runs(held, running)]
            case "torn":  # the model holds parts of two; what is tried next comes verified
                self._holds.move(older, "torn")
                self._holds.rebase(None, None, None)
                self.stale, self.torn = held.key, self.torn + 1
                self.epoch = max(self.epoch, held.key[0])
                fate: Event = "torn" if self.torn < APPLIES_MAX else "declined"
                return self._failed(held, report, fate, now)
            case "declined":
                return self._failed(held, report, "declined", now)
            case "failed":
                self._holds.move(held, "failed")
                return self.fail(held.key, "no-memory", report.text, now)[:1]
            case _:
                self.stale = held.key if report.what == "stale" else self.stale
                self._holds.move(held, report.what)
                return []

    def _failed(self, held: Held, report: Report, fate: Event, now: float) -> list[Effect]:
        """The user's part has failed; a version that it still holds stays where it is."""
        if report.still:
            held.late(fate)
        else:
            self._holds.move(held, fate)
        return self.fail(held.key, "apply", report.text, now)[:1]

    def runs(self, held: Held, running: Running) -> Effect:
        """A version runs by this name; say so."""
        self.torn, self.epoch = 0, max(self.epoch, running.epoch)
        known = self.failed
        if known is not None and (known.epoch, known.version) <= held.key:
            self.failed = None
        return reports.applied(self._model, running, held.staged, at_once=True)

    def renamed(self, rename: Rename) -> list[Effect]:
        """What runs here is a newer version, byte for byte; nothing if that has no effect.

        It has none if another version is at the user's, who may be writing it into the model.
        """  # W25
        holds, key = self._holds, (rename.epoch, rename.version)
        held = holds.at["running"]
        if held is None or held.running != rename.was or holds.all("ready", "applying"):
            return []
        if self._asking.only not in (None, key):  # W8
            return []
        begun = max((h.key for h in holds.all("arriving")), default=(0, 0))
        if key <= holds.newest or key < begun:
            return []
        for older in holds.all("announced", "arriving", "staged"):
            holds.move(older, "newer")
        running = Running(*key, rename.was.digest)
        holds.rename(held, running)
        said = self.runs(held, running)
        self.begun()
        return [Renamed(self._model, *key, rename.metadata), said]

    def reconnected(self) -> None:
        """A session begins: what was torn may be tried as often as at first."""
        self.torn = min(self.torn, 1)

    def begun(self) -> None:
        """A version is on its way: forget why another was not. (That nothing runs is said on.)"""
        if not self.torn:
            self.failed = None

    def fail(self, key: Key, code: str, text: str, now: float) -> list[Effect]:
        """Tell the publisher and the user that a version is not taken; not now, or not ever."""
        epoch, version = key
        if code in TRANSIENT:
            self._asking.put_off(key, now)
        self.failed = Failed(model=self._model, epoch=epoch, version=version, code=code, text=text)
        return [*self.failure(), Rejected(self._model, epoch, version, code, text)]

    def failure(self) -> list[Effect]:
        """Say what was not taken last, if it still counts."""
        if self.failed is None:
            return []
        return [reports.failed(self.failed, torn=bool(self.torn))]
