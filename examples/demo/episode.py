"""Episodes, which a worker sends to the trainer: one JSON line each, on the worker's stdout.

Arrays are sent as bytes (base64 in JSON). CartPole's reward is 1 for every step, so the return of
an episode is its length.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from .policy import OBSERVATION


class Episode(msgspec.Struct, frozen=True):
    """The observations and actions of an episode, from the reset to the end.

    Attributes:
        worker: The worker's name.
        version: The version at the start of the episode; newer ones may have been applied later.
        fell: Whether the pole fell; otherwise the time was up.
        observations: float32, (steps + 1, OBSERVATION).
        actions: uint8, (steps,).
        log_probabilities: float32, (steps,): of each action, with the weights that chose it.
    """

    worker: str
    version: int
    fell: bool
    observations: bytes
    actions: bytes
    log_probabilities: bytes

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.actions)

    @property
    def reward(self) -> float:
        """The return: 1 for every step."""
        return float(self.steps)

    def seen(self) -> NDArray[np.float32]:
        """Return the observations, the last one included."""
        return np.frombuffer(self.observations, np.float32).reshape(-1, OBSERVATION)

    def done(self) -> NDArray[np.uint8]:
        """Return the actions."""
        return np.frombuffer(self.actions, np.uint8)

    def likelihood(self) -> NDArray[np.float32]:
        """Return the log-probabilities of the actions."""
        return np.frombuffer(self.log_probabilities, np.float32)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Episode)


def to_line(episode: Episode) -> bytes:
    """Return an episode as a line."""
    return _encoder.encode(episode) + b"\n"


def from_line(line: bytes) -> Episode:
    """Return the episode of a line.

    Raises:
        msgspec.DecodeError: The line is not an episode.
    """
    return _decoder.decode(line)
