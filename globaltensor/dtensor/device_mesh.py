"""A placement that answers to torch's names: what `gt.dtensor` makes lies on one, and gives its part as in torch.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh["tp"]                                       the ranks of this process's row, and `mesh` as its root

A `DeviceMesh` does not equal the placement of the same ranks. So a tensor's placement says which meaning `to_local()`
has: here the gradient of the part is that of the part alone, as in torch; of a placement it is that of the sum over all
ranks of what they compute. `x.to_global(placement, sbp)` goes from one to the other.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from globaltensor.dtensor.conversion import to_mesh
from globaltensor.errors import ArgumentError, PlacementError, expect
from globaltensor.layouts.placement import placement
from globaltensor.runtime.world import world
from globaltensor.tracebacks import api_boundary


class DeviceMesh(placement):
    """torch's class, of a placement: `DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))`."""

    root: DeviceMesh
    device_type: str
    mesh_dim_names: tuple[str, ...] | None
    mesh: torch.Tensor                               # the ranks

    @api_boundary
    def __init__(self, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None,
                 root: DeviceMesh | None = None) -> None:
        super().__init__(device_type, mesh, mesh_dim_names)
        for key, value in (("root", root or self), ("device_type", self.type), ("mesh_dim_names", self.axis_names),
                           ("mesh", torch.tensor(self.ranks, device="cpu"))):
            object.__setattr__(self, key, value)

    def __enter__(self) -> DeviceMesh:
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.pop()

    def __repr__(self) -> str:
        return super().__repr__().replace("placement(", "DeviceMesh(", 1).replace("axis_names", "mesh_dim_names")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_mesh, (self.type, self.ranks, self.axis_names)

    @api_boundary
    def of_type(self, type: str) -> DeviceMesh:
        if type == self.type:
            return self
        root = None if self.root is self else self.root.of_type(type)
        return DeviceMesh(type, self.ranks, mesh_dim_names=self.axis_names, root=root)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        name = DeviceMesh.__name__
        return f"{name}({self.type!r}, {self.ranks}, mesh_dim_names={self.axis_names})", {name: DeviceMesh}

    def size(self, mesh_dim: int | None = None) -> int:
        """The number of ranks, or of those along one dim."""
        return len(self.flat) if mesh_dim is None else self.shape[mesh_dim]

    def get_rank(self) -> int:
        return world().rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Where this process's rank is on the mesh; None where it is not."""
        return self.coords.get(world().rank)

    @api_boundary
    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This process's index along one dim. Raises PlacementError for a rank outside, or a dim that is not there."""
        index = self.get_coordinate()
        if index is None:
            raise PlacementError(f"rank {world().rank} is not on {self}", "it has no index there",
                                 "mesh.get_coordinate(), which is None there")
        if mesh_dim is None and self.ndim > 1:
            raise PlacementError(f"get_local_rank of a mesh of {self.ndim} dims", "it has an index along each",
                                 f"mesh.get_local_rank({(self.axis_names or (0,))[0]!r})")
        return index[self._dim(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0]

    @api_boundary
    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """torch's process group of the ranks along one dim, this process's among them: for torch's own collectives on
        plain tensors. The first of a mesh makes the groups of all its dims, for which every process of the world calls
        it. Raises GlobalTensorError in a process that drives several ranks.
        """
        return self._of_torch().get_group(mesh_dim)

    @api_boundary
    def get_all_groups(self) -> list[ProcessGroup]:
        """`get_group` along each dim."""
        return self._of_torch().get_all_groups()

    @api_boundary
    def _of_torch(self) -> TorchMesh:
        if self.root is self:
            return to_mesh(self)
        return to_mesh(self.root)[self.names]

    @api_boundary
    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh along these dims that this process's rank is on; along all of them, the mesh itself.

        Raises PlacementError for names that it does not have, and in a process that drives several ranks, which would
        be on several.
        """
        dims = [self._dim(name) for name in ((names,) if isinstance(names, str) else names)]
        if dims == list(range(self.ndim)):
            return self
        if len(world().local_ranks) > 1:
            raise PlacementError(f"mesh[{names!r}] in a process that drives {len(world().local_ranks)} ranks",
                                 "they are on different parts of the mesh",
                                 f"globaltensor run -n {world().size} ..., or torchrun")
        index = self.get_coordinate() or (0,) * self.ndim
        ranks = self.mesh[tuple(slice(None) if d in dims else i for d, i in enumerate(index))]
        ranks = ranks.permute([sorted(dims).index(d) for d in dims])
        return DeviceMesh(self.type, ranks, mesh_dim_names=[(self.axis_names or ())[d] for d in dims], root=self.root)

    def _dim(self, name: str) -> int:
        names = self.axis_names or ()
        if name not in names:
            raise PlacementError(f"the mesh has no dim {name!r}", f"it has {', '.join(names) or 'dims without names'}",
                                 f"init_device_mesh(..., mesh_dim_names=({name!r}, ...))")
        return names.index(name)


def _rebuild_mesh(device_type: str, ranks: Any, names: Sequence[str] | None) -> DeviceMesh:
    return DeviceMesh(device_type, ranks, mesh_dim_names=names)


torch.serialization.add_safe_globals([_rebuild_mesh])            # `torch.load` of a tensor on a mesh
_current: list[DeviceMesh] = []                      # of the `with` blocks that the program is in


def mesh_or_current(mesh: DeviceMesh | None, what: str) -> DeviceMesh:
    """The mesh that was given, or that of the `with` block. Raises ArgumentError for none; `what` needs it."""
    if mesh is None and _current:
        return _current[-1]
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"{what} without a DeviceMesh of gt.dtensor", f"device_mesh is {mesh!r}, and no mesh is "
                            "the one of a `with` block", 'init_device_mesh("cpu", (2,)), of globaltensor.dtensor')
    return mesh


@api_boundary
def init_device_mesh(device_type: str, mesh_shape: Sequence[int], *,
                     mesh_dim_names: Sequence[str] | None = None) -> DeviceMesh:
    """The first ranks of the world, in a mesh of this shape."""
    expect(mesh_shape, Sequence, f"init_device_mesh of shape {mesh_shape!r}", 'init_device_mesh("cpu", (2, 2))')
    asked: Any = mesh_shape                          # a text is a Sequence, too
    if isinstance(asked, str) or not all(isinstance(n, int) and n > 0 for n in asked):
        raise ArgumentError(f"init_device_mesh of shape {mesh_shape!r}", "it has a number of ranks for each dim",
                            'init_device_mesh("cpu", (2, 2))')
    ranks = torch.arange(torch.Size(mesh_shape).numel(), device="cpu").view(*mesh_shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names)
