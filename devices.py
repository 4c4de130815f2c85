"""From --devices and --strategy to running ranks, and out again: launch, shard, stop together, fail together.

Launching, collectives and sharding are Fabric's and torch's; here is only which of them, and what they get wrong.
"""

import gc
import inspect
import logging
import math
import os
import signal
import sys
import time
import traceback

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from data import BadInput, Failed
from settings import Run, torchrun

LAUNCHED: list[Fabric] = []  # whose child processes end with us


def shard(module, mesh):
    """FSDP2: each block by itself, then what is left (embedding, last norm, head) around the forward."""
    for block in module.transformer.h:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(module, mesh=mesh["data_parallel"])


def launch(s: Run) -> Fabric:
    """A Fabric with all its processes running and seeded alike. Fills in s.precision."""
    torchrun(s)
    if s.accelerator == "auto":
        s.accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    if s.accelerator == "gpu" and s.devices > torch.cuda.device_count():
        raise BadInput(f"devices: {s.devices}, but this machine has {torch.cuda.device_count()} GPUs")
    s.precision = s.precision or ("bf16-mixed" if s.accelerator == "gpu" else "32-true")
    n = s.devices * s.num_nodes
    strategy = s.strategy
    if strategy == "ddp" or strategy == "auto" and n > 1:
        names = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters  # renamed in torch 2.13
        sync = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        strategy = DDPStrategy(**{sync: False})  # the buffers are constant, and a look should not talk
    elif strategy == "fsdp":  # without sizes Fabric would make all of a node tensor parallel
        strategy = ModelParallelStrategy(shard, n, 1, save_distributed_checkpoint=False)
    if s.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if s.precision == "64-true":  # else Fabric casts what a forward returns to float32
        torch.set_default_dtype(torch.float64)
    for name in ("lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # banners
    fabric = Fabric(
        accelerator=s.accelerator,
        strategy=strategy,
        devices=s.devices,
        num_nodes=s.num_nodes,
        precision="bf16-mixed" if s.precision == "bf16-true" else s.precision,  # the base is loaded in bf16
    )
    LAUNCHED.append(fabric)
    fabric.launch()
    if fabric.world_size != max(n, int(os.environ.get("WORLD_SIZE", n))):
        raise BadInput(f"devices: {fabric.world_size} processes run, but {os.environ['WORLD_SIZE']} were launched")
    torch.manual_seed(s.seed)
    return fabric


def rank() -> int:
    """This process's place among all, before launching too. 0 where it is alone."""
    env = os.environ
    return int(env.get("RANK") or env.get("SLURM_PROCID") or env.get("LOCAL_RANK") or 0) or int(
        env.get("NODE_RANK") or 0
    )


def leave(fabric: Fabric) -> None:
    """End the processes in step. Tearing gloo down with a live model behind it aborts now and then (pytorch 190489)."""
    gc.collect()
    if torch.distributed.is_initialized():
        fabric.barrier()
        torch.distributed.destroy_process_group()


def guarded(main) -> None:
    """Run main(); say an error in one line where we know it, and end every rank: none is left waiting for another."""
    try:
        return main()
    except SystemExit as e:
        code, message = e.code, ""
    except (BadInput, Failed) as e:
        code, message = 2 if isinstance(e, BadInput) else 1, str(e)
    except BaseException:
        code, message = 1, traceback.format_exc()
    me, launched = rank(), torch.distributed.is_initialized()
    if me == 0 or launched:  # before launching all ranks find the same fault; one says it
        prefix = f"rank {me}: " if me else ""
        print(
            "\n".join(f"{prefix}error: {line}" for line in message.splitlines()),
            end="\n" * bool(message),
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    if launched:
        for fabric in LAUNCHED:
            for child in getattr(fabric.strategy.launcher, "procs", []):
                child.kill()
        os._exit(code)  # no teardown: it would wait for ranks that wait for us
    sys.exit(code)


class Stop:
    """A signal or the time limit ends the run after the step it fell in; all ranks agree on which."""

    def __init__(self, seconds: float | None):
        self.deadline = time.monotonic() + seconds if seconds else math.inf
        self.signal = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, _frame):
        self.signal = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once

    def now(self, fabric) -> bool:
        """Whether to end after this step; then .why tells."""
        mine = torch.tensor([self.signal, time.monotonic() > self.deadline], device=fabric.device)
        number, late = fabric.all_reduce(mine, reduce_op="max").tolist()
        self.signal = number or self.signal  # one may have come in while we asked
        self.why = signal.Signals(number).name if number else "max_time" if late else ""
        return bool(self.why)
