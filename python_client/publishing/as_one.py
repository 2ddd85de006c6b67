"""Publishes versions of several models as one, for `Publisher.publish_many`."""

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
        self._promises, self._ended = promises, False

    def end(self) -> None:
        """Record that the call of `publish_many` does not wait for these versions any more."""
        self._ended = True

    def wait(self, model: str, loop: PublisherLoop, until: Deadline) -> None:
        """Wait until the versions are decided: a new publish of one of them would abort them all.

        Raises:
            DeadlineError: They are not decided in time.
        """
        if self._ended:
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
                "after publish_many has returned, or with it, or with a longer timeout"
            ) from None

    @property
    def _decided(self) -> bool:
        # Only the publisher's thread may read this property, as with `Promise.committed`.
        promises = self._promises.values()
        return self._ended or all(p.done() or p.committed is not None for p in promises)


class CopiedModel(NamedTuple):
    """A copy of one model's weights. A copy from a device may still be in progress."""

    record: PublishedModel
    offer: VersionOffer
    arriving: "Arriving | None"

    def wait(self, deadline: Deadline) -> None:
        """Wait until the copy is complete; hash it, and check for values that did not fit."""
        if self.arriving is not None:
            self.arriving.wait(deadline.check)
        for index in self.offer.chunks.unhashed():
            hash_chunk(self.offer, index)
            deadline.check()
        if self.offer.count_lost is not None:
            self.record.check_overflow(self.offer)

    def drop(self) -> None:
        """Release the memory, once the copy from a device has ended."""
        if self.arriving is not None:
            with contextlib.suppress(Exception):  # the device has failed
                self.arriving.wait()
        self.offer.snapshot.release()


def by_model(models: object) -> Mapping[str, object]:
    """Check that `models` maps model ids to weights; return it as such a mapping.

    Raises:
        ValueError: `models` is no such mapping, has no or too many models, or has an invalid id.
    """
    wanted = 'write publish_many({"llm": base, "llm.lora": adapter})'
    if is_module(models) or is_tensordict(models) or not isinstance(models, Mapping):
        raise ValueError(f"models={type(models).__name__} does not map ids to weights: {wanted}")
    named = cast("Mapping[str, object]", models)
    if not 1 <= len(named) <= MODELS_MAX:
        raise ValueError(f"models= has {len(named)} models: give 1 to {MODELS_MAX}; {wanted}")
    return {check_name(model, "model"): weights for model, weights in named.items()}


def receipts_of(futures: Mapping[str, Promise], left: Callable[[], float]) -> Receipts:
    """Wait for the receipts of versions that are published as one; `left` returns seconds to wait.

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
    result = Receipts(receipts)
    if errors:
        text = f"published as one: {'; '.join(map(str, errors))}"
        raise PublishError(text, errors[0].receipt, result)
    return result


def drop_all(copied: Collection[CopiedModel]) -> None:
    """Release the memory of copies that are not published."""
    for each in copied:
        each.drop()
