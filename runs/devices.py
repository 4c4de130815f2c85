"""From --devices and --strategy to processes that compute together: launch, shard, collectives.

All of this is Fabric's and torch's; this file chooses among it, and works around what it gets wrong.
"""

import contextlib
import ctypes
import functools
import gc
import inspect
import logging
import math
import os
import warnings

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from runs.errors import BadInput, Failed, Interrupted, launched_fabrics
from runs.settings import RunSettings


def resolve_devices(cfg: RunSettings) -> dict[str, object]:
    """The settings devices, num_nodes, accelerator and precision, filled in. torchrun and SLURM fix
    the number of processes: a run that ignored it would silently be several runs. Raises
    BadInput."""
    devices, nodes = cfg.devices, cfg.num_nodes
    if started := int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
        if devices not in (1, started):
            raise BadInput(
                f"devices: {devices}, but the launcher started {started} processes on this node"
            )
        devices = started
        nodes = max(1, int(os.environ["WORLD_SIZE"]) // started)
    # srun starts this program once a task. Fabric uses these processes only where their number is the
    # one that the settings ask for; any other number would be so many runs of the same settings.
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
    if not started and tasks not in (1, devices * nodes):
        raise BadInput(
            f"devices: {devices} on each of {nodes} nodes, but srun started {tasks} processes"
        )
    gpus, accelerator = torch.cuda.device_count(), cfg.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if gpus else "cpu"
    if accelerator == "gpu" and devices > gpus:
        raise BadInput(f"accelerator: gpu, devices: {devices}, but this machine has {gpus} GPUs")
    precision = cfg.precision or ("bf16-mixed" if accelerator == "gpu" else "32-true")
    return dict(devices=devices, num_nodes=nodes, accelerator=accelerator, precision=precision)


def shard_module(module, mesh, bf16: bool):
    """Shard a model on the meta device with FSDP2: each block, an untied embedding and head by
    themselves, then what is left. `bf16`: linear layers are gathered in bfloat16, as autocast would
    cast them; norms, embedding and adapters stay float32."""
    # FSDP2 warns of views that a hook might change in place; no hook of ours does
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = mesh["data_parallel"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    of_linears = {"mp_policy": policy} if bf16 else {}
    for block in module.blocks:
        if bf16:
            linears = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
            fully_shard(linears, mesh=mesh, **of_linears)
        fully_shard(block, mesh=mesh)
    if not module.tied and module.plain_head:
        fully_shard(module.embedding, mesh=mesh)
        fully_shard(module.lm_head, mesh=mesh, **of_linears)
        register_fsdp_forward_method(module.lm_head, "logp")
    # By default a root stays gathered for its backward; a frozen model has no backward.
    is_frozen = not any(p.requires_grad for p in module.parameters())
    fully_shard(module, mesh=mesh, reshard_after_forward=True if is_frozen else None)
    tied = module.tied
    buffers = {name: x.to(mesh.device_type) for name, x in module.named_buffers()}  # cos and sin
    module.to_empty(device=mesh.device_type)
    for name, x in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, x)
    if tied:
        module.tie()
    return module


def make_strategy(name: str, n_devices: int, bf16: bool):
    """The Fabric strategy of the setting `strategy`."""
    if name == "ddp" or (name == "auto" and n_devices > 1):
        names = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
        renamed = "forward_sync_buffers"  # its name since torch 2.13
        sync = renamed if renamed in names else "broadcast_buffers"
        return DDPStrategy(**{sync: False})  # our buffers are constant
    if name == "fsdp":  # without the two sizes Fabric would make a node tensor parallel
        shard = functools.partial(shard_module, bf16=bf16)
        return ModelParallelStrategy(shard, data_parallel_size=n_devices, tensor_parallel_size=1)
    return name


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors of up to 32 MB for the next ones.

    By default it gives much of it back, and the kernel clears the same pages for the next forward: a
    small model's step took 1.1 to 1.2 times as long (benchmarks/RESULTS.md). Larger tensors are given back at
    once, as before. What the user's environment says about malloc stays.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    trim_threshold, mmap_threshold = -1, -3  # numbers of the two settings in glibc's malloc.h
    with contextlib.suppress(OSError, TypeError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 32 * 2**20)  # the largest that glibc takes
        mallopt(trim_threshold, 2**31 - 1)


def avoid_cudnn_attention() -> None:
    """Let torch's attention use its flash or memory-efficient kernels on a GPU, not cuDNN's.

    cuDNN comes first on an H100 (torch 2.11), and builds a plan for each new shape, which takes tens of milliseconds or
    more. Our shapes are new all the time: a token longer, or a row fewer.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def launch(cfg: RunSettings) -> Fabric:
    """A Fabric with all its processes running and seeded alike. Raises BadInput."""
    keep_freed_memory()
    avoid_cudnn_attention()
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # 64-true: else Fabric casts what a forward returns to float32. Else the one before Run.close, if a
    # run in this process has ended without it
    torch.set_default_dtype(torch.float64 if cfg.precision == "64-true" else torch.float32)
    for name in ("lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no banners
    n_devices = cfg.devices * cfg.num_nodes
    fabric = Fabric(
        accelerator=cfg.accelerator,
        devices=cfg.devices,
        num_nodes=cfg.num_nodes,
        strategy=make_strategy(cfg.strategy, n_devices, bf16=cfg.precision == "bf16-mixed"),
        # bf16-true: we load the base in bfloat16 ourselves, and adapters stay in float32
        precision=cfg.precision.replace("bf16-true", "bf16-mixed"),
    )
    launched_fabrics.append(fabric)
    fabric.launch()
    expected = max(n_devices, int(os.environ.get("WORLD_SIZE", n_devices)))
    if fabric.world_size != expected:
        raise BadInput(f"devices: {fabric.world_size} processes run, but {expected} were expected")
    torch.manual_seed(cfg.seed)
    return fabric


def leave_process_group(fabric: Fabric) -> None:
    """End the processes together, after their models are gone: gloo aborts now and then if a model
    is alive when its process group is destroyed (pytorch issue 190489)."""
    if torch.distributed.is_initialized():
        gc.collect()
        fabric.barrier()
        torch.distributed.destroy_process_group()


# ---- collectives ---------------------------------------------------------------------------------


def all_reduce(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """x, reduced over all ranks in place (op: sum, max or min). Fabric's own all_reduce also waits
    for the device."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, op.upper()))
    return x


_rank_0_works = False  # whether rank 0 is in on_rank_0: there the other ranks take part in nothing


def on_rank_0(fabric, work):
    """Call work() on rank 0. -> what it returns, on all ranks; a BadInput, Failed or Interrupted is
    raised on all ranks. A collective, but within another on_rank_0."""
    global _rank_0_works
    if _rank_0_works:
        return work()
    answer = error = None
    if fabric.global_rank == 0:
        _rank_0_works = True
        try:
            answer = work()
        except (BadInput, Failed, Interrupted) as e:
            error = e
        finally:
            _rank_0_works = False
    answer, error = fabric.broadcast((answer, error))
    if error:
        raise error
    return answer


# ---- memory --------------------------------------------------------------------------------------


def free_memory(device) -> float:
    """Bytes that a cache may take. On a GPU: what is free, down to a power of two, so that two equal
    runs find the same number. On a CPU, which has no such number: 16 GB."""
    if device.type != "cuda":
        return 16e9
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2.0 ** math.floor(math.log2(torch.cuda.mem_get_info(device)[0] + unused))


@contextlib.contextmanager
def keep_gathered(policy, device):
    """Keep the blocks of a sharded policy gathered from one forward to the next, if memory allows:
    else sampling would gather the whole model for each token."""
    module = getattr(policy, "module", policy)
    blocks = [m for m in module.modules() if isinstance(m, FSDPModule) and m is not module]
    size = sum(p.numel() * p.element_size() for p in module.parameters())  # of the whole model
    if blocks:
        # The least of all ranks: they must agree, because gathering a block is a collective.
        room = torch.tensor(free_memory(device), dtype=torch.float64, device=device)
        if size > all_reduce(room, "min").item() / 2:
            blocks = []
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
            block.reshard()
