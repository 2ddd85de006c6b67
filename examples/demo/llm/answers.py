"""Batches of answers, which a worker sends to the trainer: one JSON line each, on stdout."""

from statistics import fmean

import msgspec

from .transformer import LENGTH, reward


class Answers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch of answers that one worker wrote with one version.

    Attributes:
        worker: The worker's name.
        version: The version of the model.
        questions, answers: Texts of the same length.
        greedy: The greedy answers to `ASKED`, in the worker's first batch with this version.
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
        """The number of answers, which counts towards the next update."""
        return len(self.answers)

    @property
    def reward(self) -> float:
        """The mean reward of the answers."""
        return fmean(map(reward, self.questions, self.answers))


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Answers)


def to_line(answers: Answers) -> bytes:
    """Return a batch as a line."""
    return _encoder.encode(answers) + b"\n"


def from_line(line: bytes) -> Answers:
    """Return the batch of a line.

    Raises:
        msgspec.DecodeError: The line is not a batch.
    """
    return _decoder.decode(line)
