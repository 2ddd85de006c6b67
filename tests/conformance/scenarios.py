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
    patching,
    publishing,
    sources,
    streams,
    trust,
)
from weightbus.tests.conformance.driver import WAIT_SECONDS, Fault
from weightbus.tests.conformance.relaying import WITH_KEYS
from weightbus.tests.conformance.stage import Stage

_SHM = Path("/dev/shm")  # noqa: S108 - a file system without a disk, where there is one
IN_MEMORY = _SHM if _SHM.is_dir() else None
Play = Callable[[Stage], None]

PLAIN, BOTH, KEYED = (False,), (False, True), (True,)  # whether either side has keys

# In the order of the table. Those that need not look into the control channel come with keys, too.
PLAYS: tuple[tuple[Play, tuple[bool, ...]], ...] = (
    (publishing.join_and_push, BOTH),
    (publishing.late_join, BOTH),
    (publishing.metadata, BOTH),
    (publishing.metadata_renamed, BOTH),
    (publishing.before_the_publisher, BOTH),
    (publishing.over_ipc, BOTH),
    (publishing.several_models, BOTH),
    (publishing.layout_changes, BOTH),
    (publishing.every_shape_and_dtype, BOTH),
    (publishing.large_version, BOTH),
    (publishing.many_small_versions, BOTH),
    (publishing.slow_worker, BOTH),
    (publishing.in_place, PLAIN),
    (publishing.in_place_with_a_reader, BOTH),
    (publishing.layout_mismatch, BOTH),
    (publishing.too_large, BOTH),
    (applying.apply_turns_down, PLAIN),
    (applying.apply_breaks, PLAIN),
    (applying.apply_slow, PLAIN),
    (applying.apply_hangs, PLAIN),
    (applying.partial_target, PLAIN),
    (applying.cast_target, PLAIN),
    (decisions.targeted, PLAIN),
    (decisions.staged_first, PLAIN),
    (decisions.together_committed, PLAIN),
    (decisions.commit_of_another_digest, PLAIN),
    (decisions.commits_lost, PLAIN),
    (decisions.together_not_announced, PLAIN),
    (decisions.published_as_one, PLAIN),
    (decisions.together_aborted, PLAIN),
    (decisions.together_superseded, PLAIN),
    (lives.publisher_restart, BOTH),
    (lives.publisher_restart_while_receiving, BOTH),
    (lives.worker_restart, BOTH),
    (lives.stale_publisher, BOTH),
    (lives.name_taken, BOTH),
    (lives.silent_publisher, PLAIN),
    (lives.publisher_forgets, PLAIN),
    (lives.goodbye, PLAIN),
    (faults.lost_chunks, BOTH),
    (faults.damaged_chunks, BOTH),
    (faults.frames_too_many, BOTH),
    (faults.damaged_headers, PLAIN),
    (faults.lost_messages, PLAIN),
    (faults.ends_and_announcements_lost, BOTH),
    (faults.doubled_and_late, BOTH),
    (faults.cut_while_receiving, PLAIN),
    (faults.slow_pushes, PLAIN),
    (faults.no_data_channel, BOTH),
    (faults.wrong_digest, PLAIN),
    (streams.another_answers_first, PLAIN),
    (streams.damaged_handshakes, BOTH),
    (streams.damaged_control, PLAIN),
    (hostile.malformed_messages, PLAIN),
    (hostile.hostile_layouts, PLAIN),
    (hostile.other_epochs, PLAIN),
    (publishing.shared_memory, PLAIN),
    (publishing.shared_memory_overtaken, BOTH),
    (overwriting.shared_memory_overwritten, PLAIN),
    (patching.patched, BOTH),
    (patching.patched_decode_time, PLAIN),
    (patching.patched_late_join, BOTH),
    (patching.patched_missed_versions, BOTH),
    (patching.patched_models, PLAIN),
    (patching.patched_every_dtype, BOTH),
    (patching.patched_overtaken, BOTH),
    (patching.patched_in_place, PLAIN),
    (patching.patched_with_a_reader, PLAIN),
    (patching.patched_beside_shared_memory, PLAIN),
    (patching.patched_together, BOTH),
    (patching.patched_together_aborted, PLAIN),
    (patching.patched_apply_fails, PLAIN),
    (patching.patched_renamed, BOTH),
    (patching.patched_publisher_restart, BOTH),
    (patching.patched_worker_restart, BOTH),
    (patching.patched_another_base, PLAIN),
    (patching.patched_wrongly, PLAIN),
    (patching.patched_refused, PLAIN),
    (patching.patched_lossy, BOTH),
    (patching.patched_without_ends, BOTH),
    (patching.patched_doubled_and_late, BOTH),
    (patching.patched_cut, PLAIN),
    (sources.sources, BOTH),
    (sources.source_dies, PLAIN),
    (trust.let_in_later, KEYED),
    (trust.wrong_name, KEYED),
    (trust.no_key_of_a_worker, KEYED),
    (trust.another_publisher, KEYED),
    (trust.no_mixture, KEYED),
    (trust.revoked, KEYED),
    (trust.other_group_keys, KEYED),
    (trust.forged_and_repeated, KEYED),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario: its name, and what a worker must do in it, `keyed` if both sides have keys."""

    play: Play
    keyed: bool = False

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        name = self.play.__name__.replace("_", "-")
        return f"{WITH_KEYS}{name}" if self.keyed else name

    @property
    def title(self) -> str:
        """What a worker does in it."""
        again = self.keyed and (self.play, BOTH) in PLAYS
        return (self.play.__doc__ or self.name) + (", with keys" if again else "")


SCENARIOS = tuple(
    Scenario(play, keyed) for keyed in (False, True) for play, ways in PLAYS if keyed in ways
)


def play(
    scenario: Scenario,
    command: Sequence[str],
    seed: int,
    patience: float = WAIT_SECONDS,
    publisher: Sequence[str] | None = None,
    *,
    relayed: bool = False,
) -> str:
    """Play a scenario with a driver; return what is wrong, nothing if all is right.

    `publisher`: the driver that publishes; None: Python does. `relayed`: a relay is between.
    """
    chance, said = random.Random(f"{seed} {scenario.name}"), ""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="wbc", dir=IN_MEMORY) as folder,
            Stage(
                command,
                chance,
                Path(folder),
                patience,
                keyed=scenario.keyed,
                publisher=publisher,
                relayed=relayed,
            ) as stage,
        ):
            said = _said(scenario, stage)
    except Fault as fault:  # of its end
        said = said or str(fault)
    return said


def _said(scenario: Scenario, stage: Stage) -> str:
    try:
        scenario.play(stage)
        stage.check()
        stage.stop()
    except Fault as fault:
        return str(fault) or "a fault without words"
    except Exception:
        return f"the scenario broke off: {traceback.format_exc(limit=-3)}"
    return ""
