"""Each row of the serving guide's tables of outcomes is held by tests, which are named here."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "serving.md"
FIRST_CELLS = ("`load`", "what happens")  # of the tables' headers

APPLIES = "tests/client/test_loading.py"
LATE = "tests/faults/test_late_applies.py"
RANKS = "tests/serving/test_failing_ranks.py"
LOST = "tests/serving/test_lost_calls.py"
TRANSFERS = "tests/serving/test_transfers.py"
ENGINE = "tests/serving/vllm/test_engine.py"
SERVER = "tests/serving/test_server.py"
TRL = "tests/serving/test_trl_transfer.py"
BRIDGE = "tests/serving/test_bridge.py"
COMMAND = "tests/serving/test_bridge_command.py"
FITS = "tests/serving/test_served_checkpoint.py"
SWAP = "tests/serving/test_swap.py"

LEFT_PAUSED = f"{TRANSFERS}::test_a_trainer_that_dies_at_a_call_leaves_whole_weights_to_the_next"

# By heading and first cell, the tests that assert what the engine runs and what its trainer hears.
HELD: dict[str, dict[str, list[str]]] = {
    "An engine of your own": {
        "returns": [f"{APPLIES}::test_tensors_come_by_every_name_and_without_a_copy"],
        "raises `weightbus.UnchangedError`": [
            f"{APPLIES}::test_nobody_but_the_function_knows_what_runs_after_it_failed"
        ],
        "raises anything else": [
            f"{APPLIES}::test_nobody_but_the_function_knows_what_runs_after_it_failed"
        ],
        "does not return within `apply_timeout`": [f"{LATE}::test_what_does_not_return_has_failed"],
    },
    "vLLM": {
        "the model cannot load the names, shapes or dtypes": [
            f"{ENGINE}::test_what_cannot_be_loaded_is_refused_before_anything_is_touched",
            f"{RANKS}::test_a_rank_that_fails",
        ],
        "a rank dies, hangs or fails while the bytes travel": [f"{RANKS}::test_a_rank_that_fails"],
        "a rank fails before any rank loads": [
            f"{RANKS}::test_a_rank_that_fails",
            f"{TRANSFERS}::test_a_rank_that_fails_in_the_pause_before_it_loads_has_the_others_"
            "release_the_version",
        ],
        "a rank fails to load the version": [
            f"{RANKS}::test_a_rank_that_fails",
            f"{ENGINE}::test_a_load_that_fails_is_said_plainly_and_a_full_publish_repairs_it",
        ],
        "a rank dies in the load": [
            f"{RANKS}::test_a_server_that_dies_in_a_transfer_is_reached_once_it_is_back"
        ],
        "a rank hangs in the load": [f"{RANKS}::test_a_rank_that_fails"],
        "a call is lost, or no answer comes": [
            f"{TRANSFERS}::test_what_no_answer_comes_to_is_called_again",
            f"{LOST}::test_a_call_that_is_spoilt",
        ],
        "the answer is an error of another program, such as a proxy's 500": [
            f"{LOST}::test_a_call_that_is_spoilt"
        ],
        "a call arrives twice, or after the trainer has stopped waiting for it": [
            f"{LOST}::test_a_call_that_is_spoilt",
            f"{TRANSFERS}::test_what_a_call_of_an_older_version_says_changes_nothing",
        ],
        "a server's front end hangs (all calls)": [
            f"{TRANSFERS}::test_a_server_that_takes_no_calls_stays_paused_and_goes_on_with_the_"
            "next_transfer"
        ],
        "one of two servers fails": [
            f"{TRANSFERS}::test_of_two_servers_each_says_what_its_own_ranks_run"
        ],
        "a server was started again": [
            f"{RANKS}::test_the_ranks_of_a_server_that_was_started_again_join_again"
        ],
        "the trainer dies before the pause": [LEFT_PAUSED],
        "the trainer dies in a pause": [LEFT_PAUSED],
        "the trainer starts again": [
            LEFT_PAUSED,
            f"{ENGINE}::test_a_trainer_that_starts_again_takes_over",
        ],
        "another program calls `/start_weight_update`, `/update_weights` and "
        "`/finish_weight_update`, before any trainer has joined": [
            f"{TRANSFERS}::test_a_session_that_loads_nothing_claims_no_version",
            f"{ENGINE}::test_a_worker_that_no_trainer_has_joined_loads_nothing_and_claims_nothing",
        ],
        "there is no vLLM at the URL, or one without the routes": [
            f"{TRANSFERS}::test_a_trainer_without_a_vllm_at_the_url_is_told_so"
        ],
        "the server has another engine, or `VLLM_PLUGINS` leaves weightbus out": [
            f"{SERVER}::test_another_engine_is_told_what_to_install",
            f"{ENGINE}::test_a_server_with_another_engine_is_told_what_to_do",
            f"{ENGINE}::test_an_allow_list_that_leaves_us_out_is_said_with_what_to_do",
        ],
    },
    "TRL": {
        "the weights do not fit a server or a worker": [
            f"{TRL}::test_what_a_worker_cannot_take_is_said_at_once_and_nobody_has_changed_anything",
            f"{TRL}::test_weights_that_do_not_fit_a_server_end_the_training_and_pause_nothing",
        ],
        "not all have received the weights within `timeout`": [
            f"{TRL}::test_a_worker_that_has_not_received_the_weights_in_time_ends_the_training",
            f"{TRL}::test_a_rank_that_has_not_received_the_weights_in_time_ends_the_training",
        ],
        "one of your workers dies, or stops answering": [
            f"{TRL}::test_a_process_that_is_killed_or_stopped_does_not_end_the_training",
            f"{TRL}::test_a_worker_that_died_is_missed_only_if_it_is_expected",
        ],
        "one of your workers fails to load a version": [
            f"{TRL}::test_a_worker_that_cannot_load_a_version_ends_the_training_unless_none_is_"
            "required"
        ],
        "a server fails or dies while it is paused": [
            f"{TRL}::test_servers_go_on_whatever_fails",
            f"{TRL}::test_of_two_servers_one_dies_while_it_is_paused",
        ],
        "a server does not answer `/resume`": [
            f"{TRL}::test_a_server_that_does_not_answer_its_resume_is_named_and_called_until_"
            "training_ends",
            f"{TRL}::test_servers_go_on_whatever_fails",
        ],
        "the trainer is killed while a server is paused": [LEFT_PAUSED],
        "gathering the weights fails": [
            f"{TRL}::test_an_iterator_that_raises_in_the_middle_publishes_nothing"
        ],
        "the training ends while a worker is busy with a batch": [
            f"{TRL}::test_the_last_update_is_taken_after_the_batch_that_a_worker_is_at",
            f"{TRL}::test_a_worker_that_never_comes_back_from_a_batch_is_named_when_training_ends",
        ],
    },
    "Any HTTP engine": {
        "names, shapes or dtypes do not fit the server's checkpoint": [
            f"{FITS}::test_what_does_not_fit_is_not_loaded"
        ],
        "the bridge cannot read the checkpoint": [
            f"{COMMAND}::test_a_checkpoint_that_is_not_here_ends_it_with_the_ways_out",
            f"{FITS}::test_a_checkpoint_that_is_not_here",
            f"{FITS}::test_a_server_that_was_started_again_with_a_checkpoint_that_is_not_here",
        ],
        "the engine refuses the version, or fails in the middle of the load": [
            f"{BRIDGE}::test_a_refusal_is_in_the_receipt",
            f"{BRIDGE}::test_a_load_that_fails_in_the_middle_is_taken_back",
        ],
        "one of two servers fails": [f"{BRIDGE}::test_of_two_servers_one_fails"],
        "no answer: status 503, or a closed or broken connection": [
            f"{BRIDGE}::test_asking_again_has_a_bound"
        ],
        "the server hangs": [f"{BRIDGE}::test_a_server_that_hangs"],
        "the server does not run, is of another kind, lacks a route, or requires a key": [
            f"{BRIDGE}::test_of_two_servers_one_can_be_given_nothing"
        ],
        "the server cannot load the previous version either": [
            f"{BRIDGE}::test_a_server_that_loads_neither_version",
            f"{SWAP}::test_parts_of_two_versions_never_answer",
        ],
        "the server was restarted": [f"{BRIDGE}::test_a_server_that_was_restarted_loads_again"],
        "another client had paused the server": [
            f"{BRIDGE}::test_a_server_that_others_have_paused_stays_so"
        ],
        "the bridge is stopped while servers load": [
            f"{COMMAND}::test_ctrl_c_while_a_server_loads"
        ],
        "the bridge is killed while servers are paused": [
            f"{COMMAND}::test_a_killed_bridge_leaves_a_pause_to_the_next",
            f"{BRIDGE}::test_what_a_killed_bridge_has_left_paused_goes_on",
            f"{SWAP}::test_a_bridge_that_was_killed_while_a_server_loads_leaves_it_to_the_next",
        ],
        "one of two servers loads slowly": [
            f"{SWAP}::test_no_server_goes_on_before_the_slowest_has_loaded"
        ],
        "the folder's disk is full": [f"{BRIDGE}::test_a_disk_that_is_full"],
    },
}


def rows() -> Iterator[tuple[str, str]]:
    """Yield (heading, first cell) of each row of the tables of outcomes."""
    heading, inside = "", False
    for line in GUIDE.read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        cell = line.removeprefix("| ").split(" | ")[0]
        if not line.startswith("|"):
            inside = False
        elif cell in FIRST_CELLS:
            inside = True
        elif inside and not line.startswith("|---"):
            yield heading, cell


def test_every_row_names_its_tests_and_every_test_has_its_row() -> None:
    named = [(heading, cell) for heading, cells in HELD.items() for cell in cells]
    assert sorted(rows()) == sorted(named)
    assert all(tests for cells in HELD.values() for tests in cells.values())


def test_every_named_test_is_there() -> None:
    found: dict[str, set[str]] = {}
    missing: list[str] = []
    for test in (t for cells in HELD.values() for tests in cells.values() for t in tests):
        path, function = test.split("::")
        if path not in found:
            body = ast.parse((ROOT / path).read_text()).body
            found[path] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        if function not in found[path]:
            missing.append(test)
    assert missing == []
