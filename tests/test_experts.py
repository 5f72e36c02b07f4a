"""Experts on ranks of their own: rows that travel, products of groups of rows, and models of experts beside one device.

The bytes are counted here row by row, with no arithmetic of the library. Real processes run `programs/experts.py`.
"""
from __future__ import annotations

import copy
import importlib.util
import itertools
import os
import runpy

import pytest
import torch
from harness import PROGRAMS, PYTHON, RUN, environment, good, results
from shards import place, scatter, sizes

import globaltensor as gt
from globaltensor.errors import BoxingError
from globaltensor.layouts.layout import layout
from globaltensor.parallel.experts import Relabel, arrange_slots

SEED = int(os.environ.get("EXPERTS_SEED") or 20_261_123)
print(f"tests/test_experts.py: EXPERTS_SEED={SEED}")
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
F64 = torch.float64
PROGRAM = runpy.run_path(str(PROGRAMS / "experts.py"))


def generator():
    return torch.Generator().manual_seed(SEED)


def ends(n, parts):
    return list(itertools.accumulate(sizes(n, parts), initial=0))


def crossing(n, index, ranks):
    """Per rank, the rows of others that its part of the index names, each counted once; and per rank, how many of its
    rows others name, once for each of them."""
    held, named = ends(n, ranks), ends(len(index), ranks)
    own = [set(range(held[r], held[r + 1])) for r in range(ranks)]
    asked = [{int(i) % n for i in index[named[r]:named[r + 1]]} for r in range(ranks)]
    there = [len(asked[r] - own[r]) for r in range(ranks)]
    back = [sum(len(asked[other] & own[r]) for other in range(ranks) if other != r) for r in range(ranks)]
    return there, back


# --------------------------------------------------------------------------------------------------- rows by number

INDICES = {
    "at random": lambda n, g: torch.randint(-n, n, (2 * n + 1,), generator=g),
    "a permutation": lambda n, g: torch.randperm(n, generator=g),
    "one row many times": lambda n, g: torch.full((9,), n - 1),
    "ascending": lambda n, g: torch.arange(n),
    "a single one": lambda n, g: torch.tensor([0]),
    "none": lambda n, g: torch.zeros(0, dtype=torch.long),
    "int32": lambda n, g: torch.randint(n, (n + 3,), generator=g, dtype=torch.int32),
}
LIE = {"2": ([0, 1], [(S(0),)]), "3": ([2, 0, 1], [(S(0),)]),
       "2x2": ([[0, 1], [2, 3]], [(S(0), S(0)), (S(0), B), (B, S(0)), (S(0), S(1)), (S(0), P), (P, S(0))])}


@pytest.mark.parametrize("ranks", LIE)
@pytest.mark.parametrize("name", INDICES)
def test_rows_travel_as_plain_indexing_picks_them(name, ranks):
    where, g = place(LIE[ranks][0]), generator()
    for nd, n, how in itertools.product(LIE[ranks][1], (1, 5, 8), ("[]", "index_select", "sparse")):
        index = INDICES[name](n, g)
        x = torch.randn(n, 3, dtype=F64, generator=g).requires_grad_()
        pick = (lambda x, i: x[i]) if how == "[]" else lambda x, i: x.index_select(0, i) if i.min() >= 0 else x[i]
        if how == "sparse":
            pick = lambda x, i: x[i][i.numel() // 2:].sum(1)         # rows of which some get no gradient
        if how == "index_select" and (not len(index) or index.min() < 0):
            continue
        want = pick(x, index)
        weights = torch.randn(want.shape, dtype=F64, generator=g)
        want.backward(weights)
        spread = scatter(x.detach(), where, nd, g).requires_grad_()
        for given in (index, gt.from_full(index, where, B)):
            got = pick(spread, given)
            assert how == "sparse" or got.sbp == nd, (nd, got.sbp)
            got.backward(gt.from_full(weights, where, B))
            torch.testing.assert_close(got.detach().full_tensor(), want.detach(), msg=lambda m: f"{nd} {n} {how}\n{m}")
            torch.testing.assert_close(spread.grad.full_tensor(), x.grad, msg=lambda m: f"{nd} {n} {how}, grad\n{m}")
            spread.grad = None


@pytest.mark.parametrize("ranks", LIE)
def test_rows_are_added_where_they_are_held(ranks):
    """index_add and index_put, in place too: the target as the values lie, or whole; 16-bit floats in float32."""
    where, g = place(LIE[ranks][0]), generator()
    cases = itertools.product(LIE[ranks][1], (F64, torch.bfloat16), (1, 2.5), INDICES)
    for nd, dtype, alpha, name in cases:
        index = INDICES[name](5, g) % 5
        x, values = torch.randn(5, 3, generator=g).to(dtype), torch.randn(len(index), 3, generator=g).to(dtype)
        want = x.double().index_add(0, index, values.double(), alpha=alpha).to(dtype)
        if any(s.is_partial for s in nd) and dtype != F64:
            continue
        # where what is added cancels, torch itself, which rounds each sum, is off by more than a part of the result
        off = max((plain.double() - want.double()).abs().max().item() for plain in (
            x.index_add(0, index, values, alpha=alpha), x.index_put((index,), values * alpha, accumulate=True)))
        near = {"rtol": 0.02, "atol": max(0.02, off)} if dtype != F64 else {"rtol": 1e-9, "atol": 1e-9}
        for own in {nd, tuple(B if s == S(0) else s for s in nd)}:
            target, given = scatter(x, where, own, g), scatter(values, where, nd, g)
            for got in (target.index_add(0, index, given, alpha=alpha),
                        target.clone().index_add_(0, index, given, alpha=alpha),
                        target.index_put((index,), given * alpha, accumulate=True)):
                torch.testing.assert_close(got.full_tensor(), want, msg=lambda m: f"{own} {nd} {name}\n{m}", **near)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", INDICES)
def test_only_rows_of_others_travel_and_each_once(name, ranks):
    where, g = place(list(range(ranks))), generator()
    for n in (3, 8):
        index = INDICES[name](n, g)
        x = gt.from_full(torch.randn(n, 6, generator=g), where, S(0)).requires_grad_()
        there, back = crossing(n, index, ranks)
        with gt.record() as moves:
            picked = x[index]
            picked.backward(gt.from_full(torch.ones(len(index), 6), where, S(0)))
        assert [m.bytes for m in moves if m.op.startswith("aten.index.")] == [max(there) * 6 * 4]
        assert [m.bytes for m in moves if m.op.startswith("aten.index_put") and m.src is m.dst] == [max(back) * 6 * 4]
        assert sum(m.bytes for m in moves) == (max(there) + max(back)) * 6 * 4, [str(m) for m in moves]


def test_rows_that_travel_can_be_forbidden_and_explained():
    where = place([0, 1])
    x = gt.from_full(torch.arange(8.0).view(4, 2), where, S(0))
    with gt.boxing("forbid"):
        swapped = x[torch.tensor([1, 0, 3, 2])]      # all on their ranks
        with pytest.raises(BoxingError, match=r"aten.index.Tensor needs a boxing .* 16 bytes"):
            x[torch.tensor([2, 3, 0, 1])]
    assert swapped.tolist() == [[2, 3], [0, 1], [6, 7], [4, 5]]
    told = gt.explain(lambda: x[torch.tensor([2, 1, 0, 3])])
    assert [(row.op, row.chosen, row.bytes) for row in told.rows] == [("index.Tensor", "S(0) -> S(0)", 8)]
    for wrong in (4, -5):
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for a dim of size 4"):
            x[torch.tensor([0, wrong])]


# ----------------------------------------------------------------------------------------------- groups of rows

COUNTS = {"even": [4, 4, 4, 4], "one expert": [0, 13, 0, 0], "the first": [9, 0, 0, 0], "the last": [0, 0, 0, 9],
          "the ends": [5, 0, 0, 8], "rising": [1, 2, 3, 7], "fewer than ranks": [1, 0, 1, 0],
          "rows of nobody": [3, 1, 2, 2]}
EXPERTS = {"2": ([0, 1], [B, S(0)]), "3": ([1, 2, 0], [B, S(0)]), "4": ([0, 1, 2, 3], [B, S(0)]),
           "2x2": ([[0, 1], [2, 3]], [(B, S(0)), (S(0), B), (S(0), S(0)), (B, B)])}


@pytest.mark.parametrize("ranks", EXPERTS)
@pytest.mark.parametrize("name", COUNTS)
def test_groups_of_rows_times_their_experts(name, ranks):
    """Every layout of the experts, rows however they lie; forward, and both gradients."""
    where, g = place(EXPERTS[ranks][0]), generator()
    counts = torch.tensor(COUNTS[name])
    n = int(counts.sum()) + 3 * (name == "rows of nobody")
    offs = counts.cumsum(0).int()
    used = int(offs[-1])
    a, w = torch.randn(n, 8, generator=g).requires_grad_(), torch.randn(4, 12, 8, generator=g).requires_grad_()
    want = torch._grouped_mm(a, w.mT, offs=offs)[:used]
    weights = torch.randn(want.shape, generator=g)
    want.backward(weights)
    rows = {1: [B, S(0), S(1)], 2: [(S(0), S(0)), (S(0), B), (B, S(0)), (S(1), S(0)), (B, B)]}[where.ndim]
    cut = EXPERTS[ranks][1] + ([S(1), S(2)] if where.ndim == 1 else [(S(0), S(1)), (S(2), S(0))])
    for lie, own in itertools.product(rows, cut):
        ours = [gt.from_full(t.detach(), where, sbp).requires_grad_() for t, sbp in ((a, lie), (w, own))]
        got = torch._grouped_mm(ours[0], ours[1].mT, offs=gt.from_full(offs, where, B))[:used]
        got.backward(gt.from_full(weights, where, B))
        for x, y in ((got.detach(), want.detach()), (ours[0].grad[:used], a.grad[:used]), (ours[1].grad, w.grad)):
            torch.testing.assert_close(x.full_tensor(), y, msg=lambda m: f"rows {lie}, experts {own}\n{m}")


@pytest.mark.parametrize("name", COUNTS)
def test_a_grouped_product_moves_the_rows_at_the_seams(name):
    """The rows that lie with a rank that does not hold their expert, to it and back; the matrices never."""
    where, counts = place([0, 1]), COUNTS[name]
    n, seam = sum(counts), sum(counts[:2])
    a = gt.from_full(torch.randn(n, 8), where, S(0))
    w = gt.from_full(torch.randn(4, 8, 16), where, S(0))
    half = sizes(n, 2)[0]
    with gt.record() as moves:
        torch._grouped_mm(a, w, offs=torch.tensor(counts).cumsum(0).int())
    crossing_rows = abs(half - seam)                 # one side has too few, and the other gets them back
    assert [m.bytes for m in moves if m.bytes] == [crossing_rows * 8 * 4, crossing_rows * 16 * 4] * (crossing_rows > 0)


def test_other_grouped_products_are_done_whole():
    where, g = place([0, 1]), generator()
    offs = torch.tensor([3, 5, 8], dtype=torch.int32)
    for shapes, lie in (((3, 4, 8), (8, 8)), (S(0), S(1))), (((3, 4, 8), (3, 8, 4)), (S(0), S(2))):
        a, b = (torch.randn(s, generator=g) for s in shapes)
        ends_of = offs if b.dim() == 2 else None
        got = torch._grouped_mm(gt.from_full(a, where, lie[0]), gt.from_full(b, where, lie[1]), offs=ends_of)
        torch.testing.assert_close(got.full_tensor(), torch._grouped_mm(a, b, offs=ends_of))


# --------------------------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("blocks, share", [([(0, 2), (2, 4)], 1), ([(0, 2), (2, 3), (3, 4)], 1), ([(0, 4)], 3),
                                           ([(0, 1), (1, 2), (2, 3), (3, 4)], 2)])
@pytest.mark.parametrize("how", ["random", "one expert", "one token"])
def test_slots_are_sorted_alike_long_and_complete(blocks, share, how):
    g = generator()
    n = 1 if how == "one token" else 37
    chosen = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(n)])
    if how == "one expert":
        chosen = torch.full((n, 1), 3)
    slots = arrange_slots(chosen, blocks, share)
    length, rest = divmod(len(slots.token), len(blocks))
    assert rest == 0 and length % share == 0 and bool((slots.expert.diff() >= 0).all())
    for (first, stop), experts in zip(blocks, slots.expert.view(len(blocks), length)):
        assert first <= int(experts.min()) and int(experts.max()) < stop
    real = slots.counts
    found = sorted(zip(slots.token[real].tolist(), slots.choice[real].tolist(), slots.expert[real].tolist()))
    assert found == [(t, c, int(chosen[t, c])) for t in range(n) for c in range(chosen.shape[1])]
    fullest = max(int(((chosen >= first) & (chosen < stop)).sum()) for first, stop in blocks)
    assert length < fullest * 9 / 8 + share


# ------------------------------------------------------------------------------------------------- whole models

Block, batch_of, step_of = PROGRAM["Block"], PROGRAM["batch_of"], PROGRAM["step_of"]
WAYS = {
    "dp = ep, 2": ([0, 1], ("dp",), "dp", {"dp": S(0)}),
    "dp = ep, 4": ([0, 1, 2, 3], ("dp",), "dp", {"dp": S(0)}),
    "dp = ep, 3 of 4 experts": ([2, 0, 1], ("dp",), "dp", {"dp": S(0)}),
    "dp x ep, batch over both": ([[0, 1], [2, 3]], ("dp", "ep"), "ep", {"dp": S(0), "ep": S(0)}),
    "ep x dp, batch over both": ([[0, 1], [2, 3]], ("ep", "dp"), "ep", {"dp": S(0), "ep": S(0)}),
    "dp x ep, batch over dp": ([[0, 1], [2, 3]], ("dp", "ep"), "ep", {"dp": S(0)}),
    "ep alone": ([0, 1], ("ep",), "ep", B),
    "experts cut unevenly": ([[0, 1, 2], [3, 4, 5]], ("dp", "ep"), "ep", {"dp": S(0), "ep": S(0)}),
    "more ranks than experts": ([0, 1, 2, 3, 4], ("dp",), "dp", {"dp": S(0)}),
    "dp x more ranks than experts": ([[0, 1, 2, 3], [4, 5, 6, 7]], ("dp", "ep"), "ep", {"dp": S(0), "ep": S(0)}, 3),
}


def trained(model, plain, where, axis, batch, plan=None):
    """Three steps of AdamW on global tensors and on plain ones: losses, gradients and parameters agree."""
    gt.parallelize(model, where, gt.Plan.of(model, axis="", experts=axis) if plan is None else plan)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    inputs, targets = batch_of(4)
    for _ in range(3):
        got = step_of(model, gt.from_full(inputs, where, batch), gt.from_full(targets, where, batch))
        want = step_of(plain, inputs, targets)
        torch.testing.assert_close(got.detach().full_tensor(), want.detach())
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            assert p.grad.sbp == p.sbp
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-3, atol=1e-5, msg=lambda m: f"{name}: {m}")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-3, atol=1e-4, msg=lambda m: f"{name}: {m}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("hot", [False, True], ids=["", "hot"])
@pytest.mark.parametrize("way", WAYS)
def test_a_block_of_experts_trains_as_on_one_device(way, hot):
    ranks, names, axis, batch, *experts = WAYS[way]
    where = place(ranks, names)
    torch.manual_seed(SEED)
    model = Block(*experts, hot=hot)
    trained(model, copy.deepcopy(model), where, axis, batch)


def test_a_block_without_travelling_trains_the_same():
    """Only the matrices are told to lie apart: every op moves what it needs."""
    torch.manual_seed(SEED)
    model = Block()
    trained(model, copy.deepcopy(model), place([0, 1], ("dp",)), "dp", {"dp": S(0)}, {"experts.*": {"dp": S(0)}})


def mixtral(how):
    import transformers

    torch.manual_seed(SEED)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
        num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2, output_router_logits=True,
        router_aux_loss_coef=0.1)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(how)
    return model


needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None,
                                        reason="transformers is not installed")


@pytest.mark.sample(3)
@needs_transformers
@pytest.mark.parametrize("how", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("way", ["dp = ep, 2", "dp = ep, 4", "dp x ep, batch over both"])
def test_mixtral_of_transformers_as_it_is(way, how):
    """With the loss that balances the experts."""
    ranks, names, axis, batch = WAYS[way]
    where, model = place(ranks, names), mixtral(how)
    trained(model, copy.deepcopy(model), where, axis, batch)


@needs_transformers
def test_ready_made_for_mixtral():
    plan = gt.Plan.of(mixtral("grouped_mm"), axis="", experts="dp")
    assert str(plan) == """\
# name                                    dp
model.layers.*.mlp.experts.gate_up_proj   S(0)
model.layers.*.mlp.experts.down_proj      S(0)
model.layers.*.mlp.experts =>             S(0)"""
    assert str(gt.Plan.parse(str(plan))) == str(plan)


@pytest.mark.parametrize("ranks", [2, 4])
def test_only_tokens_that_change_rank_move(ranks):
    """Per layer and direction: to the ranks of their experts and back, each token once per rank; the gradients as much.
    Beside that the numbers of the experts, and the weights of the choices, which go with the tokens."""
    where = place(list(range(ranks)), ("dp",))
    torch.manual_seed(SEED)
    model = Block()
    gt.parallelize(model, where, gt.Plan.of(model, axis="", experts="dp"))
    inputs, targets = (gt.from_full(t, where, S(0)) for t in batch_of(4))
    seen = []
    model.experts.register_forward_pre_hook(lambda layer, args: seen.append(args[1].full_tensor()), prepend=True)
    with gt.record() as moves:
        step_of(model, inputs, targets)
    chosen, hidden = seen[0], model.hidden
    n, k = chosen.shape
    home, apart = ends(n, ranks), ends(model.experts.count, ranks)
    holder = lambda expert: next(r for r in range(ranks) if apart[r] <= expert < apart[r + 1])
    visits = {(t, holder(int(e))) for t in range(n) for e in chosen[t]}
    away = [(t, r) for t, r in visits if not home[r] <= t < home[r + 1]]
    there = max(sum(r == rank for _, r in away) for rank in range(ranks))
    back = max(sum(home[rank] <= t < home[rank + 1] for t, _ in away) for rank in range(ranks))
    rows = {"aten.index.Tensor": [there * k * 4, there * hidden * 4], "aten.index_add.default": [back * hidden * 4],
            "aten.index_select.default": [there * hidden * 4],
            "aten.index_put.default": [back * hidden * 4, back * k * 4]}
    for op, expected in rows.items():
        got = [m.bytes for m in moves if m.op == op and m.bytes]
        assert got == expected, f"{op}: {got}, not {expected}"
    numbers = (n if gt.world_size() > ranks else max(n - m for m in sizes(n, ranks))) * k * 8
    assert [m.bytes for m in moves if m.op == "full_tensor" and m.bytes] == [numbers] * 2     # once by this test
    others = [m for m in moves if m.op not in rows and m.op != "full_tensor"]
    assert sum(m.bytes for m in others) <= 64, "\n".join(map(str, others))                    # of the loss


def test_calls_that_are_not_recognised_run_as_well():
    torch.manual_seed(SEED)
    model, where = Block(), place([0, 1], ("dp",))
    plain = copy.deepcopy(model)
    gt.parallelize(model, where, gt.Plan.of(model, axis="", experts="dp"))
    hidden, index, weights = torch.randn(6, model.hidden), torch.randint(4, (6, 2)), torch.rand(6, 2)
    want = plain.experts(hidden, index, weights)
    hidden, index, weights = (gt.from_full(t, where, S(0)) for t in (hidden, index, weights))
    got = model.experts(hidden, index, top_k_weights=weights)
    torch.testing.assert_close(got.full_tensor(), want)


def test_a_call_that_fails_leaves_nothing_behind():
    torch.manual_seed(SEED)
    model, where = Block(), place([[0, 1], [2, 3]], ("dp", "ep"))
    plain = copy.deepcopy(model)
    gt.parallelize(model, where, gt.Plan.of(model, axis="", experts="ep"))
    hidden, index, weights = torch.randn(6, model.hidden), torch.randint(4, (6, 2)), torch.rand(6, 2)
    call = lambda *args: model.experts(*[gt.from_full(t, where, {"dp": S(0)}) for t in args])
    with pytest.raises(RuntimeError, match="contraction dimension"):
        call(hidden[:, :4], index, weights)
    assert model.experts.up is model.experts._parameters["up"]
    torch.testing.assert_close(call(hidden, index, weights).full_tensor(), plain.experts(hidden, index, weights))


# ------------------------------------------------------------------------------------------------ real processes


@pytest.mark.long
@pytest.mark.parametrize("native", [pytest.param("1", id="native"), pytest.param("0", id="python")])
def test_in_two_processes(native, tmp_path):
    good([*RUN, "-n", "2", PROGRAMS / "experts.py", tmp_path], environment(GLOBALTENSOR_NATIVE=native), timeout=180)
    lone = tmp_path / "lone"
    lone.mkdir()
    good([PYTHON, PROGRAMS / "experts.py", lone], environment(GLOBALTENSOR_RANKS="2"), timeout=180)
    found, (alone,) = results(tmp_path), results(lone).values()
    assert sorted(found) == [0, 1] and found[0]["values"] == found[1]["values"]
    for seen in (*found.values(), alone):
        for got, want in zip(seen["values"], seen["plain"], strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-3, atol=1e-5)
    told = [[[op, n] for op, n in seen["moves"] if op.startswith("aten.index")] for seen in (*found.values(), alone)]
    assert told[0] == told[1] == told[2] and sum(n for _, n in told[0]) > 0


@pytest.mark.parametrize("sbp", [(S(0), B), (S(0), S(1)), (B, S(1))], ids=str)
def test_axes_in_another_order_can_be_differentiated_twice(sbp):
    home, other = place([[0, 1], [2, 3]], ("a", "b")), place([[0, 2], [1, 3]], ("b", "a"))
    value = torch.randn(6, 4, dtype=F64, generator=generator())

    def penalty(x, y):
        grad, = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (grad.pow(2).sum() + grad.sum()).backward()
        return x.grad

    plain, x = value.clone().requires_grad_(), gt.from_full(value, home, sbp).requires_grad_()
    torch.testing.assert_close(penalty(x, Relabel.apply(x, layout(other, sbp[::-1]), [1, 0])).full_tensor(),
                               penalty(plain, plain * 1))
