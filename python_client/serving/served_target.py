"""Versions that servers load from a folder: written there, then each server is told to load them.

Theory of operation: each version has a folder of its own, EPOCH.VERSION, with the files beside the
weights that a checkpoint has; what servers run from is never written to. All servers load a version
or none keeps it: where one fails, those that have it load what they had before. The folders of
earlier versions are removed once all servers have a later one; but of adapters the one before
stays, since requests that began with it may read it again.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, cast

from ...bus.staged import StagedVersion
from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ..checkpoints.checkpoint import open_checkpoint
from ..file_target import FileTarget
from ..loading import UnreadableTargetError
from ..places import open_lock, place_of
from ..target import Names, Sums, Target
from .calls import CallError, SilentError
from .engines import Engine, How, Weights

WEIGHTS, ADAPTER, CONFIG = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"
LOCK = ".lock"
VERSION = re.compile(r"\d+\.\d+")  # the name of a version's folder, and what servers say they run
# What is weights, in whatever form, or says in which files they are: not copied beside ours.
WEIGHTS_ENDINGS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
BESIDE_BYTES_MAX = 64 * 2**20  # of a file beside the weights: a tokenizer has 20 MiB
NAMES_SHOWN = 3
LOOK_SECONDS = 5.0  # between two looks at what servers run
PREFIX = "base_model.model."  # with which PEFT, and whoever reads its adapters, begins each name


class ServersError(WeightBusError):
    """Not all servers have loaded a version."""


class ServedTarget(Target):
    """A folder whose versions some servers load.

    Args:
        engines: The servers.
        how: How they are treated. Its folder is made if its parent is there.
        like: A checkpoint, or an adapter, of the same form: its other files go beside the weights.
        adapter: Versions are an adapter that servers know by this name; empty: the whole model.

    Raises:
        OSError: The folder cannot be written to; or `like` is no folder.
        CheckpointError: The weights in `like` cannot be read.
    """

    on_disk = True  # `asks_user` not: servers are asked, each with a deadline of its own

    def __init__(
        self,
        engines: Sequence[Engine],
        how: How,
        *,
        like: Path | None = None,
        adapter: str = "",
    ) -> None:
        self._folder, self._seen = how.folder, how.seen
        self._engines, self._adapter = engines, adapter
        folder = how.folder
        folder.mkdir(exist_ok=True)
        FileTarget(folder / WEIGHTS)  # which tries whether it can be written to
        self._beside = [] if like is None else _beside(like)
        self._known = None if like is None or adapter else _layout_in(like)
        self._file: FileTarget | None = None  # the last version that was applied
        self._runs = ""  # that version
        self._kept: list[Path] = []  # folders that servers may read, the newest last
        self._intact = True
        self._looked = 0.0
        self._lock = _locked(folder)

    def close(self) -> None:
        """Let another one write to the folder."""
        self._lock.close()

    # What fits.

    def fault(self, layout: Layout) -> str:
        """Say why no server could take this `layout`, as far as that is known; else nothing."""
        if self._adapter:
            return _no_adapter(layout)
        return "" if self._known is None else _unlike(layout, self._known)

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Sum what the file holds.

        Arguments are those of `Target.summing`.

        Raises:
            UnreadableTargetError: There is none yet.
        """
        if self._file is None:
            raise UnreadableTargetError("no version was written yet")
        return self._file.summing(layout, names, sums)

    # Applying.

    def apply(self, staged: StagedVersion) -> None:
        """Write a version, and have all servers load it.

        Raises:
            ServersError: Some have not; it says what all of them run now.
            OSError: It could not be written; no server was told.
        """
        self._intact = True
        version = f"{staged.epoch}.{staged.version}"
        old = self._asked()
        home, was_there = self._folder / version, (self._folder / version).exists()
        try:
            file = self._written(home, staged)
            self._load(Weights(f"{self._seen}/{version}", version, self._adapter), old)
        except BaseException:
            if self._intact and not was_there:
                shutil.rmtree(home, ignore_errors=True)
            raise
        self._file, self._runs = file, version

    def _asked(self) -> dict[Engine, Weights | None]:
        """Ask all servers what they run, before anything is written."""
        old: dict[Engine, Weights | None] = {}

        def ask(engine: Engine) -> None:
            old[engine] = self._old(engine)

        if failed := self._all(ask):
            raise ServersError(f"{_listed(failed)}; nothing was changed{self._others(failed)}")
        return old

    def _old(self, engine: Engine) -> Weights | None:
        """Return what a server runs now; None: no adapter of that name, or it does not say."""
        if self._adapter:
            path = engine.adapter(self._adapter)
            return None if path is None else Weights(path, adapter=self._adapter)
        version = engine.version()
        ours = VERSION.fullmatch(version) and (self._folder / version).is_dir()
        home = f"{self._seen}/{version}" if ours else engine.home()
        return Weights(home, version) if home else None

    def _written(self, home: Path, staged: StagedVersion) -> FileTarget:
        home.mkdir(exist_ok=True)
        for path in self._beside:
            shutil.copyfile(path, home / path.name)
        if self._adapter and CONFIG in staged.metadata:
            (home / CONFIG).write_text(staged.metadata[CONFIG])
        if self._adapter:
            _check_config(home / CONFIG)
        file = FileTarget(home / (ADAPTER if self._adapter else WEIGHTS), untied=True)
        file.apply(staged)
        file.settle()
        return file

    def _load(self, new: Weights, old: dict[Engine, Weights | None]) -> None:
        def load(engine: Engine) -> None:
            engine.load(new, old[engine])

        def back(engine: Engine) -> None:
            before = old[engine]
            if before is not None:
                engine.load(before, None)

        interrupted, failed = self._each(load, self._engines)
        if not failed and interrupted is None:
            return
        again, stuck = self._each(back, [e for e in self._engines if e not in failed])
        self._intact = not stuck and all(error.harmless for error in failed.values())
        if (stop := interrupted or again) is not None:
            raise stop
        text = _listed(failed) + self._others({**failed, **stuck})
        if stuck:
            text += f"; and these have the new version: {_listed(stuck)}"
        raise ServersError(text)

    def _others(self, failed: Mapping[Engine, CallError]) -> str:
        names = [engine.url for engine in self._engines if engine not in failed]
        return f" ({', '.join(names)}: as before)" if names else ""

    def _all(self, work: Callable[[Engine], object]) -> dict[Engine, CallError]:
        interrupted, failed = self._each(work, self._engines)
        if interrupted is not None:
            raise interrupted
        return failed

    def _each(
        self, work: Callable[[Engine], object], engines: Sequence[Engine]
    ) -> tuple[BaseException | None, dict[Engine, CallError]]:
        """Do something with each server, side by side; return what interrupted us, and who failed.

        Nothing ends it but its own deadlines: a server that was told to load cannot be told not to.
        """
        failed: dict[Engine, CallError] = {}

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

    def undo(self) -> bool:
        """Say whether all servers run what they ran before."""
        return self._intact

    def settle(self) -> None:
        """Remove the folders of versions that no server needs any more."""
        home = self._folder / self._runs
        kept = [*(path for path in self._kept if path != home), home]
        self._kept = kept[-2:] if self._adapter else kept[-1:]
        for path in self._folder.iterdir():
            if VERSION.fullmatch(path.name) and path not in self._kept:
                shutil.rmtree(path, ignore_errors=True)

    # Between versions.

    def look(self) -> list[str] | None:
        """Have servers go on that were left paused, or load again what they lost by a restart.

        Whoever waits for versions calls it again and again; it looks every few seconds.

        Returns:
            What there is to tell; None if it was not yet time to look.
        """
        told: list[str] = []
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return None

        def mend(engine: Engine) -> None:
            engine.resume()
            if not self._runs:
                return
            there = self._old(engine)
            new = Weights(f"{self._seen}/{self._runs}", self._runs, self._adapter)
            if there == new or (there is not None and self._adapter and there.folder == new.folder):
                return
            engine.load(new, there)
            ran = "nothing" if there is None else there.version or there.folder
            told.append(f"{engine.url} ran {ran}, and has loaded {self._runs} again")

        failed = self._all(mend)
        self._looked = time.monotonic()
        return [*told, *(str(error) for error in failed.values())]

    def missing(self) -> str:
        """Say which servers do not answer yet; nothing if all do, and go on if we had paused them.

        Raises:
            ServersError: Some answer that they can never be of use.
        """

        def ask(engine: Engine) -> None:
            self._old(engine)
            engine.resume()

        failed = self._all(ask)
        text = _listed(failed)
        if all(isinstance(error, SilentError) for error in failed.values()):
            return text
        raise ServersError(text)


def _locked(folder: Path) -> IO[bytes]:
    """Take the lock of a folder: two who write there would remove each other's versions."""
    with place_of(folder / LOCK) as place:
        lock = os.fdopen(open_lock(place.name, place.folder), "rb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        text = "another bridge writes there; give each a folder of its own"
        raise FileExistsError(errno.EEXIST, text, str(folder)) from None
    return lock


def _listed(failed: Mapping[Engine, CallError]) -> str:
    return "; ".join(str(error) for error in failed.values())


def _beside(like: Path) -> list[Path]:
    """Return what is beside the weights in a folder."""
    return [
        path
        for path in sorted(like.iterdir())
        if path.is_file()
        and not path.name.endswith(WEIGHTS_ENDINGS)
        and path.stat().st_size <= BESIDE_BYTES_MAX
    ]


def _layout_in(like: Path) -> Layout | None:
    """Return the layout of the weights in a folder; None if there are none."""
    if not any(like.glob("*.safetensors")):
        return None
    return open_checkpoint(like).layout


def _unlike(layout: Layout, known: Layout) -> str:
    """Say how names and shapes differ from a checkpoint's, ties taken into account."""
    names, wanted = set(layout.names()), set(known.names())
    tied = {layout.by_name(name).name for name in names & wanted}
    extra = sorted(name for name in names - wanted if layout.by_name(name).name not in tied)
    lacking = sorted(wanted - names)
    shapes = [
        f"{name} is {list(layout.by_name(name).shape)}, not {list(known.by_name(name).shape)}"
        for name in sorted(names & wanted)
        if layout.by_name(name).shape != known.by_name(name).shape
    ]
    faults = [_some("it lacks", lacking), _some("it has besides", extra), _some("", shapes)]
    found = "; ".join(fault for fault in faults if fault)
    return found and f"it is no version of the model in --like: {found}. Publish it under its names"


def _some(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{what} {', '.join(names[:NAMES_SHOWN])}{more}".strip() if names else ""


def _no_adapter(layout: Layout) -> str:
    """Say why a version is no adapter as PEFT writes them; nothing if it is one."""
    names = layout.names()
    wrong = [name for name in names if not name.startswith(PREFIX)]
    if not wrong and any(".lora_" in name for name in names):
        named = [name for name in names if ".default." in name]
        if not named:
            return ""
        wrong = named
    return (
        f"it is no LoRA adapter as PEFT writes them ({_some('', wrong or names)}): publish "
        "peft.get_peft_model_state_dict(model)"
    )


def _check_config(path: Path) -> None:
    """Check that a file is an adapter's configuration.

    Raises:
        ServersError: It is none, or is not there; it says what to do.
    """
    what = "the version"
    with_it = f'publish it with metadata={{"{CONFIG}": ...}}, or give a folder with one as --like'
    if not path.exists():
        raise ServersError(f"{what} has no {CONFIG}: {with_it}")
    try:
        found: Any = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ServersError(f"{what} has an {CONFIG} that is no JSON ({error}): {with_it}") from None
    config = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise ServersError(f"{what} has an {CONFIG} that is no LoRA's: {with_it}")
