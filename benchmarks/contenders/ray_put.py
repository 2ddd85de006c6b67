"""Ray: puts the arrays into the object store; an actor for each worker copies them.

The actors read the store's shared memory without a copy and copy into their own model, and all of
their answers are fetched with `ray.get` (`ray.wait` would count a dead actor as done). The store is
large enough for three versions, so nothing is ever spilled to disk.
"""

import time
from typing import Any

from ..contender import Kind
from ..fleet import ANSWER_SECONDS, START_SECONDS, compare
from ..model import Model, Shape

NEEDS: tuple[str, ...] = ("ray",)
LIMIT = "fill_copy"
STORE_BYTES_MIN = 2**27  # Ray refuses less than 75 MiB
VERSIONS = 3  # in the store at a time
PUBLISH_SECONDS = 120.0


class Actor:
    """A worker, which Ray runs in a separate process."""

    def __init__(self, shape: str) -> None:
        self._model = Model(Shape.parse(shape), zeros=True)

    def apply(self, arrays: dict[str, Any]) -> None:
        """Copy a version out of the store."""
        self._model.take(arrays)

    def digest(self) -> int:
        """Hash the bytes."""
        return self._model.digest()


class RayPut:
    """The publisher's side."""

    title = "shared: Ray, put and actors"
    kind: Kind = "peer"

    def start(self, workers: int, model: Model) -> None:
        import ray

        self._model = model
        ray.init(
            num_cpus=1 + workers,  # regardless of the machine's processors
            include_dashboard=False,
            object_store_memory=max(STORE_BYTES_MIN, VERSIONS * model.shape.nbytes),
            log_to_driver=False,
            configure_logging=False,
        )
        actor: Any = ray.remote(Actor)
        self._actors: list[Any] = [actor.remote(model.shape.text) for _ in range(workers)]
        ray.get([each.digest.remote() for each in self._actors], timeout=START_SECONDS)

    def publish_once(self) -> float:
        import ray

        before = time.perf_counter()
        version = ray.put(self._model.arrays)
        ray.get([a.apply.remote(version) for a in self._actors], timeout=PUBLISH_SECONDS)
        return time.perf_counter() - before

    def check(self) -> None:
        import ray

        asked = [each.digest.remote() for each in self._actors]
        compare(ray.get(asked, timeout=ANSWER_SECONDS), self._model)

    def stop(self) -> None:
        import ray

        ray.shutdown()


def create() -> RayPut:
    """Return the publisher's side."""
    return RayPut()
