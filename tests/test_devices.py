"""Blocks of a sharded policy that stay gathered while it samples, and freed memory that is used again."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch import nn

from runs import devices


class Block(nn.Linear):
    """Stands in for FSDP2's module, and remembers what it is told."""

    def __init__(self):
        super().__init__(4, 4)
        self.told = []

    def set_reshard_after_forward(self, on, recurse):
        self.told.append(on)

    def reshard(self):
        self.told.append("reshard")


@pytest.fixture
def policy(monkeypatch):
    monkeypatch.setattr(devices, "FSDPModule", Block)
    return nn.Sequential(Block(), Block())


def test_blocks_are_kept_only_if_the_rank_with_the_least_memory_has_room(policy, monkeypatch):
    for least, told in ((1e9, [False, True, "reshard"]), (1.0, [])):
        monkeypatch.setattr(devices, "all_reduce", lambda x, op: x.clamp(max=least))
        for block in policy:
            block.told.clear()
        with devices.keep_gathered(policy, torch.device("cpu")):
            pass
        assert [block.told for block in policy] == [told, told]


def test_blocks_are_given_back_after_an_error(policy):
    with pytest.raises(KeyError), devices.keep_gathered(policy, torch.device("cpu")):
        raise KeyError
    assert [block.told for block in policy] == [[False, True, "reshard"]] * 2


FAULTS = """
import resource, torch
from runs.devices import keep_freed_memory
keep_freed_memory()
def use():
    tensors = [torch.ones(n, 2**18) for n in (4, 16, 8)]  # of 4, 16 and 8 MB
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
@pytest.mark.parametrize("users", [{}, {"MALLOC_TRIM_THRESHOLD_": "0"}])
def test_memory_of_freed_tensors_is_not_asked_of_the_kernel_again(users):
    """The number of pages that the kernel has cleared, of 4 KB each. The user's own settings stay."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | users
    told = subprocess.run(
        [sys.executable, "-c", FAULTS], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    faults = int(told.stdout)
    assert faults > 10_000 if users else faults < 1_000
