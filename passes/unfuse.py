"""kvfuse::QuantizedKvSdpa -> Concat(past, new) and attention in plain ONNX ops: the rewriting, undone.

The graph gets back the inputs and outputs that it had, by name, type and order; inside, attention is spelled
one way, whatever the original's spelling was. What the caches were is read from the model's metadata. The
past length of a run is the length of the cache inputs, for all rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from ..errors import ModelError
from .attention_scope import Scope, optional, owner_of, required, restart
from .builder import Builder
from .drop_cache_io import remove_dead_nodes
from .float_attention import Form, Lengths, MaskSource, as_float, attend
from .fuse import PAST_LENGTH_INPUT, SEQUENCE_INPUT
from .fusion_record import CacheRecord, CacheSide, Record, read_record
from .lower import DOMAIN, OP
from .site import label

BEGIN = "KvCacheBegin"
_HEADS_FIRST = {1: "BSHD", 2: "BHSD"}  # the op's axis attribute -> the layout of its operands
_PADDING, _BIAS, _SINK = 4, 5, 6  # positions of the op's optional inputs


def unfuse(model: ir.Model) -> Record:
    """Gives a rewritten model its float caches back; edits the model.

    Returns:
        What was known of the original.

    Raises:
        ModelError: The model was not rewritten by kvfuse, or its metadata does not describe its ops.
    """
    record = read_record(model)
    begin, attentions = _own_nodes(model, record)
    try:
        restorer = _Restorer(model.graph, record, begin)
        for node in attentions:
            restorer.restore(node)
        restorer.finish(begin)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"[unfuse] expected metadata that fits the ops; found: {error!r}") from error
    del model.metadata_props[DOMAIN]
    if not any(node.domain == DOMAIN for node in model.graph.all_nodes()):
        model.graph.opset_imports.pop(DOMAIN, None)
    return record


def _own_nodes(model: ir.Model, record: Record) -> tuple[ir.Node, list[ir.Node]]:
    nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    begins = [node for node in nodes if node.op_type == BEGIN]
    attentions = [node for node in nodes if node.op_type == OP]
    if len(begins) != 1 or not attentions:
        raise ModelError(
            f"[unfuse] expected one {BEGIN} and a {OP} for each layer; found {len(begins)} and "
            f"{len(attentions)}"
        )
    for node in attentions:
        layer = _attribute(node, "layer", "")
        if layer not in record.layers:
            raise ModelError(f"[unfuse] expected metadata of layer {layer!r} of {label(node)}; found none")
        for side in (record.layers[layer].key, record.layers[layer].value):
            length = (record.dropped.get(side.past, {}).get("shape") or ())[side.sequence_axis :]
            if length and isinstance(length[0], int):
                raise ModelError(
                    f"[unfuse] expected caches that grow; found {side.past} with the fixed length {length[0]}"
                )
    return begins[0], attentions


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


class _Restorer:
    """Makes cache inputs and outputs as they are needed, and replaces the ops one by one."""

    def __init__(self, graph: ir.Graph, record: Record, begin: ir.Node) -> None:
        self._graph, self._record = graph, record
        self._main = Scope(graph, None, False, None)
        self._scopes = {graph: self._main}
        self._pasts: dict[str, ir.Value] = {}
        self._restart = restart(begin)
        self._past_length = self._first_length()

    def _first_length(self) -> ir.Value:
        """int64 [1]: the cached tokens, as the first layer's key input has them; before all other nodes."""
        side = next(iter(self._record.layers.values())).key
        builder = self._main.builder
        builder.before(self._graph[0])
        length = builder.axis_length(self._past(side), side.sequence_axis)
        if self._restart is not None:  # 0 where the branch without a past is chosen
            condition, restarts_when = self._restart
            choices = [builder.integers([0]), length]
            length = builder.node("Where", [condition, *(choices if restarts_when else reversed(choices))])
        return length

    def _scope(self, node: ir.Node) -> Scope:
        graph = node.graph
        if not isinstance(graph, ir.Graph):
            raise ValueError(f"{label(node)} is in no graph")
        if graph not in self._scopes:
            owner, branch = owner_of(self._graph, graph)
            if self._restart is None or owner.inputs[0] is not self._restart[0]:
                raise ValueError(
                    f"{label(node)} is in a branch of {label(owner)}, which starts nothing again"
                )
            fresh = (branch == "then_branch") == self._restart[1]
            self._scopes[graph] = Scope(graph, owner, fresh, self._main.builder)
        return self._scopes[graph]

    def _past(self, side: CacheSide) -> ir.Value:
        if side.past not in self._pasts:
            value = ir.Value(name=self._free(side.past))
            self._pasts[side.past] = self._record.declare(value, side.past, side, "past_sequence_length")
        return self._pasts[side.past]

    def restore(self, node: ir.Node) -> None:
        """Replaces one attention by its float form."""
        cache = self._record.layers[_attribute(node, "layer", "")]
        scope, layout = self._scope(node), _HEADS_FIRST[_attribute(node, "axis", 2)]
        builder = scope.builder
        builder.before(node)
        query, key, value = (required(node, position) for position in range(3))
        padding, bias, sink = (optional(node, position) for position in (_PADDING, _BIAS, _SINK))
        if scope.masks is None:
            new = builder.axis_length(query, layout.index("S"))
            lengths = Lengths(self._past_length, new, builder.node("Add", [self._past_length, new]))
            scope.masks = MaskSource(builder, lengths)
        dtype = cache.op_dtype
        present_key, keys = self._append(scope, cache, cache.key, key, layout)
        present_value, values = self._append(scope, cache, cache.value, value, layout)
        self._publish(scope, cache, present_key, present_value)
        causal, window = bool(_attribute(node, "causal", 0)), _attribute(node, "window_left", -1)
        form = Form(
            num_heads=cache.num_heads or _num_heads(query, layout),
            kv_num_heads=cache.key.kv_num_heads,
            head_dim=cache.key.head_dim,
            value_head_dim=cache.value.head_dim,
            scale=_attribute(node, "scale", cache.key.head_dim**-0.5),
            softcap=_attribute(node, "softcap", 0.0),
            mask=scope.masks.mask(causal, window, padding),
            attention_bias=None if bias is None else as_float(builder, bias, dtype),
            head_sink=None if sink is None else as_float(builder, sink, dtype),
            may_hide_all=padding is not None or bias is not None,
        )
        queries = as_float(builder, _permute(builder, query, layout, "BHSD"), dtype)
        output = _permute(builder, attend(builder, form, queries, keys, values), "BHSD", layout)
        if dtype != ir.DataType.FLOAT:
            output = builder.node("Cast", [output], {"to": int(dtype)})
        output.type = ir.TensorType(dtype)
        _take_place(node.outputs[0], output)

    def _append(
        self, scope: Scope, cache: CacheRecord, side: CacheSide, new: ir.Value, layout: str
    ) -> tuple[ir.Value, ir.Value]:
        """The appended tensor in the cache's own layout and type, and as f32 [B, K, T, D]."""
        builder = scope.builder
        unpacked = "BSHD" if side.layout == "BSC" else side.layout
        rows = _permute(builder, new, layout, unpacked)
        if side.layout == "BSC":
            rows = builder.node("Reshape", [rows, builder.integers([0, 0, -1])])
        if cache.op_dtype != side.dtype:
            rows = builder.node("Cast", [rows], {"to": int(side.dtype)})
        if scope.fresh:
            present = builder.node("Identity", [rows])
        else:
            past = self._past(side)
            if side.stacked_index is not None:
                past = builder.node("Gather", [past, builder.integer(side.stacked_index)], {"axis": 0})
            present = builder.node("Concat", [past, rows], {"axis": side.rows_axis})
        all_rows = as_float(builder, present, side.dtype)
        if side.layout == "BSC":
            split = builder.integers([0, 0, side.kv_num_heads, side.head_dim])
            all_rows = builder.node("Reshape", [all_rows, split])
        return present, _permute(builder, all_rows, unpacked, "BHSD")

    def _publish(self, scope: Scope, cache: CacheRecord, key: ir.Value, value: ir.Value) -> None:
        """Makes the appended tensors outputs of their graph, under the names they had."""
        builder = scope.builder
        if cache.key.stacked_index is not None:
            first = builder.integers([0])
            sides = [builder.node("Unsqueeze", [present, first]) for present in (key, value)]
            key = value = builder.node("Concat", sides, {"axis": 0})
        for side, present in ((cache.key, key), (cache.value, value)):
            for name in side.presents:
                if name in scope.presents:
                    continue
                output, dtype = present, self._record.dtype_of(name, side)
                if dtype != side.dtype:
                    output = builder.node("Cast", [present], {"to": int(dtype)})
                elif present in scope.presents.values():
                    output = builder.node("Identity", [present])
                if scope.owner is None:
                    output.name = self._free(name)
                scope.presents[name] = self._record.declare(output, name, side, "total_sequence_length")

    def _free(self, name: str) -> str:
        """The name, after taking it from an inner value that has it by now."""
        for node in self._graph.all_nodes():
            for output in node.outputs:
                if output.name == name:
                    output.name = self._main.builder.fresh(name)
        return name

    def finish(self, begin: ir.Node) -> None:
        """Answers the lengths, removes what only served the ops, and orders inputs and outputs."""
        self._answer_lengths(begin)
        self._hand_out()
        controls = (SEQUENCE_INPUT, PAST_LENGTH_INPUT)
        for name in controls:
            self._graph.initializers.pop(name, None)
        kept = [value for value in self._graph.inputs if value.name not in controls]
        _reorder(self._graph.inputs, [*kept, *self._pasts.values()], self._record.inputs)
        presents = self._main.presents.values()
        _reorder(self._graph.outputs, [*self._graph.outputs, *presents], self._record.outputs)
        for scope in reversed(self._scopes.values()):
            remove_dead_nodes(scope.graph)

    def _answer_lengths(self, begin: ir.Node) -> None:
        """Gives what read KvCacheBegin's past lengths the length of the cache inputs."""
        _slots, scalar, rows = begin.outputs
        builder = self._main.builder
        made = self._past_length.producer()
        if made is None:
            raise ValueError("the past length is made by no node")
        builder.after(made)
        for value in (scalar, rows):
            value.type = ir.TensorType(ir.DataType.INT64)
        if scalar.uses() or scalar.is_graph_output():
            _take_place(scalar, builder.node("Reshape", [self._past_length, builder.integers([])]))
        if rows.uses() or rows.is_graph_output():
            batch = builder.axis_length(required(begin, 2), 0)
            _take_place(rows, builder.node("Expand", [self._past_length, batch]))

    def _hand_out(self) -> None:
        """Passes the appended tensors of branches through the outputs of their If."""
        for scope in self._scopes.values():
            if scope.owner is None:
                continue
            first = len(scope.graph.outputs)
            scope.graph.outputs.extend(scope.presents.values())
            if len(scope.owner.outputs) == first:
                scope.owner.resize_outputs(first + len(scope.presents))
                for (name, inner), output in zip(
                    scope.presents.items(), scope.owner.outputs[first:], strict=True
                ):
                    output.name, output.type, output.shape = self._free(name), inner.type, inner.shape
                    self._main.presents[name] = output


def _num_heads(query: ir.Value, layout: str) -> int:
    found = None if query.shape is None else query.shape[layout.index("H")]
    if not isinstance(found, int):
        raise ValueError("the number of heads was not noted")
    return found


def _permute(builder: Builder, value: ir.Value, layout: str, wanted: str) -> ir.Value:
    if layout == wanted:
        return value
    return builder.node("Transpose", [value], {"perm": [layout.index(axis) for axis in wanted]})


def _take_place(old: ir.Value, new: ir.Value) -> None:
    """Gives a new value to all readers of an old one, as a graph output under the old name."""
    new.type, new.shape = new.type or old.type, old.shape
    name, published = old.name, old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if published:
        old.name, new.name = f"{name}.before", name


def _reorder(place: Any, values: Iterable[ir.Value], names: tuple[str, ...]) -> None:
    """Sets graph inputs or outputs in the order of the names; values without a place there go last."""
    places = {name: position for position, name in enumerate(names)}
    ordered = sorted(values, key=lambda value: places.get(str(value.name), len(places)))
    place.clear()
    place.extend(ordered)
