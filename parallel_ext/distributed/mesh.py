"""The ranks of a job as a grid: its tp, dp, ep and edp groups."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel_ext import _C
from parallel_ext.distributed.background import Background
from parallel_ext.distributed.barrier import join_job
from parallel_ext.distributed.control import ControlPlane, world
from parallel_ext.distributed.errors import check_positive
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.ops import ALONE, Group
from parallel_ext.version import VERSION


def _grid(size: int, inner: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the rows of ``inner`` consecutive ranks each, and the columns across the rows."""
    rows = [list(range(first, first + inner)) for first in range(0, size, inner)]
    return rows, [list(column) for column in zip(*rows, strict=True)]


def _refuse_shared_gpus(control: ControlPlane, device: torch.device) -> None:
    """Raise on all ranks if two of them have one GPU, of which NCCL's own error names neither."""
    # Not by its index, which each host counts for itself.
    own = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    first: dict[str, int] = {}
    for rank, gpu in enumerate(control.all_gather_object(str(own or ""), op_name="init_mesh")):
        other = first.setdefault(gpu, rank)
        if gpu and other != rank:
            raise RuntimeError(
                f"init_mesh: ranks {other} and {rank} have the same GPU, {gpu}, which NCCL does "
                "not allow; start no more ranks on a host than it has GPUs, or initialise "
                "torch.distributed with gloo before, through which ranks may share one"
            )


class Mesh:
    """The ranks of a job as a grid ``(dp, tp)``, tp innermost, made by :func:`init_mesh`.

    The experts of a mixture see the same ranks as a grid ``(edp, ep)``, ep innermost.

    Attributes:
        rank, world_size: of the whole job.
        timeout: seconds after which a rank that does not come is reported.
        tp_rank, tp_size: position among the ranks that share a model; they get the same batch.
        dp_rank, dp_size: which replica of the model this is; feed them to a sampler.
        ep_rank, ep_size: position among the ranks over which the experts are sharded.
        edp_rank, edp_size: which replica of the experts this is.
        tp, dp, ep, edp: the groups as the ops take them.
        device: where the parameters of this rank live.
        control: of this package alone, by which the ranks wait for and talk to each other; others
            use torch.distributed.
        background: what the ranks do behind training.
    """

    live: weakref.WeakSet[Mesh] = weakref.WeakSet()
    last: Mesh | None = None  # what init_mesh has made last, unless it was closed

    def __init__(self, tp: int, ep: int, dp: int, timeout: float, device: torch.device) -> None:
        self.control = ControlPlane(timeout, "init_mesh")
        Mesh.live.add(self)
        self.rank, self.world_size, self.timeout = *world(), timeout
        self.tp_size, self.dp_size, self.ep_size = tp, dp, ep
        self.dp_rank, self.tp_rank = divmod(self.rank, tp)
        self.edp_size = self.world_size // ep
        self.edp_rank, self.ep_rank = divmod(self.rank, ep)
        self.device = device
        self.background = Background(self.control)
        self.tp = self.dp = self.ep = self.edp = self.tp_control = ALONE
        self._made_of: dict[str, Group] = {}  # by the ranks of all groups of one kind
        if self.world_size == 1:
            return
        asked = {"tp": tp, "ep": ep, "dp": dp, "timeout": timeout, "device": device.type}
        asked |= {"parallel_ext": VERSION, "torch": torch.__version__.partition("+")[0]}
        require_equal(self.control, "init_mesh", asked)
        if device.type == "cuda" and "cuda:nccl" in dist.get_backend_config():
            _refuse_shared_gpus(self.control, device)
        tp_rows, dp_columns = _grid(self.world_size, tp)
        ep_rows, edp_columns = _grid(self.world_size, ep)
        self._names = {"tp": tp_rows, "dp": dp_columns, "ep": ep_rows}
        if ep > 1:  # else all ranks, as tp or dp may be
            self._names["edp"] = edp_columns
        self.tp, self.dp = self._group_of(tp_rows), self._group_of(dp_columns)
        self.ep, self.edp = self._group_of(ep_rows), self._group_of(edp_columns)
        if tp > 1:
            self.tp_control = self.control.new_group(
                tp_rows, backend="gloo", group_desc="tp control"
            )
        self.control.members = {
            self.edp: f"every edp rank of ep_rank {self.ep_rank}",
            self.dp: f"every dp rank of tp_rank {self.tp_rank}",  # perhaps the same group
            self.tp_control: f"every tp rank of dp_rank {self.dp_rank}",
        }

    def _group_of(self, ranks_of: list[list[int]]) -> Group:
        """Return this rank's group of ``ranks_of``; one that communicates nothing for one rank."""
        return self._made_once(ranks_of) if len(ranks_of[0]) > 1 else ALONE

    def _made_once(self, ranks_of: list[list[int]]) -> Group:
        """Return this rank's group of ``ranks_of``, made once for the same lists of ranks."""
        key = str(ranks_of)
        if key not in self._made_of:
            shown = "/".join(name for name, ranks in self._names.items() if ranks == ranks_of)
            shown = shown or f"{len(ranks_of[0])} ranks"
            self._made_of[key] = self.control.new_group(ranks_of, group_desc=shown)
        return self._made_of[key]

    def close(self) -> None:
        """Give back what the mesh holds: groups with their connections and threads, and keys.

        Every rank calls it, when nothing uses the mesh any more: no model, no save. For jobs that
        make many meshes; at its end a job gives everything back by itself.

        Raises:
            CollectiveTimeout: not all ranks called it; this one has given back its part.
            CheckpointError: an asynchronous save failed, and no earlier call raised its error.

        Example:
            >>> init_mesh().close()
        """
        self._forget()
        try:
            self.background.finish()
        finally:
            self.background.close()
            self.control.close()

    def destroy(self) -> None:
        """Destroy this rank's groups after its asynchronous save, whatever other ranks do."""
        self._forget()
        self.background.destroy()
        self.control.destroy()

    def _forget(self) -> None:
        """Stop using this mesh where a function is given none."""
        if Mesh.last is self:
            Mesh.last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # copies of a model live on the same ranks

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a parallel model cannot be pickled, since it holds the groups of the job; "
            "model.save_pretrained, px.save_checkpoint and model.state_dict() serve for files"
        )

    def __repr__(self) -> str:
        return (
            f"Mesh(dp={self.dp_size}, tp={self.tp_size}, ep={self.ep_size}: rank {self.rank} is "
            f"dp_rank {self.dp_rank}, tp_rank {self.tp_rank} on {self.device})"
        )

    def columns(self, inner: int) -> list[list[int]]:
        """Return the columns of ranks in a grid whose rows are ``inner`` consecutive ranks."""
        return _grid(self.world_size, inner)[1]

    def group_of_columns(self, inner: int) -> Group:
        """Return this rank's group of :meth:`columns`; every rank of the job calls it."""
        return self._made_once(self.columns(inner))

    def broadcast(self, tensor: torch.Tensor, group: Group) -> None:
        """Overwrite a tensor by that of the first rank of a group, each of whose ranks calls it."""
        if group.size > 1:
            with _C.ExchangeRange("broadcast", tensor.nbytes, group.size, group.name):
                dist.broadcast(tensor, group=self.process_group(group), group_src=0)

    def tp_subgroup(self, partition: Sequence[Sequence[int]]) -> Group:
        """Return the group of this rank when the tp ranks are partitioned as given.

        Args:
            partition: disjoint lists of tp ranks, the same on every rank of the job.

        Returns:
            The group of the list that holds this tp rank; a group of one where the list has one.
        """
        shared = [ranks for ranks in partition if len(ranks) > 1]
        if not shared:
            return ALONE
        rows = range(self.dp_size)
        return self._made_once(
            [[row * self.tp_size + r for r in ranks] for row in rows for ranks in shared]
        )

    def process_group(self, group: Group) -> dist.ProcessGroup:
        """Return the process group behind one of the mesh's groups, such as ``mesh.dp``.

        That of a group of one rank is made here, without the other ranks.
        """
        made = self.control.process_groups
        if group == ALONE and ALONE.name not in made:
            made[ALONE.name] = dist.new_group([self.rank], use_local_synchronization=True)
        return made[group.name]

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """Return torch's view of the mesh: all ranks of the job as ``("dp", "tp")``, tp innermost.

        ``mesh.device_mesh["dp"]`` holds the ranks with this ``tp_rank``, ``mesh.device_mesh["tp"]``
        those with this ``dp_rank``; their groups are ``mesh.dp`` and ``mesh.tp``. It is made when
        it is first read, without communication, so that no other rank needs to read it too.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialised, as in a job of one process that
                was started without torchrun.

        Example:
            >>> init_mesh(tp=2).device_mesh["dp"].size()  # doctest: +SKIP
            1
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "mesh.device_mesh needs torch.distributed; start the job with torchrun, or call "
                "torch.distributed.init_process_group before px.init_mesh"
            )
        groups = [self.process_group(group) for group in (self.dp, self.tp)]
        ranks, names = _grid(self.world_size, self.tp_size)[0], ("dp", "tp")
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=names)


def check_mesh(op_name: str, mesh: Any) -> None:
    """Raise a TypeError that names the function ``op_name`` unless it was given a :class:`Mesh`."""
    if not isinstance(mesh, Mesh):
        got = "none" if mesh is None else f"a {type(mesh).__name__}"
        raise TypeError(
            f"{op_name} needs the mesh that px.init_mesh makes, as in mesh = px.init_mesh(tp=2), "
            f"but was given {got}"
        )


def given_or_last(op_name: str, mesh: Mesh | None) -> Mesh:
    """Return the mesh that the function ``op_name`` was given, or the one that was made last.

    Raises:
        TypeError: it is no mesh, or none was made, or the last was closed.
    """
    mesh = Mesh.last if mesh is None else mesh
    check_mesh(op_name, mesh)
    return mesh


_DRAIN_S = 0.05
_made_here: list[dist.ProcessGroup] = []  # the group of the job, if init_mesh has made it


def shutdown() -> None:
    """End the communication of this rank, as the interpreter does by itself when it exits.

    Waits for asynchronous saves, destroys the groups of all meshes and, if :func:`init_mesh` has
    initialised ``torch.distributed``, the group of the job. Needs no other rank, and may be called
    again.

    Example:
        >>> shutdown()
    """
    for mesh in list(Mesh.live):
        mesh.destroy()
    # A thread of gloo that lets go of a tensor while the interpreter ends aborts the process. Those
    # of a destroyed group have ended here; of one that is still held, as by FSDP, they wait for the
    # interpreter to do so, and get it now.
    if dist.is_initialized():
        time.sleep(_DRAIN_S)
    if _made_here and dist.is_initialized() and dist.group.WORLD is _made_here[0]:
        dist.destroy_process_group()
    _made_here.clear()


@cache
def _shut_down_at_exit() -> None:
    atexit.register(shutdown)


def _device_of(asked: torch.device | str | None) -> torch.device:
    """Return the device of this rank: the one asked for, else a GPU of its own if there is one.

    Raises:
        ValueError: it is neither a CPU nor a GPU.
        RuntimeError: there is no such GPU, or the group of the job does not serve the device.
    """
    served: Sequence[str] = ("cpu", "cuda")
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    if dist.is_initialized():
        served = [each.partition(":")[0] for each in dist.get_backend_config().split(",")]
        local_rank = None  # who has made the group has chosen the GPU
    if asked is None:
        asked = "cuda" if torch.cuda.is_available() and "cuda" in served else "cpu"
    device = torch.device(asked)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"init_mesh: device must be a CPU or a CUDA device, got {asked!r}")
    if device.type not in served:
        raise RuntimeError(
            f"init_mesh: device={str(device)!r}, but torch.distributed was initialised with "
            f"{dist.get_backend_config()}, which serves {' and '.join(served)}"
        )
    if device.type == "cpu":
        return device
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.index is None:
        # A launcher may show each rank one GPU only.
        chosen = torch.cuda.current_device if local_rank is None else lambda: int(local_rank) % gpus
        device = torch.device("cuda", chosen() if gpus else 0)
    if device.index >= gpus:
        raise RuntimeError(f"init_mesh: device={str(asked)!r}, but torch sees {gpus} GPUs")
    return device


def _refuse_one_of_many() -> None:
    """Raise in one of several tasks that were started without ``RANK``, each a job by itself."""
    for launcher, name in (("srun", "SLURM_STEP_NUM_TASKS"), ("mpirun", "OMPI_COMM_WORLD_SIZE")):
        tasks = os.environ.get(name, "1")
        if tasks != "1" and "WORLD_SIZE" not in os.environ:
            raise RuntimeError(
                f"init_mesh: {launcher} has started {tasks} tasks without RANK, so that each would "
                "train alone; set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for "
                "each, or WORLD_SIZE=1 where each shall be a job of its own"
            )


def init_mesh(
    tp: int = 1,
    ep: int = 1,
    dp: int | None = None,
    timeout: float = 120.0,
    device: torch.device | str | None = None,
) -> Mesh:
    """Lay the ranks of the job out as ``(dp, tp)`` and create their groups.

    Every rank must call it, with the same arguments. Under ``torchrun`` it initialises
    ``torch.distributed`` (NCCL with GPUs, else gloo) when that has not been done; without it and
    without torchrun the mesh is one process.

    Args:
        tp: ranks that share one model; consecutive ranks.
        ep: ranks over which the experts of a mixture are sharded, consecutive ranks; must divide
            the world size. They may lie within tp groups or span several.
        dp: replicas of the model; ``world_size / tp`` when None.
        timeout: seconds after which a function that only some ranks call, this one included,
            raises :class:`CollectiveTimeout` on those that did. Also of collectives on the groups
            made here.
        device: of this rank's parameters. When None a GPU if torch sees one and the group of the
            job, if it is there already, serves GPUs: the current one, or that of ``LOCAL_RANK``
            (under SLURM ``SLURM_LOCALID``) where the group is made here; else the CPU.

    Returns:
        The mesh, on every rank with its own ``tp_rank``, ``dp_rank``, ``ep_rank``, ``edp_rank``.

    Raises:
        ValueError: the sizes do not multiply to the world size, ``timeout`` is no number of
            seconds, ``device`` is no CPU or GPU, or a variable of torchrun is no number or not in
            its range.
        RuntimeError: there is no such GPU, two ranks would share one through NCCL, the group of the
            job does not serve the device, the variables of torchrun are not complete, or srun or
            mpirun has started several tasks without them.
        OSError: another process has the port of ``MASTER_PORT``, or there is no room for a thread.
        CollectiveTimeout: ranks did not come within ``timeout`` seconds; names them.
        DisagreementError: the ranks ask for different meshes, or have different versions.

    Example:
        >>> mesh = init_mesh()
        >>> mesh.tp_size, mesh.dp_size
        (1, 1)
    """
    _shut_down_at_exit()
    for name, size in (("tp", tp), ("ep", ep), ("dp", 1 if dp is None else dp)):
        check_positive(f"init_mesh: {name}", size)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise ValueError(f"init_mesh: timeout must be seconds, more than 0, got {timeout!r}")
    device = _device_of(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized() and "RANK" not in os.environ:
        _refuse_one_of_many()
    elif not dist.is_initialized():
        join_job("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout)
        _made_here.append(dist.group.WORLD)
    world_size = world()[1]
    if world_size % tp or (dp is not None and dp * tp != world_size):
        asked = f"tp={tp}" if dp is None else f"dp={dp} * tp={tp} = {dp * tp}"
        raise ValueError(
            f"init_mesh: {asked} does not fit a world of {world_size} ranks; "
            "dp * tp must equal the world size"
        )
    if world_size % ep:
        raise ValueError(f"init_mesh: ep={ep} does not divide the world of {world_size} ranks")
    Mesh.last = Mesh(tp, ep, world_size // tp, timeout, device)
    return Mesh.last
