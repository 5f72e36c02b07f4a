"""Do the stages fit together? Asked before inputs of a new kind are run, so that all processes get the same error.

Once a schedule runs, a stage that cannot work on what comes raises on its own ranks only, and the others hear no more
than that these are gone. So one micro-batch is run forward first, stage by stage, all processes hearing how it went.
Inputs are of a kind with others that differ in sizes only: batches of varying length are tried once.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from globaltensor.pipelining.actions import Step, buffers_left_alone, layouts_forward
from globaltensor.pipelining.stage_comm import Parcel, carried, parcel, text
from globaltensor.pipelining.stages import StageError
from globaltensor.runtime.agreement import gather_objects, uncoordinated
from globaltensor.tensors.global_tensor import GlobalTensor


def trial(step: Step, mb: int, part: Sequence[Any], own: Sequence[int]) -> None:
    """Run a micro-batch forward through all stages, one after the other; `own` are those of this process.

    Raises StageError on every process where a stage, or the loss, cannot do it.
    """
    model, given = step.model, parcel(part, torch.get_rng_state())
    for stage, module in enumerate(model.stages):
        outputs, found, wrong = (), None, ""
        if stage in own:
            try:
                with uncoordinated(), model.homes.replicas_in(stage), buffers_left_alone(module):
                    outputs = step.call(stage, mb, given, grad=False)[1]
                found = parcel(outputs).form
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is known'}"
        said = gather_objects((found, wrong), "a trial of the stages of a pipeline")
        wrong = next((error for _, error in said if error), "")
        if wrong:
            raise StageError(f"stage {stage} of {len(model.stages)} cannot work on {text(given.form)}", wrong,
                             "stages of which each takes what the one before gives, and a loss that takes the last's")
        if stage == step.last:
            return
        form = next(form for form, _ in said if form is not None)
        tensors = tuple(y.detach() for y in outputs) or tuple(GlobalTensor.wrap(part.spec, {}) for part in form)
        given = carried(Parcel(tensors, form, given.random), layouts_forward(form, model.places[stage + 1]))
