"""Plans: their text, what they recognise, their errors, and models trained by them beside plain torch."""
from __future__ import annotations

import copy
import importlib.util
import os
import re
import sys
from math import prod

import pytest
import torch
import torch.nn.functional as F
from harness import ROOT
from torch import nn

import globaltensor as gt
from globaltensor.errors import SbpError

sys.path.insert(0, os.fspath(ROOT / "examples"))
from gpt import GPT

S, B = gt.sbp.split, gt.sbp.broadcast
SEED = 20_261_121
VOCAB, SEQ, HIDDEN, LAYERS, BATCH = 64, 16, 32, 2, 4


def where(*shape, names):
    return gt.placement("cpu", torch.arange(prod(shape)).view(shape).tolist(), names)


def gpt():
    torch.manual_seed(SEED)
    return GPT(VOCAB, SEQ, LAYERS, HIDDEN, 4)


# --------------------------------------------------------------------------------------------------------- tables


def test_a_plan_is_its_text(tmp_path):
    plan = gt.Plan.of(gpt(), sequence="sp")
    plan["*.bias"] = {"dp": "S(0)", "tp": B}
    plan.save(tmp_path / "plan.txt")
    again = gt.Plan.load(tmp_path / "plan.txt")
    assert str(again) == str(plan) == (tmp_path / "plan.txt").read_text().rstrip("\n")
    assert again["*.bias"] == {"tp": B, "sp": B, "dp": S(0)} and again.axes == ("tp", "sp", "dp")
    del again["*.bias"]
    assert "*.bias" not in again and len(again) == len(plan) - 1


def test_a_plan_is_read_as_an_editor_saves_it(tmp_path):
    plan = gt.Plan.of(gpt(), sequence="tp")
    (tmp_path / "plan.txt").write_text(f"{plan}\r\n", encoding="utf-8-sig")
    assert str(gt.Plan.load(tmp_path / "plan.txt")) == str(plan)


def test_names_that_are_letters_of_sbps_are_names():
    assert list(gt.Plan.parse("# name tp\nB S(0)\nP -> B\nx.B B")) == ["B", "P ->", "x.B"]


def test_along_no_axes_nothing_is_cut_and_along_one_twice_neither():
    assert not gt.Plan.of(gpt(), ())
    with pytest.raises(SbpError, match="each of them once"):
        gt.Plan.of(gpt(), ("tp", "tp"))


def test_ready_made_for_a_gpt():
    assert str(gt.Plan.of(gpt(), sequence="tp")) == """\
# name                        tp
token.weight                  S(0)
blocks.*.attention.q.weight   S(0)
blocks.*.attention.q.bias     S(0)
blocks.*.attention.k.weight   S(0)
blocks.*.attention.k.bias     S(0)
blocks.*.attention.v.weight   S(0)
blocks.*.attention.v.bias     S(0)
blocks.*.attention.o.weight   S(1)
blocks.*.mlp.up.weight        S(0)
blocks.*.mlp.up.bias          S(0)
blocks.*.mlp.down.weight      S(1)
head.weight                   S(0)
token ->                      S(1)
blocks.*.attention_norm ->    B
blocks.*.mlp_norm ->          B
blocks.*.attention.o ->       S(1)
blocks.*.mlp.down ->          S(1)
norm ->                       B"""


class Adapted(nn.Module):
    """A linear layer with an adapter of rank 2, as peft makes one."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 0.5


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down_proj(F.gelu(self.up_proj(x)))


def test_adapters_are_cut_on_the_side_on_which_their_layer_is():
    torch.manual_seed(SEED)
    plain = Mlp()
    plain.up_proj, plain.down_proj = Adapted(plain.up_proj), Adapted(plain.down_proj)
    plan = gt.Plan.of(plain)
    assert plan == {"up_proj.base_layer.weight": {"tp": S(0)}, "up_proj.base_layer.bias": {"tp": S(0)},
                    "up_proj.lora_B.default.weight": {"tp": S(0)}, "down_proj.base_layer.weight": {"tp": S(1)},
                    "down_proj.lora_A.default.weight": {"tp": S(1)}}
    assert set(plan.whole) == {"up_proj.lora_A.default.weight", "down_proj.lora_B.default.weight"}
    pair = nn.Sequential(Adapted(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))       # told by its sizes
    assert gt.Plan.of(pair).keys() == {"*.base_layer.weight", "*.base_layer.bias", "*.lora_B.default.weight",
                                       "2.weight"}
    for p in (plain.up_proj.base_layer, plain.down_proj.base_layer):
        p.requires_grad_(False)
    place = where(2, names=("tp",))
    model, x = gt.parallelize(copy.deepcopy(plain), place, plan), torch.randn(3, 6)
    with gt.record() as moves:
        y = model(gt.from_full(x, place, B)).to_global(sbp=B)
    # of the second layer: the narrow sum inside of its adapter, and what it gives
    assert [(move.bytes, move.src.sbp, move.dst.sbp) for move in moves if move.bytes] == [
        (2 * k * x.shape[0] * 4 // 2, (gt.sbp.partial_sum,), (B,)) for k in (2, 6)], moves
    want = plain(x)
    torch.testing.assert_close(y.full_tensor(), want)
    y.square().sum().backward()
    want.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)


def test_a_pair_of_layers_is_recognised_by_its_sizes():
    pair = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    assert gt.Plan.of(pair) == {"0.weight": {"tp": S(0)}, "0.bias": {"tp": S(0)}, "2.weight": {"tp": S(1)}}
    assert not gt.Plan.of(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)))
    assert not gt.Plan.of(nn.MultiheadAttention(8, 2))


@pytest.mark.parametrize("plan, axes, text", [
    ({"*.wieght": {"tp": S(0)}}, ("dp", "tp"), "fits no parameter or buffer"),
    ({"blocks.0.atention ->": {"tp": S(1)}}, ("dp", "tp"), "near it: blocks.0.attention"),
    ({"token.weight": {"tb": S(0)}}, ("dp", "tp"), "near it: tp"),
    ({"token.weight": {"tp": S(0)}}, None, "without names"),
    ({"norm.weight": {"tp": S(1)}}, ("dp", "tp"), "'norm.weight' along 'tp', which has 1 dims"),
    ({"norm.weight": {"tp": "S0"}}, ("dp", "tp"), "not an sbp: 'S0'"),
    ({"norm.weight": S(0)}, ("dp", "tp"), "a row says how along each axis"),
])
def test_a_wrong_plan_changes_nothing(plan, axes, text):
    model = gpt()
    with pytest.raises(SbpError, match=re.escape(text)):
        gt.parallelize(model, where(2, 2, names=axes), plan)
    assert not any(p.is_global for p in model.parameters())


@pytest.mark.parametrize("text, told", [
    ("", "its first line names the axes"), ("token S(0)", "its first line names the axes"),
    ("# name tp\n\ntoken.weight", "line 3: 'token.weight' is not a row of 1 axis"),
    ("# name dp tp\nx S(0) Q", "line 2: not an sbp: 'Q'"), ("# name tp tp\nx S(0) B", "has an axis twice: tp tp"),
    ("# name tp\nx S(0) S(1)", "line 2: 'x S(0) S(1)' is not a row of 1 axis"),
    ("# name tp\nx -> - S(1)", "line 2: 'x -> - S(1)' is not a row of 1 axis"),
])
def test_a_wrong_text_is_told_by_its_line(text, told):
    with pytest.raises(SbpError, match=re.escape(told)):
        gt.Plan.parse(text)


# ------------------------------------------------------------------------------------------------------- training


def batch(placement):
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(SEED))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    rows = {"dp": S(0)} if "dp" in placement.axis_names else B
    return inputs, targets, gt.from_full(inputs, placement, rows), gt.from_full(targets, placement, rows)


def check(model, plain, of):
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        if of(q) is not None:
            torch.testing.assert_close(of(p).full_tensor(), of(q), rtol=1e-3, atol=1e-5, msg=lambda m: f"{name}: {m}")


def step(model, inputs, targets):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss


@pytest.mark.parametrize("shape, names, plan", [
    ((2,), ("dp",), None), ((3,), ("tp",), None), ((2, 2), ("dp", "tp"), None), ((2,), ("sp",), None),
    ((2, 2), ("dp", "sp"), None), ((2, 2, 2), ("dp", "tp", "sp"), None),
    ((2,), ("tp",), "tp"), ((3,), ("tp",), "tp"), ((2, 2), ("dp", "tp"), "tp"),
], ids=str)
def test_a_gpt_trains_as_on_one_device(shape, names, plan):
    model, plain, placement = gpt(), gpt(), where(*shape, names=names)
    assert gt.parallelize(model, placement, plan and gt.Plan.of(model, sequence=plan)) is model
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    inputs, targets, global_inputs, global_targets = batch(placement)
    for _ in range(3):
        got, expected = step(model, global_inputs, global_targets), step(plain, inputs, targets)
        torch.testing.assert_close(got.full_tensor(), expected)
        check(model, plain, lambda p: p.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    check(model, plain, lambda p: p)


def moved(sequence):
    """The boxings of a step that move activations, as (how, how many, bytes)."""
    model, placement = gpt(), where(2, names=("tp",))
    gt.parallelize(model, placement, gt.Plan.of(model, sequence=sequence))
    _, _, inputs, targets = batch(placement)
    for _ in range(2):
        with gt.record() as boxings:
            step(model, inputs, targets)
    size = BATCH * SEQ * HIDDEN * 4
    kinds = {}
    for b in boxings:
        if b.bytes >= size // 2:
            kinds.setdefault((str(b.src.sbp), str(b.dst.sbp)), []).append(b.bytes)
    return kinds, size


def test_tensor_parallelism_reduces_four_times_a_layer_and_gathers_nothing():
    kinds, size = moved("")
    # per layer two forward and two backward; the embedding's forward and the head's backward
    assert kinds == {("(P,)", "(B,)"): [size] * (4 * LAYERS + 2)}, kinds


def test_a_split_sequence_moves_the_same_bytes():
    kinds, size = moved("tp")
    # each reduction has become a scatter of sums and a gather, of half the bytes
    halves = [size // 2] * (4 * LAYERS + 2)
    assert kinds == {("(P,)", "(S(1),)"): halves, ("(S(1),)", "(B,)"): halves}, kinds


# ----------------------------------------------------------------------------------------------- transformers' models

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0,
              "eos_token_id": 0, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "Bert": ("BertForMaskedLM", "BertConfig", {**SMALL, **NO_DROPOUT, "max_position_embeddings": 32}),
}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("sequence", ["", "tp"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_as_they_are(name, sequence):
    import transformers

    kind, config, options = MODELS[name]
    torch.manual_seed(SEED)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options))
    plain, placement = copy.deepcopy(model), where(2, 2, names=("dp", "tp"))
    plan = gt.Plan.of(model, sequence=sequence)
    assert sum(row == {"tp": S(0)} for row in plan.values()) >= 3 and {"tp": S(1)} in plan.values()
    gt.parallelize(model, placement, plan)
    ids = torch.randint(96, (BATCH, SEQ))
    rows = gt.from_full(ids, placement, {"dp": S(0)})
    got, expected = model(input_ids=rows, labels=rows).loss, plain(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(got.full_tensor(), expected)
    got.backward()
    expected.backward()
    check(model, plain, lambda p: p.grad)


def test_a_matrix_in_two_dims_moves_what_summa_does():
    """X, W and Y on (S0, S1) of q x q ranks: 6 (q-1)/q^2 of a matrix's bytes, forward and backward (q = 2)."""
    q, n, placement = 2, 32, where(2, 2, names=("row", "column"))
    x, w = (torch.randn(n, n, generator=torch.Generator().manual_seed(SEED + k)) for k in range(2))
    lie = (S(0), S(1))
    gx, gw = (gt.from_full(t, placement, sbp).requires_grad_() for t, sbp in ((x, lie), (w, lie[::-1])))
    upstream = gt.from_full(torch.ones(n, n), placement, lie)
    with gt.record() as boxings:
        y = F.linear(gx, gw)                         # a weight is [outputs, inputs]
        y.backward(upstream)
        assert y.sbp == gx.grad.sbp == lie and gw.grad.sbp == lie[::-1]
    assert sum(b.bytes for b in boxings) == 6 * (q - 1) * (n * n * 4) // q**2
    torch.testing.assert_close(gx.grad.full_tensor(), torch.ones(n, n) @ w)
    torch.testing.assert_close(gw.grad.full_tensor(), torch.ones(n, n) @ x)


@pytest.mark.parametrize("batch_size, dealt", [(1, 1), (2, 0)], ids=["by heads", "by samples"])
def test_attention_over_a_split_sequence_takes_one_all_to_all(batch_size, dealt):
    """DeepSpeed-Ulysses (arXiv:2309.14509) is what dispatch finds cheapest: q, k and v come whole in the sequence, and
    split by heads, or by samples, in one move."""
    placement, generator = where(2, names=("sp",)), torch.Generator().manual_seed(SEED)
    plain = [torch.randn(batch_size, 4, 16, 8, generator=generator) for _ in range(3)]
    with gt.record() as boxings:
        mixed = F.scaled_dot_product_attention(*[gt.from_full(t, placement, S(2)) for t in plain], is_causal=True)
    boxings = [b for b in boxings if b.bytes]
    assert [(b.src.sbp, b.dst.sbp, b.tensors) for b in boxings] == [((S(2),), (S(dealt),), 3)]
    assert boxings[0].bytes == 3 * plain[0].nbytes // 4 and mixed.sbp == (S(dealt),)
    torch.testing.assert_close(mixed.full_tensor(), F.scaled_dot_product_attention(*plain, is_causal=True))


# ------------------------------------------------------------------------------------------------ others' plans


class Fused(nn.Module):
    """nanoGPT's block, whose q, k and v lie in one matrix."""

    def __init__(self, parts=3):
        super().__init__()
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(8, 8 * parts), "c_proj": nn.Linear(8, 8)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(8, 32), "c_proj": nn.Linear(32, 8)})
        self.conv, self.words = nn.Conv1d(8, 8, 3), nn.Embedding(9, 8)

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], 4, 2).transpose(1, 2) for t in self.attn.c_attn(x).split(8, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(x)))


def test_a_plan_prints_what_it_left_whole_and_why():
    plan = gt.Plan.of(nn.ModuleDict({"h": nn.ModuleList([Fused(), Fused()])}))
    assert dict(plan) == {
        "h.*.attn.c_attn.weight": {"tp": S(0)}, "h.*.attn.c_attn.bias": {"tp": S(0)},
        "h.*.attn.c_proj.weight": {"tp": S(1)}, "h.*.mlp.c_fc.weight": {"tp": S(0)}, "h.*.mlp.c_fc.bias": {"tp": S(0)},
        "h.*.mlp.c_proj.weight": {"tp": S(1)}, "h.*.attn.c_attn />": {"tp": S(-1)}}
    assert str(plan).splitlines()[-2:] == [
        "# whole: h.*.conv.weight    a Conv1d, of which no row is ready made",
        "# whole: h.*.words.weight   an embedding whose name is not one of a vocabulary's: split(0) for one of tokens"]
    assert str(gt.Plan.parse(str(plan))) == str(plan)
    assert gt.Plan.of(Fused(5)).whole["attn.c_attn.weight"].startswith("one matrix of several, of other sizes")


@pytest.mark.parametrize("shape, names", [((2,), ("tp",)), ((3,), ("tp",)), ((2, 2), ("dp", "tp"))], ids=str)
def test_q_k_and_v_of_one_matrix_are_dealt_out_by_heads(shape, names):
    """Each element moves once at most, in one all-to-all forward and one backward; the rest is Megatron-LM's."""
    torch.manual_seed(SEED)
    plain, place = Fused(), where(*shape, names=names)
    x = torch.randn(4, 5, 8)
    model, one = copy.deepcopy(plain), x.clone().requires_grad_()
    gt.parallelize(model, place)
    ours = gt.from_full(x, place, {"dp": S(0)} if "dp" in names else B).requires_grad_()
    seen = []
    model.attn.c_proj.register_forward_pre_hook(lambda layer, args: seen.append(args[0].sbp[-1]))
    plain(one).square().sum().backward()
    with gt.record() as moves:
        model(ours).square().sum().backward()
    torch.testing.assert_close(ours.grad.full_tensor(), one.grad)
    for p, q in zip(model.parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)
    tp, y = shape[-1], 3 * x.nbytes // (shape[0] if "dp" in names else 1)
    dealt = [move for move in moves if move.op == "parts of one matrix"]
    assert len(dealt) == 2 and all(0 < move.bytes < y / tp for move in dealt)
    if tp == 2:                                      # of q and v half each, which the other rank has
        assert seen == [S(2)] and [move.bytes for move in dealt] == [y // 6, y // 6]


def test_what_is_dealt_out_can_be_differentiated_again_and_looked_at_whole():
    place = where(2, names=("tp",))
    layer = gt.parallelize(nn.ModuleDict({"c_attn": nn.Linear(4, 8)}), place)["c_attn"]
    weight, bias = (p.full_tensor().detach().requires_grad_() for p in layer.parameters())
    x = torch.randn(3, 4)

    def twice(y, w, split):
        a, b = split(y)
        first, = torch.autograd.grad((a.square() * b).sum(), w, create_graph=True)
        second, = torch.autograd.grad(first.square().sum(), w)
        return second

    for split in (lambda y: y.chunk(2, 1), lambda y: torch.split(y, 4, dim=-1), lambda y: (y[:, :4], y[:, 4:]),
                  lambda y: y.split([4, 4], 1)):
        want = twice(F.linear(x, weight, bias), weight, split)
        got = twice(layer(gt.from_full(x, place, B)), layer.weight, split)
        torch.testing.assert_close(got.full_tensor(), want)


def test_styles_of_torch_are_read_as_a_plan():
    import globaltensor.dtensor as ours

    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    for T in (parallel, ours):
        plan = gt.Plan.of_styles(gpt(), {
            "token": T.RowwiseParallel(output_layouts=ours.Shard(1)), "blocks.*.mlp.up": T.ColwiseParallel(),
            "blocks.*.mlp.down": T.RowwiseParallel(output_layouts=ours.Shard(1)), "norm": T.SequenceParallel(),
            "blocks.*.mlp": T.PrepareModuleInput(input_layouts=(ours.Shard(1),),
                                                 desired_input_layouts=(ours.Replicate(),))})
        assert plan == {"token.weight": {"tp": S(0)}, "token ->": {"tp": S(1)}, "blocks.*.mlp.up.weight": {"tp": S(0)},
                        "blocks.*.mlp.up.bias": {"tp": S(0)}, "blocks.*.mlp.down.weight": {"tp": S(1)},
                        "blocks.*.mlp.down ->": {"tp": S(1)}, "norm ->": {"tp": S(1)}, "blocks.*.mlp <-": {"tp": B}}
    with pytest.raises(gt.SbpError, match="fits no module"):
        gt.Plan.of_styles(gpt(), {"no.such": parallel.ColwiseParallel()})
    with pytest.raises(gt.SbpError, match=r"row 'toke' fits no module(.|\n)*'token', or a pattern"):
        gt.Plan.of_styles(gpt(), {"toke": "colwise", "no.such": "rowwise"})
    with pytest.raises(gt.ArgumentError, match="has no plan of its own"):
        gt.Plan.of_styles(gpt())


def test_the_plan_of_a_llama_is_transformers_own():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2))
    assert gt.Plan.of_styles(model) == gt.Plan.of(model)
    assert gt.Plan.of_styles(model, {"lm_head": "packed_colwise"}).whole == {
        "lm_head": "packed_colwise, for which there is no row"}


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_what_a_module_writes_to_a_parameter_in_its_layout_of_use():
    torch.manual_seed(SEED)
    plain, x = nn.Sequential(Clamped(6, 8), nn.Linear(8, 4)).double(), torch.randn(4, 6).double()
    model = gt.parallelize(copy.deepcopy(plain), where(2, names=("tp",)), {
        "0.weight": {"tp": S(0)}, "0.weight ->": {"tp": B}})
    for net, rows in ((plain, x), (model, gt.from_full(x, where(2, names=("tp",)), B))):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(2):
            net(rows).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model[0].weight.sbp == (S(0),)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q)
