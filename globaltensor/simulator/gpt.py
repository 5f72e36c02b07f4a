"""A GPT by its sizes: how many parameters, operations and bytes of activations, without building it.

    l layers, h hidden, a heads, s sequence, V vocabulary, b micro-batch, B global batch, t tensor parallel

    parameters                  12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h))                              arXiv:2104.04473
    operations an iteration     96 B s l h^2 (1 + s/(6h) + V/(16 l h)), full recomputation included   arXiv:2104.04473
    bytes of activations a layer, 16 bit, masks of dropout a byte                                     arXiv:2205.05198
        plain                   s b h (34 + 5 a s/h)
        tensor parallel         s b h (10 + 24/t + 5 a s/(h t))
        + sequence parallel     the plain one / t
        selective               without its 5 a s/h term: attention is recomputed
        full                    2 s b h: only the layer's input is kept
        flash attention         without the 5 a s/h term, whatever is recomputed                      arXiv:2205.14135
    and of the loss, in 32 bits 4 s b V/t                                                             arXiv:2205.05198

All are integers or fractions, exact.
"""
from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from globaltensor.errors import ShapeError

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class GPT:
    """The sizes of the model. `inner`, the width of the MLP, is 4 h. `flash`: attention keeps no s x s matrix."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 51200
    flash: bool = False

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if name != "flash" and size < 1:
                raise ShapeError(f"a GPT with {name} = {size}", "every size is at least 1")
        if self.hidden % self.heads:
            raise ShapeError(f"hidden {self.hidden} over {self.heads} heads", "the heads divide the hidden size",
                             f"hidden {self.hidden // self.heads * self.heads or self.heads}")

    def check_tensor_parallel(self, tensor: int) -> None:
        """Raise ShapeError where the heads are not so many ranks' worth."""
        if self.heads % tensor:
            most = max(n for n in range(1, min(tensor, self.heads + 1)) if self.heads % n == 0)
            raise ShapeError(f"tp {tensor} with {self.heads} heads", "heads are dealt out whole, as many to each rank",
                             f"--tp {most}")

    def check_stages(self, pipeline: int) -> None:
        """Raise ShapeError where so many ranks of a pipeline have not a layer each."""
        if self.layers < pipeline:
            raise ShapeError(f"pp {pipeline} with {self.layers} layers", "a stage has at least one layer",
                             f"--pp {self.layers}")

    @property
    def parameters_per_layer(self) -> int:
        """12 h^2 weights, 9 h biases, 4 h of the two norms."""
        return 12 * self.hidden ** 2 + 13 * self.hidden

    @property
    def embeddings(self) -> int:
        """Parameters of the embeddings: of the vocabulary, which the output layer shares, and of positions."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.parameters_per_layer + self.embeddings

    def layer_forward(self, micro_batch: int, tensor: int = 1) -> tuple[Fraction, Fraction]:
        """Operations of a layer's forward on one of `tensor` ranks: products with weights, and those of attention."""
        tokens = micro_batch * self.sequence
        return (Fraction(24 * tokens * self.hidden ** 2, tensor),
                Fraction(4 * tokens * self.sequence * self.hidden, tensor))

    def logits_forward(self, micro_batch: int, tensor: int = 1) -> Fraction:
        """Operations of the output layer's forward."""
        return Fraction(2 * micro_batch * self.sequence * self.hidden * self.vocabulary, tensor)

    def logits_bytes(self, micro_batch: int, tensor: int = 1) -> Fraction:
        """Bytes that a rank with the output layer keeps for the loss of a micro-batch."""
        return Fraction(4 * micro_batch * self.sequence * self.vocabulary, tensor)

    def operations(self, batch: int, recompute: str = "full") -> Fraction:
        """Of one iteration on a whole batch, including recomputation."""
        with_weights, attention = self.layer_forward(batch)
        again = {"none": Fraction(0), "selective": attention, "full": with_weights + attention}[recompute]
        return self.layers * (3 * (with_weights + attention) + again) + 3 * self.logits_forward(batch)

    def activations_per_layer(self, micro_batch: int, tensor: int = 1, sequence_parallel: bool = False,
                              recompute: str = "none") -> Fraction:
        """Bytes that a rank keeps of one layer for one micro-batch."""
        if recompute not in RECOMPUTE:
            raise ShapeError(f"recompute {recompute!r}", f"it is one of {', '.join(RECOMPUTE)}")
        sbh = self.sequence * micro_batch * self.hidden
        if recompute == "full":
            return Fraction(2 * sbh)
        attention = Fraction(5 * self.heads * self.sequence, self.hidden * tensor)
        # 10: norms, dropouts and the inputs of the pairs, which every rank keeps whole unless the sequence is split
        rest = Fraction(34, tensor) if sequence_parallel else 10 + Fraction(24, tensor)
        return sbh * (rest + (attention if recompute == "none" and not self.flash else 0))
