"""A frozen base in 4 bits under adapters (QLoRA)."""

import bitsandbytes.nn as bnb
import torch
from torch import nn

from head import autocast
from infra.console import BadInput


def quantize_base(model: nn.Module, device: torch.device | str) -> None:
    """QLoRA (arXiv 2305.14314): replace the frozen linear layers of all blocks by bitsandbytes'
    layers of 4 bits (nf4), on `device`. Adapters, biases and everything outside the blocks
    stay as they are. Raises BadInput, also if a block has a matrix outside of its linear layers."""
    linears = {name: m for name, m in model.blocks.named_modules() if type(m) is nn.Linear}
    weights = {m.weight for m in linears.values()}
    for name, p in model.blocks.named_parameters():
        if p.dim() > 1 and p not in weights and "lora_" not in name:
            raise BadInput(
                "lora.quantize: nf4 holds linear layers in 4 bits, and this model has matrices outside of them, such "
                f"as the experts of a mixture ({name}): leave lora.quantize null"
            )
    for name, old in linears.items():
        # on a CPU bitsandbytes computes other widths wrong, by 20 to 40%, without an error
        if old.in_features % 64 != 0:
            raise BadInput(
                "lora.quantize: nf4 needs layer widths that are multiples of 64, "
                f"this model has {old.in_features}"
            )
        sizes = old.in_features, old.out_features
        new = bnb.Linear4bit(*sizes, quant_type="nf4", device="meta")
        weight = bnb.Params4bit(old.weight.data, quant_type="nf4", module=new)  # ty: ignore
        new.weight = weight.to(device)
        new.bias = old.bias
        # autocast casts only the inputs of nn.Linear, and not those of bitsandbytes
        new.register_forward_pre_hook(lambda _, inputs: autocast(inputs[0]))
        # On a CPU eval() would repack the weights for good, and repacked weights pass no gradient on.
        new.train = lambda mode=True, new=new: new
        model.blocks.set_submodule(name, new)
