"""What the user sees of an error: their own lines, and of torch's errors the operands with their layouts."""
from __future__ import annotations

import ast
import copy
import inspect
import os
import re
import signal
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import PYTHON, by_hand, environment, good
from test_errors import MISTAKES, B, S, on, ones
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map_only

import globaltensor as gt
from globaltensor.errors import OURS, TORCH, GlobalTensorError, TransportError
from globaltensor.runtime import start, world
from globaltensor.runtime.native import torch_ext


def frames(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def raised(mistake) -> Exception:
    try:
        mistake()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def weight(*size):
    return torch.nn.Linear(*size).to_global(on(), B)


# what torch refuses, its class, a part of its text, and of the note: a row per operand
OF_TORCH = {
    "product": (lambda: ones(4, 3, sbp=S(0)) @ ones(5, 6), RuntimeError, "cannot be multiplied (4x3 and 5x6)",
                ["self:  [4, 3] torch.float32 on placement(\"cpu\", [0, 1]) S(0)", "mat2:  [5, 6] torch.float32 on"]),
    "batched product": (lambda: ones(2, 4, 3, sbp=S(0)) @ ones(5, 6), RuntimeError, "input of shape [2, 4, 3]",
                        ["input: [2, 4, 3]", "other: [5, 6]"]),
    "linear": (lambda: weight(4, 2)(ones(4, 3, sbp=S(0))), RuntimeError, "weight of shape [2, 4]",
               ["input:  [4, 3] torch.float32 on placement(\"cpu\", [0, 1]) S(0)", "weight: [2, 4]"]),
    "sum of shapes": (lambda: ones(4, 3, sbp=S(1)) + ones(5), RuntimeError, "must match",
                      ["self:  [4, 3] torch.float32 on placement(\"cpu\", [0, 1]) S(1)", "other: [5]"]),
    "beside a plain one": (lambda: ones(4, 3) * torch.ones(7), RuntimeError, "must match",
                           ["other: [7] torch.float32, a plain tensor"]),
    "list": (lambda: torch.cat([ones(4, 3), ones(4, 5)]), RuntimeError, "Sizes of tensors must match",
             ["tensors[0]: [4, 3]", "tensors[1]: [4, 5]"]),
    "dim": (lambda: ones(4, 3).sum(5), IndexError, "Dimension out of range", ["self:  [4, 3]"]),
    "view": (lambda: ones(4, 3).view(7), RuntimeError, "invalid for input of size 12", ["self:  [4, 3]"]),
    "dtype": (lambda: torch.softmax(ones(4, 3).long(), 1), NotImplementedError, "not implemented for 'Long'",
              ["self:  [4, 3] torch.int64"]),
    "dtypes": (lambda: ones(4, 3) @ ones(3, 2).double(), RuntimeError, "same dtype", ["mat2:  [3, 2] torch.float64"]),
    "values": (lambda: torch.linalg.svd(gt.full((3, 3), float("nan"), placement=on(), sbp=B)), torch.linalg.LinAlgError,
               "failed to converge", ["A:     [3, 3]"]),
}


@pytest.mark.parametrize("read", [bool, int, float, complex, range])
def test_a_number_of_several_elements_is_an_error_at_the_programs_line(read):
    here, plain = (raised(lambda x=x: read(x)) for x in (ones(4, 3), torch.ones(4, 3)))
    assert type(here) is type(plain) and str(here) == str(plain)
    assert not any(file.startswith(OURS) for file in frames(here)) and "test_tracebacks.py:" in here.__notes__[0]


def assigned(x, name, value):
    setattr(x, name, value)


# what torch's code in C++, which has no frames, raises right below a function of ours
HANDED_ON = {
    "x[9] = 1": lambda x: x.__setitem__(9, 1), "x[mask] = 1": lambda x: x.__setitem__(x[:3, :2] > 0, 1),
    "format": lambda x: format(x, ".2f"), "numpy": lambda x: x.requires_grad_().numpy(),
    "asarray": lambda x: np.asarray(x.requires_grad_()), "split": lambda x: x.split(-1),
    "split by sizes": lambda x: x.split([1, 1]), "chunk": lambda x: x.chunk(0),
    "deepcopy": lambda x: copy.deepcopy(x.requires_grad_() * 2), "type": lambda x: x.type("none"),
    "view_as": lambda x: x.view_as(x[:1]), "requires_grad_": lambda x: x.long().requires_grad_(),
    "requires_grad": lambda x: assigned(x.long(), "requires_grad", True),
    "grad": lambda x: assigned(x, "grad", 3), "grad of another shape": lambda x: assigned(x, "grad", x[0]),
}


@pytest.mark.parametrize("sbp", [B, S(0)], ids=str)
@pytest.mark.parametrize("name", HANDED_ON)
def test_what_torch_raises_below_a_function_of_ours_is_folded(name, sbp):
    here, plain = (raised(lambda x=x: HANDED_ON[name](x)) for x in (ones(4, 3, sbp=sbp), torch.ones(4, 3)))
    assert type(here) is type(plain)
    words, plain_words = (str(error).replace("GlobalTensor.__f", "Tensor.__f").split() for error in (here, plain))
    assert words[:5] == plain_words[:5]
    assert not [file for file in frames(here) if file.startswith(OURS)], frames(here)
    assert "where: " in here.__notes__[0]


def pairs(x):
    return torch.complex(x, x)


# what torch's code in C++, or Python's, warns of right below a function of ours
WARNED = {
    "copy_": lambda x: torch.zeros_like(x).copy_(pairs(x)), "x[0] = z": lambda x: x.__setitem__(0, pairs(x)[0]),
    "x[:] = z": lambda x: x.__setitem__(slice(None), pairs(x)), "float()": lambda x: pairs(x).float(),
    "type": lambda x: pairs(x).type(torch.float32), "grad": lambda x: (x.requires_grad_() * 2).grad,
    "float": lambda x: float(x.requires_grad_()[0, 0]), "complex": lambda x: complex(x.requires_grad_()[0, 0]),
    "new_tensor": lambda x: x.new_tensor(x), "T": lambda x: x[0].T, "variance": lambda x: x.var(1, correction=5),
    "variance of columns": lambda x: x.std(0, correction=9), "backward": lambda x: (
        x.requires_grad_() * 2).sum().backward(create_graph=True),
}


@pytest.mark.parametrize("sbp", [B, S(0), S(1)], ids=str)
@pytest.mark.parametrize("name", WARNED)
def test_what_torch_warns_of_is_told_at_the_programs_line(name, sbp):
    heard, always = [], torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        for x in (torch.ones(4, 3), ones(4, 3, sbp=sbp)):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                WARNED[name](x)
            heard.append({(one.category, str(one.message), one.lineno, os.path.abspath(one.filename)) for one in told})
    finally:
        torch.set_warn_always(always)
    assert heard[0] == heard[1] and len(heard[0]) == 1


def test_data_that_is_a_tensor_is_warned_of_at_the_programs_line():
    with pytest.warns(UserWarning, match="To copy construct") as told:
        gt.tensor(torch.ones(3), placement=on(), sbp=B)
    assert os.path.abspath(told[0].filename) == __file__


OPS = [op for op in op_db if op.error_inputs_func is not None]


@pytest.mark.parametrize("op", OPS[int(os.environ.get("SEED", "0")) % 10::10], ids=lambda op: op.formatted_name)
@pytest.mark.filterwarnings("ignore")
def test_errors_of_torchs_own_tests_show_no_frame_of_ours(op):
    for error in op.error_inputs("cpu"):
        for sbp in (B, S(0)):
            def spread(t, sbp=sbp):
                return t if t.is_sparse or t.layout != torch.strided else gt.from_full(
                    t.detach(), on(), sbp if t.dim() else B).requires_grad_(t.requires_grad)

            sample = error.sample_input
            operands = tree_map_only(torch.Tensor, spread, (sample.input, sample.args, sample.kwargs))
            for function in {op.op, op.method_variant, op.inplace_variant} - {None}:
                try:
                    function(operands[0], *operands[1], **operands[2])
                except Exception as caught:
                    assert not [file for file in frames(caught) if file.startswith(OURS)], caught


# of a library that asks for an address, by functions of torch's that stand between
@pytest.mark.parametrize("name", [name for name in MISTAKES if name != "saved by a library"])
def test_no_frame_of_ours_is_seen(name):
    error = raised(MISTAKES[name][0])
    assert isinstance(error, GlobalTensorError)
    assert frames(error)[0] == __file__ and not [file for file in frames(error) if file.startswith((OURS, TORCH))]


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("times", [1, 3])
def test_an_error_of_torch_tells_the_operands(name, times):
    mistake, kind, text, rows = OF_TORCH[name]
    for _ in range(times):                           # what comes a second time may be cached
        error = raised(mistake)
        assert type(error) is kind and text in str(error), error
        note, = error.__notes__
        assert "  op:" in note and "test_tracebacks.py:" in note and all(row in note for row in rows), note
        assert not [file for file in frames(error) if file.startswith(OURS)]
        assert name == "linear" or not [file for file in frames(error) if file.startswith(TORCH)]


@pytest.mark.skipif(torch_ext is None, reason="the native code is not built")
def test_the_native_path_tells_them_too():
    for _ in range(3):
        torch.linalg.svd(gt.eye(5, placement=on(), sbp=B))           # decided, cached, and run natively
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("globaltensor.dispatch.core._run_arrived", None)           # it does not come to Python
        error = raised(lambda: torch.linalg.svd(gt.full((5, 5), float("nan"), placement=on(), sbp=B)))
    assert type(error) is torch.linalg.LinAlgError and "A:     [5, 5]" in error.__notes__[0], error


def test_all_frames_are_seen_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("GLOBALTENSOR_TRACEBACK", "full")
    for mistake in (MISTAKES["mixed placements"][0], OF_TORCH["product"][0]):
        assert len([file for file in frames(raised(mistake)) if file.startswith(OURS)]) >= 3


def test_a_mistake_of_ours_is_not_folded(monkeypatch):
    monkeypatch.setattr("globaltensor.dispatch.core.find", lambda *_: {}["none"])
    error = raised(lambda: torch.nextafter(ones(43), ones(43)))       # which nothing before has decided
    assert type(error) is KeyError and [file for file in frames(error) if file.startswith(OURS)]


@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [lambda: ones(4, 3, sbp=S(0)).softmax(0), lambda: ones(4, sbp=S(0)).full_tensor(),
                                  lambda: ones(4, sbp=S(0)).to_global(sbp=B)])
def test_a_signal_handler_that_raises_while_our_code_runs_is_seen_below_the_line_of_the_program(call, kind):
    def handler(*_):
        raise kind("too slow")

    def interrupted(frame, event, arg):              # as a signal comes between two instructions
        if frame.f_code.co_filename.startswith(OURS + "boxings"):
            sys.settrace(None)
            frame.f_trace = None
            at.append(frame)
            signal.raise_signal(signal.SIGUSR1)
        return interrupted

    at: list[object] = []
    before, traced = signal.signal(signal.SIGUSR1, handler), sys.gettrace()
    try:
        sys.settrace(interrupted)
        call()
    except kind as error:
        assert not getattr(error, "__notes__", []) and not [file for file in frames(error) if file.startswith(OURS)]
        assert traceback.extract_tb(error.__traceback__)[-1].name == "handler"
    finally:
        sys.settrace(traced)
        signal.signal(signal.SIGUSR1, before)
    assert at


def test_the_frames_of_a_function_that_the_user_gave_stay():
    def mine(x):
        return helper(x)

    def helper(x):
        return x.to_global(sbp=S(7))

    error = raised(lambda: gt.explain(mine, ones(4)))
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-3:] == ["<lambda>", "mine", "helper"], names
    wrong = raised(lambda: gt.explain(lambda: {}["none"]))           # the user's own error: all of it is shown
    assert type(wrong) is KeyError and [file for file in frames(wrong) if file.startswith(OURS)]


def test_causes_are_kept_and_folded(tmp_path):
    def cause():
        try:
            ones(4).to_global(sbp=S(7))
        except GlobalTensorError as error:
            raise ValueError("the user's own") from error

    error = raised(cause)
    assert isinstance(error.__cause__, GlobalTensorError) and frames(error.__cause__) == [__file__]
    (tmp_path / "file").write_text("no folder")
    error = raised(lambda: gt.save({"x": ones(4)}, tmp_path / "file" / "checkpoint"))
    assert isinstance(error, GlobalTensorError) and frames(error)[-1] == __file__
    chain = [error.__cause__ or error.__context__]
    assert chain[0] is not None and not [file for file in frames(chain[0]) if file.startswith(OURS)]


@pytest.mark.parametrize("batches", [
    lambda: gt.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 3)), 4, on(), S(0),
                               collate_fn=lambda samples: torch.ones(1, 2)),
    lambda: gt.data.from_ranks(lambda rank: [(torch.ones(2, 2), torch.ones(3))], on())])
def test_no_frame_of_a_loader_is_seen(batches):
    error = raised(lambda: list(batches()))
    assert isinstance(error, GlobalTensorError) and set(frames(error)) == {__file__}, frames(error)


def test_backward_errors_show_the_call_of_backward():
    z = ones(4, 4, sbp=S(0)).requires_grad_()
    loss = (z @ z).softmax(0).sum()

    def forbidden():
        with gt.boxing("forbid"):
            loss.backward()
    error = raised(forbidden)
    assert isinstance(error, GlobalTensorError) and not [f for f in frames(error) if f.startswith(OURS)]


# functions of public classes that need be no boundary: they only ask, only make what they were given into an object,
# or raise what torch and Python raise
OPEN = {
    "GlobalTensor": "wrap_traced placement sbp is_global to_global with_dealt_parts data requires_grad copy_ "
                    "new_tensor new data_ptr untyped_storage device_mesh placements",
    "Plan": "axes __getitem__ __iter__ __len__",
    "Strategy": "as_text",
    "data.DataLoader": "__len__ epoch state_dict",
    "data.Sampler": "epoch resize state_dict __len__ count_batches order batches yielded ended",
    "dtensor.ColwiseParallel": "__init__",
    "dtensor.RowwiseParallel": "__init__",
    "dtensor.FSDPModule": "unshard reshard reset_iter_state set_is_last_backward set_requires_gradient_sync "
                          "set_requires_all_reduce set_reshard_after_forward set_reshard_after_backward "
                          "set_modules_to_forward_prefetch set_modules_to_backward_prefetch set_post_optim_event "
                          "set_force_sum_reduction_for_comms set_reduce_scatter_max_input_buffers "
                          "set_separate_reduce_scatter_group set_unshard_in_backward "
                          "set_allocate_memory_from_process_group_for_comm set_symm_mem_for_comm "
                          "set_reduce_scatter_divide_factor",
    "dtensor.DeviceMesh": "__enter__ __exit__ size get_rank get_coordinate",
    "placement": "ranks_along",
}
PUBLIC_OPERATORS = {"__init__", "__new__", "__call__", "__iter__", "__getitem__", "__len__", "__enter__", "__exit__"}


def is_open(function) -> bool:
    return (inspect.isfunction(function) and not hasattr(function, "__wrapped__")
            and function.__code__.co_filename.startswith(OURS))


def public(name, value):
    """(name, function) of all functions of a public name: of a room its names', of a class its own methods."""
    if inspect.ismodule(value):
        for each in getattr(value, "__all__", ()):
            yield from public(f"{name}.{each}", getattr(value, each))
    elif inspect.isclass(value) and not issubclass(value, BaseException):
        for each, method in vars(value).items():
            if not each.startswith("_") or each in PUBLIC_OPERATORS:
                for function in (method.fget, method.fset) if isinstance(method, property) else (method,):
                    yield f"{name}.{each}", getattr(function, "__func__", function)
    else:
        yield name, value


def test_every_function_of_the_face_is_a_boundary():
    assert gt.dtensor.DeviceMesh                     # which teaches global tensors what torch's programs ask
    open_ones = {name for face in gt.FACE for name, function in public(face, getattr(gt, face)) if is_open(function)}
    assert open_ones == {f"{name}.{each}" for name, all_of_it in OPEN.items() for each in all_of_it.split()}


class Short(gt.data.Sampler):
    def order(self, epoch):
        return [1]


BELOW_THE_FACE = {
    "as_subclass": lambda: ones(4).as_subclass(int),
    "to_dtensor": lambda: ones(4).to_dtensor(),
    "of_type": lambda: on().of_type("none"),
    "DeviceMesh": lambda: gt.dtensor.DeviceMesh("cpu", [[0, 0]]),
    "get_group": lambda: gt.dtensor.DeviceMesh("cpu", [0, 1]).get_group(),
    "get_all_groups": lambda: gt.dtensor.DeviceMesh("cpu", [0, 1]).get_all_groups(),
    "SequenceParallel": lambda: gt.dtensor.SequenceParallel(sequence_dim="x"),
    "PrepareModuleInput": lambda: gt.dtensor.PrepareModuleInput(input_layouts=gt.dtensor.Shard(0)),
    "PrepareModuleOutput": lambda: gt.dtensor.PrepareModuleOutput(output_layouts=gt.dtensor.Shard(0),
                                                                      desired_output_layouts=()),
    "PrepareModuleInputOutput": lambda: gt.dtensor.PrepareModuleInputOutput(
        output_layouts=gt.dtensor.Shard(0), desired_output_layouts=()),
    "Sampler": lambda: list(Short(3, 2)),
}


@pytest.mark.parametrize("name", BELOW_THE_FACE)
def test_errors_of_methods_show_no_frame_of_ours(name):
    error = raised(BELOW_THE_FACE[name])
    assert set(frames(error)) == {__file__}, frames(error)


@pytest.mark.parametrize("ask", [lambda: gt.rank(), lambda: gt.world_size(), lambda: gt.placement.all("cpu"),
                                 lambda: gt.placement("cpu", [0]), lambda: gt.init()])
def test_a_world_that_cannot_start_shows_the_line_that_asked_for_it(ask, monkeypatch):
    def fail(*args):
        raise TransportError("no rank came", "a test", "none")

    exec(compile("def in_ours(*args):\n    fail()", f"{OURS}start.py", "exec"), made := {"fail": fail})
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(world, "_start_world", made["in_ours"])
    monkeypatch.setattr(start, "recognize_launcher", made["in_ours"])
    error = raised(ask)
    assert isinstance(error, TransportError) and set(frames(error)) == {__file__}, frames(error)


def test_all_that_native_code_calls_is_a_boundary():
    """No frame of ours stands above it, once an op is decided in native code. `on_...(f)` hands f over."""
    calls = [call for path in Path(OURS).rglob("*.py") for call in ast.walk(ast.parse(path.read_text()))
             if isinstance(call, ast.Call) and re.match(r"torch_ext\.on_", ast.unparse(call.func))]
    hooks = [ast.unparse(hook) for call in calls for hook in call.args]
    assert len(hooks) > 10
    open_ones = [hook for hook in hooks if "api_boundary" not in hook]
    assert not open_ones, open_ones


ALONE = """
import torch
import globaltensor as gt
x = gt.ones(6, 6, placement=gt.placement("cpu", [0, 1]), sbp="S(0)")
w = torch.nn.Linear(6, 6).to_global(x.placement, gt.sbp.broadcast)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
def step():
    {step}
for _ in range(3):                                   # what comes again is decided in native code
    step()
if gt.rank() == 0:
    step()
"""
WARM = {
    "a loss": "torch.nn.functional.cross_entropy(w(x), torch.arange(6))",
    "a backward pass": "w(x).sum().backward(); w.weight.grad.to_local()",
    "an optimizer": "w(x).sum().backward(); optimizer.step(); optimizer.zero_grad()",
}


@pytest.mark.parametrize("name", WARM)
def test_an_error_of_ops_between_processes_shows_no_frame_of_ours(name, tmp_path):
    program = tmp_path / "alone.py"
    program.write_text(ALONE.format(step=WARM[name]))
    code, _, told = by_hand([program], 2)[0].end(45)
    assert code == 1 and "Error: " in told and "alone.py" in told and f'File "{OURS}' not in told, told


@pytest.mark.usefixtures("real_processes")
def test_the_default_hook_prints_the_user_s_line_alone(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import globaltensor as gt\nP = gt.placement('cpu', [0, 1])\n"
                       "try:\n    gt.ones(4, 3, placement=P, sbp='S(9)')\n"
                       "except gt.GlobalTensorError:\n    import traceback\n    print(traceback.format_exc())\n")
    told = good([PYTHON, program], environment())
    assert told.count("File ") == 1 and "program.py" in told and "split(9) of a tensor of 2 dims" in told, told
