"""The scenarios in the order of the table, and running one."""

import random
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightbus.tests.conformance import (
    applying,
    decisions,
    faults,
    hostile,
    lives,
    overwriting,
    publishing,
    streams,
)
from weightbus.tests.conformance.driver import WAIT_SECONDS, Fault
from weightbus.tests.conformance.stage import Stage

_SHM = Path("/dev/shm")  # noqa: S108 - a file system without a disk, where there is one
IN_MEMORY = _SHM if _SHM.is_dir() else None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario: its name, and what a worker must do in it."""

    play: Callable[[Stage], None]

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        return self.play.__name__.replace("_", "-")

    @property
    def title(self) -> str:
        """What a worker does in it."""
        return self.play.__doc__ or self.name


SCENARIOS = tuple(
    Scenario(play)
    for play in (
        publishing.join_and_push,
        publishing.late_join,
        publishing.before_the_publisher,
        publishing.over_ipc,
        publishing.several_models,
        publishing.layout_changes,
        publishing.every_shape_and_dtype,
        publishing.large_version,
        publishing.many_small_versions,
        publishing.slow_worker,
        publishing.in_place,
        publishing.in_place_with_a_reader,
        publishing.layout_mismatch,
        publishing.too_large,
        applying.apply_turns_down,
        applying.apply_breaks,
        applying.apply_slow,
        applying.apply_hangs,
        applying.partial_target,
        applying.cast_target,
        decisions.targeted,
        decisions.staged_first,
        decisions.together_committed,
        decisions.commit_of_another_digest,
        decisions.commits_lost,
        decisions.together_aborted,
        decisions.together_superseded,
        lives.publisher_restart,
        lives.publisher_restart_while_receiving,
        lives.worker_restart,
        lives.stale_publisher,
        lives.name_taken,
        lives.silent_publisher,
        lives.publisher_forgets,
        lives.goodbye,
        faults.lost_chunks,
        faults.damaged_chunks,
        faults.frames_too_many,
        faults.damaged_headers,
        faults.lost_messages,
        faults.ends_and_announcements_lost,
        faults.doubled_and_late,
        faults.cut_while_receiving,
        faults.slow_pushes,
        faults.no_data_channel,
        faults.wrong_digest,
        streams.another_answers_first,
        streams.damaged_handshakes,
        streams.damaged_control,
        hostile.malformed_messages,
        hostile.hostile_layouts,
        hostile.other_epochs,
        publishing.shared_road,
        publishing.shared_road_overtaken,
        overwriting.shared_road_overwritten,
    )
)


def play(
    scenario: Scenario, command: Sequence[str], seed: int, patience: float = WAIT_SECONDS
) -> str:
    """Play a scenario with a driver; return what is wrong, nothing if all is right."""
    chance = random.Random(f"{seed} {scenario.name}")
    with (
        tempfile.TemporaryDirectory(prefix="wbc", dir=IN_MEMORY) as folder,
        Stage(command, chance, Path(folder), patience) as stage,
    ):
        try:
            scenario.play(stage)
            stage.check()
            stage.stop()
        except Fault as fault:
            return str(fault) or "a fault without words"
        except Exception:
            return f"the scenario broke off: {traceback.format_exc(limit=-3)}"
    return ""
