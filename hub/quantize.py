"""QLoRA's frozen base (arXiv 2305.14314): bitsandbytes' linears for the blocks' own."""

import logging

import torch
from litgpt.lora import LoRALinear
from torch import nn

from runs.errors import BadInput


def quantize_base(model: nn.Module, kind: str, device) -> None:
    """The blocks' base matrices in nf4 (its scales quantised too) or int8 (a scale
    for each row), on their device. Raises BadInput."""
    # it warns of casts that are meant, at every forward
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.nn as bnb  # slow to import

    layers = [m for m in model.transformer.h.modules() if isinstance(m, LoRALinear)]
    for m in layers:
        old, has_bias = m.linear, m.linear.bias is not None
        sizes = old.in_features, old.out_features, has_bias
        if kind == "nf4":
            if sizes[0] % 64:  # on a CPU wrong by 20 to 40%, and silent
                why = f"nf4 takes widths of a multiple of 64, not {sizes[0]}"
                raise BadInput(f"lora.base: {why}")
            new = bnb.Linear4bit(*sizes, quant_type="nf4", device="meta")
            weight = bnb.Params4bit(old.weight.data, quant_type="nf4", module=new)
        else:
            new = bnb.Linear8bitLt(*sizes, has_fp16_weights=False, device="meta")
            weight = bnb.Int8Params(old.weight.data, requires_grad=False)
        new.weight, new.bias = weight.to(device), old.bias  # .to() quantises
        new.register_forward_pre_hook(_autocast)
        _always_as_in_training(new)
        m.linear = new


def _autocast(_linear, inputs):
    """As autocast does at an nn.Linear, and not at bitsandbytes'."""
    x, kind = inputs[0], inputs[0].device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))


def _always_as_in_training(linear) -> None:
    """On a CPU an evaluation computes otherwise: int8 rounds its inputs too, so that a reference's
    log-probs would not be the policy's; nf4 repacks its weights for good, without a gradient."""
    linear.train = lambda mode=True: linear
