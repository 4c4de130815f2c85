"""From --devices and --strategy to processes that compute together: launch, shard, collectives, stop.

All of this is Fabric's and torch's; this file chooses among it, and works around what it gets wrong.
"""

import ctypes
import gc
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from runs.console import BadInput, Failed, Interrupted, launched, rank, say
from runs.settings import RunSettings, refuse_unless

# Batches of ever new sizes leave gaps in a GPU's memory, unless its segments may grow: GPT-2 1.5B with 16,384
# tokens would reserve up to 84 GB in place of 69. torch reads this when it first uses a GPU, so it is set now.
# What the user's environment says about the allocator stays.
if not any(name.endswith("_ALLOC_CONF") for name in os.environ):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def multiplies_bfloat16(gpu: int | torch.device) -> bool:
    """Whether a GPU has products of bfloat16: Ampere (capability 8.0) or later."""
    return torch.cuda.get_device_capability(gpu)[0] >= 8


def resolve_devices(cfg: RunSettings, n_layer: int, n_embd: int) -> dict[str, object]:
    """The settings devices, num_nodes, accelerator and precision, filled in for a model of this size.
    torchrun and SLURM fix the number of processes: a run that ignored it would silently be several
    runs. Raises BadInput."""
    devices, nodes = cfg.devices, cfg.num_nodes
    if started := int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
        devices, nodes = started, int(os.environ["WORLD_SIZE"]) // started
    # srun starts this program once a task. Fabric uses these processes only where their number is the
    # one that the settings ask for; any other number would be so many runs of the same settings.
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
    refuse_unless(
        started or tasks in (1, devices * nodes),
        f"devices: {devices} on each of {nodes} nodes, but srun started {tasks} processes",
    )
    gpus, accelerator = torch.cuda.device_count(), cfg.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if gpus else "cpu"
    refuse_unless(
        accelerator == "cpu" or devices <= gpus,
        f"accelerator: gpu, devices: {devices}, but this machine has {gpus} GPUs",
    )
    on_gpu = accelerator == "gpu"
    precision = resolve_precision(cfg.precision, devices if on_gpu else 0, n_layer, n_embd)
    return dict(devices=devices, num_nodes=nodes, accelerator=accelerator, precision=precision)


def resolve_precision(precision: str | None, gpus: int, n_layer: int, n_embd: int) -> str:
    """The setting precision; where it is not given, the fastest for a model of this size on so many GPUs (0:
    on the CPU). Raises BadInput."""
    for gpu in range(gpus):
        if multiplies_bfloat16(gpu):
            continue
        name = torch.cuda.get_device_name(gpu)
        major, minor = torch.cuda.get_device_capability(gpu)
        reason = f"{name} (capability {major}.{minor}, below 8.0) does not multiply bfloat16"
        refuse_unless(
            precision not in ("bf16-mixed", "bf16-true"),
            f"precision: {precision}: {reason}; use 32-true",
        )
        if not precision:
            say(f"precision: 32-true: {reason}")
        return precision or "32-true"
    if precision:
        return precision
    # a CPU that has products of bfloat16 gains from them where the blocks have more than 50M weights: 1.6
    # to 1.7 times at 135M (benchmarks/RESULTS.md); without such products it is about six times slower
    has_them = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    gains = has_them and 12 * n_layer * n_embd**2 > 50e6
    precision = "bf16-mixed" if gpus or gains else "32-true"
    say(f"precision: {precision}, which is fastest for this machine and a model of this size")
    return precision


def prepare_machine() -> None:
    """What makes torch fast here.

    glibc keeps the memory of freed tensors of up to 32 MB for the next ones. By default it gives much of
    it back, and the kernel clears the same pages for the next forward: a small model's step took 1.1 to
    1.2 times as long (benchmarks/RESULTS.md). What the user's environment says about malloc stays.

    Attention on a GPU uses flash or memory-efficient kernels, not cuDNN's, which come first on an H100
    (torch 2.11) and build a plan for each new shape; ours are new all the time.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    trim_threshold, mmap_threshold = -1, -3  # numbers of the two settings in glibc's malloc.h
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc
        mallopt(mmap_threshold, 32 * 2**20)  # the largest that glibc takes
        mallopt(trim_threshold, 2**31 - 1)


class DDP(DDPStrategy):
    """Fabric's, but for the stream. Fabric wraps the model in a side stream; gradients would then be added up
    in that one, which waits for the backward's stream each time, and torch warns about it."""

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        device_ids = self._determine_ddp_device_ids()
        return DistributedDataParallel(module, device_ids, **self._ddp_kwargs)


def launch(cfg: RunSettings, shard: Callable) -> Fabric:
    """A Fabric with all its processes running and seeded alike. shard(module, mesh): shards a model for
    strategy fsdp."""
    prepare_machine()
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # 64-true: else Fabric casts what a forward returns to float32
    torch.set_default_dtype(torch.float64 if cfg.precision == "64-true" else torch.float32)
    for name in ("lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no banners
    n_devices, strategy = cfg.devices * cfg.num_nodes, cfg.strategy
    if strategy == "fsdp":  # without the two sizes Fabric would make a node tensor parallel
        strategy = ModelParallelStrategy(
            shard, data_parallel_size=n_devices, tensor_parallel_size=1
        )
    elif strategy == "ddp" or n_devices > 1:
        # our buffers are constant; the option has a new name since torch 2.13
        is_new = torch.__version__ >= "2.13"
        strategy = DDP(**{"forward_sync_buffers" if is_new else "broadcast_buffers": False})
    fabric = Fabric(
        accelerator=cfg.accelerator,
        devices=cfg.devices,
        num_nodes=cfg.num_nodes,
        strategy=strategy,
        # bf16-true: we load the base in bfloat16 ourselves, and adapters stay in float32
        precision=cfg.precision.replace("bf16-true", "bf16-mixed"),
    )
    fabric.launch()
    if fabric.world_size > 1:
        launched.append(fabric)
    torch.manual_seed(cfg.seed)
    return fabric


def leave_process_group(fabric: Fabric) -> None:
    """End the processes together, after their models are gone: gloo aborts now and then if a model
    is alive when its process group is destroyed (pytorch issue 190489)."""
    launched.clear()
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


def reduce_number(number: float, op: str, device: torch.device) -> float:
    """A number that the host knows, reduced over all ranks. A single process does not wait for the device."""
    if not torch.distributed.is_initialized():
        return number
    return all_reduce(torch.tensor(number, dtype=torch.float64, device=device), op).item()


def on_rank_0(fabric, work):
    """Call work() on rank 0. -> what it returns, on all ranks; a BadInput, Failed or OSError is raised
    on all ranks. A collective: no collective may be in `work`."""
    answer = error = None
    if fabric.global_rank == 0:
        try:
            answer = work()
        except (BadInput, Failed, OSError) as e:
            error = e
    answer, error = fabric.broadcast((answer, error))
    if error:
        raise error
    return answer


# ---- sharded tensors -----------------------------------------------------------------------------


def place_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x, which is whole, on the device of `like`, and sharded if `like` is. Sharding is a collective that takes
    the values of rank 0."""
    x = x.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(x, like.device_mesh, like.placements)
    return x


def local_part(x: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def gather_tensor(x: torch.Tensor) -> torch.Tensor:
    """The full tensor on the CPU. A collective if x is sharded."""
    full = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach().cpu()


@torch.no_grad()
def set_weights(module, weights: Mapping | None, share: float = 1.0) -> None:
    """Copy weights into a module's parameters of the same names, or move these by a share towards the
    weights. Parameters that `weights` lacks stay.

    A collective if the module is sharded: rank 0 gives the weights of all parameters, the other ranks may give None.
    """
    for name, p in module.unique_parameters().items():
        x = torch.empty(p.shape) if weights is None else weights.get(name)
        if x is not None:
            new = place_like(x.detach().to(p.dtype), p)
            p.copy_(new if share == 1 else p.lerp(new, share))


# ---- when a run ends early -----------------------------------------------------------------------


class Stop:
    """Whether to stop, and why: a signal or the time limit. All ranks end after the same step.

    The first signal sets a flag, at which the loop looks after each step; sampling, checks and validation
    look between two units of work. A second signal ends the process at once. Nothing ends between the
    micro-batches of a step: the random state that is saved would be one of mid-step.

    reason: why to stop, as the ranks have agreed, or stop_at, which the loop looks at; empty to go on.
    signal: the number of the signal that arrived, or 0.
    """

    def __init__(self, max_time: timedelta | None):
        self.deadline = time.monotonic() + max_time.total_seconds() if max_time else math.inf
        self.signal, self.reason = 0, ""
        numbers = signal.SIGINT, signal.SIGTERM
        self.before = {n: signal.signal(n, self._on_signal) for n in numbers}

    def close(self) -> None:
        """Leave the signals to those who had them before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _on_signal(self, number, _frame) -> None:
        self.signal = number
        self.close()
        if rank() == 0:  # not print: the signal may have come in the middle of another one
            name = signal.Signals(number).name
            os.write(2, f"{name}: stopping soon; a second one ends at once\n".encode())

    def code(self) -> int:
        """What this rank knows: 0 go on; 1 the time is up; else a signal's number."""
        return self.signal or int(time.monotonic() > self.deadline)

    def set_agreed(self, code: float) -> None:
        """The largest code of all ranks, which they exchange in each step (Trainer.check_finite). A signal
        that arrives later waits for the next step's."""
        if code > 1:
            self.signal, self.reason = int(code), signal.Signals(int(code)).name
        elif code:
            self.reason = "max_time"

    def check(self, device, time_limit: bool = False) -> None:
        """Raise Interrupted if a signal asks the run to end, or the time limit where that counts. A
        collective, between two units of work that may end there."""
        code = reduce_number(self.code(), "max", device)
        if code > 1 or (code and time_limit):
            self.set_agreed(code)
            raise Interrupted
