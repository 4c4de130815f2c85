"""Random numbers: seeds, the generators, and rounding at random."""

import hashlib
import random

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor


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


def round_at_random(x: Tensor, dtype: torch.dtype, name: str, seed: int = 0) -> Tensor:
    """x in this dtype. In bfloat16 or float16 each number becomes one of its two neighbours, with the
    probabilities that make x the mean. A number that the type has stays the same. The draws depend on the
    seed, the weight's name and the kind of device.

    Training changes most weights by less than half of bfloat16's spacing. Rounded to nearest, they would be the
    weights from before the training again."""
    x = x.contiguous()
    rounded = x.to(dtype)
    if dtype not in (torch.bfloat16, torch.float16) or x.dtype == dtype:
        return rounded
    x = x.float()
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(x.device).manual_seed(int.from_bytes(digest[:7], "big"))
    limits = torch.finfo(dtype)
    # in parts: the temporary tensors of a whole embedding would take gigabytes
    for part, out in zip(x.view(-1).split(2**24), rounded.view(-1).split(2**24)):
        if torch.equal(out.float(), part):
            continue  # nothing to round
        # the bits of the exponent alone: the largest power of 2 that is not above |part|
        power = (part.view(torch.int32) & 0x7F800000).view(torch.float32)
        spacing = (power * limits.eps).clamp(min=limits.smallest_normal * limits.eps)
        share = torch.rand(part.shape, generator=generator, dtype=torch.float32, device=x.device)
        drawn = torch.floor(part / spacing + share) * spacing
        out.copy_(torch.where(out == part, part, drawn))
    return rounded
