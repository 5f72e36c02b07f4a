"""A Llama of 70 billion parameters is planned and checked: its layouts, its bytes, and a forward pass without memory.

Prints the seconds of this process, its MB, and the GB of parameters on a rank.
"""
import re
import sys
import time
from pathlib import Path

import torch
import transformers

import globaltensor as gt

config, model_of = transformers.LlamaConfig, transformers.LlamaForCausalLM       # imported before time is taken
began, ranks = time.process_time(), int(sys.argv[1])
gt.init(ranks=ranks)
where = gt.placement("cpu", torch.arange(ranks).view(-1, 8).tolist(), ("dp", "tp"))
with torch.device("meta"):
    model = model_of(config(
        vocab_size=128_256, hidden_size=8_192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8)).to(torch.bfloat16)
gt.parallelize(model, where, gt.Plan.of(model, "tp"))
assert sum(p.numel() for p in model.parameters()) == 70_553_706_496
if ranks == 8:
    meta = gt.placement("meta", where.ranks, where.axis_names)
    ids = gt.zeros(2, 128, placement=meta, sbp={"dp": gt.sbp.split(0)}, dtype=torch.int64)
    mask = torch.ones(2, 1, 128, 128, dtype=torch.bool, device="meta")
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert logits.shape == (2, 128, 128_256) and logits.sbp == (gt.sbp.split(0), gt.sbp.split(2)), logits.sbp
own = sum(p.shards[0].nbytes for p in model.parameters()) / 1e9
# getrusage tells the most of the process that started this one, too
most = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3
print(time.process_time() - began, most, own)
