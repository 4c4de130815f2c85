"""How many processes there are, which precision they compute in and when they stop."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import kto
from head import add_product
from runs.console import BadInput
from runs.devices import Stop, resolve_devices
from runs.settings import Data

DEMO, LARGE = (3, 96), (30, 576)  # layers, width


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def resolved(size=DEMO, accelerator="cpu", **given) -> dict:
    return resolve_devices(kto.Settings("m", Data("t"), accelerator=accelerator, **given), *size)


def test_a_launchers_number_of_processes_is_taken(monkeypatch):
    asked = dict(devices=3, num_nodes=2, accelerator="cpu", precision="32-true")
    assert resolved(**asked) == asked, "no launcher"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = resolved(devices=3)
    assert (found["devices"], found["num_nodes"]) == (2, 2)


def test_srun_starts_as_many_processes_as_the_settings_ask_for_or_one(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(BadInput, match="^devices: 1 on each of 1 nodes, but srun started 8 proc"):
        resolved()
    assert resolved(devices=4, num_nodes=2)["devices"] == 4, "srun -N 2 -n 8"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert resolved(devices=4)["devices"] == 4, "Fabric launches them itself"


def gpus(monkeypatch, *capabilities):
    """This machine has GPUs of these capabilities."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"GPU number {gpu}")


def test_more_gpus_than_there_are_are_refused(monkeypatch):
    gpus(monkeypatch, (9, 0), (9, 0))
    assert resolved(accelerator="auto", devices=2)["accelerator"] == "gpu"
    with pytest.raises(BadInput, match="^accelerator: gpu, devices: 3, but this machine has 2 GPU"):
        resolved(accelerator="auto", devices=3)


@pytest.mark.parametrize(
    "capabilities, multiplies, size, precision",
    [
        ([(8, 0)], False, DEMO, "bf16-mixed"),
        ([(8, 9), (12, 0)], False, DEMO, "bf16-mixed"),
        ([(7, 5)], True, LARGE, "32-true"),  # a T4
        ([], True, LARGE, "bf16-mixed"),
        ([], True, (6, 512), "32-true"),  # 19M weights
        ([], False, LARGE, "32-true"),
    ],
)
def test_the_precision_that_is_not_given_is_what_the_machine_multiplies_and_is_said(
    capabilities, multiplies, size, precision, monkeypatch, capsys
):
    gpus(monkeypatch, *capabilities)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: multiplies)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolved(size, "auto")["precision"] == precision
    out = capsys.readouterr().out
    assert re.match(f"precision: {precision}[,:] ", out) and out.count("\n") == 1
    assert ("GPU number 0 (capability 7.5, below 8.0)" in out) == (capabilities == [(7, 5)])
    assert resolved(size, "auto", precision="64-true")["precision"] == "64-true"
    assert capsys.readouterr().out == "", "it was asked for"


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_is_refused_on_a_gpu_that_does_not_multiply_it(precision, monkeypatch):
    gpus(monkeypatch, (8, 0), (7, 0))
    asked = dict(accelerator="gpu", precision=precision)
    assert resolved(**asked)["precision"] == precision, "the first GPU alone computes"
    said = f"^precision: {precision}: GPU number 1 .capability 7.0, below 8.0. does not multiply "
    with pytest.raises(BadInput, match=f"{said}bfloat16; use 32-true$"):
        resolved(devices=2, **asked)


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_the_heads_gradient_is_added_up_in_float32_on_a_gpu_without_such_a_product(
    capability, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    asked = []
    monkeypatch.setattr(torch, "addmm", lambda *a, out, **k: asked.append(k["out_dtype"]))
    a, b = torch.full((3, 300), 1.0), torch.full((300, 2), 1 + 2**-7)
    sum_32 = torch.ones(3, 2)
    add_product(sum_32.as_subclass(OnGpu), a.bfloat16(), b.bfloat16())
    if capability >= (8, 0):
        assert asked == [torch.float32]
    else:
        assert not asked and sum_32.tolist() == [[1 + 300 * (1 + 2**-7)] * 2] * 3


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
)
def test_a_gpus_memory_grows_by_segments_unless_the_users_environment_says_how(env, expected):
    """torch reads it when it first uses a GPU, as for its capability: so it is set by the import."""
    code = "import kto, os, json; print(json.dumps(dict(os.environ)))"
    started = {k: v for k, v in os.environ.items() if not k.endswith("_ALLOC_CONF")}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env=started | env, cwd=ROOT, capture_output=True, check=True)
    found = json.loads(out.stdout)
    assert {k: v for k, v in found.items() if k.endswith("_ALLOC_CONF")} == expected


def test_a_signal_that_comes_after_the_ranks_have_agreed_waits_for_the_next_step(capfd):
    stop = Stop(None)
    try:
        stop.set_agreed(stop.code())
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.reason
        stop.set_agreed(stop.code())
        assert stop.reason == "SIGTERM"
    finally:
        stop.close()
