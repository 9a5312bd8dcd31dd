"""Engines that take turns: A B C A B C. What slows the machine down for a while then slows all of them down."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from .engines import Outputs
from .worker import EngineError, Lap
from .workload import Workload

SETTLE = 0.25
"""Seconds before each run, in which the threads of the one before stop spinning."""


class Runner(Protocol):
    """Who takes part; see `Worker`."""

    def prepare(self, workload: Workload) -> None:
        """See `Worker.prepare`."""

    def run(self) -> Lap:
        """See `Worker.run`."""


class Score(msgspec.Struct):
    """How one engine did on one workload."""

    seconds: list[float]
    """Of each round."""
    tokens: int
    """Of all outputs of a round, EOS not counted."""
    error: str = ""
    """Why it is out of the race; the other fields then mean nothing."""

    @property
    def median(self) -> float:
        """Tokens a second in the median round."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Tokens a second in the round that took the minimum of time."""
        return self.tokens / min(self.seconds)


class Course(NamedTuple):
    """What came out of a race."""

    scores: dict[str, Score]
    outputs: dict[str, Outputs]
    """Of the last round, for those who are not out of the race."""


class Ratio(msgspec.Struct):
    """How much faster one engine is than another; above 1 it is faster."""

    ratio: float
    """Of the medians of tokens a second."""
    rounds: list[float]
    """The same within each round: both engines then ran under the same conditions."""


def race(
    runners: Mapping[str, Runner],
    workload: Workload,
    rounds: int,
    *,
    settle: float = SETTLE,
    say: Callable[[str], None] = lambda _: None,
) -> Course:
    """Let all `runners` run `workload` in turn, `rounds` times after a warm-up.

    Who fails, or gives outputs of another length than was forced, is out of the race from then on.
    """
    scores = {name: Score([], 0) for name in runners}
    outputs: dict[str, Outputs] = {}
    for turn in range(rounds + 1):
        for name, runner in runners.items():
            score = scores[name]
            if score.error:
                continue
            say(f"{workload.name}: {f'round {turn} of {rounds}' if turn else 'warm-up'}, {name}")
            time.sleep(settle)
            try:
                if turn == 0:
                    runner.prepare(workload)
                    continue
                lap = runner.run()
            except EngineError as error:
                score.error = str(error)
                continue
            score.error = _wrong_lengths(lap.outputs, workload)
            score.seconds.append(lap.seconds)
            score.tokens = sum(map(len, lap.outputs))
            outputs[name] = lap.outputs
    return Course(scores, {name: found for name, found in outputs.items() if not scores[name].error})


def ratio(ours: Score, theirs: Score) -> Ratio:
    """How much faster `ours` is than `theirs`; neither is out of the race."""
    rounds = [
        (ours.tokens / mine) / (theirs.tokens / other) for mine, other in zip(ours.seconds, theirs.seconds, strict=True)
    ]
    return Ratio(ours.median / theirs.median, rounds)


def agreement(found: Outputs, expected: Outputs) -> float:
    """Share of the outputs that are the same, id by id."""
    return sum(one == other for one, other in zip(found, expected, strict=True)) / len(expected)


def _wrong_lengths(outputs: Outputs, workload: Workload) -> str:
    if len(outputs) != workload.sentences:
        return f"gave {len(outputs)} outputs for {workload.sentences} sentences"
    odd = sorted({len(output) for output in outputs} - {workload.tokens})
    if workload.tokens is None or not odd:
        return "" if any(outputs) else "gave no tokens"
    return f"gave outputs of {', '.join(map(str, odd))} tokens where {workload.tokens} were forced"
