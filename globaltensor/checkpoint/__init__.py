"""Checkpoints: `save` and `load` a state under any layout and number of ranks, whole or not at all.

    save({"model": model, "optimizer": optimizer, "step": 7}, "run/checkpoint")
    state = load({"model": model, "optimizer": optimizer, "step": 0}, "run/checkpoint")

Every rank writes its own part once, into a file of its own; a manifest in JSON says which box of which tensor lies
where, and what its bytes hash to. Who loads reads the boxes it needs, whatever wrote them. Nothing is pickled.

torch's own checkpoints, `torch.distributed.checkpoint`, take global tensors too (`dcp.py`); a single file is torch's as
well (`torch_files.py`).
"""
from __future__ import annotations

from globaltensor.checkpoint import dcp  # noqa: F401  (global tensors learn the protocol of torch's own checkpoints)
from globaltensor.checkpoint.huggingface import load_safetensors, save_safetensors
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.checkpoint.saving import Saving
from globaltensor.checkpoint.torch_files import load, save

__all__ = ["CheckpointError", "Saving", "load", "load_safetensors", "save", "save_safetensors"]
