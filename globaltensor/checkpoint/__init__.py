"""Checkpoints: `save` and `load` a state under any layout and number of ranks, atomically.

    save({"model": model, "optimizer": optimizer, "step": 7}, "run/checkpoint")
    state = load({"model": model, "optimizer": optimizer, "step": 0}, "run/checkpoint")

Every rank writes its share, each piece once, into a file of its own; a manifest in JSON says which region of which
tensor is in which file, and the hash of its bytes. A process that loads reads the regions it needs, whatever layout
wrote them. Nothing is pickled.

torch's own checkpoints, `torch.distributed.checkpoint`, take global tensors too (`dcp.py`); a single file is torch's as
well (`torch_files.py`). Nothing of it is loaded before it is used.
"""
