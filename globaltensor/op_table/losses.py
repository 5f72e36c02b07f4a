"""Lines of the table: losses."""
from __future__ import annotations

from globaltensor.algorithms import ctc, decompositions, local_impls
from globaltensor.op_table.line import decomposed, lines
from globaltensor.op_table.mathematics import TABLE
from globaltensor.rules import layers
from globaltensor.rules.families import loss

__all__ = ["TABLE"]                                  # filled by the lines below, and by table.py

# --------------------------------------------------------------------------------------------- element by element
lines("mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits",
      loss(), decomposition=decompositions.mean_loss, applies=decompositions.is_mean)
lines("mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward "
      "binary_cross_entropy_backward", loss(backward=True), decomposition=decompositions.mean_loss_backward,
      applies=decompositions.is_mean)
lines("nll_loss_forward", layers.nll_loss(), local_impl=local_impls.own_nll, decomposition=decompositions.nll_mean,
      applies=decompositions.is_mean)
lines("nll_loss_backward", layers.nll_loss(backward=True), local_impl=local_impls.own_nll)
lines("nll_loss2d_forward", layers.nll_loss("y x"), local_impl=local_impls.own_nll,
      decomposition=decompositions.nll_mean, applies=decompositions.is_mean)
lines("nll_loss2d_backward", layers.nll_loss("y x", backward=True), local_impl=local_impls.own_nll)

# ------------------------------------------------------------------------------------------------- row by row
lines("multi_margin_loss", layers.margin_loss(), decomposition=decompositions.mean_of_rows,
      applies=decompositions.is_mean)
lines("multi_margin_loss_backward", layers.margin_loss(backward=True),
      decomposition=decompositions.mean_of_rows_backward, applies=decompositions.is_mean)
lines("multilabel_margin_loss_forward", layers.margin_loss(of_each=True), decomposition=decompositions.mean_of_rows,
      applies=decompositions.is_mean)
lines("multilabel_margin_loss_backward", layers.margin_loss(of_each=True, backward=True),
      decomposition=decompositions.mean_of_rows_backward, applies=decompositions.is_mean)
lines("_ctc_loss _ctc_loss.Tensor", ctc.ctc_samples, local_impl=ctc.own_ctc_loss)
lines("_ctc_loss_backward _ctc_loss_backward.Tensor", ctc.ctc_samples, local_impl=ctc.own_ctc_loss_backward)
decomposed("_use_cudnn_ctc_loss _use_cudnn_ctc_loss.Tensor", lambda call, run: False)
