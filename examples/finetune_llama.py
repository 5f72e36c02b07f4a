"""Fine-tune a Llama of `transformers`, as it is, from a folder of safetensors: dp x tp, ZeRO, a split sequence.

    python examples/finetune_llama.py                           one process drives all ranks
    globaltensor run -n 4 examples/finetune_llama.py            one process per rank

The folder is made by `transformers` itself, with a model small enough for a laptop; put your own in its place with
--folder. Each rank reads only its part of the weights, and writes only its part of the result, which `transformers`
reads back.
"""
from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

import globaltensor as gt

SEQ, BATCH = 32, 8


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Fine-tune a Llama over dp x tp ranks.")
    parser.add_argument("--folder", type=Path, help="of a model (default: a small one, made here)")
    parser.add_argument("--out", type=Path, help="where the result is written (default: nowhere)")
    for name, default in ("dp", 2), ("tp", 2), ("steps", 20):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or make(Path(scratch))
        where = gt.placement("cpu", torch.arange(options.dp * options.tp).view(options.dp, options.tp).tolist(),
                             axis_names=("dp", "tp"))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        gt.parallelize(model, where, gt.Plan.of(model, sequence="tp"))
        gt.load_safetensors(model, folder)
    optimizer = gt.zero(torch.optim.AdamW(model.parameters(), lr=1e-3), axis="dp", stage=1)
    data = gt.data.DataLoader(Text(), BATCH, where, {"dp": gt.sbp.split(0)}, shuffle=True, tail="drop")
    losses: list[float] = []
    while len(losses) < options.steps:
        for ids in data:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if gt.rank() == 0:
                print(f"step {len(losses):3}   loss {losses[-1]:.4f}", flush=True)
            if len(losses) == options.steps:
                break
    if options.out:
        gt.save_safetensors(model, options.out)
        if gt.rank() == 0:
            model.config.save_pretrained(options.out)
    return losses


def make(folder: Path) -> Path:
    """A Llama with random weights, as `transformers` writes it; the same in every process."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                 num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
    return folder


class Text(torch.utils.data.Dataset):
    """This file, in pieces of SEQ bytes."""

    def __init__(self) -> None:
        text = torch.tensor(list(Path(__file__).read_bytes())).clamp_(max=127)
        self.pieces = text[:len(text) // SEQ * SEQ].view(-1, SEQ)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.pieces[i]


if __name__ == "__main__":
    main()
