"""Types of floating-point numbers, and stochastic rounding from one to another."""

import hashlib

import torch


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of the weights in a run of this precision."""
    return {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)


def round_at_random(x: torch.Tensor, dtype: torch.dtype, name: str, seed: int = 0) -> torch.Tensor:
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
        random = torch.floor(part / spacing + share) * spacing
        out.copy_(torch.where(out == part, part, random))
    return rounded
