"""QLoRA's frozen base (arXiv 2305.14314): bitsandbytes' linears in place of the blocks' own."""

import logging

import torch
from litgpt.lora import LoRALinear
from torch import nn

from support.errors import BadInput


def quantize_base(model: nn.Module, kind: str, device) -> None:
    """Put the blocks' base matrices on their device in nf4 (its scales quantised too: 4.13 bits a
    weight) or int8 (a scale for each row). Embedding, head, norms and adapters stay as they are."""
    # it warns of casts that are meant, at every forward
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.nn as bnb  # slow to import

    for m in [m for m in model.transformer.h.modules() if isinstance(m, LoRALinear)]:
        old, given = m.linear, dict(bias=m.linear.bias is not None, device="meta")
        sizes = old.in_features, old.out_features
        if kind == "nf4" and sizes[0] % 64:  # on a CPU, wrong by 20 to 40% and silent
            raise BadInput(f"lora.base: nf4 takes widths of a multiple of 64, not {sizes[0]}")
        if kind == "nf4":
            new = bnb.Linear4bit(*sizes, **given, quant_type="nf4")
            new.weight = bnb.Params4bit(old.weight.data, quant_type="nf4", module=new)
        else:
            new = bnb.Linear8bitLt(*sizes, **given, has_fp16_weights=False)
            new.weight = bnb.Int8Params(old.weight.data, requires_grad=False)
        new.weight, new.bias = new.weight.to(device), old.bias  # .to() is what quantises
        new.register_forward_pre_hook(_autocast)
        _always_as_in_training(new)
        m.linear = new


def _autocast(_linear, inputs):
    """What autocast does at an nn.Linear; at bitsandbytes' it does nothing."""
    kind = inputs[0].device.type
    if torch.is_autocast_enabled(kind):
        return inputs[0].to(torch.get_autocast_dtype(kind))


def _always_as_in_training(linear) -> None:
    """On a CPU an evaluation computes otherwise: int8 rounds its inputs too, so that a reference's
    log-probs would not be the policy's, and nf4 repacks its weights for good, without a gradient."""
    linear.train = lambda mode=True: linear
