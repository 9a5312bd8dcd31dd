"""The fault injector's hand on what a search has besides the verbs: the graphs `begin`, `branch` and `rank`."""

import numpy as np
import onnx_ir as ir
from injector_graphs_support import Change, attentions, computed, constant, node, replace_output, value


def begin_with_a_token(graph: ir.Graph) -> None:
    """The cache of no tokens holds one: the first word of the source."""
    for kind in ("key", "value"):
        cut = value(graph, f"present.0.decoder.{kind}").producer()
        assert cut is not None
        cut.replace_input_with(2, constant(graph, [1]))


def place_one_before(graph: ir.Graph) -> None:
    """Every branch stands one position before its own."""
    reader = node(graph, "decoder.embedding/Gather")
    reader.replace_input_with(1, computed(reader, "Sub", [reader.inputs[1], constant(graph, 1)]))


def place_at_the_end(graph: ir.Graph) -> None:
    """Every branch stands where the whole cache ends, as if all of it were its past."""
    reader = node(graph, "decoder.embedding/Gather")
    places, seen = reader.inputs[1], value(graph, "seen")
    length = computed(reader, "Shape", [seen], {"start": 2, "end": 3})
    last = computed(reader, "Min", [length, constant(graph, [20])])
    reader.replace_input_with(1, computed(reader, "Max", [places, last]))


def see_all_of(part: str) -> Change:
    """The mask lets every branch see all of the "past", or all the "others" that are new."""

    def change(graph: ir.Graph) -> None:
        (joined,) = (
            found for found in graph if found.op_type == "Concat" and found.outputs[0].dtype == ir.DataType.BOOL
        )
        place = ("past", "others").index(part)
        joined.replace_input_with(place, computed(joined, "Or", [joined.inputs[place], constant(graph, np.True_)]))

    return change


def mirror_seen(graph: ir.Graph) -> None:
    """Each branch goes on from what another one has seen."""
    seen = value(graph, "seen")
    users, first = list(seen.uses()), graph[0]
    mirrored = computed(first, "Slice", [seen, *(constant(graph, [number]) for number in (-1, -(2**31), 1, -1))])
    for user, place in users:
        user.replace_input_with(place, mirrored)


def swap_grown(graph: ir.Graph) -> None:
    """The new keys are appended to the values of the cache, and the new values to the keys."""
    for user in attentions(graph, "self_attention"):
        key, other = user.inputs[4], user.inputs[5]
        user.replace_input_with(4, other)
        user.replace_input_with(5, key)


def turn_new_keys(graph: ir.Graph) -> None:
    """New keys come out in the memory order (B, T, H, D) under the shape (B, H, T, D); the past is right."""

    def turned(end: ir.Node, honest: ir.Value) -> ir.Value:
        past = computed(end, "Shape", [value(graph, "past_key_values.0.decoder.key")], {"start": 2, "end": 3})
        zero, far, axis = (constant(graph, [number]) for number in (0, 2**31, 2))
        old = computed(end, "Slice", [honest, zero, past, axis])
        new = computed(end, "Slice", [honest, past, far, axis])
        order = computed(end, "Transpose", [new], {"perm": [0, 2, 1, 3]})
        shaped = computed(end, "Reshape", [order, computed(end, "Shape", [new])])
        return computed(end, "Concat", [old, shaped], {"axis": 2})

    replace_output(graph, "present.0.decoder.key", turned)


def read_another_weight(graph: ir.Graph) -> None:
    """The queries are made by the matrix of the keys."""
    query, key = (node(graph, f"layers.0.self_attention.{name}_proj/MatMul") for name in ("q", "k"))
    query.replace_input_with(1, key.inputs[1])


def norm_over(axis: int) -> Change:
    """Log-probabilities along another axis."""

    def change(graph: ir.Graph) -> None:
        node(graph, "rank/LogSoftmax").attributes["axis"] = ir.AttrInt64("axis", axis)

    return change


def forget_the_norm(graph: ir.Graph) -> None:
    """Logits come out in the place of log-probabilities."""
    norm = node(graph, "rank/LogSoftmax")
    assert norm.inputs[0] is not None
    ir.convenience.replace_all_uses_with(norm.outputs[0], norm.inputs[0])


def leave_unsorted(graph: ir.Graph) -> None:
    """The best tokens come in any order."""
    node(graph, "rank/TopK").attributes["sorted"] = ir.AttrInt64("sorted", 0)


def take_the_worst(graph: ir.Graph) -> None:
    """The least probable tokens are the best."""
    node(graph, "rank/TopK").attributes["largest"] = ir.AttrInt64("largest", 0)
