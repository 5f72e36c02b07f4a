"""A small GPT in plain torch. It knows nothing of ranks, placements or sbp: every size below is the whole model's.

    ids [b, t] -> token embedding + learned positions -> blocks -> norm -> head -> logits [b, t, vocab]
    block: x + attention(norm(x)), then x + mlp(norm(x)), both [b, t, hidden]

    b batch    t time, at most `context`    h heads    d hidden / heads

q, k, v and o are linear layers of their own, so that heads can be dealt out: split q, k and v along their outputs and
each rank computes some of the heads; split o along its inputs and each rank adds what its heads say.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention, [b, t, hidden] -> [b, t, hidden]."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, hidden = x.shape
        q, k, v = (linear(x).view(b, t, self.heads, hidden // self.heads).transpose(1, 2)    # [b, h, t, d]
                   for linear in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.o(mixed.transpose(1, 2).reshape(b, t, hidden))


class Mlp(nn.Module):
    """Two linear layers, four times as wide between them, [b, t, hidden] -> [b, t, hidden]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to what came in, [b, t, hidden] -> [b, t, hidden]."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads, dropout), Mlp(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """ids [b, t] -> logits [b, t, vocab]. `tied`: the head's weight is the embedding's."""

    def __init__(self, vocab: int, context: int, layers: int, hidden: int, heads: int, dropout: float = 0.0,
                 tied: bool = False) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"{heads} heads do not divide a hidden size of {hidden}")
        self.context = context
        self.token, self.position = nn.Embedding(vocab, hidden), nn.Embedding(context, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:                  # what is added to the residual starts smaller in deep models
                deep = (2 * layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.5 * hidden ** -0.5 * deep)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.token(ids) + self.position.weight[:ids.shape[1]])              # [b, t, hidden]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, ids: Tensor, n: int) -> Tensor:
        """ids [b, t] -> [b, t + n]: each next one is drawn from what the model says of the last `context`."""
        was_training = self.training
        self.eval()
        for _ in range(n):
            logits = self(ids[:, -self.context:])[:, -1]                                     # [b, vocab]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(dim=-1), 1)], dim=1)
        self.train(was_training)
        return ids
