"""Writes versions to a folder, and makes servers load them from the folder.

Each version has its own folder, EPOCH.VERSION, with the weights and the other files of a
checkpoint. A folder that servers use is never written to. A version that does not fit a server's
checkpoint is rejected before the server reads it. If one server cannot load a version, all servers
go back to their previous weights (`swap`). When all servers have a later version, the folders of
earlier versions are removed. The folder of the previous adapter is kept: requests that began with
that adapter may read it again.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from ...bus.staged import StagedVersion
from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ..applying.loading import UnreadableTargetError
from ..applying.target import Names, Sums, Target
from ..files.file_target import FileTarget
from ..files.places import open_lock, place_of
from . import served_checkpoint
from .calls import CallError, SilentError
from .engines import Engine, EngineSettings, ServedWeights
from .served_checkpoint import ServedCheckpoint
from .swap import each, swap

WEIGHTS, ADAPTER, CONFIG = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"
LOCK = ".lock"
VERSION = re.compile(r"\d+\.\d+")  # a version's folder name, and its version label on servers
# Files with these endings (weights in any format, and indexes) are not copied from a checkpoint.
WEIGHTS_ENDINGS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
COPIED_BYTES_MAX = 64 * 2**20  # largest file that is copied; a tokenizer has 20 MiB
CHECK_SECONDS = 5.0  # seconds between two checks of which versions servers run
PREFIX = "base_model.model."  # the start of each tensor's name in PEFT's adapters


class ServersError(WeightBusError):
    """Some servers have not loaded a version."""


class ServedTarget(Target):
    """A target that writes versions to a folder, from which servers load them.

    Args:
        engines: The servers.
        settings: The settings for servers. `settings.folder` is created if its parent exists.
        like: A folder with a checkpoint or an adapter of the same model. Its files, except for
            weights, are copied to the folder of each version.
        adapter: The name of the adapter on the servers; empty: versions are whole models.
        unchecked: Whether to load versions without comparing them. Otherwise each version is
            compared with the weights in `like` if there are any, else with the checkpoint that a
            server reports.

    Raises:
        OSError: The folder cannot be written to, or `like` is not a folder.
        CheckpointError: The weights in `like` cannot be read.
    """

    on_disk = True  # `asks_user` is False, because calls to servers have deadlines

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: EngineSettings,
        *,
        like: Path | None = None,
        adapter: str = "",
        unchecked: bool = False,
    ) -> None:
        self._folder, self._server_path = settings.folder, settings.server_path
        self._engines, self._adapter = engines, adapter
        folder = settings.folder
        folder.mkdir(exist_ok=True)
        FileTarget(folder / WEIGHTS)  # checks that the folder can be written to
        self._other_files = [] if like is None else _other_files(like)
        self._checked = not adapter and not unchecked
        self._like: ServedCheckpoint | None = None
        if self._checked and like is not None and served_checkpoint.has_weights(like):
            self._like = served_checkpoint.read(like, "--like")
        # By server: the name of its checkpoint, and the layout that was read on this host.
        self._checkpoints: dict[Engine, tuple[str, ServedCheckpoint]] = {}
        self._file: FileTarget | None = None  # the file of the last applied version
        self._applied_label = ""  # the label of the last applied version
        self._layout: Layout | None = None
        self._kept: list[Path] = []  # folders of versions that servers may read, the newest last
        self._intact = True
        self._checked_at = 0.0  # when `sync` last checked the servers
        self._lock = _locked(folder)

    def close(self) -> None:
        """Release the lock of the folder."""
        self._lock.close()

    # Comparing with checkpoints.

    def fault(self, layout: Layout) -> str:
        """Return why a server cannot load a version of this layout; "" if no reason is known."""
        if self._adapter:
            return _adapter_fault(layout)
        if self._like is not None:
            return self._like.fault(layout)
        faults = (served.fault(layout) for _, served in [*self._checkpoints.values()])
        return next((fault for fault in faults if fault), "")

    def _learn(self, engine: Engine) -> None:
        """Read a server's checkpoint, unless it was read before, or versions are not compared.

        Raises:
            UnknownCheckpointError: The checkpoint cannot be read here.
            CallError: The server makes copies of weights that a reload does not update.
        """
        name = engine.checkpoint() if self._checked else ""
        if not self._checked or self._checkpoints.get(engine, ("",))[0] == name:
            return
        served = self._like or served_checkpoint.find(name, engine.url)
        if served.derived:
            engine.check_reload(served.derived)
        self._checkpoints[engine] = name, served

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Sum the tensors in the file of the last applied version.

        Arguments are those of `Target.summing`.

        Raises:
            UnreadableTargetError: No version has been applied yet.
        """
        if self._file is None:
            raise UnreadableTargetError("no version was written yet")
        return self._file.summing(layout, names, sums)

    # Applying.

    def apply(self, staged: StagedVersion) -> None:
        """Write a version, and load it on all servers.

        Raises:
            ServersError: Some servers failed; the message says what each server runs now.
            OSError: The version could not be written; no server was changed.
        """
        self._intact = True
        version = f"{staged.epoch}.{staged.version}"
        old = self._ask_servers()
        if fault := self.fault(staged.layout):
            raise ServersError(f"{fault}; nothing was changed")
        folder, existed = self._folder / version, (self._folder / version).exists()
        try:
            file = self._write(folder, staged)
            paused = self._load(
                ServedWeights(f"{self._server_path}/{version}", version, self._adapter), old
            )
        except BaseException:
            if self._intact and not existed:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._file, self._applied_label, self._layout = file, version, staged.layout
        if paused:
            self._intact = False
            raise ServersError(f"all servers have the new version, but {_joined(paused)}")

    def _ask_servers(self) -> dict[Engine, ServedWeights | None]:
        """Return the current weights of each server, and read the servers' checkpoints."""
        old: dict[Engine, ServedWeights | None] = {}

        def ask(engine: Engine) -> None:
            old[engine] = self._current(engine)
            self._learn(engine)

        if failed := self._on_all(ask):
            raise ServersError(f"{_joined(failed)}; nothing was changed{self._others(failed)}")
        return old

    def _current(self, engine: Engine) -> ServedWeights | None:
        """Return a server's current weights; None if it lacks the adapter or reports no path."""
        if self._adapter:
            path = engine.adapter(self._adapter)
            return None if path is None else ServedWeights(path, adapter=self._adapter)
        version = engine.version()
        ours = VERSION.fullmatch(version) and (self._folder / version).is_dir()
        path = f"{self._server_path}/{version}" if ours else engine.loaded_from()
        return ServedWeights(path, version) if path else None

    def _write(self, folder: Path, staged: StagedVersion) -> FileTarget:
        folder.mkdir(exist_ok=True)
        for path in self._other_files:
            shutil.copyfile(path, folder / path.name)
        if self._adapter and CONFIG in staged.metadata:
            (folder / CONFIG).write_text(staged.metadata[CONFIG])
        if self._adapter:
            _check_config(folder / CONFIG)
        file = FileTarget(folder / (ADAPTER if self._adapter else WEIGHTS), untied=True)
        file.apply(staged)
        file.settle()
        return file

    def _load(
        self, new: ServedWeights, old: Mapping[Engine, ServedWeights | None]
    ) -> dict[Engine, CallError]:
        """Load a version on all servers, or on none; return the errors of servers left paused.

        Raises:
            ServersError: Some servers failed; the message says what each server runs now.
        """
        done = swap(old, new)
        if not done.must_revert:
            return done.paused
        self._intact = all(error.harmless for error in done.failed.values())
        if done.interrupted is not None:
            raise done.interrupted
        paused = f"; {_joined(done.paused)}" if done.paused else ""
        raise ServersError(_joined(done.failed) + self._others(done.failed) + paused)

    def _others(self, failed: Mapping[Engine, CallError]) -> str:
        names = [engine.url for engine in self._engines if engine not in failed]
        return f" ({', '.join(names)}: as before)" if names else ""

    def _on_all(self, work: Callable[[Engine], object]) -> dict[Engine, CallError]:
        interrupted, failed = each(work, self._engines)
        if interrupted is not None:
            raise interrupted
        return failed

    def undo(self) -> bool:
        """Return whether all servers run their previous weights after a failed `apply`."""
        return self._intact

    def settle(self) -> None:
        """Remove the folders of versions that servers no longer need."""
        folder = self._folder / self._applied_label
        kept = [*(path for path in self._kept if path != folder), folder]
        self._kept = kept[-2:] if self._adapter else kept[-1:]
        for path in self._folder.iterdir():
            if VERSION.fullmatch(path.name) and path not in self._kept:
                shutil.rmtree(path, ignore_errors=True)

    # Between versions.

    def sync(self) -> list[str] | None:
        """Resume servers that are still paused, and reload on servers that were restarted.

        Call this repeatedly while waiting for versions; it acts every `CHECK_SECONDS`.

        Returns:
            Lines for the log; None if the last check was less than `CHECK_SECONDS` ago.
        """
        notes: list[str] = []
        if time.monotonic() < self._checked_at + CHECK_SECONDS:
            return None

        def mend(engine: Engine) -> None:
            engine.resume()
            old, partial = self._current(engine), engine.partial
            label = self._applied_label
            new = ServedWeights(f"{self._server_path}/{label}", label, self._adapter)
            if not label:
                if not partial or old is None:
                    return
                new = old
            elif not partial and old is not None and self._is_same(old, new):
                return
            elif fault := self._fault_at(engine):
                raise CallError(f"{engine.url} is not given {label} again: {fault}")
            done = swap({engine: old}, new)
            if wrong := [*done.failed.values(), *done.paused.values()]:
                raise wrong[0]
            ran = "nothing" if old is None else old.version or old.folder
            ran = "parts of two versions" if partial else ran
            notes.append(
                f"{engine.url} ran {ran}, and has loaded {new.version or new.folder} again"
            )

        failed = self._on_all(mend)
        self._checked_at = time.monotonic()
        return [*notes, *(str(error) for error in failed.values())]

    def _fault_at(self, engine: Engine) -> str:
        """Return why a server cannot load the last version again, or "" if it can."""
        self._learn(engine)
        return "" if self._layout is None else self.fault(self._layout)

    def _is_same(self, old: ServedWeights, new: ServedWeights) -> bool:
        return old.folder == new.folder if self._adapter else old == new

    def check_servers(self) -> str:
        """Resume servers that were left paused; return the errors of servers that do not answer.

        The errors are one text; it is empty if all servers answer.

        Raises:
            ServersError: Some servers cannot load versions at all.
        """

        def ask(engine: Engine) -> None:
            self._current(engine)
            self._learn(engine)
            engine.resume()

        failed = self._on_all(ask)
        text = _joined(failed)
        if all(isinstance(error, SilentError) for error in failed.values()):
            return text
        raise ServersError(text)


def _locked(folder: Path) -> IO[bytes]:
    """Lock a folder against other processes, and return the open lock file.

    Otherwise two processes that write to the same folder would remove each other's versions.
    """
    with place_of(folder / LOCK) as place:
        lock = os.fdopen(open_lock(place.name, place.folder), "rb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        text = "another bridge writes there; give each a folder of its own"
        raise FileExistsError(errno.EEXIST, text, str(folder)) from None
    return lock


def _joined(failed: Mapping[Engine, CallError]) -> str:
    return "; ".join(str(error) for error in failed.values())


def _other_files(like: Path) -> list[Path]:
    """Return the files in a folder that are not weights and not too large to copy."""
    return [
        path
        for path in sorted(like.iterdir())
        if path.is_file()
        and not path.name.endswith(WEIGHTS_ENDINGS)
        and path.stat().st_size <= COPIED_BYTES_MAX
    ]


def _adapter_fault(layout: Layout) -> str:
    """Return why a layout is not that of a PEFT adapter, or "" if it is."""
    names = layout.names()
    wrong = [name for name in names if not name.startswith(PREFIX)]
    if not wrong and any(".lora_" in name for name in names):
        named = [name for name in names if ".default." in name]
        if not named:
            return ""
        wrong = named
    some = served_checkpoint.some("", wrong or names)
    return (
        f"it is not a LoRA adapter as PEFT writes them ({some}): publish "
        "peft.get_peft_model_state_dict(model)"
    )


def _check_config(path: Path) -> None:
    """Check that a file is the configuration of a LoRA adapter.

    Raises:
        ServersError: The file is missing or has other contents; the message says what to do.
    """
    what = "the version"
    with_it = f'publish it with metadata={{"{CONFIG}": ...}}, or give a folder with one as --like'
    if not path.exists():
        raise ServersError(f"{what} has no {CONFIG}: {with_it}")
    try:
        found: Any = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ServersError(f"{what} has a malformed {CONFIG} ({error}): {with_it}") from None
    config = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise ServersError(f"{what} has an {CONFIG} that is not a LoRA's: {with_it}")
