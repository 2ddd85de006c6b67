"""What a publisher keeps of each model: its memory, and the form and layout that it had last."""

import contextlib
import threading
from collections.abc import Callable, Generator

from ..bus.deadline import Deadline
from ..bus.limits import CHUNKS_MAX
from ..bus.memory.snapshots import NEVER, MakeRoom, Pool, nobody
from ..bus.messages import Shared
from ..bus.publisher.version import Version
from ..codecs.errors import StateError
from ..codecs.layout import Layout
from ..codecs.precision import Precision, precision_of
from ..codecs.state import Form, State, state_of
from .options import Dtype
from .state_folder import Saved


class PublishedModel:
    """One model of a publisher. Whoever calls anything here has the `lock`.

    Args:
        name: Its name.
        chunk_bytes: Bytes of a chunk.
        share: Whether workers on this host may read it.
    """

    def __init__(self, name: str, chunk_bytes: int, *, share: bool) -> None:
        self.name, self.lock = name, threading.Lock()
        self.pool = Pool(name, share=share)
        self._chunk_bytes = chunk_bytes
        self._form: Form | None = None
        self._layout: Layout | None = None
        self._converted: tuple[Form, Precision, Form] | None = None  # what became what, last

    @contextlib.contextmanager
    def locked(self, deadline: Deadline) -> Generator[None]:
        """Wait until nobody else copies this model.

        Raises:
            DeadlineError: Somebody copies it for too long.
        """
        while not self.lock.acquire(timeout=deadline.left()):
            deadline.check()
        try:
            yield
        finally:
            self.lock.release()

    def describe(self, weights: object, precision: Precision | None = None) -> tuple[State, Layout]:
        """Return the state of some weights and its layout, the ones before if nothing changed.

        Raises:
            StateError: They cannot travel, or not in this precision.
        """
        state = state_of(weights, self._form)
        self._form = state.form
        if precision is not None:
            state = State(self._form_in(precision, state, weights), state.leaves)
        self._layout = state.layout(self._layout)
        return state, self._layout

    def _form_in(self, precision: Precision, state: State, weights: object) -> Form:
        known = self._converted
        if known is not None and known[0] is state.form and known[1] == precision:
            return known[2]
        form = precision.form_of(state, weights)
        self._converted = state.form, precision, form
        return form

    def reserve(self, weights: object, dtype: Dtype = None) -> tuple[Shared, int] | None:
        """Take memory for weights like these; return where workers find it, and its size.

        None: they do not, or there was memory before.
        """
        _, layout = self.describe(weights, precision_of(dtype))
        _check_chunks(layout.nbytes, self._chunk_bytes)
        shared = self.pool.reserve(layout.nbytes)
        return None if shared is None else (shared, layout.nbytes)

    def snapshot(
        self,
        weights: object,
        *,
        replaces_latest: bool,
        precision: Precision | None = None,
        hashed: Callable[[], bool] = lambda: False,
        make_room: MakeRoom = nobody,
        deadline: Deadline = NEVER,
    ) -> Version:
        """Copy weights into memory as a new version, or read them from disk.

        Args:
            weights: What to copy.
            replaces_latest: The version will be the latest for all at once.
            precision: What to convert while it is copied.
            hashed: Whether to hash it while it is copied: it will be sent, or its digest asked for.
            make_room: Asks for memory where all of it is in use.
            deadline: When it must be there.

        Raises:
            StateError: They cannot travel.
            StateFolderError: The file is damaged.
            ValueError: What is on disk is not converted.
            WeightBusError: All memory stayed in use.
            DeadlineError: There was no time.
        """
        saved = weights if isinstance(weights, Saved) else None
        if saved and precision is not None:
            raise ValueError("a rollback publishes the bytes that were: leave out dtype=")
        state, layout = (None, saved.layout) if saved else self.describe(weights, precision)
        chunk_bytes = saved.stored.chunk_bytes if saved else self._chunk_bytes
        _check_chunks(layout.nbytes, chunk_bytes)
        snapshot = self.pool.take(
            layout.nbytes, make_room, replaces_latest=replaces_latest, deadline=deadline
        )
        version = Version(self.name, layout, chunk_bytes, snapshot, snapshot.shared)
        try:
            if saved is not None:
                saved.copy_to(snapshot.data)
                version.restored(saved.stored.digest, frozenset(saved.stored.names))
            elif state is not None:
                crcs = snapshot.write(state, layout, deadline.check, chunk_bytes, hashed)
                version.hashed_all(crcs)
            deadline.check()
        except BaseException:
            snapshot.release()
            raise
        return version


def _check_chunks(nbytes: int, chunk_bytes: int) -> None:
    if nbytes > CHUNKS_MAX * chunk_bytes:  # P2
        raise StateError(
            f"{nbytes} bytes in chunks of {chunk_bytes} are more than {CHUNKS_MAX} chunks; give "
            f"the Publisher chunk_bytes of at least {-(-nbytes // CHUNKS_MAX)}"
        )
