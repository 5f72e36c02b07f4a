"""The layouts of a stage under which it costs least, and a bound that no choice of layouts is below.

Every op has options (op_costs.py): a signature of its rule per axis. Every parameter is stored in some layout, and its
gradient reduced to some layout, in which the optimizer works: so data parallelism and ZeRO 1, 2 and 3 are choices like
any other. A value that is taken in another layout than the one it was made in costs a boxing, once for all that take it
in that layout. The least sum is found by linear programming (scipy's HiGHS, with whole numbers where the relaxation has
none):

    x[op, option]             chosen or not; of each op one                       costs the op's seconds
    y[value, taker, a, b]     made in layout a and taken in b; sums of y over b and over a are sums of x
    z[value, a, b] >= y       moved from a to b, for whichever taker               costs the boxing's seconds

and, with a limit on memory, one more row: bytes of parameters, gradients, optimizer and of what forward keeps for
backward. Equal blocks are one set of variables that counts as often as they come: they get the same layouts.

What this does not weigh: algorithms that compete with signatures (ring attention and others), and what overlaps what.
"""
from __future__ import annotations

import dataclasses
from collections import defaultdict
from math import inf
from typing import Any, NamedTuple

import numpy as np

from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import Layout
from globaltensor.planner.op_costs import OpCosts, Option, TensorSize


class PlanningError(GlobalTensorError):
    """A stage that cannot be planned: nothing fits in the memory, or the solver is not there."""


class Use(NamedTuple):
    """A value and all that take it: pairs of a variable and an operand of it. `times` as often as the block comes."""

    source: int
    output: int
    takers: tuple[tuple[int, int], ...]
    value: TensorSize
    times: int = 1
    same: bool = False                               # it must lie for its takers as it was made


@dataclasses.dataclass
class Choices:
    """What is to be chosen: of each variable one of its options.

    options   per variable
    times     how often it comes
    uses      the values that pass from one to others
    memory    per variable and option: bytes of a rank that it keeps
    nodes     per variable: the node of the graph, or a name
    """

    costs: OpCosts
    options: list[list[Option]] = dataclasses.field(default_factory=list)
    times: list[int] = dataclasses.field(default_factory=list)
    uses: list[Use] = dataclasses.field(default_factory=list)
    memory: list[list[float]] = dataclasses.field(default_factory=list)
    nodes: list[Any] = dataclasses.field(default_factory=list)

    def add(self, node: Any, options: list[Option], times: int = 1) -> int:
        """A variable more."""
        self.nodes.append(node)
        self.options.append(options)
        self.times.append(times)
        self.memory.append([0.0] * len(options))
        return len(self.nodes) - 1

    def seconds(self, chosen: list[int]) -> float:
        """What a choice costs."""
        total = sum(options[k].seconds * n for options, k, n in zip(self.options, chosen, self.times))
        for use in self.uses:
            held = self._layout(use.source, use.output, chosen[use.source])
            wants = {self.options[taker][chosen[taker]].inputs[operand] for taker, operand in use.takers}
            total += sum(self.price(use, held, want) for want in wants)
        return total

    def price(self, use: Use, held: Layout, want: Layout) -> float:
        """Seconds of bringing a value to a layout, as often as it comes; inf where it may not be moved."""
        if use.same and held is not want:
            return inf
        return use.times * self.costs.boxing(held, want, use.value.shape, use.value.nbytes)

    def bytes_kept(self, chosen: list[int]) -> float:
        """Bytes of a rank under a choice."""
        return sum(rows[k] for rows, k in zip(self.memory, chosen))

    def _layout(self, variable: int, output: int, option: int) -> Layout:
        held = self.options[variable][option].outputs[output]
        assert held is not None                      # somebody takes it
        return held


class Solution(NamedTuple):
    """The best choice, its seconds and bytes; no choice takes less than `lower_bound`. `relaxed`: was the linear
    program whole-numbered by itself?"""

    chosen: list[int]
    seconds: float
    lower_bound: float
    nbytes: float
    relaxed: bool


def solve(of: Choices, memory: float = inf, time_limit: float = 60.0) -> Solution:
    """The choice of least seconds within a memory in bytes.

    Raises PlanningError where none fits, where the solver needs more than `time_limit` seconds, and without scipy."""
    try:
        from scipy import optimize
    except ImportError:
        raise PlanningError("a stage is planned by linear programming", "scipy, which does it, is not installed",
                            "pip install 'globaltensor[plan]'") from None
    program = _Program(of, memory)
    matrix, lower, upper = program.matrix()
    constraints = optimize.LinearConstraint(matrix, lower, upper)
    for whole in (False, True):
        kinds = np.where(np.arange(program.columns) < program.first_flow, 1, 0) if whole else None
        result = optimize.milp(np.array(program.prices), integrality=kinds, bounds=optimize.Bounds(0, 1),
                               constraints=constraints, options={"time_limit": time_limit, "mip_rel_gap": 0.0})
        if result.status == 2:
            raise PlanningError("no choice of layouts fits in the memory", f"a rank has {memory:,.0f} bytes",
                                "more ranks, a smaller batch, or recomputation")
        if result.x is None:
            raise PlanningError("the search for layouts did not end", str(result.message), "a longer time_limit")
        chosen = program.chosen(result.x)
        if chosen is not None:
            bound = result.mip_dual_bound if whole and result.mip_dual_bound is not None else result.fun
            seconds = of.seconds(chosen)
            return Solution(chosen, seconds, min(bound / program.scale, seconds), of.bytes_kept(chosen), not whole)
    raise AssertionError("a solution in whole numbers is whole")


class _Program:
    """The linear program, column by column. Seconds are scaled so that the solver's tolerances do not swallow them."""

    def __init__(self, of: Choices, memory: float) -> None:
        self.of = of
        self.prices: list[float] = []
        self.rows: list[list[tuple[int, float]]] = []
        self.bounds: list[tuple[float, float]] = []
        self.starts: list[int] = []
        for options, times in zip(of.options, of.times):
            self.starts.append(len(self.prices))
            self.prices += [option.seconds * times for option in options]
            self._row([(self.starts[-1] + k, 1.0) for k in range(len(options))], 1.0, 1.0)
        self.first_flow = len(self.prices)
        for use in of.uses:
            self._add_use(use)
        if memory < inf:
            kept = [(start + k, n / memory) for start, row in zip(self.starts, of.memory) for k, n in enumerate(row)]
            self._row(kept, -inf, 1.0)
        self.scale = 1e3 / max(max(self.prices, default=1.0), 1e-12)
        self.prices = [price * self.scale for price in self.prices]

    @property
    def columns(self) -> int:
        """How many there are."""
        return len(self.prices)

    def _row(self, entries: list[tuple[int, float]], lower: float, upper: float) -> None:
        self.rows.append(entries)
        self.bounds.append((lower, upper))

    def _column(self, price: float) -> int:
        self.prices.append(price)
        return len(self.prices) - 1

    def _by_layout(self, variable: int, layouts: list[Layout | None]) -> dict[Layout, list[int]]:
        columns: dict[Layout, list[int]] = defaultdict(list)
        for k, one in enumerate(layouts):
            if one is not None:
                columns[one].append(self.starts[variable] + k)
        return columns

    def _add_use(self, use: Use) -> None:
        """y of every taker; and z, where there are several takers."""
        of = self.of
        held = self._by_layout(use.source, [option.outputs[use.output] for option in of.options[use.source]])
        moved: dict[tuple[Layout, Layout], int] = {}
        for taker, operand in dict.fromkeys(use.takers):
            wanted = self._by_layout(taker, [option.inputs[operand] for option in of.options[taker]])
            flows: dict[tuple[Layout, Layout], int] = {}
            for a in held:
                for b in wanted:
                    price = of.price(use, a, b)
                    if price == inf:
                        continue
                    if len(use.takers) > 1 and price and (a, b) not in moved:
                        moved[a, b] = self._column(price)
                    flows[a, b] = self._column(0.0 if len(use.takers) > 1 else price)
                    if len(use.takers) > 1 and price:
                        self._row([(moved[a, b], 1.0), (flows[a, b], -1.0)], 0.0, inf)
            for ends, side in ((held, 0), (wanted, 1)):
                for end, columns in ends.items():
                    passing = [(column, 1.0) for pair, column in flows.items() if pair[side] is end]
                    self._row(passing + [(column, -1.0) for column in columns], 0.0, 0.0)

    def matrix(self) -> tuple[Any, Any, Any]:
        """The rows as a sparse matrix, with their bounds."""
        from scipy import sparse

        indices = [(i, column, value) for i, row in enumerate(self.rows) for column, value in row]
        rows, columns, values = zip(*indices)
        lower, upper = zip(*self.bounds)
        shape = len(self.rows), self.columns
        return sparse.csr_matrix((values, (rows, columns)), shape), np.array(lower), np.array(upper)

    def chosen(self, x: Any) -> list[int] | None:
        """The option of each variable; None where one is chosen in parts."""
        choice = []
        for start, options in zip(self.starts, self.of.options):
            share = x[start:start + len(options)]
            if share.max() < 1 - 1e-5:
                return None
            choice.append(int(share.argmax()))
        return choice
