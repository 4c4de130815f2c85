"""QLoRA (arXiv 2305.14314): the frozen matrices of the blocks in 4 bits (nf4), by bitsandbytes."""

import logging

import torch
from litgpt.lora import LoRALinear
from torch import nn

from runs.errors import BadInput


def quantize_base(model: nn.Module, device: torch.device | str) -> None:
    """Put bitsandbytes' linear layers in place of the frozen ones in all blocks, on `device`.

    The scales are quantised, too. Adapters, biases and everything outside the blocks stay as they are.
    Raises BadInput.
    """
    # bitsandbytes warns at every forward that it casts its inputs, which is what we want
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.nn as bnb  # slow to import

    layers = [m for m in model.blocks.modules() if isinstance(m, LoRALinear)]
    for layer in layers:
        old = layer.linear
        sizes = (old.in_features, old.out_features, old.bias is not None)
        # on a CPU bitsandbytes computes other widths wrong, by 20 to 40%, without an error
        if old.in_features % 64:
            raise BadInput(
                "lora.quantize: nf4 needs layer widths that are multiples of 64, "
                f"this model has {old.in_features}"
            )
        new = bnb.Linear4bit(*sizes, quant_type="nf4", device="meta")
        weight = bnb.Params4bit(old.weight.data, quant_type="nf4", module=new)
        new.weight = weight.to(device)  # this quantises
        new.bias = old.bias
        new.register_forward_pre_hook(_autocast_input)
        _keep_in_training_mode(new)
        layer.linear = new


def _autocast_input(_linear: nn.Module, inputs: tuple):
    """Cast the input under autocast, which does so for nn.Linear but not for bitsandbytes' layers."""
    x = inputs[0]
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return None  # the inputs as they are


def _keep_in_training_mode(linear: nn.Module) -> None:
    """Make eval() do nothing. On a CPU these layers repack their weights for good in evaluation mode,
    and then pass no gradient on."""
    linear.train = lambda mode=True: linear
