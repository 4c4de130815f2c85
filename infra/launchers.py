"""Who has started the processes of a run: torchrun, srun, or nobody, and then Fabric starts them."""

import ctypes
import os
import signal

from lightning.fabric.plugins.environments import SLURMEnvironment

from infra.console import FIRST_PROCESS, launcher
from infra.settings import RunSettings, refuse_unless


def resolve_processes(cfg: RunSettings) -> tuple[int, int]:
    """The settings devices and num_nodes; under torchrun its own numbers instead. After it the environment has
    torchrun's variables if a launcher has started the processes, and none of them if Fabric starts them.

    Fabric's own search for a launcher is not used: it takes SLURM_NTASKS for srun's processes, but sbatch sets
    that variable for a script, too. Raises BadInput."""
    env = os.environ
    devices = cfg.devices
    nodes = cfg.num_nodes
    started_by = launcher()
    if started_by == "torchrun":
        devices = int(env["LOCAL_WORLD_SIZE"])
        nodes = int(env["WORLD_SIZE"]) // devices
    elif started_by == "srun":
        use_torchruns_variables(devices, nodes)
    elif started_by == "Fabric":
        end_with(int(env[FIRST_PROCESS]))
    else:
        prepare_fabric_launch(devices, nodes)
    return devices, nodes


def use_torchruns_variables(devices: int, nodes: int) -> None:
    """Copy the place of a process that srun has started into torchrun's variables. Raises BadInput for another number
    of processes than the settings say: some would wait for ever, or be other runs."""
    env = os.environ
    tasks = env["SLURM_STEP_TASKS_PER_NODE"]
    expected = f"{devices}" if nodes == 1 else f"{devices}(x{nodes})"
    refuse_unless(
        tasks == expected,
        f"devices: {devices}, num_nodes: {nodes}: expected {expected} processes, but srun started {tasks}",
    )
    env["RANK"] = env["SLURM_PROCID"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["WORLD_SIZE"] = str(devices * nodes)
    env["LOCAL_WORLD_SIZE"] = str(devices)
    env["GROUP_RANK"] = env["SLURM_NODEID"]
    first_node = SLURMEnvironment.resolve_root_node_address(env["SLURM_STEP_NODELIST"])
    env.setdefault("MASTER_ADDR", first_node)
    # another port for each step of each job: two may share a node
    port = 15000 + (int(env["SLURM_JOB_ID"]) * 31 + int(env["SLURM_STEP_ID"])) % 10000
    env.setdefault("MASTER_PORT", str(port))


def prepare_fabric_launch(devices: int, nodes: int) -> None:
    """Remove the variables of torchrun that another program has left, which the processes that Fabric starts would
    inherit. Raises BadInput for processes that another launcher has started: each would be a run of its own."""
    env = os.environ
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE"):
        n = env.get(name, "1")
        refuse_unless(
            n == "1",
            f"{name} is {n} in the environment, but neither torchrun nor srun has started this process: use "
            "torchrun (docs/commands.md)",
        )
    refuse_unless(
        nodes == 1, f"num_nodes: {nodes}: start the program on each node by torchrun or srun"
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
