"""Processes that compute together: devices, precision, launch, collectives, sharded tensors, and signals.

Fabric and torch do the work. This file chooses among their options and works around their faults.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from infra.console import (
    FIRST_PROCESS,
    BadInput,
    Failed,
    Interrupted,
    launched,
    launcher,
    rank,
    say,
    user_error,
)
from infra.random_numbers import round_at_random
from infra.settings import RunSettings, refuse_unless

# Nearly every batch has a new size, which fragments a GPU's memory if segments cannot be expanded. GPT-2 1.5B with
# 16,384 tokens would reserve up to 84 GB instead of 69 GB. torch reads this variable when it first uses a GPU, so it is
# set here. The user's own setting stays.
if not any(name.endswith("_ALLOC_CONF") for name in os.environ):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def multiplies_bfloat16(gpu: int | torch.device) -> bool:
    """Whether a GPU has products of bfloat16: Ampere (capability 8.0) or later."""
    return torch.cuda.get_device_capability(gpu)[0] >= 8


def resolve_devices(cfg: RunSettings, n_layer: int, n_embd: int) -> dict[str, object]:
    """The settings devices, accelerator and precision, filled in for a model of this size.
    Raises BadInput."""
    devices, nodes = resolve_processes(cfg.devices)
    accelerator = cfg.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.device_count() else "cpu"
    on_gpu = accelerator == "gpu"
    what = "CPU"
    if on_gpu:
        # torch counts GPUs without its driver, which may be too old
        with user_error("accelerator: gpu"):
            what = torch.cuda.get_device_name(0)
    say(f"device: {what}, processes: {devices * nodes}")
    precision = resolve_precision(cfg.precision, on_gpu, n_layer, n_embd)
    return dict(devices=devices, accelerator=accelerator, precision=precision)


def resolve_precision(precision: str | None, on_gpu: bool, n_layer: int, n_embd: int) -> str:
    """The setting `precision`. If it is not given: the fastest one for a model of this size on this machine. All its
    GPUs are of one kind."""
    if precision:
        return precision
    # A CPU with matrix products in bfloat16 gains from them if the blocks have more than 50M weights: 1.6 to 1.7 times
    # at 135M. Without these products bfloat16 is about six times slower.
    cpu_multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    cpu_gains = cpu_multiplies and 12 * n_layer * n_embd**2 > 50e6
    gains = multiplies_bfloat16(0) if on_gpu else cpu_gains
    precision = "bf16-mixed" if gains else "32-true"
    say(f"precision: {precision}, which is fastest for this machine and a model of this size")
    return precision


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of the weights in a run of this precision."""
    return {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)


def prepare_machine() -> None:
    """Make torch faster on this machine.

    On a CPU: let glibc keep the memory of freed tensors up to 32 MB. By default it returns most of this memory to the
    kernel, which clears the pages for the next forward; a small model's step took 1.1 to 1.2 times as long.

    On a GPU: no attention kernels of cuDNN. torch 2.11 prefers them on an H100, but they build a plan for each new
    shape, and nearly every batch has a new shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    # numbers of the two settings in glibc's malloc.h
    trim_threshold = -1
    mmap_threshold = -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # only glibc has it
        mallopt(mmap_threshold, 32 * 2**20)  # the largest that glibc takes
        mallopt(trim_threshold, 2**31 - 1)


# How long the other ranks wait while rank 0 works alone (a judge, an export, loading a large model). Fabric's default,
# half an hour, would end the run.
LONGEST_WAIT = timedelta(days=1)


class DDP(DDPStrategy):
    """Fabric's DDPStrategy without its side stream. Fabric wraps the model in a side stream, so gradients would be
    accumulated there. The side stream would wait for the backward's stream in each step, and torch would warn."""

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        device_ids = self._determine_ddp_device_ids()
        ddp = DistributedDataParallel(module, device_ids, **self._ddp_kwargs)
        ddp.broadcast_buffers = False  # our buffers are constant
        return ddp


def launch(cfg: RunSettings, shard: Callable | None = None) -> Fabric:
    """Start all processes, with the same seed, and return their Fabric. shard(module, mesh) shards a model for strategy
    fsdp."""
    prepare_machine()
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # Fabric casts the outputs of a forward to the default dtype.
    torch.set_default_dtype(torch.float64 if cfg.precision == "64-true" else torch.float32)
    for name in ("lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no banners
    devices, nodes = resolve_processes(cfg.devices)
    strategy = cfg.strategy
    if strategy == "fsdp":  # by default Fabric makes a node tensor parallel
        strategy = ModelParallelStrategy(
            shard, data_parallel_size=devices * nodes, tensor_parallel_size=1, timeout=LONGEST_WAIT
        )
    elif strategy == "ddp" or devices * nodes > 1:
        # gradients are views of DDP's buckets, not copies
        strategy = DDP(gradient_as_bucket_view=True, timeout=LONGEST_WAIT)
    environments = {"torchrun": TorchElasticEnvironment, "srun": SLURMEnvironment}
    with user_error("devices"):
        fabric = Fabric(
            accelerator=cfg.accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=strategy,
            # see resolve_processes
            plugins=environments.get(launcher(), LightningEnvironment)(),
            # bf16-true: load_model reads the base in bfloat16, and the adapters stay in float32
            precision=cfg.precision.replace("bf16-true", "bf16-mixed"),
        )
    fabric.launch()
    if fabric.world_size > 1:
        launched.append(fabric)
    torch.manual_seed(cfg.seed)
    return fabric


def leave_process_group(fabric: Fabric) -> None:
    """End the processes together, after their models have been freed. gloo sometimes aborts if a model is alive when
    its process group is destroyed (pytorch issue 190489)."""
    launched.clear()
    if torch.distributed.is_initialized():
        gc.collect()
        fabric.barrier()
        torch.distributed.destroy_process_group()


# ---- who has started the processes ---------------------------------------------------------------


def resolve_processes(devices: int) -> tuple[int, int]:
    """-> processes on a node, and nodes: the setting `devices` on one node, or what torchrun or srun has started. If
    Fabric starts the processes, the environment has no variables of torchrun after it.

    Fabric's own search for a launcher is not used. It takes SLURM_NTASKS for srun's processes, but sbatch sets that
    variable for a script, too. Raises BadInput."""
    env = os.environ
    started_by = launcher()
    if started_by == "torchrun":
        devices = int(env["LOCAL_WORLD_SIZE"])
        return devices, int(env["WORLD_SIZE"]) // devices
    if started_by == "srun":
        tasks = env["SLURM_STEP_TASKS_PER_NODE"]  # 8, or 8(x2) on two nodes, or 8,4
        refuse_unless("," not in tasks, f"srun: {tasks} processes: give each node as many")
        devices = int(tasks.split("(")[0])
        return devices, int(env["SLURM_STEP_NUM_TASKS"]) // devices
    if started_by == "Fabric":
        end_with(int(env[FIRST_PROCESS]))
    else:
        prepare_fabric_launch(devices)
    return devices, 1


def prepare_fabric_launch(devices: int) -> None:
    """Remove the variables of torchrun that another program has left, which the processes that Fabric starts would
    inherit. Raises BadInput if another launcher has started several processes, because each would be a separate run."""
    env = os.environ
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE"):
        n = env.get(name, "1")
        refuse_unless(
            n == "1",
            f"{name} is {n} in the environment, but neither torchrun nor srun has started this process: use "
            "torchrun (docs/commands.md)",
        )
    ranks = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK")
    for name in (*ranks, "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    if devices > 1:
        env[FIRST_PROCESS] = str(os.getpid())  # Fabric's processes inherit it


def end_with(first: int) -> None:
    """Let the kernel end this process, which Fabric has started, with the first process, its parent. Otherwise it
    would look for a parent that was killed at the start for half an hour."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or os.getpid() == first:  # only Linux has it
        return
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != first:  # the parent has ended before this call
        os._exit(1)


# ---- collectives ---------------------------------------------------------------------------------


def all_reduce(x: Tensor, op: str = "sum") -> Tensor:
    """Reduce x over all ranks in place, by op (sum, max or min). Unlike Fabric's all_reduce it does not wait for the
    device."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, op.upper()))
    return x


def reduce_number(number: float, op: str, device: torch.device) -> float:
    """A Python number, reduced over all ranks. A single process does not wait for the device."""
    if not torch.distributed.is_initialized():
        return number
    return all_reduce(torch.tensor(number, dtype=torch.float64, device=device), op).item()


def on_rank_0(fabric: Fabric, work: Callable[[], Any]) -> Any:
    """Call work() on rank 0 and return its result on all ranks. A BadInput, Failed or OSError is raised on all ranks. A
    collective, so `work` may not call another collective."""
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


# ---- tensors on devices --------------------------------------------------------------------------


def copied_to_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors on the CPU. All numbers are copied as one float64 tensor, so the host waits for the device
    once. float64 holds every float32 number and every bool exactly."""
    numbers = torch.cat([x.detach().double().flatten() for x in tensors]).cpu()
    parts = numbers.split([x.numel() for x in tensors])
    return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, tensors)]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x on a device, by an asynchronous copy."""
    if device.type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def place_like(x: Tensor, like: Tensor) -> Tensor:
    """The full tensor x on the device of `like`, sharded if `like` is sharded. Sharding is a collective that takes the
    values of rank 0."""
    x = x.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(x, like.device_mesh, like.placements)
    return x


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def gather_tensor(x: Tensor) -> Tensor:
    """The full tensor on the CPU. A collective if x is sharded."""
    full = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach().cpu()


@torch.no_grad()
def set_weights(
    module: torch.nn.Module, weights: Mapping | None, share: float = 1.0, seed: int = 0
) -> None:
    """Copy weights into the parameters of the same names; with a share below 1, move the parameters by this share
    towards the weights. Other parameters stay. seed: of the rounding of a move.

    A collective if the module is sharded: rank 0 gives the weights of all parameters, and other ranks may give None.
    """
    for name, p in module.unique_parameters().items():
        x = torch.empty(p.shape) if weights is None else weights.get(name)
        if x is not None:
            part = local_part(p)
            new = local_part(place_like(x.detach().to(p.dtype), p))
            if share < 1:
                wide = torch.promote_types(part.dtype, torch.float32)
                exact = part.to(wide).lerp(new.to(wide), share)
                new = round_at_random(exact, part.dtype, name, seed)
            part.copy_(new)


# ---- when a run ends early -----------------------------------------------------------------------


class Stop:
    """Whether a signal asks the run to stop. All ranks stop after the same step.

    A signal sets a flag. The loop reads the flag after each step; sampling, checks and validation read it between two
    units of work. A step is never stopped between two micro-batches. After the first signal a Ctrl-C ends the process
    immediately. A second SIGUSR1 or SIGTERM does not, because schedulers send one after the other and kill later.

    reason: the name of the signal on which the ranks have agreed. It is empty if the run continues.
    signal: the number of the signal that this rank got, or 0.
    """

    def __init__(self):
        self.signal = 0
        self.reason = ""
        # sbatch --signal=USR1@90 sends SIGUSR1; a terminal that closes sends SIGHUP, which nohup has ignored
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.before = {n: signal.signal(n, self._on_signal) for n in numbers}

    def close(self) -> None:
        """Give the signals back to the handlers that they had before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        is_first = not self.signal
        self.signal = number
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])
        if is_first and rank() == 0:
            name = signal.Signals(number).name
            # not print: the signal may have interrupted another print
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"{name}: stopping soon; Ctrl-C now ends at once\n".encode())

    def agree(self, device: torch.device) -> None:
        """Set the reason on all ranks if one of them got a signal. A collective, called once per step. A signal that
        arrives later waits for the next call."""
        number = reduce_number(self.signal, "max", device)
        if number:
            self.signal = int(number)
            self.reason = signal.Signals(self.signal).name

    def check(self, device: torch.device) -> None:
        """Raise Interrupted if a signal asks the run to end. A collective, called between two units of work."""
        self.agree(device)
        if self.reason:
            raise Interrupted
