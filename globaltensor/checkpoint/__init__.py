"""Checkpoints: `save` and `load` a state under any layout and number of ranks, atomically.

    save({"model": model, "optimizer": optimizer, "step": 7}, "run/checkpoint")
    state = load({"model": model, "optimizer": optimizer, "step": 0}, "run/checkpoint")

Every rank writes its share, each piece once, into a file of its own; a manifest in JSON says which region of which
tensor is in which file, and the hash of its bytes. A process that loads reads the regions it needs, whatever layout
wrote them. Nothing is pickled.

torch's own checkpoints, `torch.distributed.checkpoint`, take global tensors too (`dcp.py`); a single file is torch's as
well (`torch_files.py`).
"""
from __future__ import annotations

from globaltensor.checkpoint import dcp  # noqa: F401  (adds to global tensors the protocol of torch's own checkpoints)
from globaltensor.checkpoint.huggingface import load_safetensors, save_safetensors
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.checkpoint.saving import Saving
from globaltensor.checkpoint.torch_files import load, save

__all__ = ["CheckpointError", "Saving", "load", "load_safetensors", "save", "save_safetensors"]
