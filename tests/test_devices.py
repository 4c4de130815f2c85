"""How many processes there are, which precision they compute in and when they stop."""

import os
import signal

import pytest
import torch

import kto
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


def test_more_gpus_than_there_are_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolved(accelerator="auto", devices=2)["accelerator"] == "gpu"
    with pytest.raises(BadInput, match="^accelerator: gpu, devices: 3, but this machine has 2 GPU"):
        resolved(accelerator="auto", devices=3)


@pytest.mark.parametrize(
    "gpus, multiplies, size, precision",
    [
        (1, False, DEMO, "bf16-mixed"),
        (0, True, LARGE, "bf16-mixed"),
        (0, True, (6, 512), "32-true"),  # 19M weights
        (0, False, LARGE, "32-true"),
    ],
)
def test_the_precision_that_is_not_given_is_what_the_machine_multiplies_and_is_said(
    gpus, multiplies, size, precision, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: multiplies)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolved(size, "auto")["precision"] == precision
    assert capsys.readouterr().out.startswith(f"precision: {precision}, ")
    assert resolved(size, "auto", precision="64-true")["precision"] == "64-true"
    assert capsys.readouterr().out == "", "it was asked for"


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
