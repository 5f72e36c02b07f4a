"""The surface of torch: methods of Tensor, functions, modules, on global tensors and on operands without memory.

Every case gives what plain torch gives, raises what it raises, or is refused by an error of ours; nothing ends the
process (programs/surface.py, in child processes). `SURFACE_SEED=` turns the layouts.
"""
from __future__ import annotations

import json
from collections import Counter

import pytest
from harness import PROGRAMS, PYTHON, environment, good

# what is refused where plain torch runs, and why
REFUSED = {
    "no memory of its own": "apply_ map_ map2_ share_memory_ set_ __dlpack__",
    "would be sparse or quantized": """to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc
        _to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc to_mkldnn quantize_per_channel
        quantize_per_tensor quantize_per_tensor_dynamic""",
    "a sparse operand": "smm sspaddmm hspmm sparse_mask",
    "torch gives the target another shape in place": "addbmm_",
    "a lazy module becomes global after its first forward pass": """nn_LazyConv1d nn_LazyConv2d nn_LazyConv3d
        nn_LazyConvTranspose1d nn_LazyConvTranspose2d nn_LazyConvTranspose3d""",
}
MAY_REFUSE = {name for names in REFUSED.values() for name in names.split()}


def run(kinds: str, every: int, native: str = "1") -> Counter[str]:
    """Counts of the cases; none is wrong."""
    command = [PYTHON, PROGRAMS / "surface.py", kinds, every]
    said = json.loads(good(command, environment(GLOBALTENSOR_NATIVE=native), timeout=1500))
    counts, wrong = Counter(cases=len(said)), []
    for case, came in said.items():
        if isinstance(came, str):
            wrong.append(f"{case}: {came}")
            continue
        wrong += [f"{case}: {what}" for what in came["wrong"]]
        name = case.split()[1].rpartition(".")[2]
        if came["refused"] and name not in MAY_REFUSE and not case.endswith("without memory"):
            wrong.append(f"{case}: refused: {came['refused']}")
        counts["no arguments" if came["no arguments"] else "refused" if came["refused"] else "right"] += 1
        counts["calls right"] += came["right"]
        counts["calls that raise as torch's"] += came["raises"]
        counts["calls refused"] += sum(came["refused"].values())
    print(f"{kinds}, 1 in {every}, native {native}: {dict(counts)}")
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:40])
    return counts


def test_a_part_of_the_surface():
    assert run("methods,functions,modules,without-memory", 33)["right"] > 50


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("kinds, least", [("methods", 650), ("functions", 670), ("modules", 100),
                                          ("without-memory", 1000)])
def test_the_surface(kinds, least, native):
    assert run(kinds, 1, native)["right"] > least
