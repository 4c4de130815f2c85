"""A model whose weights are sharded over all ranks, by FSDP2 (strategy fsdp)."""

import copy
import warnings

import torch
import transformers
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from infra.devices import set_weights
from infra.settings import Lora
from model import Packed
from models.hub import Source, read_config
from models.load import freeze, model_of
from models.lora import add_adapters


def shard_over_ranks(
    fabric: Fabric,
    whole: Packed | None,
    source: Source,
    precision: str,
    lora: Lora | None = None,
    objective_module: nn.Module | None = None,
) -> nn.Module:
    """Shard a model over all ranks. whole: the model on rank 0, None elsewhere: no other rank ever holds
    all of it. Without `lora` the model is frozen. The objective's module, if there is one, is sharded with
    the model. A collective."""
    config = read_config(source)
    about = weights = None
    if whole:
        # rank 0's values of the module count, not other ranks'
        whole.objective_module = copy.deepcopy(objective_module)
        weights = whole.unique_parameters()
        about = whole.tied, whole.embedding.weight.dtype, dict(whole.named_buffers())
    config.tie_word_embeddings, dtype, buffers = fabric.broadcast(about)
    auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        hf = auto.from_config(config, attn_implementation="eager", dtype=dtype)
        shell = model_of(hf)
    add_adapters(shell, lora)
    shell.objective_module = objective_module
    if lora is None:
        freeze(shell, precision)
    module = fabric.setup_module(shell)
    for name, x in buffers.items():
        shell.get_buffer(name).copy_(x)
    set_weights(module, weights)
    return module


def shard_module(module: Packed, mesh: DeviceMesh, bf16: bool) -> Packed:
    """Shard a model on the meta device with FSDP2: each block, an untied embedding and head by
    themselves, then the rest. `bf16`: linear layers are gathered in bfloat16, as autocast would
    cast them; norms, embedding and adapters stay float32."""
    # FSDP2 warns of views that a hook might change in place; no hook of ours does
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = mesh["data_parallel"]
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in module.blocks:
        if bf16:
            linears = [m for m in block.modules() if isinstance(m, nn.Linear)]
            fully_shard(linears, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh)
    if not module.tied and module.plain_head:
        fully_shard(module.embedding, mesh=mesh)
        fully_shard(module.lm_head, mesh=mesh, mp_policy=policy)
        # The model's logp reads the head's weight, and FSDP2 gathers a weight only before a method of its layer.
        # Therefore the model calls its logp as a method of the head.
        module.lm_head.logp = module.logp
        register_fsdp_forward_method(module.lm_head, "logp")
        module.logp = module.lm_head.logp
    # By default a root stays gathered for its backward; a frozen model has no backward.
    is_frozen = not any(p.requires_grad for p in module.parameters())
    fully_shard(module, mesh=mesh, reshard_after_forward=True if is_frozen else None)
    return module.to_empty(device=mesh.device_type)
