"""Verifies for observers that a worker's weights equal the published weights. (P24)

The worker computes a CRC-32C of each of its tensors. The publisher does the same with its own
bytes, in small steps and once per version, and sends the names of the tensors that differ. Each
worker has at most one open check. If the worker does not answer in time, the publisher does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from ...codecs.layout import TensorSpec
from ...codecs.native import crc32c
from ..effects import Send
from ..messages import CHECKING, Check, Checked, Difference, Verified, Verify
from ..observed import PAGE_BYTES
from ..protocol_limits import DIFFERENCES_LISTED, OBSERVERS_MAX
from .effects import Compare, Effect
from .offers import SLICE_BYTES
from .roster import Peer
from .state import PublisherState
from .version import Version


@dataclass(slots=True)
class Comparison:
    """A comparison of a worker's checksums with a version.

    Attributes:
        version: The version that the worker runs.
        asked, observer: The observer's request, and the routing id of the observer's connection.
        sums: The worker's checksum of each tensor; None: the worker cannot compare the tensor.
        answer: The answer to the observer, after the last step.
    """

    version: Version
    asked: Verify
    observer: bytes
    sums: list[int | None]
    answer: Verified | None = None
    _found: list[Difference] = field(default_factory=list[Difference])

    def steps(self) -> Iterator[int]:
        """Compare in small steps, and set `answer` at the end; yield how many bytes a step read."""
        layout, first = self.version.layout, self.asked.first
        names = layout.sorted_names
        unlike = differing = 0
        for name, actual in zip(islice(names, first, None), self.sums, strict=False):
            if actual is None:
                unlike += 1
                continue
            spec = layout.by_name(name)
            yield from self._compute_sum(spec)
            published = self.version.sums[spec.begin] if spec.nbytes else 0
            if published != actual:
                differing += 1
                self._list(Difference(name, published, actual))
        self.answer = Verified(
            worker=self.asked.worker,
            model=self.asked.model,
            epoch=self.version.epoch,
            version=self.version.version,
            first=first,
            count=min(len(self.sums), max(0, len(names) - first)),
            names=len(names),
            unlike=unlike,
            differing=differing,
            differences=self._found,
        )

    def _compute_sum(self, spec: TensorSpec) -> Iterator[int]:
        """Compute and store a published tensor's checksum in small steps, unless it is known."""
        if not spec.nbytes or spec.begin in self.version.sums:
            return
        total, take = 0, self.version.snapshot.bytes
        for begin in range(spec.begin, spec.end, SLICE_BYTES):
            end = min(begin + SLICE_BYTES, spec.end)
            total = crc32c(take(begin, end), total)
            yield end - begin
        self.version.add_sum(spec.begin, total)

    def _list(self, difference: Difference) -> None:
        """Add a difference to the answer, unless the answer is full."""
        listed = [*self._found, difference]
        if len(listed) <= DIFFERENCES_LISTED and len(msgspec.json.encode(listed)) <= PAGE_BYTES:
            self._found = listed


@dataclass(frozen=True, slots=True)
class _OpenCheck:
    """A check that the worker has not answered yet."""

    asked: Verify
    observer: bytes
    key: tuple[int, int]  # (epoch, version) that the worker ran at the request
    since: float  # the time of the request


class Checks:
    """The open checks of workers' weights, at most one for each worker."""

    def __init__(self, state: PublisherState) -> None:
        self._state = state
        self._open: dict[str, _OpenCheck] = {}  # by worker

    def verify(self, observer: bytes, asked: Verify, now: float) -> list[Effect]:
        """Handle an observer's request: send the worker a `check`, or the observer a refusal."""
        peer = self._state.roster.by_name(asked.worker)
        code, text = self._obstacle(peer, observer, asked)
        if code or peer is None:
            return [_unverified(observer, asked, code, text)]
        epoch, version = key = peer.runs(asked.model)
        self._open[asked.worker] = _OpenCheck(asked, observer, key, now)
        check = Check(model=asked.model, epoch=epoch, version=version, first=asked.first)
        return [Send(check, to=peer.identity)]

    def _obstacle(self, peer: Peer | None, observer: bytes, asked: Verify) -> tuple[str, str]:
        """Return (error code, text) if a worker cannot be checked; both are empty if it can."""
        if peer is None or asked.model not in peer.hello.models:
            return "absent", f"no worker {asked.worker} with {asked.model} is there"
        if peer.lost:
            return "absent", "it is lost: nothing is heard of it"
        if peer.through:
            return "unsupported", f"it is behind relay {peer.through[-1]}: ask that relay"
        if CHECKING not in peer.hello.features:
            who = peer.hello.client or "its program"
            return "unsupported", f"{who} computes no checksums of weights: it lacks `{CHECKING}`"
        epoch, version = peer.runs(asked.model)
        if not version:
            return "absent", f"it runs no version of {asked.model} yet, or none any more"
        if self._version(asked.model, epoch, version) is None:
            return "gone", f"it runs version {version}, whose bytes the publisher no longer has"
        other = self._open.get(asked.worker)
        if other is not None and other.observer != observer:
            return "busy", "another observer verifies it now: ask again in a moment"
        if other is None and len(self._open) >= OBSERVERS_MAX:
            return "busy", "too many workers are being verified: ask again in a moment"
        return "", ""

    def _version(self, model: str, epoch: int, number: int) -> Version | None:
        versions = self._state.store.get(model)
        return versions.find(number) if versions and epoch == self._state.epoch else None

    def checked(self, peer: Peer, answer: Checked) -> list[Effect]:
        """Handle a worker's answer: start a comparison, or send the observer why there is none."""
        found, key = self._open.get(peer.name), (answer.epoch, answer.version)
        asked = found.asked if found is not None else None
        if found is None or asked is None or found.key != key:
            return []
        if (asked.model, asked.first) != (answer.model, answer.first):
            return []
        del self._open[peer.name]
        if answer.code is not None:
            return [_unverified(found.observer, asked, answer.code, answer.text)]
        version = self._version(answer.model, *key)
        if version is None or not self._state.store[version.model].hold(version):
            text = f"version {key[1]} was replaced meanwhile"
            return [_unverified(found.observer, asked, "gone", text)]
        version.begin_comparison()
        return [Compare(Comparison(version, asked, found.observer, answer.sums))]

    def compared(self, comparison: Comparison) -> list[Effect]:
        """Handle the end of a comparison: send its answer, or an error if there is none."""
        version = comparison.version
        self._state.store[version.model].compared(version)
        if comparison.answer is not None:
            return [Send(comparison.answer, to=comparison.observer)]
        text = f"version {version.version} was replaced meanwhile"
        return [_unverified(comparison.observer, comparison.asked, "gone", text)]

    def tick(self, now: float) -> list[Effect]:
        """Answer the observers whose workers have not answered within `lost_after`."""
        late = [o for o in self._open.values() if now - o.since >= self._state.timing.lost_after]
        for each in late:
            del self._open[each.asked.worker]
        text = f"it has not answered for {self._state.timing.lost_after:g} s"
        return [_unverified(each.observer, each.asked, "silent", text) for each in late]


def _unverified(observer: bytes, asked: Verify, code: str, text: str) -> Send:
    return Send(
        Verified(worker=asked.worker, model=asked.model, first=asked.first, code=code, text=text),
        to=observer,
    )
