"""Threads for the sessions of ONNX Runtime, each of which has a pool of its own.

A pool's idle threads wait for work by spinning, and take the CPUs from whichever graph is at work or being loaded. So
only the graph that runs step after step may spin when it is done, and none does for long. (A pool for the whole process
would be shared, but then ONNX Runtime refuses every session that does not use it, also those that are not ours.)
"""

import os

import onnxruntime as ort

from .contract import BRANCH, RANK, STEP

SPIN_MICROSECONDS = 1000
"""How long an idle thread spins before it sleeps: longer than the search needs between two steps. ONNX Runtime's own
choice is some 50 ms, from the moment on when a pool is made."""


def available_cpus() -> int:
    """CPUs that this process may use: a container's or `taskset`'s share, not the machine's."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1


def set_threads(options: ort.SessionOptions, verb: str, count: int) -> None:
    """Let the graph of `verb` compute with `count` threads in a session with these `options`."""
    # Between two steps the threads of `step` still spin: `rank` is done before it could wake others.
    options.intra_op_num_threads = 1 if verb == RANK else count
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    options.add_session_config_entry("session.prepack.enable_parallel", "1")
    if verb not in (STEP, BRANCH):
        options.add_session_config_entry("session.force_spinning_stop", "1")
