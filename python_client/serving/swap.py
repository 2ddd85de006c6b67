"""Loads a version on several servers together: pause all, load on all, resume all.

No server answers while another server is still loading. Otherwise two servers could answer with
different versions, or with a version that is reverted later, since another server cannot load it.
A server that can load neither the new version nor its previous weights stays paused.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from .calls import CallError, SilentError
from .engines import Engine, ServedWeights

Failed = dict[Engine, CallError]


@dataclass
class Swap:
    """The result of `swap`.

    Attributes:
        interrupted: The exception of a signal that interrupted the swap, which then counts as
            failed. None: no signal came.
        failed: The errors of servers that do not run the new weights. An error is `harmless` if its
            server runs its previous weights.
        paused: The errors of servers that could not be resumed.
    """

    interrupted: BaseException | None = None
    failed: Failed = field(default_factory=Failed)
    paused: Failed = field(default_factory=Failed)

    @property
    def must_revert(self) -> bool:
        """Whether all servers must go back to their previous weights."""
        return bool(self.failed) or self.interrupted is not None


def swap(old: Mapping[Engine, ServedWeights | None], new: ServedWeights) -> Swap:
    """Load new weights on all servers; if one fails, load the previous weights on all of them.

    Args:
        old: The current weights of each server; None: unknown.
        new: The new weights.
    """
    done, engines = Swap(), [*old]
    pauses = not new.adapter  # for an adapter, the engines themselves make requests wait
    if pauses:
        done.interrupted, done.failed = each(lambda engine: engine.pause(), engines)
    if not done.must_revert:
        done.interrupted, done.failed = each(lambda engine: engine.load(new), engines)
        if done.must_revert:
            _revert(done, old, new)
    if pauses:
        interrupted, done.paused = each(lambda engine: engine.resume(), engines)
        done.interrupted = done.interrupted or interrupted
    return done


def _revert(done: Swap, old: Mapping[Engine, ServedWeights | None], new: ServedWeights) -> None:
    """Load the previous weights on each server that began to load the new weights."""

    def load_previous(engine: Engine) -> None:
        if (before := old[engine]) is not None:
            engine.load(before)
        elif not new.adapter:
            raise CallError(f"{engine.url} does not report which weights it had")

    changed = [e for e in old if e not in done.failed or not done.failed[e].harmless]
    interrupted, stuck = each(load_previous, changed)
    done.interrupted = done.interrupted or interrupted
    _, answering = each(lambda engine: engine.hold(), [] if new.adapter else [*stuck])
    for engine in changed:
        cause, before = done.failed.get(engine), old[engine]
        if engine in stuck:
            what = f"{engine.url} has the new version" if cause is None else str(cause)
            what += "; nor has it loaded what it had before"
            what += "" if before is None else f", from {before.folder}"
            what += f" ({stuck[engine]}): it may hold parts of both"
            if not new.adapter:
                stays = "it stays paused until it loads a version"
                what += f", so {answering.get(engine, stays)}"
            done.failed[engine] = CallError(f"{what}; publish again, or restart it")
        elif cause is not None and before is None:  # the server did not have the adapter before
            harmless = not isinstance(cause, SilentError)
            done.failed[engine] = CallError(str(cause), harmless=harmless)
        elif cause is not None:
            text = f"{cause}; it has loaded what it had before"
            done.failed[engine] = CallError(text, harmless=True)


def each(
    work: Callable[[Engine], object], engines: Sequence[Engine]
) -> tuple[BaseException | None, Failed]:
    """Run `work` on all servers concurrently; return the exception of a signal, and the errors.

    A signal does not end the wait early, since a load that has begun cannot be cancelled. Only the
    deadlines in `work` limit the duration.
    """
    failed: Failed = {}

    def attempt(engine: Engine) -> None:
        try:
            work(engine)
        except CallError as error:
            failed[engine] = error
        except Exception as error:
            failed[engine] = CallError(f"{engine.url}: {error!r}")

    interrupted: BaseException | None = None
    with ThreadPoolExecutor(max(1, len(engines)), "weightbus-server") as pool:
        pending: list[Future[None]] = [pool.submit(attempt, engine) for engine in engines]
        while pending:
            try:
                pending = list(wait(pending).not_done)
            except BaseException as error:  # a signal came; the calls continue
                interrupted = error
    return interrupted, failed
