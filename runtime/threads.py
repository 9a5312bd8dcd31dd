"""Threads for the sessions of ONNX Runtime: one pool for all graphs of a process, as large as the CPUs that it may use.

A pool's idle threads wait for work by spinning. With a pool for each graph they would take the CPUs from the graph
that is at work: steps take twice as long then.
"""

import os

import onnxruntime as ort

_pool: list[int] = []
"""Threads of ONNX Runtime's pool for the whole process, once there is one. It can be neither changed nor replaced."""


def available_cpus() -> int:
    """CPUs that this process may use: a container's or `taskset`'s share, not the machine's."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1


def use_threads(options: ort.SessionOptions, count: int) -> None:
    """Let a session with these `options` compute with `count` threads: of the pool, or of its own for another count."""
    if count > 1 and not _pool:
        ort.set_global_thread_pool_sizes(count, 1)
        _pool.append(count)
    if _pool == [count]:
        options.use_per_session_threads = False
        return
    options.intra_op_num_threads, options.inter_op_num_threads = count, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
