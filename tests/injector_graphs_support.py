"""The fault injector's hand on graphs: each change makes one graph of a bundle compute something else."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from injector_files_support import sign

from exporters.graphs import TRACED
from runtime.contract import BATCH, GRAPH_FILES, PAST, SOURCE

NUMBERS = count()
"""Tell apart what is put into graphs."""
Change = Callable[[ir.Graph], None]
Edit = Callable[[Path], None]


def graph_edit(verb: str, change: Change) -> Edit:
    """What lets `change` work on the graph of `verb` in a folder, and signs the result. Weights stay outside."""

    def edit(folder: Path) -> None:
        path = folder / GRAPH_FILES[verb]
        model = ir.load(path)
        change(model.graph)
        ir.save(model, path)
        sign(folder)

    return edit


# Tools


def node(graph: ir.Graph, ending: str) -> ir.Node:
    """The only node whose name ends so; nodes are named after modules."""
    (found,) = (node for node in graph if str(node.name).endswith(ending))
    return found


def value(graph: ir.Graph, name: str) -> ir.Value:
    """The input or output of that name."""
    return next(value for value in (*graph.inputs, *graph.outputs) if value.name == name)


def constant(graph: ir.Graph, array: Any) -> ir.Value:
    """A new constant of `graph`, kept inside the file."""
    content = ir.tensor(np.asarray(array))
    made = ir.Value(
        name=f"fault_{next(NUMBERS)}",
        shape=ir.Shape(content.shape.numpy()),
        type=ir.TensorType(content.dtype),
        const_value=content,
    )
    graph.register_initializer(made)
    return made


def computed(
    before: ir.Node, operator: str, inputs: list[ir.Value | None], attributes: dict[str, Any] | None = None
) -> ir.Value:
    """The first output of a new node in front of `before`."""
    graph = before.graph
    assert isinstance(graph, ir.Graph)
    name = f"fault_node_{next(NUMBERS)}"
    outputs = [ir.val(f"{name}_{place}") for place in range(3 if operator == "DynamicQuantizeLinear" else 1)]
    graph.insert_before(before, ir.node(operator, inputs, attributes, outputs=outputs, name=name))
    return outputs[0]


def replace_output(graph: ir.Graph, name: str, made: Callable[[ir.Node, ir.Value], ir.Value]) -> None:
    """Let the output `name` be what `made` makes of it; whoever reads it inside the graph sees no difference."""
    honest = value(graph, name)
    producer = honest.producer()
    assert producer is not None
    # New nodes need one that they may stand in front of.
    end = ir.node("Identity", [honest], name="fault_end")
    graph.append(end)
    found = made(end, honest)
    graph.remove(end, safe=True)
    honest.name, found.name = f"{name}_honest", name
    found.type, found.shape = found.type or honest.type, found.shape or honest.shape
    graph.outputs[list(graph.outputs).index(honest)] = found


def attentions(graph: ir.Graph, part: str = "") -> list[ir.Node]:
    """The attention nodes whose names hold `part`."""
    return [found for found in graph if found.op_type == "Attention" and part in str(found.name)]


# Outputs


def swap_outputs(side: str) -> Change:
    """Keys of a `side` come out as values and values as keys."""

    def change(graph: ir.Graph) -> None:
        start = f"present.0.{side}"
        places = [place for place, output in enumerate(graph.outputs) if str(output.name).startswith(start)]
        key, other = (graph.outputs[place] for place in places)
        key.name, other.name = f"{key.name}_moved", key.name
        key.name = f"{str(key.name).removesuffix('key_moved')}value"
        graph.outputs[places[0]], graph.outputs[places[1]] = other, key

    return change


def turn_cache(graph: ir.Graph) -> None:
    """A cache in the memory order (B, T, H, D) under the shape (B, H, T, D)."""

    def turned(end: ir.Node, honest: ir.Value) -> ir.Value:
        order = computed(end, "Transpose", [honest], {"perm": [0, 2, 1, 3]})
        return computed(end, "Reshape", [order, computed(end, "Shape", [honest])])

    replace_output(graph, "present.0.decoder.key", turned)


def roll_cross_cache(graph: ir.Graph) -> None:
    """Every sentence gets the source of the next."""

    def rolled(end: ir.Node, honest: ir.Value) -> ir.Value:
        zero, one, many = (constant(graph, [number]) for number in (0, 1, 2**31))
        rest, first = (computed(end, "Slice", [honest, *span, zero]) for span in ((one, many), (zero, one)))
        return computed(end, "Concat", [rest, first], {"axis": 0})

    for kind in ("key", "value"):
        replace_output(graph, f"present.0.encoder.{kind}", rolled)


def forget_to_grow(graph: ir.Graph) -> None:
    """The cache comes out as it went in, without the new position."""

    def cut(end: ir.Node, honest: ir.Value) -> ir.Value:
        start, stop, axis = (constant(graph, [number]) for number in (0, -1, 2))
        return computed(end, "Slice", [honest, start, stop, axis])

    for kind in ("key", "value"):
        replace_output(graph, f"present.0.decoder.{kind}", cut)


def grow_in_front(graph: ir.Graph) -> None:
    """The new position stands before the past instead of after it."""

    def moved(end: ir.Node, honest: ir.Value) -> ir.Value:
        start, last, stop, axis = (constant(graph, [number]) for number in (0, -1, 2**31, 2))
        past, new = (computed(end, "Slice", [honest, *span, axis]) for span in ((start, last), (last, stop)))
        return computed(end, "Concat", [new, past], {"axis": 2})

    for kind in ("key", "value"):
        replace_output(graph, f"present.0.decoder.{kind}", moved)


def drop_output(graph: ir.Graph) -> None:
    """One cache does not come out."""
    graph.outputs.pop()


def halve_logits(graph: ir.Graph) -> None:
    """Logits come out in float16."""

    def cast(end: ir.Node, honest: ir.Value) -> ir.Value:
        found = computed(end, "Cast", [honest], {"to": ir.DataType.FLOAT16})
        found.type = ir.TensorType(ir.DataType.FLOAT16)
        return found

    replace_output(graph, "logits", cast)


def pick_other_rows(graph: ir.Graph) -> None:
    """Rows are counted from the end."""
    rows = graph.inputs[0]
    users = list(rows.uses())
    first = graph[0]
    count = computed(first, "Shape", [graph.inputs[1]], {"start": 0, "end": 1})
    last = computed(first, "Sub", [count, constant(graph, [1])])
    mirrored = computed(first, "Sub", [last, rows])
    for user, place in users:
        user.replace_input_with(place, mirrored)


# Masks


def invert_mask(graph: ir.Graph) -> None:
    """Attention to padding, and to nothing else."""
    for user in attentions(graph):
        user.replace_input_with(3, computed(user, "Not", [user.inputs[3]]))


def drop_mask(part: str) -> Change:
    """Attention whose name holds `part` without its mask."""

    def change(graph: ir.Graph) -> None:
        for user in attentions(graph, part):
            user.replace_input_with(3, None)

    return change


def look_ahead_from(length: int) -> Change:
    """Tokens from position `length` on see what comes after them."""

    def change(graph: ir.Graph) -> None:
        (user,) = attentions(graph, "self")
        places = node(graph, "prefill/Range").outputs[0]
        late = computed(user, "GreaterOrEqual", [places, constant(graph, length)])
        column = computed(user, "Unsqueeze", [late, constant(graph, [1])])
        user.replace_input_with(3, computed(user, "Or", [user.inputs[3], column]))

    return change


def mask_by_infinity(graph: ir.Graph) -> None:
    """A mask that adds minus infinity, so that the softmax of a row that may see nothing divides 0 by 0."""
    for user in attentions(graph):
        bounds = [constant(graph, np.float32(number)) for number in (0, -np.inf)]
        scores = [user.inputs[3], *bounds]
        query, key, states = user.inputs[:3]
        assert key is not None
        assert states is not None
        turned = computed(user, "Transpose", [key], {"perm": [0, 1, 3, 2]})
        masked = computed(user, "Add", [computed(user, "MatMul", [query, turned]), computed(user, "Where", scores)])
        weights = computed(user, "Softmax", [masked], {"axis": -1})
        ir.convenience.replace_all_uses_with(user.outputs[0], computed(user, "MatMul", [weights, states]))
        graph.remove(user, safe=True)


# Sizes and positions


def declare_size(axis: str) -> Change:
    """`axis` has the traced size in every input and output."""

    def change(graph: ir.Graph) -> None:
        for tensor in (*graph.inputs, *graph.outputs):
            assert tensor.shape is not None
            tensor.shape = ir.Shape([TRACED[axis] if str(size) == axis else size for size in tensor.shape])

    return change


def hide_size(axis: str) -> Change:
    """`axis` looks free, but a reshape in the middle of the encoder holds the size that was traced."""

    def change(graph: ir.Graph) -> None:
        place = (BATCH, SOURCE).index(axis)
        node(graph, "encoder.layers.0/Concat").replace_input_with(place, constant(graph, [TRACED[axis]]))

    return change


def move_positions(moved: Callable[[ir.Node, ir.Value], ir.Value]) -> Change:
    """A step reads the table of positions where `moved` says instead of at the length of its cache."""

    def change(graph: ir.Graph) -> None:
        reader = node(graph, "positions/Slice")
        start = reader.inputs[1]
        assert start is not None
        begin = moved(reader, start)
        reader.replace_input_with(1, begin)
        reader.replace_input_with(2, computed(reader, "Add", [begin, constant(graph, [1])]))

    return change


def traced(reader: ir.Node, _: ir.Value) -> ir.Value:
    """The past that was traced, whatever the cache."""
    assert isinstance(reader.graph, ir.Graph)
    return constant(reader.graph, [TRACED[PAST]])


def one_before(reader: ir.Node, start: ir.Value) -> ir.Value:
    """Off by one."""
    assert isinstance(reader.graph, ir.Graph)
    return computed(reader, "Sub", [start, constant(reader.graph, [1])])


def at_most(limit: int) -> Callable[[ir.Node, ir.Value], ir.Value]:
    """The table seems to end at `limit`."""

    def moved(reader: ir.Node, start: ir.Value) -> ir.Value:
        assert isinstance(reader.graph, ir.Graph)
        return computed(reader, "Min", [start, constant(reader.graph, [limit])])

    return moved


def off_at(place: int) -> Callable[[ir.Node, ir.Value], ir.Value]:
    """Off by one at a single past."""

    def moved(reader: ir.Node, start: ir.Value) -> ir.Value:
        assert isinstance(reader.graph, ir.Graph)
        there = computed(reader, "Equal", [start, constant(reader.graph, [place])])
        return computed(reader, "Sub", [start, computed(reader, "Cast", [there], {"to": ir.DataType.INT64})])

    return moved


def nowhere_at(place: int) -> Callable[[ir.Node, ir.Value], ir.Value]:
    """At a single past the table of positions has nothing to read."""

    def moved(reader: ir.Node, start: ir.Value) -> ir.Value:
        assert isinstance(reader.graph, ir.Graph)
        there = computed(reader, "Equal", [start, constant(reader.graph, [place])])
        return computed(reader, "Where", [there, constant(reader.graph, [1000]), start])

    return moved


# What is computed


def read_the_first_source_from(rows: int) -> Change:
    """All sentences from row `rows` on attend to the cross-attention cache of the first."""

    def change(graph: ir.Graph) -> None:
        for name in ("key", "value"):
            cache = value(graph, f"past_key_values.0.encoder.{name}")
            for user, place in list(cache.uses()):
                zero, one, limit = (constant(graph, number) for number in (0, 1, rows))
                size = computed(user, "Squeeze", [computed(user, "Shape", [cache], {"start": 0, "end": 1})])
                own = computed(user, "Range", [zero, size, one])
                picked = computed(user, "Where", [computed(user, "Less", [own, limit]), own, zero])
                user.replace_input_with(place, computed(user, "Gather", [cache, picked], {"axis": 0}))

    return change


def forget_the_root(graph: ir.Graph) -> None:
    """Scores are divided by D instead of by its square root, by which the query is divided already."""
    for user in attentions(graph, "cross_attention"):
        user.attributes["scale"] = ir.AttrFloat32("scale", 1 / 4)


def set_epsilon(epsilon: float) -> Change:
    """All layer norms get another epsilon."""

    def change(graph: ir.Graph) -> None:
        for found in graph:
            if found.op_type == "LayerNormalization":
                found.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)

    return change


def replace_input(ending: str, place: int, array: Any) -> Change:
    """Input `place` of the node whose name ends so is `array`."""
    return lambda graph: node(graph, ending).replace_input_with(place, constant(graph, array))


def drop_bias(ending: str) -> Change:
    """The node that adds a bias adds nothing."""

    def change(graph: ir.Graph) -> None:
        adder = node(graph, ending)
        assert adder.inputs[0] is not None
        ir.convenience.replace_all_uses_with(adder.outputs[0], adder.inputs[0])

    return change


def smooth_the_activation(graph: ir.Graph) -> None:
    """GELU in the place of ReLU."""
    for found in graph:
        if found.op_type == "Relu":
            found.op_type = "Gelu"


def quantise_by_the_batch(graph: ir.Graph) -> None:
    """What goes into matrix products is rounded to 8 bits with one scale for the whole batch."""
    for found in list(graph):
        if found.op_type == "MatMul":
            rounded = computed(found, "DynamicQuantizeLinear", [found.inputs[0]])
            producer = rounded.producer()
            assert producer is not None
            found.replace_input_with(0, computed(found, "DequantizeLinear", list(producer.outputs)))
