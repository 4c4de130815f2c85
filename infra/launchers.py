"""Who has started the processes of a run: torchrun or srun. If nobody has, Fabric starts them."""

import ctypes
import os
import signal

from infra.console import FIRST_PROCESS, launcher
from infra.settings import refuse_unless


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
