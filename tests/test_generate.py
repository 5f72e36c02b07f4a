"""Generation by transformers' models under tensor parallelism: plain torch's tokens, and a cache that never moves."""
from __future__ import annotations

import copy

import pytest
import torch

import globaltensor as gt

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
S, B = gt.sbp.split, gt.sbp.broadcast
SEED, NEW, ROWS, HIDDEN, VOCAB, LAYERS = 20_261_123, 6, 4, 16, 48, 2
GRIDS = [pytest.param([0, 1], ("tp",), marks=pytest.mark.long), ([[0, 1], [2, 3]], ("dp", "tp"))]


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, max_position_embeddings=32))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2))


@pytest.mark.parametrize("ranks, names", GRIDS, ids=["tp 2", "dp 2 x tp 2"])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_cache_is_split_by_heads_and_never_moves(make, ranks, names):
    print("seed", SEED)
    torch.manual_seed(SEED)
    plain = make().eval()
    ids = torch.randint(3, VOCAB, (ROWS, 5))
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    want = plain.generate(ids, **options)
    place = gt.placement("cpu", ranks, names)
    dp = 2 if "dp" in names else 1
    model = gt.parallelize(copy.deepcopy(plain), place)
    starts: list[int] = []
    model.register_forward_pre_hook(lambda *_: starts.append(len(moves)))
    with gt.record() as moves:
        out = model.generate(gt.from_full(ids, place, {"dp": S(0)} if dp > 1 else B), return_dict_in_generate=True,
                             **options)
    assert torch.equal(out.sequences.full_tensor(), want)
    for layer in out.past_key_values.layers:
        for kept in (layer.keys, layer.values):
            assert kept.sbp == ((S(0), S(1)) if dp > 1 else (S(1),)) and kept.shape[2] == 5 + NEW - 1
    # an all-reduce of [rows, 1, hidden] behind the embedding, and two a layer; the best word of each half of them
    reduced, best = (2 * LAYERS + 1) * ROWS // dp * HIDDEN * 4, ROWS // dp * (4 + 8)
    dealt = LAYERS * ROWS // dp * 3 * HIDDEN * 4 // 6 if make is gpt2 else 0
    for first, last in zip(starts[1:], [*starts[2:], len(moves)]):
        along_tp = [move for move in moves[first:last] if move.src.sbp[-1] != move.dst.sbp[-1]]
        assert sum(move.bytes for move in along_tp) == reduced + best + dealt, along_tp
        others = sum(move.bytes for move in moves[first:last]) - (reduced + best + dealt)
        assert others <= (ROWS * 8 if dp > 1 else 0)             # are all done, is there padding: asked along dp
