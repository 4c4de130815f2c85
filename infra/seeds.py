"""Seeds, and the generators of random numbers."""

import random

import numpy as np
import torch
from lightning.fabric import Fabric


def mixed(seed: int, number: int) -> int:
    """A seed for each pair of a seed and a number: another one for each pair, as long as the numbers stay below
    1000003."""
    return (seed * 1000003 + number) % 2**63


def generator_of(fabric: Fabric) -> torch.Generator:
    """The source of this rank's random numbers."""
    if fabric.device.type == "cuda":
        return torch.cuda.default_generators[fabric.device.index]
    return torch.default_generator


def seed_user_code(fabric: Fabric, seed: int, step: int) -> None:
    """Seed the generators that a fork may use and that no checkpoint holds: Python's, numpy's and, on a GPU, torch's
    generator of the CPU. The same step of a resumed run then draws the same numbers."""
    number = mixed(seed, step) % 2**32
    random.seed(number)
    np.random.seed(number)
    if fabric.device.type == "cuda":
        torch.default_generator.manual_seed(number)
