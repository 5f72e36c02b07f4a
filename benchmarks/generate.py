"""How many tokens a second do transformers' Llama and GPT-2 generate at, beside plain torch and its DTensor plan?

One model in all arms, with random weights: 4 layers, heads of 32, 8 prompts of 32 tokens of 512, each continued
greedily by 32 tokens, with the cache of keys and values that `generate` keeps. One process per rank with one thread
each; plain torch is one process with as many threads. Every arm lives in processes of its own, generates in turns while
the others wait, and must say plain torch's tokens first. Tokens by the median turn, of the slowest rank.

    DTensor    torch's plan over gloo: q, k, v, gate and up by columns, o and down by rows, the rest on every rank. Of
               Llama alone: GPT-2's layers are not nn.Linear, and its q, k and v are one matrix, for which torch has no
               style
    tp 2       ours, by gt.parallelize without a plan
    dp 2 ...   the prompts split along dp

`bytes a token` are those that a rank receives for one more token of each prompt, recorded. `more at the end` is how
many more they are for the last token than for the second: 0, where the keys and values that are kept never move.
"""
from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import globaltensor as gt
from benchmarks.processes import Workers
from benchmarks.timing import show

LAYERS, HEAD, VOCAB, BATCH, PROMPT, NEW = 4, 32, 512, 8, 32, 32


class Arm(NamedTuple):
    """A way to generate: `kind` is one of plain, dtensor, ours. `beside`: the arm of torch's that does the same."""

    kind: str
    dp: int
    tp: int
    beside: str = ""


ARMS = {"plain, 2 threads": Arm("plain", 2, 1), "DTensor 2": Arm("dtensor", 1, 2),
        "tp 2": Arm("ours", 1, 2, "DTensor 2"), "plain, 4 threads": Arm("plain", 4, 1),
        "dp 2 x tp 2": Arm("ours", 2, 2)}


def main(json: bool = False, quick: bool = False, hidden: int | None = None) -> None:
    if importlib.util.find_spec("transformers") is None:
        print("generate was left out: transformers is not installed, pip install 'globaltensor[hf]'", file=sys.stderr)
        return
    arms = {name: ARMS[name] for name in list(ARMS)[:3]} if quick else ARMS
    sizes = [hidden] if hidden else [64] if quick else [128, 256]
    rows = [row for name in ("Llama", "GPT-2") for size in sizes
            for row in compare(name, size, arms, *(1, 4) if quick else (7, NEW))]
    show("generate: tokens per second", rows, json)


def compare(model: str, hidden: int, arms: dict[str, Arm], rounds: int, new: int) -> list[dict[str, Any]]:
    """All arms that can run the model, in turns of one call of `generate`."""
    arms = {name: arm for name, arm in arms.items() if model == "Llama" or arm.kind != "dtensor"}
    with ExitStack() as stack:
        workers = {}
        for name, arm in arms.items():
            alone, ranks = arm.kind == "plain", arm.dp * arm.tp
            settings = {"model": model, "hidden": hidden, "kind": arm.kind, "dp": arm.dp, "tp": arm.tp, "new": new}
            workers[name] = stack.enter_context(Workers("benchmarks.generate:worker", 1 if alone else ranks, settings,
                                                        ranks if alone else 1))
        facts = {name: some.hear() for name, some in workers.items()}
        expected = next(iter(facts.values()))[0]["tokens"]
        for name, told in facts.items():
            if any(one["tokens"] != expected for one in told):
                raise SystemExit(f"{name} says other tokens of {model} than plain torch")
        times: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(rounds):
            for name, some in workers.items():
                some.tell()
                times[name].append(max(some.hear()))
    speed = {name: BATCH * new / statistics.median(laps) for name, laps in times.items()}
    return [_row(model, hidden, name, arm, speed, facts[name]) for name, arm in arms.items()]


def _row(model: str, hidden: int, name: str, arm: Arm, speed: dict[str, float], told: list[dict[str, Any]]
         ) -> dict[str, Any]:
    ours = arm.kind == "ours"
    beside = f"{speed[name] / speed[arm.beside]:.2f} x {arm.beside}" if arm.beside in speed else ""
    return {"model": model, "hidden": hidden, "arm": f"globaltensor {name}" if ours else name, "tokens/s": speed[name],
            "of plain": speed[name] / speed[f"plain, {arm.dp * arm.tp} threads"], "beside": beside,
            "bytes a token": max(one["bytes"][-1] for one in told) if ours else None,
            "more at the end": max(one["bytes"][-1] - one["bytes"][0] for one in told) if ours else None}


# -------------------------------------------------------------------------------------------------------- a worker


def worker(settings: dict[str, Any]) -> Iterator[Any]:
    """What it says, and what was moved for it; then, at every turn, the seconds of one call."""
    model, ids = model_and_prompts(settings["model"], settings["hidden"])
    dp, tp, new = settings["dp"], settings["tp"], settings["new"]
    if settings["kind"] == "dtensor":
        parallelize_by_torch(model, tp)
    elif settings["kind"] == "ours":
        place = gt.placement("cpu", torch.arange(dp * tp).view(dp, tp).tolist(), axis_names=("dp", "tp"))
        gt.parallelize(model, place)
        ids = gt.from_full(ids, place, {"dp": gt.sbp.split(0)})
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    tokens = model.generate(ids, **options)
    moved: list[int] = []
    if settings["kind"] == "ours":
        tokens, moved = tokens.full_tensor(), moved_by_token(model, ids, options)
    yield {"tokens": tokens.tolist(), "bytes": moved}
    for _ in sys.stdin:
        began = time.perf_counter()
        model.generate(ids, **options)
        yield time.perf_counter() - began


def model_and_prompts(name: str, hidden: int) -> tuple[Any, Tensor]:
    """The same in every process."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    heads, length = hidden // HEAD, PROMPT + NEW
    if name == "Llama":
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=LAYERS,
            num_attention_heads=heads, max_position_embeddings=length, pad_token_id=0))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=hidden, n_layer=LAYERS, n_head=heads, n_positions=length, pad_token_id=0,
            bos_token_id=1, eos_token_id=2))
    return model.eval(), torch.randint(3, VOCAB, (BATCH, PROMPT))


def moved_by_token(model: Any, ids: Any, options: dict[str, Any]) -> list[int]:
    """Bytes received for each token but the first, whose pass reads the prompt, from its pass to the next one's."""
    starts: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: starts.append(len(moves)))
    with gt.record() as moves:
        model.generate(ids, **options)
    hook.remove()
    return [sum(move.bytes for move in moves[a:b]) for a, b in zip(starts[1:], [*starts[2:], len(moves)])]


def parallelize_by_torch(model: Any, tp: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (tp,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}, "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()})


if __name__ == "__main__":
    main()
