"""Servers that go from one version to another side by side: all stand still, all load, all go on.

While one of them loads slowly, none answers: else two would answer with different versions, and
one perhaps with a version that another cannot load, and that is then taken back. A server that can
load neither the new version nor what it had before does not go on.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from .calls import CallError, SilentError
from .engines import Engine, Weights

Failed = dict[Engine, CallError]


@dataclass
class Swap:
    """What has become of a swap.

    Attributes:
        interrupted: What has interrupted it: a signal. All is as after a failure then.
        failed: Why servers do not run the new weights; harmless if they run what they had before.
        paused: Why servers do not go on that could.
    """

    interrupted: BaseException | None = None
    failed: Failed = field(default_factory=Failed)
    paused: Failed = field(default_factory=Failed)

    @property
    def given_up(self) -> bool:
        """Whether servers are to run what they had before."""
        return bool(self.failed) or self.interrupted is not None


def swap(old: Mapping[Engine, Weights | None], new: Weights) -> Swap:
    """Have some servers load weights, or else all of them what they had.

    Args:
        old: The servers, with what each runs, if that is known.
        new: What they are to run.
    """
    done, engines = Swap(), [*old]
    stand_still = not new.adapter  # requests for an adapter wait for it by themselves, or need not
    if stand_still:
        done.interrupted, done.failed = each(lambda engine: engine.pause(), engines)
    if not done.given_up:
        done.interrupted, done.failed = each(lambda engine: engine.load(new), engines)
        if done.given_up:
            _take_back(done, old, new)
    if stand_still:
        interrupted, done.paused = each(lambda engine: engine.resume(), engines)
        done.interrupted = done.interrupted or interrupted
    return done


def _take_back(done: Swap, old: Mapping[Engine, Weights | None], new: Weights) -> None:
    """Have each server that has touched the new weights load what it had before."""

    def back(engine: Engine) -> None:
        if (before := old[engine]) is not None:
            engine.load(before)
        elif not new.adapter:
            raise CallError(f"{engine.url} does not say what that was")

    touched = [e for e in old if e not in done.failed or not done.failed[e].harmless]
    interrupted, stuck = each(back, touched)
    done.interrupted = done.interrupted or interrupted
    _, answering = each(lambda engine: engine.hold(), [] if new.adapter else [*stuck])
    for engine in touched:
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
        elif cause is not None and before is None:  # it has no such adapter, as before
            harmless = not isinstance(cause, SilentError)
            done.failed[engine] = CallError(str(cause), harmless=harmless)
        elif cause is not None:
            text = f"{cause}; it has loaded what it had before"
            done.failed[engine] = CallError(text, harmless=True)


def each(
    work: Callable[[Engine], object], engines: Sequence[Engine]
) -> tuple[BaseException | None, Failed]:
    """Do something with each server, side by side; return what has interrupted us, and who failed.

    Nothing ends it but its own deadlines: a server that was told to load cannot be told not to.
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
        waits: list[Future[None]] = [pool.submit(attempt, engine) for engine in engines]
        while waits:
            try:
                waits = list(wait(waits).not_done)
            except BaseException as error:  # a signal; whoever sent it waits for what is asked
                interrupted = error
    return interrupted, failed
