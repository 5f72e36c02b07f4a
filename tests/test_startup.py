"""What a process imports on the way to its first results: torch's compiler only where plain torch does so too.

Each program runs twice, in processes of its own: on plain tensors, and on global ones. dynamo, inductor, sympy and
DTensor cost seconds; a global program loads none of them that the plain one does not load.

Without native code, ops reach us as they reach any tensor subclass, and there torch itself asks whether that is a
DTensor, which it loads to know. So the plain program then has a subclass, too.
"""
from __future__ import annotations

import pytest
from harness import PYTHON, environment, good

from globaltensor.runtime.native import torch_ext

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes",
         "sympy", "pandas", "transformers")

PLAIN = """
import sys, tempfile, torch, torch.nn.functional as F
from contextlib import nullcontext as record
from torch import nn
torch.manual_seed(0)
given = integers = lambda t: t
parallel = lambda model: model
def through_a_file(state, path):
    torch.save(state, path)
    return torch.load(path)
"""

SUBCLASS = """
class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.ones(1)
torch.ones(1).as_subclass(Subclass).neg()
"""

GLOBAL = """
import sys, tempfile, torch, torch.nn.functional as F
import globaltensor as gt
from globaltensor import record
from torch import nn
torch.manual_seed(0)
where = gt.placement("cpu", [0, 1], ("dp",))
given = integers = lambda t: gt.from_full(t, where, gt.sbp.split(0))
parallel = lambda model: gt.parallelize(model, where)
def through_a_file(state, path):
    gt.save(state, path)
    return gt.load(state, path)
"""

MODELS = """
class Block(nn.Module):
    def __init__(self, features, heads):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.mlp = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features),
                                 nn.Dropout(0.1))

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).split(d, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d))
        return x + self.mlp(self.n2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))

def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
"""

PROGRAMS = {
    "x + x": "x = given(torch.randn(4, 6)); x + x",
    "random": "x = given(torch.randn(4, 6)); torch.randn_like(x) + torch.rand_like(x)",
    "pointwise": """
x = given(torch.rand(4, 6)).requires_grad_()
y = (x * 2 - x / 3 + 1).exp().log1p().sqrt().abs().tanh().relu().sigmoid() ** 2
y = torch.where(y > 0.5, y, -y).masked_fill(y < 0, 0.0).clamp(0, 1).to(torch.float64)
F.mse_loss(y, torch.ones(4, 6).double()).backward()""",
    "reductions": """
x = given(torch.rand(4, 6)).requires_grad_()
parts = x.sum(), x.mean(0), x.var(1), x.amax(), x.std(), x.norm(), x.logsumexp(1), x.max(0)[0], x.softmax(1)
(sum(p.sum() for p in parts)).backward()""",
    "views": """
x = given(torch.rand(4, 6)).requires_grad_()
y = torch.cat([x.view(4, 2, 3).transpose(1, 2).reshape(4, 6), x[1:3], x[[0, 2]], torch.stack([x[0], x[1]])])
y = y.expand(2, 10, 6)[0]
(y.permute(1, 0).contiguous().unsqueeze(0).squeeze(0).flatten().unflatten(0, (2, -1)).repeat(1, 2).sum()).backward()""",
    "a step of an MLP": """
model = parallel(mlp())
F.cross_entropy(model(given(torch.randn(4, 6))), integers(torch.randint(3, (4,)))).backward()
with torch.no_grad():
    for p in model.parameters(): p -= 0.1 * p.grad""",
    "a step of a GPT": """
model = parallel(GPT())
tokens = integers(torch.randint(20, (4, 8)))
F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
print(all(p.grad is not None for p in model.parameters()))""",
    "a step of AdamW": """
model = parallel(mlp())
optimizer = torch.optim.AdamW(model.parameters())
F.cross_entropy(model(given(torch.randn(4, 6))), integers(torch.randint(3, (4,)))).backward()
optimizer.step(); optimizer.zero_grad()""",
    "record": """
x = given(torch.randn(4, 6))
with record(): (x.t() @ x).sum().item()""",
    "checkpoint": """
model = parallel(mlp())
with tempfile.TemporaryDirectory() as folder:
    model.load_state_dict(through_a_file(model.state_dict(), folder + "/state"))""",
}
REPORT = f"\nprint('loaded', *[m for m in {HEAVY} if m in sys.modules])"


def loaded(setting: str, program: str) -> set[str]:
    """The heavy modules that a program has loaded when it ends; none is a fork that loaded ours."""
    env = environment() if setting is GLOBAL else environment(GLOBALTENSOR_NATIVE="0")
    return set(good([PYTHON, "-c", setting + MODELS + PROGRAMS[program] + REPORT], env).splitlines()[-1].split()[1:])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_global_program_loads_what_a_plain_one_does(program):
    more = loaded(GLOBAL, program)
    if more:
        more -= loaded(PLAIN if torch_ext is not None else PLAIN + SUBCLASS, program)
    assert not more


def test_what_is_for_later_is_loaded_later(real_processes):
    program = """
x = given(torch.ones(4, 6)).requires_grad_()
x.to_global(sbp=gt.sbp.broadcast).sum().backward()
print(*sorted(sys.modules))"""
    unwatched = GLOBAL.replace("from globaltensor import record\n", "")      # a name that brings its room
    modules = set(good([PYTHON, "-c", unwatched + program]).split())
    rooms = {name.split(".")[1] for name in modules if name.startswith("globaltensor.")}
    assert not modules & {"safetensors", "networkx", "globaltensor.checkpoint.dcp"}
    assert not rooms & {"cli", "data", "debug", "pipelining", "simulator"}, rooms
