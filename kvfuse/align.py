"""Which node of one graph is which node of another, so that their difference is what really changed.

Equal parts are found from both ends: from the inputs by structural hash, from the outputs by who reads what.
A node behind a change keeps its partner, and a value that another op makes now keeps its label. Whatever is
paired, lines that are equal under the pairing are equal in the graphs: a poor pairing makes a difference
longer and never wrong.
"""

from __future__ import annotations

from collections import defaultdict

import onnx_ir as ir

from kvfuse.canonical import View
from kvfuse.text import Literal, Name, Value, label_of

_MAX_ROUNDS = 50


class Alignment:
    """Pairs the nodes and values of two views.

    Attributes:
        partner: Node of b -> its partner in a.
        labels: Value of b -> label; the label of its partner in a where it has one.
        nodes: The shown nodes of b in the order of a as far as b allows it.
    """

    def __init__(self, a: View, b: View) -> None:
        self._a, self._b = a, b
        self.partner: dict[ir.Node, ir.Node] = {}
        self._paired: set[ir.Node] = set()
        self._link: dict[ir.Value, ir.Value] = {}  # value of a -> value of b
        self.labels: dict[ir.Value, str] = {
            value: label
            for value, label in b.labels.items()
            if isinstance(label, Literal) or not b.owns(value.producer())
        }
        self._leaves = {label: value for value, label in self.labels.items()}
        self._place = {node: place for place, node in enumerate(b.nodes)}
        self._match_equal()
        self._match_outputs()
        self._match_neighbours()
        self._label_rest()
        self.nodes = self._ordered()

    def _identity(self, value: ir.Value | None, of_a: bool) -> str | None:
        """What an operand is, in the words of a; None for a value of b without a partner."""
        if value is None:
            return "_"
        if of_a:
            return label_of(value, self._a.labels)
        return self.labels.get(value)

    def _is_literal(self, value: ir.Value) -> bool:
        return isinstance(self._a.labels.get(value), Literal)

    def _pair(self, one: ir.Node, other: ir.Node) -> bool:
        """Pairs two nodes, unless their only values have other partners already."""
        outputs = self._outputs(one, other)
        free = [pair for pair in outputs if self._may_join(*pair)]
        if outputs and not free:
            return False
        self.partner[other] = one
        self._paired.add(one)
        for mine, yours in free:
            self._join(mine, yours)
        return True

    def _outputs(self, one: ir.Node, other: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
        """The outputs of two nodes side by side; where one has more of them, those of one name."""
        if len(one.outputs) == len(other.outputs):
            return list(zip(one.outputs, other.outputs, strict=True))
        named = {self._b.labels.get(value): value for value in other.outputs}
        pairs = ((value, named.get(self._a.labels.get(value))) for value in one.outputs)
        return [
            (mine, yours)
            for mine, yours in pairs
            if yours is not None and not isinstance(self._a.labels.get(mine), Value)
        ]

    def _may_join(self, mine: ir.Value, yours: ir.Value) -> bool:
        """Whether both are free, or partners already."""
        if mine in self._link or yours in self.labels:
            return self._link.get(mine) is yours
        return True

    def _join(self, mine: ir.Value, yours: ir.Value) -> None:
        self._link[mine] = yours
        if mine in self._a.labels:
            self.labels[yours] = self._a.labels[mine]

    def _match_equal(self) -> None:
        """Pairs nodes that compute the same from the same; equal ones by who reads them."""
        buckets: dict[str, list[ir.Node]] = defaultdict(list)
        for node in self._b.shown:
            buckets[self._b.forward[node]].append(node)
        for node in self._a.shown:
            bucket = buckets.get(self._a.forward[node])
            if not bucket:
                continue
            backward = self._a.backward[node]
            best = max(
                range(len(bucket)),
                key=lambda place, backward=backward, bucket=bucket, node=node: (  # type: ignore[misc]
                    self._reads_same(node, bucket[place]) + 2 * (self._b.backward[bucket[place]] == backward),
                    -place,
                ),
            )
            if self._pair(node, bucket[best]):
                del bucket[best]

    def _reads_same(self, one: ir.Node, other: ir.Node) -> bool:
        return len(one.inputs) == len(other.inputs) and all(
            self._identity(mine, True) == self._identity(yours, False)
            for mine, yours in zip(one.inputs, other.inputs, strict=True)
        )

    def _match_outputs(self) -> None:
        """From the same outputs upwards: what is read at one place by partners is one value."""
        mine, yours = (
            {view.end_label("output", place, value): value for place, value in enumerate(view.graph.outputs)}
            for view in (self._a, self._b)
        )
        self._climb([(value, yours[name]) for name, value in mine.items() if name in yours])

    def _climb(self, pairs: list[tuple[ir.Value, ir.Value]]) -> None:
        while pairs:
            mine, yours = pairs.pop()
            one, other = mine.producer(), yours.producer()
            if not self._a.owns(one) or not self._b.owns(other) or one is None or other is None:
                continue
            if mine not in self._link and yours not in self.labels and not self._is_literal(mine):
                self._join(mine, yours)
            if self._link.get(mine) is yours and self._may_pair(one, other) and self._pair(one, other):
                pairs += self._operands(one, other)

    def _may_pair(self, one: ir.Node, other: ir.Node) -> bool:
        return (
            one not in self._paired
            and other not in self.partner
            and self._a.signature(one) == self._b.signature(other)
        )

    def _operands(self, one: ir.Node, other: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
        pairs = zip(one.inputs, other.inputs, strict=False)
        return [(mine, yours) for mine, yours in pairs if mine is not None and yours is not None]

    def _match_neighbours(self) -> None:
        """Downwards from what is paired: the same op on the same operands, else the only one on some."""
        for _ in range(_MAX_ROUNDS):
            if not (self._descend(whole=True) or self._descend(whole=False)):
                return

    def _descend(self, *, whole: bool) -> bool:
        found = False
        for node in self._a.shown:
            if node in self._paired:
                continue
            candidates = self._candidates(node)
            if whole:
                candidates = [other for other in candidates if self._reads_same(node, other)]
                likely = self._a.readers(node)
                candidates.sort(key=lambda other, likely=likely: self._b.readers(other) != likely)  # type: ignore[misc]
                candidates = candidates[:1]
            if len(candidates) == 1 and self._pair(node, candidates[0]):
                found = True
                self._climb(self._operands(node, candidates[0]))
        return found

    def _candidates(self, node: ir.Node) -> list[ir.Node]:
        """Nodes of b that read a partner of one of the node's operands at the same place."""
        found: dict[ir.Node, None] = {}
        for place, mine in enumerate(node.inputs):
            if mine is None or self._is_literal(mine):
                continue
            yours = self._link.get(mine) or self._leaves.get(self._a.labels.get(mine, ""))
            for use in () if yours is None else yours.uses():
                if use.idx == place and self._b.owns(use.node) and self._may_pair(node, use.node):
                    found[use.node] = None
        return sorted(found, key=lambda node: self._place[node])

    def _label_rest(self) -> None:
        taken = {str(label) for label in self._a.labels.values()}
        used = set(self.labels.values())
        counts: dict[str, int] = defaultdict(int)
        for value, label in self._b.labels.items():
            if value in self.labels:
                continue
            node = value.producer()
            if isinstance(label, Value) and node is not None:
                while f"{node.op_type}.{counts[node.op_type] + 1}" in taken:
                    counts[node.op_type] += 1
                counts[node.op_type] += 1
                label = Value(f"{node.op_type}.{counts[node.op_type]}")
            elif label in used:  # an output whose name a partner elsewhere has by now
                label = Name(f"{label}'")
            self.labels[value] = label

    def _ordered(self) -> list[ir.Node]:
        """Partners where a has them; other nodes in front of the first that reads them."""
        places = {node: place for place, node in enumerate(self._a.nodes)}
        keys: dict[ir.Node, int] = {}
        for node in reversed(self._b.nodes):
            if node in self.partner:
                keys[node] = places[self.partner[node]]
            else:
                users = [keys[user] for output in node.outputs for user in output.consumers() if user in keys]
                keys[node] = min(users, default=len(places))
        return sorted(self._b.shown, key=lambda node: (keys[node], node in self.partner, self._place[node]))
