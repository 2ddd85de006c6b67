"""Answers on their way from a worker to the trainer: one JSON line on the worker's stdout."""

from statistics import fmean

import msgspec

from .transformer import LENGTH, reward


class Answers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one worker wrote with one version.

    Attributes:
        worker: Who wrote it.
        version: Of the model, for all of the batch.
        questions, answers: Of as many letters each.
        greedy: Its greedy answers to `ASKED`, if it had not told those of this version yet.
    """

    worker: str
    version: int
    questions: list[str]
    answers: list[str]
    greedy: list[str]

    def __post_init__(self) -> None:
        lengths = {len(text) for text in (*self.questions, *self.answers, *self.greedy)}
        if not self.questions or len(self.questions) != len(self.answers) or lengths != {LENGTH}:
            raise ValueError(f"not as many answers as questions, of {LENGTH} letters each")

    @property
    def steps(self) -> int:
        """How many answers there are, which is what an update is made of."""
        return len(self.answers)

    @property
    def reward(self) -> float:
        """Their mean reward."""
        return fmean(map(reward, self.questions, self.answers))


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Answers)


def to_line(answers: Answers) -> bytes:
    """Return a batch as a line."""
    return _encoder.encode(answers) + b"\n"


def from_line(line: bytes) -> Answers:
    """Return the batch of a line.

    Raises:
        msgspec.DecodeError: The line is none.
    """
    return _decoder.decode(line)
