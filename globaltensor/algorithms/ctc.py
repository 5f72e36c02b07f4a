"""CTC loss of samples that are split: each rank does those that it has.

What the kernel keeps for its gradient, `log_alpha`, is as wide as the longest target of all samples, and a rank knows
its own only. It is padded to the longest that there can be. Of targets that lie one behind the other, in a tensor of
one dim, with lengths that are tensors, that would be far too much: there nothing is kept, and the gradient's kernel is
given what the loss is asked once more for.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.local_impls import LocalRecipe
from globaltensor.rules.call import Call, arguments
from globaltensor.rules.language import Rule
from globaltensor.rules.parse import rule

aten = torch.ops.aten


def ctc_samples(call: Call) -> Rule:
    """Samples can be cut; targets that lie one behind the other, and then their lengths, are whole on each rank."""
    apart = call["targets"].dim() == 2
    targets, lengths = ("n s!", "n, n") if apart else ("s!", "n, l!")
    inputs = f"t! n c!, {targets}" + (f", {lengths}" if isinstance(call["input_lengths"], Tensor) else "")
    if "grad" in call.values:
        return rule(f"n, {inputs}, n, n u! w! -> t! n c!", "a*" + "*".join("BCDEFG"[:len(call.tensors) - 1]),
                    nonempty="n")
    return rule(f"{inputs} -> n, n u! w!", nonempty="n")


def kept_width(targets: Tensor, lengths: Any) -> int:
    """How wide `log_alpha` is; 0 where it is not kept."""
    if not isinstance(lengths, Tensor):
        return 2 * max(lengths, default=0) + 1
    return 2 * targets.shape[1] + 1 if targets.dim() == 2 else 0


def own_ctc_loss(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """_ctc_loss of the samples that a rank has."""
    values = _arguments_by_name(recipe, args, kwargs)
    width = kept_width(values["targets"], values["target_lengths"])
    loss, log_alpha = recipe.func(**_own_samples(recipe, rank, values, 0))
    if not width:
        return loss, log_alpha.new_empty(log_alpha.shape[0], 0, 0)
    missing = width - log_alpha.shape[2]
    return loss, torch.nn.functional.pad(log_alpha, (0, missing), value=-torch.inf) if missing else log_alpha


def own_ctc_loss_backward(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """_ctc_loss_backward of the samples that a rank has."""
    own = _own_samples(recipe, rank, _arguments_by_name(recipe, args, kwargs), 1)
    if not own["log_alpha"].numel():
        names = {a.name for a in arguments(aten._ctc_loss.Tensor)}
        again = {name: value for name, value in own.items() if name in names}
        own["log_alpha"] = aten._ctc_loss.Tensor(**again)[1]
    return recipe.func(**own)


def _arguments_by_name(recipe: LocalRecipe, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return dict(zip((a.name for a in arguments(recipe.func)), args)) | kwargs


def _own_samples(recipe: LocalRecipe, rank: int, values: dict[str, Any], operand: int) -> dict[str, Any]:
    """The same with the lengths and the targets of a rank's samples, which are those of an operand's dim 1."""
    start, stop = recipe.regions[operand][rank][1]
    targets, lengths = values["targets"], values["target_lengths"]
    own = dict(values)
    if isinstance(lengths, Tensor):
        lengths = lengths.reshape(-1)                # of one sample it may be a number
    else:
        own["input_lengths"] = values["input_lengths"][start:stop]
    if not isinstance(lengths, Tensor) or targets.dim() == 1:
        own["target_lengths"] = lengths[start:stop]
    if targets.dim() == 1 and stop - start < len(lengths):
        first, count = int(sum(lengths[:start])), int(sum(lengths[start:stop]))
        own["targets"] = targets[first:first + count]
    return own
