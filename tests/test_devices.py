"""How many processes there are, which precision they compute in and when they stop."""

import os
import re
import socket
import sys

import pytest
import torch
from conftest import ROOT, Started, assert_same, environments_of_ranks, ranks, refused, result

import kto
from infra.console import rank
from infra.devices import launch, resolve_devices, resolve_processes
from infra.settings import Data

DEMO, LARGE = (3, 96), (30, 576)  # layers, width


RENDEZVOUS = dict(MASTER_ADDR="head", MASTER_PORT="29400")
# what sbatch sets for a script with --ntasks 2; python is started once, by the script itself
SBATCH = dict(SLURM_JOB_ID="77", SLURM_JOB_NAME="train", SLURM_NTASKS="2", SLURM_PROCID="0")
SBATCH |= dict(SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_NODELIST="n[07-08]", SLURM_NNODES="2")
# two processes on each of two nodes
SRUN = SBATCH | dict(SLURM_STEP_NUM_TASKS="4", SLURM_STEP_TASKS_PER_NODE="2(x2)")
SRUN |= dict(SLURM_NTASKS="4", SLURM_NTASKS_PER_NODE="2", SLURM_PROCID="3", SLURM_LOCALID="1")
TORCHRUN = dict(WORLD_SIZE="4", RANK="3", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2") | RENDEZVOUS
OPEN_MPI = dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The environment of a program that a person starts, without a launcher's variables; what a test changes in it is
    undone."""
    monkeypatch.setattr(sys, "argv", [kto.__file__])
    before = dict(os.environ)
    for name in filter(re.compile(LAUNCHERS).match, before):
        del os.environ[name]
    yield os.environ
    os.environ.clear()
    os.environ |= before


LAUNCHERS = "SLURM_|OMPI_|PMI|JSM_|MASTER_|KTO_|(LOCAL_|NODE_|GROUP_)?RANK$|(LOCAL_)?WORLD_SIZE$"


def resolved(size=DEMO, accelerator="cpu", **given) -> dict:
    return resolve_devices(kto.Settings("m", Data("t"), accelerator=accelerator, **given), *size)


@pytest.mark.parametrize(
    "given, nodes",
    [
        (TORCHRUN, 2),
        (SRUN | TORCHRUN, 2),  # srun has started torchrun
        (SRUN, 2),
        # Fabric starts the processes
        ({}, 1),
        (SBATCH, 1),
        (SRUN | dict(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"), 1),  # a shell by srun --pty
        # a pod, or a variable that another program has left
        (dict(WORLD_SIZE="1", RANK="0") | RENDEZVOUS, 1),
        (dict(NODE_RANK="1", LOCAL_RANK="1"), 1),
        (dict(SLURM_PROCID="1", SLURM_NTASKS="4", SLURM_LOCALID="1"), 1),
    ],
)  # fmt: skip
def test_a_process_is_one_of_those_that_a_launcher_started_or_starts_the_others(
    given, nodes, environment
):
    environment |= given
    assert rank() == (3 if nodes == 2 else 0), "before anything is resolved"
    asked = 3 if nodes == 2 else 2  # a launcher's numbers count
    for _ in range(2):  # a second run in this process
        assert resolve_processes(asked) == (2, nodes)
    if nodes == 1:
        # the processes that Fabric starts would inherit it, and another job may listen at this port
        names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
        assert not names & environment.keys()


@pytest.mark.parametrize(
    "given, said",
    [
        (SRUN | dict(SLURM_STEP_TASKS_PER_NODE="2,1"), "srun: 2,1 processes: give each node as"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE is 2 in the environment, but neither torchrun nor srun"),
        (SRUN | OPEN_MPI | dict(SLURM_STEP_NUM_TASKS="1"), "OMPI_COMM_WORLD_SIZE is 2 in"),
        (dict(WORLD_SIZE="2", RANK="1") | RENDEZVOUS, "WORLD_SIZE is 2 in the"),  # Kubeflow's pods
    ],
)  # fmt: skip
def test_processes_that_would_be_other_runs_or_wait_for_ever_are_refused(given, said, environment):
    environment |= given
    refused(f"^{re.escape(said)}", resolved, devices=2)


def test_two_processes_of_srun_and_two_of_a_batch_script_that_starts_python_itself_are_one_run(
    tiny, ratings, tmp_path
):
    port = environments_of_ranks(1)[0]["MASTER_PORT"]
    argv = [f"--model={tiny}", f"--data.train={ratings}", "--batch_size=4", "--max_steps=2",
            "--precision=32-true", "--accelerator=cpu", "--progress=false"]  # fmt: skip

    def started(name: str, place: str, *more: str, **env) -> Started:
        given = [*argv, f"--out_dir={tmp_path / name}", *more]
        return Started(tmp_path / f"{name}{place}", str(ROOT / "kto.py"), given, **env)

    node = SRUN | dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, SLURM_STEP_NUM_TASKS="2")
    node |= dict(SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="1", SLURM_STEP_TASKS_PER_NODE="1(x2)")
    node |= dict(SLURM_LOCALID="0")
    processes = [started("srun", i, **node | dict(SLURM_PROCID=i, SLURM_NODEID=i)) for i in "01"]
    env = SBATCH | dict(RANK="0", WORLD_SIZE="1", SLURM_NTASKS_PER_NODE="2")
    env |= dict(LOCAL_RANK="1", OMPI_COMM_WORLD_RANK="1")  # left by another program
    with socket.socket() as other_job:
        other_job.bind(("127.0.0.1", 0))
        env |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(other_job.getsockname()[1]))
        processes.append(started("sbatch", "", "--devices=2", **env))
        ended = [process.ended(240) for process in processes]
    assert [code for code, *_ in ended] == [0] * 3, ended
    assert [said.count("train: ") for _, said, _ in ended] == [1, 0, 1], "one of the two speaks"
    assert_same(result(tmp_path / "srun"), result(tmp_path / "sbatch"))


def gpus(monkeypatch, *capabilities):
    """This machine has GPUs of these capabilities."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"GPU number {gpu}")


def test_rank_0_may_work_alone_for_hours_while_the_others_wait():
    """A judge's answers, an export: with Fabric's default of half an hour the others would end the run."""

    def work(_):
        launch(kto.Settings("m", Data("t"), accelerator="cpu", precision="32-true"), shard=None)
        group = torch.distributed.distributed_c10d._get_default_group()
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert min(ranks(2, work)) >= 12 * 3600


def test_gpus_are_used_where_there_are_some(monkeypatch):
    gpus(monkeypatch, (9, 0), (9, 0))
    assert resolved(accelerator="auto", devices=2)["accelerator"] == "gpu"


@pytest.mark.parametrize(
    "capability, cpu_multiplies, size, precision",
    [
        ((8, 0), False, DEMO, "bf16-mixed"),
        ((7, 5), True, LARGE, "32-true"),  # a T4
        (None, True, LARGE, "bf16-mixed"),
        (None, True, (6, 512), "32-true"),  # 19M weights
        (None, False, LARGE, "32-true"),
    ],
)
def test_the_precision_that_is_not_given_is_what_the_machine_multiplies_and_is_said(
    capability, cpu_multiplies, size, precision, monkeypatch, capsys
):
    gpus(monkeypatch, *[capability] * bool(capability))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpu_multiplies)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolved(size, "auto")["precision"] == precision
    device, said = capsys.readouterr().out.splitlines()
    assert device == f"device: {'GPU number 0' if capability else 'CPU'}, processes: 1"
    assert re.match(f"precision: {precision}[,:] ", said)
    assert resolved(size, "auto", precision="64-true")["precision"] == "64-true"
    assert capsys.readouterr().out == f"{device}\n", "the precision was asked for"
