"""What a look at a host, an address or a bus has found: what is so, and what to do about it."""

from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["well", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: What, in a word that stays the same.
        state: `well`; `note`: it works, and could be better; `problem`: it will not do.
        text: What was found.
        advice: What to do; empty where nothing is to be done.
    """

    about: str
    state: State
    text: str
    advice: str = ""

    def fields(self) -> dict[str, str]:
        """Return it for programs."""
        return asdict(self)
