"""transformers' GPT-2 in two stages, on one and on two ranks, each a process: the losses of plain torch."""
from __future__ import annotations

import copy
import sys

import torch
import transformers

import globaltensor as gt

transformers.logging.set_verbosity_error()
torch.manual_seed(7)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
    n_embd=16, n_layer=4, n_head=4, vocab_size=24, n_positions=16, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
plain = copy.deepcopy(model)
ids = torch.randint(24, (6, 5))
places = [gt.placement("cpu", [0, 1], ("dp",)), gt.placement("cpu", [2], ("dp",))]
runner = gt.pipeline(model, places, "1f1b", 3, inputs=["labels"])
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
for _ in range(3):
    ours = runner.step(ids, labels=ids)
    want = sum(plain(part, labels=part).loss for part in ids.tensor_split(3)) / 3
    want.backward()
    torch.testing.assert_close(ours.full_tensor(), want.detach())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
model.eval()
torch.testing.assert_close(runner.eval(ids).full_tensor(), plain.eval()(ids).logits.detach(), rtol=1e-4, atol=1e-5)
sys.stdout.write("equal\n")
