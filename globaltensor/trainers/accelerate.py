"""accelerate's Accelerator for global models: a loop that was written for one device, or for DDP, on dp x tp ranks.

    from globaltensor.trainers.accelerate import Accelerator                     # not from accelerate
    gt.parallelize(model, gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp")))   # before the optimizer is made
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

It is accelerate's own class, with other doors. `num_processes` is 1: a loader's batch is the whole one, split along
"dp". `prepare` wraps no model in DDP and moves none. What `gather`, `gather_for_metrics` and `get_state_dict` give is
plain and whole, and so is what `save_state` writes, which accelerate loads into the model on one device.
`is_main_process` is true in the process of rank 0 only, so that it alone prints, logs and writes.
"""
from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import MODEL_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import nn

from globaltensor.checkpoint.torch_files import with_whole_tensors
from globaltensor.errors import ArgumentError, GlobalTensorError
from globaltensor.layouts.placement import placement
from globaltensor.parallel.optimizer_state import globalize_state
from globaltensor.runtime.agreement import gather_objects
from globaltensor.runtime.world import rank
from globaltensor.tracebacks import api_boundary
from globaltensor.trainers.one_program import (
    check_optimizer,
    load_plain_state,
    placement_of,
    seen_as_one_process,
    to_batch,
    to_plain,
)

_ZERO, _AXES = "gt.zero(optimizer, stage={}) before prepare", "the axes of the placement in gt.parallelize"
_INSTEAD = {"deepspeed_plugin": _ZERO.format(1), "deepspeed_plugins": _ZERO.format(1), "fsdp_plugin": _ZERO.format(3),
            "megatron_lm_plugin": _AXES, "torch_tp_plugin": _AXES, "parallelism_config": _AXES,
            "device_placement": "Accelerator(), without it"}
_BY_LAUNCHER = {f"ACCELERATE_USE_{name}": instead for name, instead in (
    ("DEEPSPEED", _ZERO.format(1)), ("FSDP", _ZERO.format(3)), ("MEGATRON_LM", _AXES), ("PARALLELISM_CONFIG", _AXES))}


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # it is Any to mypy
    """accelerate's own, of models whose parameters are global. Raises ArgumentError for what would split, move or
    offload a model in another way: plugins of DeepSpeed, FSDP and Megatron-LM, parallelism_config, device_placement."""

    @api_boundary
    def __init__(self, device_placement: bool = False, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(accelerate.Accelerator).bind(device_placement, *args, **kwargs).arguments
        for name, instead in _INSTEAD.items():
            if value := arguments.get(name):
                raise ArgumentError(f"Accelerator({name}={value!r:.200}) for global models",
                                    "it splits or moves a model itself, and global parameters lie as they do", instead)
        for name, instead in _BY_LAUNCHER.items():
            if os.environ.get(name, "").lower() in ("true", "1"):
                raise ArgumentError(f"{name} in the environment of an Accelerator of globaltensor", "accelerate launch "
                                    "sets it, to split a model itself", f"globaltensor run, and {instead}")
        _check_loading(arguments.get("dataloader_config"))
        self.where: placement | None = None
        with seen_as_one_process():
            state = PartialState(cpu=arguments.get("cpu", False))
            if state.num_processes > 1:
                raise GlobalTensorError(f"accelerate has started with {state.num_processes} processes already",
                                        "each would take itself for one of several replicas",
                                        "make this Accelerator before all else of accelerate")
            # one process in what it computes, but rank 0 alone prints and writes
            state.process_index = state.local_process_index = rank()
            super().__init__(device_placement, *args, **kwargs)
        if self.mixed_precision == "fp8":
            raise ArgumentError("mixed_precision='fp8' of global models",
                                "its layers would replace those that the plan has split", 'mixed_precision="bf16"')

    @api_boundary
    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """accelerate's: the same objects, in the same order."""
        _check_not_moved(device_placement)
        for one in args:                             # here, where an error can name the program's line
            if isinstance(one, nn.Module):
                _placement_to_train_on(one)
            elif isinstance(one, torch.optim.Optimizer):
                check_optimizer(one)
        return super().prepare(*args)

    @api_boundary
    def prepare_model(self, model: nn.Module, device_placement: bool | None = None,
                      evaluation_mode: bool = False) -> nn.Module:
        """accelerate's, without DDP. Raises GlobalTensorError for a plain model, and for one that it has offloaded."""
        _check_not_moved(device_placement)
        where = _placement_to_train_on(model)
        self.where = self.where or where
        return super().prepare_model(model, device_placement=False, evaluation_mode=evaluation_mode)

    @api_boundary
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """accelerate's, whose state_dict has plain, whole tensors."""
        _check_not_moved(device_placement)
        check_optimizer(optimizer)
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        prepared.__class__ = _OptimizerOfGlobals     # made by accelerate, by no name that a class could replace
        return prepared

    @api_boundary
    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None,
                            slice_fn_for_dispatch: Any = None) -> Any:
        """accelerate's, whose batches are global."""
        _check_not_moved(device_placement)
        if isinstance(data_loader, _GlobalBatches):  # prepared already
            return data_loader
        return self._with_global_batches(super().prepare_data_loader(data_loader, device_placement=False))

    @api_boundary
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """accelerate's, whose batches are global."""
        return self._with_global_batches(super().skip_first_batches(dataloader, num_batches))

    def _with_global_batches(self, loader: Any) -> Any:
        return _GlobalBatches(loader, self) if type(loader) is DataLoaderShard else loader

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """accelerate's: the norm of the whole gradients, as a plain number."""
        return to_plain(super().clip_grad_norm_(parameters, max_norm, norm_type))

    def gather(self, tensor: Any) -> Any:
        """Plain, whole tensors for global ones; collective."""
        return super().gather(to_plain(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Plain, whole tensors for global ones, of a last batch too its own rows only; collective."""
        return super().gather_for_metrics(to_plain(input_data), use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Plain, whole tensors for global ones, which are sums over ranks already; collective."""
        return super().reduce(to_plain(tensor), reduction, scale)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """A model's, with plain, whole tensors; collective."""
        return with_whole_tensors(super().get_state_dict(model, unwrap))

    def wait_for_everyone(self) -> None:
        """Until all processes are here."""
        gather_objects(None, "Accelerator.wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The process of rank 0 goes through the block before the others."""
        if rank() != 0:
            self.wait_for_everyone()
        yield
        if rank() == 0:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    @api_boundary
    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """accelerate's: rank 0 writes. Nobody goes on before the files are whole; collective."""
        super().save_model(*args, **kwargs)
        self.wait_for_everyone()

    @api_boundary
    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """accelerate's: rank 0 writes what one device would. Nobody goes on before the files are whole; collective."""
        where = super().save_state(*args, **kwargs)
        self.wait_for_everyone()
        return where

    @api_boundary
    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """accelerate's, of a folder that any number of ranks, or a plain program, has written."""
        def load_models(models: list[nn.Module], folder: str) -> None:
            if not (Path(folder) / f"{RNG_STATE_NAME}_0.pkl").is_file():
                raise ArgumentError(f"{folder} has no {RNG_STATE_NAME}_0.pkl",
                                    "save_state has not come to its end there", "load_state of an older folder")
            for i, model in enumerate(models):
                load_plain_state(model, _saved_weights(Path(folder), f"_{i}" if i else ""))
            models.clear()                           # theirs would look for tied weights by their memory
            self.state.process_index = 0             # its random numbers are everybody's

        handle = self.register_load_state_pre_hook(load_models)
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
            self.state.process_index = rank()


class _OptimizerOfGlobals(AcceleratedOptimizer):  # type: ignore[misc]  # it is Any to mypy
    """accelerate's, whose state goes in and out as plain, whole tensors; collective."""

    def state_dict(self) -> Any:
        return with_whole_tensors(super().state_dict())

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        globalize_state(self.optimizer)


class _GlobalBatches(DataLoaderShard):  # type: ignore[misc]  # it is Any to mypy
    """A loader of accelerate's whose batches, which every process reads whole, come out global."""

    def __init__(self, loader: DataLoaderShard, accelerator: Accelerator) -> None:
        self.__dict__.update(loader.__dict__, accelerator=accelerator)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self.accelerator.where is None:
                raise GlobalTensorError("a batch of a prepared loader before a model was prepared",
                                        "it goes where the model is", "accelerator.prepare(model, optimizer, loader)")
            yield to_batch(batch, self.accelerator.where)


def _placement_to_train_on(model: nn.Module) -> placement:
    """Raises GlobalTensorError for a plain model, and for one whose weights accelerate moves by hooks."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise GlobalTensorError(f"a {type(model).__name__} that accelerate has offloaded or dispatched",
                                "its hooks move weights, and global parameters lie as they do",
                                "no device_map and no cpu_offload")
    return placement_of(model)


def _check_not_moved(device_placement: Any) -> None:
    if device_placement is True or isinstance(device_placement, (list, tuple)) and any(device_placement):
        raise ArgumentError(f"prepare(..., device_placement={device_placement!r}) of global models",
                            "parameters lie where their placement says", "prepare(...), without it")


def _check_loading(config: Any) -> None:
    for name, instead in (("dispatch_batches", "DataLoaderConfiguration() without it: each process reads the batch"),
                          ("use_stateful_dataloader", "accelerator.skip_first_batches(loader, n)")):
        if getattr(config, name, None):
            raise ArgumentError(f"DataLoaderConfiguration({name}=True) with global models",
                                "batches are read whole in every process, and no process hands them to others", instead)


def _saved_weights(folder: Path, suffix: str) -> dict[str, torch.Tensor]:
    """What save_state wrote of a model: by safetensors, or with safe_serialization=False."""
    if (safe := folder / f"{SAFE_MODEL_NAME}{suffix}.safetensors").is_file():
        return load_file(safe)
    if (file := folder / f"{MODEL_NAME}{suffix}.bin").is_file():
        return torch.load(file, map_location="cpu", weights_only=True)
    raise ArgumentError(f"{folder} has neither {safe.name} nor {file.name}",
                        "save_state writes one for each model that was prepared",
                        "the same models, and the folder that save_state was told")
