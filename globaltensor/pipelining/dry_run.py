"""Do the stages fit together? Checked before inputs of a new kind are run, so that all processes get the same error.

Once a schedule runs, a stage that fails on its inputs raises on its own ranks only; the others just see that these are
gone. So one micro-batch is run forward first, stage by stage, and all processes learn the outcome of each. Inputs that
differ in sizes only are of one kind: batches of varying length are checked once. What the check moves is not counted.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from globaltensor.boxings.watch import not_counted
from globaltensor.errors import in_brief
from globaltensor.pipelining.actions import PipelineStep, layouts_forward
from globaltensor.pipelining.kept_buffers import buffers_left_alone
from globaltensor.pipelining.stage_comm import ActivationBundle, BundleMeta, bundle, describe, move_bundle
from globaltensor.pipelining.stages import StageError
from globaltensor.runtime.agreement import gather_objects, uncoordinated
from globaltensor.tensors.global_tensor import GlobalTensor


def dry_run(step: PipelineStep, mb: int, inputs: Sequence[Any], own_stages: Sequence[int]) -> None:
    """Run a micro-batch forward through all stages, one after the other; `own_stages` are those of this process.

    Raises StageError on every process where a stage, or the loss, fails.
    """
    with not_counted():
        _run_stages(step, mb, inputs, own_stages)


def _run_stages(step: PipelineStep, mb: int, inputs: Sequence[Any], own_stages: Sequence[int]) -> None:
    model, received = step.model, bundle(inputs, torch.get_rng_state())
    for stage, module in enumerate(model.stages):
        outputs: tuple[Any, ...] = ()
        meta: BundleMeta | None = None
        failure = ""
        if stage in own_stages:
            try:
                with uncoordinated(), model.parameters.replicas_in(stage), buffers_left_alone(module):
                    outputs = step.call(stage, mb, received, grad=False, again=True)[1]
                meta = bundle(outputs).meta
            except Exception as error:               # whatever a user's module raises: all processes must learn of it
                failure = in_brief(error)
        outcomes = gather_objects((meta, failure), "the dry run of a pipeline")
        failure = next((error for _, error in outcomes if error), "")
        if failure:
            raise StageError(f"stage {stage} of {len(model.stages)} fails on {describe(received.meta)}", failure,
                             "stages that each take what the one before returns, and " + (
                                 "a last one that returns the loss; or gt.pipeline(..., loss=F.cross_entropy)"
                                 if model.loss is None else "a loss that takes what the last returns"))
        if stage == step.last:
            return
        meta = next(meta for meta, _ in outcomes if meta is not None)
        # A process without this stage has no outputs: tensors without shards stand for them.
        tensors = tuple(y if y is None else y.detach() for y in outputs) or tuple(
            part and GlobalTensor.wrap(part.spec, {}) for part in meta)
        received = move_bundle(ActivationBundle(tensors, meta, received.random),
                               layouts_forward(meta, model.placements[stage + 1]))
