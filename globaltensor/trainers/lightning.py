"""Lightning's Trainer for global models: GlobalTensorStrategy lays a module out, and says how it is run and saved.

    from globaltensor.trainers.lightning import GlobalTensorStrategy
    strategy = GlobalTensorStrategy(gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp")))
    lightning.Trainer(accelerator="cpu", strategy=strategy).fit(module, loader)

In each process the Trainer takes itself for the only one: a loader's batch is the whole one, split along "dp" before a
step sees it. `configure_optimizers` runs when the parameters are global, so that gt.zero can stand there. A checkpoint
is the one of a Trainer on one device, with whole tensors, and either goes on from it.
"""
from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from globaltensor.checkpoint.torch_files import with_whole_tensors
from globaltensor.errors import ArgumentError, expect
from globaltensor.layouts.placement import placement as Placement
from globaltensor.parallel.optimizer_state import globalize_state
from globaltensor.parallel.plan import Plan, parallelize
from globaltensor.runtime.agreement import gather_objects
from globaltensor.runtime.start import init
from globaltensor.runtime.world import rank
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary
from globaltensor.trainers.one_program import placement_of, to_batch, to_plain


def _never() -> bool:
    return False


class GlobalTensorStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # it is Any to mypy
    """Ranks of a placement as if they were one device.

    placement   where gt.parallelize puts the module; None for one that is global by then, such as one that does it in
                configure_model
    plan        of gt.parallelize
    options     of Lightning's strategies: checkpoint_io, precision_plugin
    Raises ArgumentError for a Trainer with several devices or nodes, and what gt.parallelize raises.
    """

    strategy_name = "globaltensor"

    @api_boundary
    def __init__(self, placement: Placement | None = None, plan: Plan | None = None, **options: Any) -> None:
        if placement is not None:
            expect(placement, Placement, "GlobalTensorStrategy on no placement",
                   'GlobalTensorStrategy(gt.placement("cpu", range(4)))')
        init()
        super().__init__("cpu" if placement is None else placement.type, **options)
        self.where, self.plan = placement, plan
        self.global_rank = self.local_rank = rank()
        rank_zero_only.rank = fabric_rank_zero.rank = rank()

    @property
    def parallel_devices(self) -> list[torch.device]:
        """None of Lightning's: the Trainer sets what it was told."""
        return []

    @parallel_devices.setter
    @api_boundary
    def parallel_devices(self, devices: list[Any]) -> None:
        if len(devices) > 1:
            raise ArgumentError(f"Trainer(devices={len(devices)}) with a GlobalTensorStrategy",
                                "ranks are those of the placement", "Trainer(devices=1)")

    @property
    def num_nodes(self) -> int:
        """As Lightning sees it."""
        return 1

    @num_nodes.setter
    @api_boundary
    def num_nodes(self, nodes: int) -> None:
        if nodes > 1:
            raise ArgumentError(f"Trainer(num_nodes={nodes}) with a GlobalTensorStrategy",
                                "hosts are those of the placement", "Trainer(num_nodes=1), under globaltensor run")

    @property
    def is_global_zero(self) -> bool:
        """One rank writes and logs."""
        return rank() == 0

    @api_boundary
    def model_to_device(self) -> None:
        """Lay the module out, unless it is by now."""
        module: Any = self.model
        if not any(isinstance(p, GlobalTensor) for p in module.parameters()) and self.where is not None:
            parallelize(module, self.where, self.plan)
        self.where = placement_of(module)
        for metric in module.modules():              # torchmetrics' would add up what every rank has whole
            if hasattr(metric, "distributed_available_fn"):
                metric.distributed_available_fn = _never

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The batch, which every process has read whole, made global."""
        assert self.where is not None
        return to_batch(super().batch_to_device(batch, *args, **kwargs), self.where)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Plain, whole tensors, which predict() collects."""
        return to_plain(super().predict_step(*args, **kwargs))

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Plain and whole: a global tensor is the sum over its ranks already."""
        return to_plain(tensor)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Plain and whole."""
        return to_plain(tensor)

    def barrier(self, name: str | None = None) -> None:
        gather_objects(None, f"barrier {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank `src` has, such as the folder of this run."""
        return gather_objects(obj, "broadcast")[src]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """One file with whole tensors, by rank 0. Nobody goes on before it is whole; collective."""
        super().save_checkpoint(with_whole_tensors(checkpoint), filepath, storage_options)
        self.barrier("save_checkpoint")

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Of a file with whole tensors, which a Trainer on one device or on any number of ranks has written."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            globalize_state(optimizer)

    def teardown(self) -> None:
        """Lightning's, but the module stays where it is."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
