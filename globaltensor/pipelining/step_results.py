"""What all processes know of a step of a pipeline when it is over, of which each has run its own stages only."""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from globaltensor.pipelining.stage_comm import TensorMeta
from globaltensor.runtime.agreement import agree, gather_objects

_WHAT = "the results of a step of a pipeline"


@dataclass(frozen=True)
class MissingGradients:
    """What got no gradient in a step, each as (stage, index): parameters of stages, and replicas of what a stage shares
    with an earlier one."""

    parameters: frozenset[tuple[int, int]] = frozenset()
    replicas: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class StepResults:
    missing: MissingGradients                        # of all stages
    metas: list[list[Any]]                           # of the output of the last stage, for each micro-batch


@dataclass
class KnownSteps:
    """Those of earlier steps, by what is known of a step before it runs.

    The layouts of results follow from that, but which gradients are missing does not: a layer may be left out of some
    steps (LayerDrop), or a head be used in some only. So processes tell each other in each step whether theirs are
    those of before, in one small message each, and send them again where they are not.
    """

    _known: dict[Hashable, tuple[MissingGradients, StepResults]] = field(default_factory=dict)

    def of_all(self, keys: Hashable, missing: MissingGradients, results: Sequence[Sequence[Any]] | None,
               train: bool) -> StepResults:
        """`missing` of this process' stages; `results` of the last stage, None where others run it. Collective."""
        own, known = self._known.get(keys, (None, None))
        if known is not None and not (train and agree(_WHAT, changed=missing != own)):
            return known
        metas = None if results is None else [
            [y if y is None else TensorMeta(y.spec.layout, y.spec.shape, y.spec.dtype, False) for y in result]
            for result in results]
        replies = gather_objects((set(missing.parameters), set(missing.replicas), metas), _WHAT)
        parameters, replicas, every = zip(*replies)
        known = StepResults(MissingGradients(frozenset().union(*parameters), frozenset().union(*replicas)),
                            next(meta for meta in every if meta is not None))
        self._known[keys] = missing, known
        return known
