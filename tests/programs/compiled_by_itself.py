"""Programs that torch.compile runs as they stand, as a loop ends their graphs, compile no function of the library."""
import tempfile
import warnings
from functools import partial

import torch
from torch import nn

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast
TWO = gt.placement("cpu", [0, 1], ("dp",))
FOLDER = tempfile.mkdtemp()
OURS = gt.__file__.removesuffix("__init__.py")
model = gt.parallelize(nn.Linear(8, 8), TWO, {})
x = gt.from_full(torch.ones(8, 8), TWO, S(0))
optimizer = gt.zero(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), "dp", 2)


def train():
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def scale():
    scaler = torch.amp.GradScaler("cpu", 2.0)
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def pipeline():
    stages = [nn.Linear(8, 8), nn.Linear(8, 8)]
    gt.pipeline(stages, [gt.placement("cpu", [n]) for n in (0, 1)], loss=lambda y, to: (y - to).square().mean()).step(
        torch.ones(8, 8), torch.ones(8, 8))


runner = gt.pipeline([nn.Linear(8, 8), nn.Linear(8, 8)], [gt.placement("cpu", [n]) for n in (0, 1)],
                     loss=lambda y, to: (y - to).square().mean())
PROGRAMS = [
    optimizer.step,                                  # first: nothing global is traced before it
    train,
    scale,
    lambda: gt.set_grad_reduce_dtype(model.parameters(), torch.bfloat16),
    lambda: gt.save(model.state_dict(), f"{FOLDER}/model.pt"),
    lambda: gt.save({"x": x}, f"{FOLDER}/x.pt"),
    lambda: gt.load(f"{FOLDER}/x.pt"),
    lambda: optimizer.load_state_dict(optimizer.state_dict()),
    lambda: gt.parallelize(nn.Linear(8, 8), TWO, {}),
    lambda: nn.Linear(8, 8).to_global(TWO, B),
    lambda: gt.from_local(torch.ones(4), TWO, S(0)),
    lambda: gt.ones(4, placement=TWO, sbp=B),
    pipeline,
    partial(runner.step, torch.ones(8, 8), torch.ones(8, 8)),
    partial(runner.eval, torch.ones(8, 8)),
    lambda: gt.metrics(),
    lambda: repr(x),
]
model(x).square().mean().backward()
import torch._dynamo  # noqa: E402  # it is what this is about

warnings.filterwarnings("error", ".*does not know how to trace")
compiled = []
torch._dynamo.convert_frame.register_bytecode_hook(
    lambda code, _: compiled.append(code) if code.co_filename.startswith(OURS) else None)
for program in PROGRAMS:
    def loop(program=program):
        for _ in range(2):
            print(end="")
            program()

    torch.compile(loop, backend="eager")()
    torch.compile(program, backend="eager")()
assert not compiled, compiled
print("right")
