"""torch's DTensor beside global tensors (programs/dtensors.py), and programs in its style on them (torch_style.py)."""
from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from harness import PROGRAMS, RUN, good
from torch.distributed.fsdp import MixedPrecisionPolicy

import globaltensor as gt


@pytest.mark.processes
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.long)])
def test_dtensors_become_global_tensors_and_come_back(n):
    assert good([*RUN, "-n", n, PROGRAMS / "dtensors.py"], timeout=400).count("all is well") == n


def test_a_process_of_several_ranks_refuses():
    x = gt.ones(4, placement=gt.placement("cpu", [0, 1]), sbp=gt.sbp.split(0))
    for refused in (x.to_dtensor, lambda: gt.to_mesh(x.placement)):
        with pytest.raises(gt.GlobalTensorError, match="drives 8 ranks(.|\n)*globaltensor run -n 8"):
            refused()


@pytest.mark.parametrize("n", range(9))
@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_cut_of_torch(n, p):
    from globaltensor.dtensor.conversion import torch_cut
    from globaltensor.layouts.layout import layout

    of = layout(gt.placement("cpu", range(p)), (gt.sbp.split(0),))
    sizes = [len(t) for t in torch.arange(n).chunk(p)] if n else []
    sizes += [0] * (p - len(sizes))
    assert [(torch_cut(of, (n,)) or of).local_shape((n,), r)[0] for r in range(p)] == sizes


@pytest.mark.processes
@pytest.mark.parametrize("n", [4, pytest.param(2, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)])
def test_parts_are_taken_in_either_cut_and_get_their_gradients_in_it(n):
    assert good([*RUN, "-n", n, PROGRAMS / "own_parts.py"]).count("each in its own cut") == n


@pytest.mark.processes
@pytest.mark.parametrize("n, programs", [
    (2, ["sequence_parallel", "parts", "groups", "sharded_modules", "recomputed"]),
    pytest.param(2, [], marks=pytest.mark.long), pytest.param(4, [], marks=pytest.mark.long)], ids=str)
def test_programs_in_the_style_of_torch_give_what_torch_gives(n, programs):
    said = good([*RUN, "-n", n, PROGRAMS / "torch_style.py", *programs], timeout=400)
    assert said.count("is the same") == n * (len(programs) or 11)


@pytest.mark.processes
@pytest.mark.parametrize("program", ["own_batches.py", pytest.param("own_weights.py", marks=pytest.mark.long)])
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.long)])
def test_each_rank_runs_a_model_by_itself_under_fully_shard(program, n):
    """own_batches.py beside torch's own; own_weights.py beside plain torch, where torch's own fails."""
    said = good([*RUN, "-n", n, PROGRAMS / program], timeout=400)
    assert said.count("is as torch's") + said.count("as plain torch") == n


@pytest.mark.processes
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.long)])
def test_methods_of_what_fully_shard_was_called_for(n):
    assert good([*RUN, "-n", n, PROGRAMS / "fsdp_modules.py"]).count("each method is as torch's") == n


@pytest.mark.parametrize("policy, moved, rounds", [
    (MixedPrecisionPolicy(torch.bfloat16), 2, True), (MixedPrecisionPolicy(torch.bfloat16, torch.float32), 2, True),
    (MixedPrecisionPolicy(None, torch.bfloat16), 4, False),
    (MixedPrecisionPolicy(output_dtype=torch.float64), 4, False),
    (MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32), 2, True)])
def test_a_process_of_several_ranks_works_in_the_dtypes_of_a_policy(policy, moved, rounds):
    """The oracle: a plain model whose weights and inputs were rounded, where the policy says so."""
    torch.manual_seed(3)
    plain, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6)), torch.randn(6, 4)
    model, mesh = copy.deepcopy(plain), gt.dtensor.init_device_mesh("cpu", (2,))
    gt.dtensor.fully_shard(model[0], mesh=mesh, mp_policy=dataclasses.replace(policy, output_dtype=None))
    gt.dtensor.fully_shard(model, mesh=mesh, mp_policy=policy)
    if rounds:
        plain, x = plain.bfloat16(), x.bfloat16()
    with gt.record() as moves:
        out = model(x)
    gathered = sum(move.bytes for move in moves if move.op == "zero")
    assert gathered == moved * 47, "half of the elements, to each of two ranks"
    assert out.dtype == (policy.output_dtype or policy.param_dtype or torch.float32)
    torch.testing.assert_close(out.full_tensor(), plain(x), check_dtype=False, rtol=0, atol=1e-2 if rounds else 1e-6)
    for result in (out.full_tensor(), plain(x)):
        result.float().square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.float(), rtol=2e-2, atol=2e-2)


def test_a_policy_that_is_none():
    mesh = gt.dtensor.init_device_mesh("cpu", (2,))
    for policy, told in ((torch.bfloat16, "not a MixedPrecisionPolicy"),
                         (MixedPrecisionPolicy(torch.int8), "not a floating-point dtype"),
                         (MixedPrecisionPolicy("bf16"), "'bf16' is not a floating")):
        with pytest.raises(gt.ArgumentError, match=told):
            gt.dtensor.fully_shard(torch.nn.Linear(4, 4), mesh=mesh, mp_policy=policy)


def test_a_process_of_several_ranks_runs_rnns_under_fully_shard():
    for make in (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM):
        torch.manual_seed(2)
        plain, x = make(4, 3, batch_first=True), torch.randn(4, 5, 4)
        model = gt.dtensor.fully_shard(copy.deepcopy(plain), mesh=gt.dtensor.init_device_mesh("cpu", (2,)))
        for out in (plain(x)[0], model(x)[0]):
            out.square().sum().backward()
        torch.testing.assert_close(out.full_tensor(), plain(x)[0])
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_a_process_of_several_ranks_runs_a_program_in_the_style_of_torch():
    from globaltensor.dtensor import (
        ColwiseParallel,
        DTensor,
        PrepareModuleInput,
        Replicate,
        RowwiseParallel,
        Shard,
        distribute_tensor,
        init_device_mesh,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.GELU(), torch.nn.Linear(7, 5))
    plain, x = copy.deepcopy(model), torch.randn(6, 4)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = model(x)
    out.pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    assert isinstance(out, DTensor) and isinstance(model[0].weight, torch.nn.Parameter)
    torch.testing.assert_close(out.full_tensor(), plain(x))
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    d = distribute_tensor(x, mesh, [Shard(0)])
    assert d.device_mesh == mesh == gt.dtensor.DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("tp",))
    assert d.placements == (Shard(0),)
    assert mesh != gt.placement("cpu", [0, 1, 2], ("tp",)) and repr(mesh).startswith("DeviceMesh(")
    with pytest.raises(gt.GlobalTensorError, match="drives several ranks"):
        d.to_local()
    with pytest.raises(gt.SbpError, match="fits no module"):
        parallelize_module(model, mesh, {"layers.*": ColwiseParallel()})
    with pytest.raises(gt.ArgumentError, match="it is for Linear and Embedding"):
        parallelize_module(model, mesh, {"1": ColwiseParallel()})
    with pytest.raises(gt.PlacementError, match="no dim 'dp'"):
        mesh["dp"]
    where = init_device_mesh("cpu", (2,))
    with pytest.raises(gt.ArgumentError, match="fully_shard of a parameter(.|\n)*gt.parallelize"):
        gt.dtensor.fully_shard(model, mesh=where)
    with pytest.raises(gt.ArgumentError, match="input_layouts and 0 layouts"):
        PrepareModuleInput(input_layouts=(Replicate(),))
