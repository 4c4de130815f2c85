"""Blocks of a sharded policy that stay gathered while it samples: on all ranks or on none, and no longer."""

import pytest
import torch
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
