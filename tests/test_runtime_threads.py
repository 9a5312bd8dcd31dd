"""One pool of threads for a process; who asks for another number has threads of its own."""

import onnxruntime as ort
import pytest

from runtime import threads
from runtime.threads import use_threads


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pools that were made for the whole process; there is none yet, and none is really made."""
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(threads, "_pool", [])
    monkeypatch.setattr(ort, "set_global_thread_pool_sizes", lambda *sizes: made.append(sizes))
    return made


def asked_for(*counts: int) -> list[tuple[bool, int]]:
    """Of one session after another: whether it has threads of its own, and how many of these."""
    found = []
    for count in counts:
        options = ort.SessionOptions()
        use_threads(options, count)
        found.append((options.use_per_session_threads, options.intra_op_num_threads))
    return found


def test_all_graphs_of_a_process_share_the_first_number_of_threads(pools: list[tuple[int, int]]) -> None:
    assert asked_for(3, 3, 3) == [(False, 0)] * 3
    assert pools == [(3, 1)]


def test_another_number_gets_threads_of_its_own_since_the_pool_stays_as_it_is(pools: list[tuple[int, int]]) -> None:
    assert asked_for(3, 2, 4, 3, 1) == [(False, 0), (True, 2), (True, 4), (False, 0), (True, 1)]
    assert pools == [(3, 1)]


def test_one_thread_needs_no_pool(pools: list[tuple[int, int]]) -> None:
    assert asked_for(1, 1) == [(True, 1)] * 2
    assert pools == []
    assert asked_for(2) == [(False, 0)]
    assert pools == [(2, 1)]
