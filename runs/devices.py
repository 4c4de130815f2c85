"""From --devices and --strategy to running ranks, and out again: launch, shard, stop together.

Launching, collectives and sharding are Fabric's and torch's; here is only which of them, and what
they get wrong.
"""

import contextlib
import functools
import gc
import inspect
import logging
import math
import os
import signal
import time
import warnings
from dataclasses import replace

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from runs.errors import LAUNCHED, BadInput, Failed
from runs.settings import RunSettings


def resolve_devices(cfg: RunSettings) -> RunSettings:
    """Devices, accelerator and precision filled in. torchrun and SLURM fix the number of processes;
    a run that ignores it would be several runs, silently."""
    devices, nodes, accelerator = cfg.devices, cfg.num_nodes, cfg.accelerator
    if local := int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
        if devices not in (1, local):
            started = f"the launcher started {local} processes on this node"
            raise BadInput(f"devices: {devices}, but {started}")
        devices, nodes = local, max(1, int(os.environ["WORLD_SIZE"]) // local)
    n = torch.cuda.device_count()
    if accelerator == "auto":
        accelerator = "gpu" if n else "cpu"
    if accelerator == "gpu" and devices > n:
        raise BadInput(f"accelerator: gpu, devices: {devices}, but this machine has {n} GPUs")
    precision = cfg.precision or ("bf16-mixed" if accelerator == "gpu" else "32-true")
    kw = dict(devices=devices, num_nodes=nodes, accelerator=accelerator)
    return replace(cfg, **kw, precision=precision)


def shard_module(module, mesh, narrow: bool):
    """FSDP2, of a module on the meta device: each block, an untied embedding and head by
    themselves, then what is left. `narrow`: linear layers are gathered in bfloat16, as autocast
    would cast them; norms, embedding and adapters stay float32."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # none is changed
    mesh, frozen = mesh["data_parallel"], not any(p.requires_grad for p in module.parameters())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in module.transformer.h:
        if narrow:
            linears = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
            fully_shard(linears, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh)
    if not module.tied and module.plain_head:
        fully_shard(module.transformer.wte, mesh=mesh)
        fully_shard(module.lm_head, mesh=mesh, **(dict(mp_policy=policy) if narrow else {}))
        register_fsdp_forward_method(module.lm_head, "logp")
    # a root stays whole for its backward, which a frozen one has not
    fully_shard(module, mesh=mesh, reshard_after_forward=frozen or None)
    rope, tied = (module.cos, module.sin), module.tied
    module.to_empty(device=mesh.device_type)
    module.cos, module.sin = (x.to(mesh.device_type) for x in rope)
    if tied:
        module.tie()
    return module


def make_strategy(name: str, n: int, narrow: bool):
    if name == "ddp" or name == "auto" and n > 1:
        names = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
        new = "forward_sync_buffers"  # since torch 2.13
        sync = new if new in names else "broadcast_buffers"
        return DDPStrategy(**{sync: False})  # buffers are constant
    if name == "fsdp":  # without sizes Fabric would make all of a node tensor parallel
        return ModelParallelStrategy(functools.partial(shard_module, narrow=narrow), n, 1)
    return name


def launch(cfg: RunSettings) -> Fabric:
    """A Fabric with all its processes running and seeded alike."""
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if cfg.precision == "64-true":  # else Fabric casts what a forward returns to float32
        torch.set_default_dtype(torch.float64)
    for name in ("lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # banners
    n = cfg.devices * cfg.num_nodes
    strategy = make_strategy(cfg.strategy, n, cfg.precision == "bf16-mixed")
    # bf16-true: the base is loaded in bf16, adapters stay in float32
    precision = cfg.precision.replace("bf16-true", "bf16-mixed")
    kw = dict(accelerator=cfg.accelerator, devices=cfg.devices, num_nodes=cfg.num_nodes)
    fabric = Fabric(**kw, strategy=strategy, precision=precision)
    LAUNCHED.append(fabric)
    fabric.launch()
    launched = int(os.environ.get("WORLD_SIZE", n))
    if fabric.world_size != max(n, launched):
        raise BadInput(f"devices: {fabric.world_size} processes run, but {launched} were launched")
    torch.manual_seed(cfg.seed)
    return fabric


def all_reduce(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """x, summed (op max: its largest) over all ranks, in place. Fabric's own waits for the device."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, op.upper()))
    return x


def free_memory(device) -> float:
    """Bytes for a cache: what is free on a GPU, down to a power of two, so that two runs alike
    find the same; 16 GB on a CPU, which has no such number."""
    if device.type != "cuda":
        return 16e9
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2.0 ** math.floor(math.log2(torch.cuda.mem_get_info(device)[0] + unused))


@contextlib.contextmanager
def keep_gathered(policy, device):
    """The blocks of a sharded policy stay whole from forward to forward, where memory allows: else
    sampling would gather the whole model for each token."""
    module = getattr(policy, "module", policy)
    blocks = [m for m in module.modules() if isinstance(m, FSDPModule) and m is not module]
    whole = sum(p.numel() * p.element_size() for p in module.parameters())  # DTensors: whole sizes
    if whole > free_memory(device) / 2:
        blocks = []
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    yield
    for block in blocks:
        block.set_reshard_after_forward(True, recurse=False)
        block.reshard()


def leave_process_group(fabric: Fabric) -> None:
    """End the processes in step. Tearing gloo down with a live model behind it aborts now and then
    (pytorch 190489)."""
    if torch.distributed.is_initialized():
        gc.collect()
        fabric.barrier()
        torch.distributed.destroy_process_group()


class Stop:
    """A signal or the time limit ends the run after the step it fell in; all ranks agree on it."""

    def __init__(self, seconds: float | None):
        self.deadline = time.monotonic() + seconds if seconds else math.inf
        self.signal, self.why, self.agreed = 0, "", 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, _frame):
        self.signal = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once

    def code(self) -> float:
        """0: go on; a signal's number; 0.5: the time is up. The largest of all ranks counts."""
        return self.signal or 0.5 * (time.monotonic() > self.deadline)

    def agree(self, device) -> bool:
        """requested() outside of a step: ranks ask each other now."""
        if torch.distributed.is_initialized():
            code = torch.tensor(self.code(), dtype=torch.float64, device=device)
            self.agreed = all_reduce(code, "max").item()
        return self.requested()

    def requested(self) -> bool:
        """Whether to end after this step; then .why tells. Several ranks go by what they agreed on
        in the step's one exchange; a signal that came later waits for the next step's."""
        alone = not torch.distributed.is_initialized()
        code = self.code() if alone else self.agreed
        if code >= 1:
            self.signal, self.why = int(code), signal.Signals(int(code)).name
        elif code:
            self.why = "max_time"
        return code > 0


def on_rank_0(fabric, work):
    """work() on rank 0; its answer, or its refusal, on all ranks. A collective."""
    answer = error = None
    if fabric.global_rank == 0:
        try:
            answer = work()
        except (BadInput, Failed) as e:
            error = e
    answer, error = fabric.broadcast((answer, error))
    if error:
        raise error
    return answer
