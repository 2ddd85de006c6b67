"""Versions of several models that are published as one: their weights, offers and receipts."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, NamedTuple, cast

from ...bus.deadline import Deadline, result_of
from ...bus.errors import DeadlineError, PublishError
from ...bus.net.publisher_loop import Promise, PublisherLoop
from ...bus.protocol_limits import MODELS_MAX
from ...bus.publisher.offers import hash_chunk
from ...bus.publisher.version import VersionOffer
from ...bus.receipt import Receipt, Receipts
from ...codecs.state import is_module, is_tensordict
from ..checks import check_name
from .models import PublishedModel

if TYPE_CHECKING:
    from ...codecs.device_copies import Arriving


class AsOne:
    """Versions that are published as one, until they are committed or aborted.

    Args:
        promises: The promise of each model's receipt.
    """

    def __init__(self, promises: Mapping[str, Promise]) -> None:
        self._promises, self._over = promises, False

    def end(self) -> None:
        """Record that the caller of `publish_many` does not wait for these versions any more."""
        self._over = True

    def wait(self, model: str, loop: PublisherLoop, until: Deadline) -> None:
        """Wait until the versions are decided, so that a publish of one model does not abort all.

        Raises:
            DeadlineError: They are not decided in time.
        """
        if self._over:
            return
        decided = loop.watch(lambda _machine, _now: self._decided)
        try:
            decided.result(until.left())
        except FutureTimeout:
            decided.cancel()
            others = " and ".join(sorted(self._promises.keys() - {model}))
            raise DeadlineError(
                f"{model}: publish_many publishes it as one with {others}, and not all workers "
                f"have staged these versions yet, so nothing else was published; publish {model} "
                "after that call has returned, or in its models, or give it a longer timeout"
            ) from None

    @property
    def _decided(self) -> bool:
        # Only the publisher's thread may read this property, as `Promise.committed`.
        promises = self._promises.values()
        return self._over or all(p.done() or p.committed is not None for p in promises)


class CopiedModel(NamedTuple):
    """The weights of one model, copied or, from a device, being copied."""

    kept: PublishedModel
    offer: VersionOffer
    arriving: "Arriving | None"

    def wait(self, deadline: Deadline) -> None:
        """Wait until the copy is complete, and hash it."""
        if self.arriving is not None:
            self.arriving.wait(deadline.check)
        for index in self.offer.chunks.unhashed():
            hash_chunk(self.offer, index)
            deadline.check()
        if self.offer.count_lost is not None:
            self.kept.check_overflow(self.offer)

    def drop(self) -> None:
        """Release the memory, once nothing is copied to it any more."""
        if self.arriving is not None:
            with contextlib.suppress(Exception):  # the device has failed
                self.arriving.wait()
        self.offer.snapshot.release()


def by_model(models: object) -> Mapping[str, object]:
    """Return `models`, checked: it maps model ids to weights.

    Raises:
        ValueError: `models` is no such mapping, or names no model, too many, or an invalid id.
    """
    wanted = 'write publish_many({"llm": base, "llm.lora": adapter})'
    if is_module(models) or is_tensordict(models) or not isinstance(models, Mapping):
        raise ValueError(f"models={type(models).__name__} does not map ids to weights: {wanted}")
    named = cast("Mapping[str, object]", models)
    if not 1 <= len(named) <= MODELS_MAX:
        raise ValueError(f"models= has {len(named)} models: give 1 to {MODELS_MAX}; {wanted}")
    return {check_name(model, "model"): weights for model, weights in named.items()}


def receipts_of(futures: Mapping[str, Promise], left: Callable[[], float]) -> Receipts:
    """Wait for the receipts of versions that are published as one; `left`: seconds to wait.

    Raises:
        PublishError: Fewer workers succeeded than required.
    """
    receipts, errors = dict[str, Receipt](), list[PublishError]()
    for model, future in futures.items():
        try:
            receipts[model] = result_of(future, left())
        except PublishError as error:
            receipts[model] = error.receipt
            errors.append(error)
    found = Receipts(receipts)
    if errors:
        text = f"published as one: {'; '.join(map(str, errors))}"
        raise PublishError(text, errors[0].receipt, found)
    return found


def drop_all(copied: Collection[CopiedModel]) -> None:
    """Release the memory of copies that are not published."""
    for each in copied:
        each.drop()
