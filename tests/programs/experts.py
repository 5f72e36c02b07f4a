"""A block of experts trained in whatever way of running; each process writes to FOLDER/<rank>.json the losses and
parameters that it sees, what plain torch gives, and what was moved."""
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import globaltensor as gt

S = gt.sbp.split
VOCABULARY, LENGTH = 32, 6


class Experts(nn.Module):
    """Sorts the choices by expert, multiplies group by group, and puts them back."""

    def __init__(self, count, hidden, inner):
        super().__init__()
        self.count = count
        self.up = nn.Parameter(torch.randn(count, inner, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, inner) / inner**0.5)

    def forward(self, hidden, top_k_index, top_k_weights):
        n, k = top_k_index.shape
        experts, order = torch.sort(top_k_index.reshape(-1))
        ends = torch.histc(experts.float(), self.count, 0, self.count - 1).cumsum(0).int()
        rows = torch._grouped_mm(hidden[order // k], self.up.mT, offs=ends)
        rows = torch._grouped_mm(F.silu(rows), self.down.mT, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(n * k)
        return ((rows * top_k_weights.reshape(-1)[order, None])[back]).view(n, k, -1).sum(1)


class Block(nn.Module):
    """Tokens in, experts of which each token chooses two, a head. `hot`: nearly all choose the same two."""

    def __init__(self, count=4, hidden=8, hot=False):
        super().__init__()
        self.hidden, self.hot = hidden, hot
        self.token, self.norm = nn.Embedding(VOCABULARY, hidden), nn.RMSNorm(hidden)
        self.router, self.experts = nn.Linear(hidden, count, bias=False), Experts(count, hidden, 12)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.token(ids)
        rows = self.norm(x).view(-1, self.hidden)
        scores = self.router(rows)
        if self.hot:
            scores = scores + torch.arange(scores.shape[1]) * 5
        weights, index = torch.softmax(scores, -1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.head(x + self.experts(rows, index, weights).view(x.shape))


def batch_of(rows):
    ids = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def step_of(model, inputs, targets):
    """The loss, backward done; models of transformers take their targets themselves."""
    if isinstance(model, Block):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    else:
        loss = model(input_ids=inputs, labels=inputs).loss
    loss.backward()
    return loss


def trained(spread, plan):
    """Losses and parameters of three steps; `spread` makes model and batch global."""
    torch.manual_seed(3)
    model, batch = spread(Block(), batch_of(4), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        found.append(step_of(model, *batch).detach())
        optimizer.step()
    found += [p.detach() for p in model.parameters()]
    return [(t.full_tensor() if t.is_global else t).tolist() for t in found]


def main(folder):
    where = gt.placement("cpu", [1, 0], ("dp",))

    def spread(model, batch, plan):
        plan = gt.Plan.of(model, axis="", experts="dp") if plan is None else plan
        return gt.parallelize(model, where, plan), [gt.from_full(t, where, S(0)) for t in batch]

    with gt.record() as moves:
        values = trained(spread, None) + trained(spread, {"experts.*": {"dp": S(0)}})
    values += trained(spread, None)                  # nobody watches
    plain = trained(lambda model, batch, plan: (model, batch), None)
    seen = {"values": values, "plain": plain * 3, "moves": [[m.op, m.bytes] for m in moves if m.op.startswith("aten.")]}
    Path(folder, f"{gt.rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
