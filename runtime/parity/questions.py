"""Whether an exam is about the model in the passport: answers to other questions would prove nothing."""

from collections.abc import Iterator, Mapping

from ..backend import Array
from ..contract import ENCODE, Dims, GraphSpec, TensorSpec
from ..exam import Exam, GraphCase
from .tolerance import earned_by_output, earned_by_rollout

MOST_OWN_ERROR = 0.25
"""Of the largest value of a tensor: more is no rounding. Trained models stray by about 1e-6; a large random one, in
whose attention near ties fall either way, by 0.06, and its export is good all the same."""


def strange_questions(exam: Exam, dims: Dims, contract: Mapping[str, GraphSpec]) -> list[str]:
    """Where `exam` asks for other tensors, tokens or lengths than a model of `dims` has."""
    problems = [problem for case in exam.graphs for problem in _strange_inputs(case, contract[case.verb])]
    problems += [
        f"the exam answers {case.verb} {case.label} with other outputs than the contract has"
        for case in exam.graphs
        if case.reference.keys() != {spec.name for spec in contract[case.verb].outputs}
    ]
    sizes = {"source": dims.source_vocab_size, "target": dims.vocab_size}
    largest = dict.fromkeys(sizes, -1)
    for side, ids in _ids(exam):
        largest[side] = max(largest[side], int(ids.max(initial=-1)))
    problems += [
        f"the exam has the {side} id {largest[side]}, the passport {size} entries"
        for side, size in sizes.items()
        if largest[side] >= size
    ]
    chains = [case.target_ids.shape[1] for case in exam.rollouts]
    searches = [case.config.max_length or 0 for case in exam.tokens]
    if (chains and max(chains) != dims.max_positions) or max(searches, default=0) > dims.max_positions:
        problems.append(
            f"the passport has {dims.max_positions} positions, the exam goes as far as {max([*chains, *searches])}"
        )
    problems += [
        f"PyTorch's own error of {verb} {name} is {earned.own_error:.2g} at a scale of {earned.scale:.2g}, "
        "which is not float32's: it excuses nothing"
        for (verb, name), earned in earned_by_output(exam.graphs).items()
        if earned.own_error > MOST_OWN_ERROR * earned.scale
    ]
    chain = earned_by_rollout(exam.rollouts)
    if chain.own_error > MOST_OWN_ERROR * chain.scale:
        problems.append(
            f"PyTorch's own error of a rollout is {chain.own_error:.2g} at a scale of {chain.scale:.2g}, "
            "which is not float32's: it excuses nothing"
        )
    return list(dict.fromkeys(problems))


def _strange_inputs(case: GraphCase, graph: GraphSpec) -> Iterator[str]:
    wanted = {spec.name: spec for spec in graph.inputs}
    yield from (f"the exam gives {case.verb} no {name}" for name in wanted if name not in case.inputs)
    yield from (
        f"the exam gives {case.verb} {name}, which the contract does not have"
        for name in case.inputs
        if name not in wanted
    )
    for name, spec in wanted.items():
        if name in case.inputs and not _fits(case.inputs[name], spec):
            given = case.inputs[name]
            yield (
                f"the exam gives {case.verb} {name} as {given.dtype} {given.shape}, "
                f"expected {spec.dtype} ({', '.join(map(str, spec.shape))})"
            )


def _fits(given: Array, spec: TensorSpec) -> bool:
    return (
        str(given.dtype) == spec.dtype
        and given.ndim == len(spec.shape)
        and all(isinstance(wanted, str) or wanted == size for wanted, size in zip(spec.shape, given.shape, strict=True))
    )


def _ids(exam: Exam) -> Iterator[tuple[str, Array]]:
    """All token ids of `exam`, and whose they are."""
    for case in exam.graphs:
        if "input_ids" in case.inputs:
            yield "source" if case.verb == ENCODE else "target", case.inputs["input_ids"]
    for chain in exam.rollouts:
        yield "source", chain.source_ids
        yield "target", chain.target_ids
        yield "target", chain.columns
    for tokens in exam.tokens:
        yield "target", tokens.top_ids
