"""Who has started the processes of a run: torchrun, srun, mpirun, ..., or nobody, and then Fabric starts them.

Reading order: Launcher and LAUNCHERS; resolve_processes.
"""

import ctypes
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

from lightning.fabric.plugins.environments import SLURMEnvironment

from infra.console import BadInput
from infra.settings import RunSettings, refuse_unless


class Launcher(NamedTuple):
    """A program that starts the processes of a run, and the environment variables in which it tells each
    of them its place."""

    name: str
    world_size: str
    """How many processes it has started."""
    rank: str
    """The number of a process among all of them."""
    local_rank: str
    """The number of a process among those on its node."""
    per_node: str
    """How many processes are on the node; SLURM writes 8(x2) for eight on each of two nodes."""
    job: tuple[str, ...] = ()
    """Variables that differ between two starts at the same time on the same machine."""


# From the inside out: in SLURM an mpirun is itself started by srun, and jsrun is also an mpirun.
LAUNCHERS = (
    # accelerate, deepspeed, Ray and Azure ML set these variables, too; some leave out LOCAL_WORLD_SIZE
    Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
        job=("LSB_JOBID",),
    ),
    Launcher(  # Open MPI
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
    ),
    Launcher(  # MPICH and Intel MPI
        "mpiexec",
        "PMI_SIZE",
        "PMI_RANK",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        job=("SLURM_JOB_ID",),
    ),
    Launcher(  # Cray's, which leaves out Intel's MPI_ variables
        "mpiexec",
        "PMI_SIZE",
        "PMI_RANK",
        "PMI_LOCAL_RANK",
        "PMI_LOCAL_SIZE",
        job=("PALS_APID",),
    ),
    Launcher(
        "srun",
        # not SLURM_NTASKS, which sbatch and salloc also set where they start one process
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


FIRST_PROCESS = "KTO_FIRST_PROCESS"  # in the environment of the processes that Fabric starts


def resolve_processes(cfg: RunSettings) -> tuple[int, int]:
    """The settings devices and num_nodes, as the program that started the processes has fixed them.

    A launcher's own variables are copied into torchrun's variables (RANK, ...), which torch, Fabric and
    console.rank read. If nothing has started the processes, RANK is not set, and Fabric starts them. torchrun's own
    numbers replace the settings. Another launcher that has started several processes, and not as many as the settings
    say, is refused: there would be several runs, without a word, or processes that wait for ever. Raises BadInput."""
    env = os.environ
    devices = cfg.devices
    nodes = cfg.num_nodes
    if "LT_CLI_USED" in env:
        raise BadInput("fabric run: start this program by python or torchrun")
    for launcher in LAUNCHERS:
        if not {launcher.world_size, launcher.rank, launcher.local_rank} <= env.keys():
            continue
        n = int(env[launcher.world_size])
        per_node = env.get(launcher.per_node)
        if launcher.name == "torchrun" and per_node:
            devices = int(per_node)
            nodes = n // devices
        elif n == 1:
            continue  # such as a shell by srun --pty: this process may start others
        started = f"{n} processes" + (f", {per_node} on a node" if per_node else "")
        refuse_unless(
            n == devices * nodes and per_node in (None, f"{devices}", f"{devices}(x{nodes})"),
            f"devices: {devices} on each of {nodes} nodes, but {launcher.name} started {started}",
        )
        speak_torchrun(launcher, devices, nodes)
        return devices, nodes
    prepare_fabric_launch(cfg)
    return devices, nodes


def prepare_fabric_launch(cfg: RunSettings) -> None:
    """Where no launcher has started the processes of this node: remove the variables that the processes
    which Fabric starts must not inherit, and refuse what Fabric cannot start. Raises BadInput."""
    env = os.environ
    devices = cfg.devices
    nodes = cfg.num_nodes
    if "RANK" in env:  # Kubeflow and Vertex AI: one process for each node
        node = int(env["RANK"])
        n = int(env.get("WORLD_SIZE", 1))
        refuse_unless(
            node < n == nodes,
            f"num_nodes: {nodes}, but RANK={node} and WORLD_SIZE={n} in the environment say another "
            "number of nodes",
        )
        env["NODE_RANK"] = str(node)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # Fabric's processes would inherit them
            env.pop(name, None)
    # Fabric sets both for a process that it starts. LOCAL_RANK alone is left from another program, and Fabric
    # would wait for processes that nobody starts.
    is_started_by_fabric = {"LOCAL_RANK", "WORLD_SIZE"} <= env.keys()
    if not is_started_by_fabric:
        env.pop("LOCAL_RANK", None)
    if nodes == 1:  # the platform's number of this node is not a number in this run
        env.pop("NODE_RANK", None)
        env.pop("GROUP_RANK", None)
        # Fabric finds a free port; that of an sbatch script may be another job's
        if not is_started_by_fabric:
            env.pop("MASTER_ADDR", None)
            env.pop("MASTER_PORT", None)
    refuse_unless(
        nodes == 1 or {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} <= env.keys(),
        f"num_nodes: {nodes}, but nothing says which node this is: start the program by srun, torchrun or "
        "mpirun, or set NODE_RANK, MASTER_ADDR and MASTER_PORT on each node",
    )
    if devices * nodes > 1 or cfg.strategy != "auto":
        if hasattr(sys, "ps1") or sys.flags.interactive:
            raise BadInput(
                f"devices: {devices}, strategy: {cfg.strategy}: a notebook or an interactive Python cannot be "
                "one of several processes; start the program by a command of its own (!python in a cell)"
            )
    if devices > 1 and "LOCAL_RANK" not in env:
        by_module = getattr(sys.modules["__main__"], "__spec__", None)  # python -m
        refuse_unless(
            by_module or os.path.isfile(sys.argv[0]),
            f"devices: {devices}: each process runs the program's file, and this program has none (python "
            "-c, or standard input): write it into a file",
        )
        env[FIRST_PROCESS] = str(os.getpid())  # Fabric's processes inherit it
    elif is_started_by_fabric and FIRST_PROCESS in env:
        end_with(int(env[FIRST_PROCESS]))


def end_with(first: int) -> None:
    """Let the kernel end this process, which Fabric has started, when the first one, its parent, is gone. It would
    look for one that was killed at the start for half an hour."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:  # only Linux has it
        return
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != first:  # it was gone before
        os._exit(1)


def speak_torchrun(launcher: Launcher, devices: int, nodes: int) -> None:
    """Copy this process's numbers from the launcher's variables into torchrun's, and set the address at which
    the first process listens. Raises BadInput."""
    env = os.environ
    rank = int(env[launcher.rank])
    env["RANK"] = str(rank)
    env["LOCAL_RANK"] = env[launcher.local_rank]
    env["WORLD_SIZE"] = str(devices * nodes)
    env["GROUP_RANK"] = str(rank // devices)
    if "MASTER_ADDR" not in env:
        address = None
        if nodes == 1:
            address = "127.0.0.1"
        elif launcher.name == "srun":
            address = SLURMEnvironment.resolve_root_node_address(env["SLURM_STEP_NODELIST"])
        elif launcher.name == "jsrun":  # the file's first line is the launch node's
            address = Path(env["LSB_DJOB_RANKFILE"]).read_text().split()[1]
        refuse_unless(
            address,
            f"num_nodes: {nodes}: {launcher.name} does not say where the first process is: set MASTER_ADDR "
            "to the name of its node, for all processes",
        )
        env["MASTER_ADDR"] = address
    job = " ".join(env.get(name, "") for name in launcher.job)
    env.setdefault("MASTER_PORT", str(15000 + zlib.crc32(job.encode()) % 10000))
