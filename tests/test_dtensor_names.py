"""Every public name of torch.distributed.tensor, .parallel and .device_mesh, and of fully_shard: here, or on a list.

Oracle: the installed torch. docs/bridges.md has the list of what is left out; this test compares it.
"""
from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle

import pytest
import torch
from harness import PROGRAMS, ROOT, RUN, environment, good
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import globaltensor as gt
from globaltensor import dtensor
from globaltensor.dtensor import DeviceMesh, DTensor, Replicate, Shard, init_device_mesh
from globaltensor.runtime.torch_internals import TORCH
from globaltensor.tensors.global_tensor import GlobalTensor

OF_TORCH = {name: importlib.import_module(f"torch.distributed.{name}") for name in (
    "tensor", "tensor.parallel", "tensor.experimental", "tensor.debug", "device_mesh", "fsdp")}
HERE = {"DTensor": GlobalTensor, "DeviceMesh": DeviceMesh, "FSDPModule": dtensor.FSDPModule}
MODULES = {"DTensor": "tensor", "DeviceMesh": "device_mesh", "FSDPModule": "fsdp"}
# arguments that differ, and why: the page says so too
ARGUMENTS = {
    "DTensor": "made by functions, as in torch",
    "FSDPModule": "made by fully_shard",
    "DeviceMesh": "backend_override and private ones",
    "init_device_mesh": "backend_override",
    "fully_shard": "policies are None by default, which is what torch's defaults ask for",
} | ({"local_map": "spmd_types"} if TORCH >= "2.14" else {})


def names_of_torch():
    """Public names, with what has them: functions and classes, and the methods of DTensor and DeviceMesh."""
    for module in ("tensor", "tensor.parallel", "tensor.experimental", "tensor.debug", "device_mesh"):
        yield from ((name, getattr(OF_TORCH[module], name), getattr(dtensor, name, None))
                    for name in OF_TORCH[module].__all__)
    for name in ("fully_shard", "FSDPModule", "register_fsdp_forward_method"):
        yield name, getattr(OF_TORCH["fsdp"], name), getattr(dtensor, name)
    for name, here in HERE.items():
        of_torch = getattr(OF_TORCH[MODULES[name]], name)
        for key in vars(of_torch):
            if not key.startswith("_"):
                own = getattr(DTensor, key, None) if key == "from_local" else getattr(here, key, None)
                yield f"{name}.{key}", getattr(of_torch, key), own or (key in here.__annotations__ or None)


def arguments(function):
    """In order, keywords by name; without the object of a method."""
    listed = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "x")]
    named = [p for p in listed if p.kind is p.KEYWORD_ONLY]
    return [(p.name, p.kind, p.default) for p in listed if p not in named], {(p.name, p.default) for p in named}


def left_out():
    """The names of the page's table."""
    page = (ROOT / "docs" / "bridges.md").read_text()
    table = page.partition("| of torch, and not here |")[2].partition("\n\n")[0]
    names = set()
    for line in table.splitlines()[2:]:
        names |= {name.strip("` ") for name in line.split("|")[1].split(",")}
    return names


def test_each_name_of_torch_is_here_or_on_the_page():
    missing = {name for name, _, here in names_of_torch() if here is None}
    listed = left_out()
    assert missing == listed, (sorted(missing - listed), sorted(listed - missing))


def test_arguments_are_those_of_torch():
    differ = {}
    for name, of_torch, here in names_of_torch():
        if here is None or here is of_torch or not callable(of_torch) or here is True or inspect.isdatadescriptor(here):
            continue
        if name not in ARGUMENTS and arguments(of_torch) != arguments(here):
            differ[name] = arguments(of_torch), arguments(here)
    assert not differ, differ
    theirs, ours = (set(inspect.signature(f).parameters) for f in (OF_TORCH["fsdp"].fully_shard, dtensor.fully_shard))
    assert theirs == ours


def test_factories_lie_as_they_are_told():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with mesh:
        for name in ("zeros", "ones", "rand", "randn", "empty"):
            gt.manual_seed(3)
            x = getattr(dtensor, name)(5, 2, placements=[Shard(0)], dtype=torch.float64, requires_grad=True)
            gt.manual_seed(3)
            want = getattr(gt, name)(5, 2, placement=mesh, sbp=gt.sbp.split(0), dtype=torch.float64)
            assert x.placements == (Shard(0),) and x.device_mesh == mesh and x.requires_grad and x.dtype == want.dtype
            if name != "empty":
                torch.testing.assert_close(x.full_tensor(), want.full_tensor())
        for make, numbers in ((dtensor.linspace, [1, 2, 3, 4]), (dtensor.logspace, [10, 100, 1000, 10000])):
            x = make(1, 4, 4, placements=[Shard(0)], requires_grad=True)
            assert x.placements == (Shard(0),) and x.requires_grad and x.full_tensor().tolist() == numbers
        x = dtensor.full((3,), 2.0)
        assert x.placements == (Replicate(),) and x.full_tensor().tolist() == [2, 2, 2]
        assert dtensor.distribute_tensor(torch.ones(4), placements=[Shard(0)]).device_mesh == mesh
    with pytest.raises(gt.ArgumentError, match=r"ones\(...\) without a DeviceMesh(.|\n)*init_device_mesh"):
        dtensor.ones(3)
    with pytest.raises(gt.ArgumentError, match="the shards of a global tensor are dense"):
        dtensor.ones(3, device_mesh=mesh, layout=torch.sparse_coo)


def test_dtypes_of_a_redistribution():
    mesh = init_device_mesh("cpu", (2,))
    x = dtensor.distribute_tensor(torch.randn(4, 2, requires_grad=True), mesh, [Shard(0)])
    with gt.record() as moves:
        y = x.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32 and moves[0].bytes == 2 * 4
    with pytest.raises(gt.ArgumentError, match="forward_dtype=torch.bfloat16"):
        x.redistribute(placements=[Replicate()], backward_dtype=torch.bfloat16)


def test_policies_that_ask_for_nothing_are_taken():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = torch.nn.Linear(4, 4)
    dtensor.fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(), offload_policy=OffloadPolicy())
    dtensor.fully_shard(torch.nn.Linear(4, 4), mesh=mesh, offload_policy=CPUOffloadPolicy())
    for option in ({"offload_policy": True}, {"dp_mesh_dims": ("dp",)}):
        with pytest.raises(gt.ArgumentError, match=f"fully_shard\\({next(iter(option))}="):
            dtensor.fully_shard(torch.nn.Linear(4, 4), mesh=mesh, **option)


def test_a_model_without_memory_is_distributed_and_given_memory():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def rows(name, module, mesh):
        for key, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, torch.nn.Parameter(dtensor.distribute_tensor(p, mesh, [Shard(0)])))

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    dtensor.distribute_module(model, mesh, rows)
    assert all(p.is_meta and isinstance(p, DTensor) for p in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.constant_(p, 1.5)
    assert all(p.device_mesh == mesh and p.placements == (Shard(0),) for p in model.parameters())
    assert model[0].weight.full_tensor().eq(1.5).all() and model[1].running_mean.placements == (Replicate(),)
    part = dtensor.DTensor.from_local(torch.empty(3, 2, device="meta"), mesh, [Shard(0)])
    assert part.is_meta and part.shape == (6, 2)
    assert torch.empty_like(part, device="cpu").device_mesh == mesh
    root = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tp = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",), root=root)
    assert tp.of_type("meta").of_type("cpu").root == root, "a part of a mesh still knows of which"


def test_a_tensor_on_a_mesh_is_saved_and_copied_with_its_mesh():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = dtensor.distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    for y in (torch.load(file)["x"], copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert isinstance(y, DTensor) and y.device_mesh == mesh and y.placements == (Shard(0),)
        assert y.full_tensor().equal(x.full_tensor())


def test_functions_without_the_module_are_called_and_warn():
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(5, 3)

    def split(inputs, mesh):
        return dtensor.distribute_tensor(inputs[0], mesh, [Shard(0)])

    with pytest.warns(FutureWarning, match=r"input_fn without the module.*def input_fn\(module, inputs, device_mesh\)"):
        model = dtensor.distribute_module(torch.nn.Linear(3, 3), mesh, None, split)
    with pytest.warns(FutureWarning, match="output_fn without the module"):
        dtensor.distribute_module(model, mesh, None, None, lambda out, mesh: out.redistribute(placements=[Replicate()]))
    assert model(x).placements == (Replicate(),)
    with pytest.raises(gt.ArgumentError, match="output_fn of 1 argument"):
        dtensor.distribute_module(model, mesh, None, None, lambda out: out)


@pytest.mark.processes
@pytest.mark.parametrize("native", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_a_rank_outside_of_the_mesh_knows_the_shapes_of_parts(native):
    """It has no part to tell them by: local_map gives it one of zeros, and from_local is told, or says so."""
    out = good([*RUN, "-n", 3, PROGRAMS / "outside_mesh.py"], environment(GLOBALTENSOR_NATIVE=native))
    assert out.count("outside:") == 1 and "leaves this rank out" in out, out
