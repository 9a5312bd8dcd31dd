"""Threads of a session: as many as asked for; those of graphs that run step after step alone wait by spinning."""

import onnxruntime as ort
import pytest

from runtime.contract import BRANCH, GRAPH_FILES, RANK, STEP
from runtime.threads import set_threads

STOP = "session.force_spinning_stop"


def options_of(verb: str) -> ort.SessionOptions:
    options = ort.SessionOptions()
    set_threads(options, verb, 5)
    return options


@pytest.mark.parametrize("verb", GRAPH_FILES)
def test_a_graph_has_the_threads_that_were_asked_for(verb: str) -> None:
    options = options_of(verb)
    assert options.intra_op_num_threads == (1 if verb == RANK else 5)
    assert options.inter_op_num_threads == 1


@pytest.mark.parametrize("verb", GRAPH_FILES)
def test_threads_of_a_graph_that_is_not_at_work_do_not_spin(verb: str) -> None:
    try:
        stops = options_of(verb).get_session_config_entry(STOP) == "1"
    except RuntimeError:  # it was not set
        stops = False
    assert stops == (verb not in (STEP, BRANCH))


@pytest.mark.parametrize("verb", GRAPH_FILES)
def test_idle_threads_sleep_after_a_millisecond_and_weights_are_packed_by_all_of_them(verb: str) -> None:
    options = options_of(verb)
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "1000"
    assert options.get_session_config_entry("session.prepack.enable_parallel") == "1"


def test_sessions_of_others_in_the_same_process_are_left_alone() -> None:
    """A pool for the whole process would make ONNX Runtime refuse them."""
    assert options_of(STEP).use_per_session_threads
