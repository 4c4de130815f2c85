"""The models of a run: the policy, and the frozen model that it is compared with. The frozen model is a separate model,
or the policy with its adapters off, or a cache of its log-probs (reference_cache.py)."""

import copy
import hashlib
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from infra.console import BadInput
from infra.devices import dtype_of, on_rank_0, set_weights
from infra.random_numbers import round_at_random
from infra.settings import RunSettings
from model import Scores
from models.hub import Source, find_model, weights_hash
from models.load import freeze, load_model
from models.lora import add_adapters, disable_adapters, plain_name
from objective import Objective
from packing import PackedBatch
from records.tokenizer import Tokenizer


class FrozenModel:
    """A reference that is a separate model: a copy of the start, or another model."""

    def __init__(self, fabric: Fabric, model: nn.Module):
        self.fabric = fabric
        self.model = model

    def compute(self, packed: PackedBatch, **options: Any) -> Scores:
        """options: see model.Packed.forward."""
        # Unless it is sharded, Fabric does not wrap the copy: without its autocast it would round
        # differently from the policy.
        with self.fabric.autocast():
            return self.model(packed, **options)

    __call__ = compute

    def own_weights(self) -> dict[str, nn.Parameter]:
        """The weights that the policy does not hold."""
        return self.model.unique_parameters()

    def set_weights(
        self, weights: dict[str, Tensor] | None, share: float = 1.0, seed: int = 0
    ) -> None:
        """Take these weights, or move towards them by a share. A collective (devices.set_weights)."""
        set_weights(self.model, weights, share, seed)


class AdaptersOff:
    """A reference that is the policy without its adapters."""

    def __init__(self, policy: nn.Module):
        self.policy = policy

    def compute(self, packed: PackedBatch, **options: Any) -> Scores:
        """options: see model.Packed.forward."""
        with disable_adapters(self.policy):
            return self.policy(packed, **options)

    __call__ = compute

    def own_weights(self) -> dict[str, nn.Parameter]:
        """The weights that the policy does not hold: none."""
        return {}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Put weights by their plain names into the policy's base; its adapters stay. A collective."""
        names = self.policy.module.unique_parameters()
        set_weights(self.policy, {name: weights.get(plain_name(name)) for name in names})


if TYPE_CHECKING:
    from reference_cache import CachedReference

    Reference = FrozenModel | AdaptersOff | CachedReference


# ---- how they are made ---------------------------------------------------------------------------


def load_policy_and_reference(
    cfg: RunSettings,
    fabric: Fabric,
    source: Source,
    tokenizer: Tokenizer,
    objective: Objective,
    width: int,
    hashes: dict[str, str],
) -> "tuple[nn.Module, Reference | None, dict[str, str]]":
    """-> the policy, the reference (None: the objective needs none), and `hashes`, those of the run's inputs, with
    those of the weights. Of a sharded run rank 0 alone reads the weights. The objective's module, for hidden states of
    this width, becomes a part of the policy after the reference was copied from the policy. Raises BadInput."""
    sharded = cfg.strategy == "fsdp"
    if sharded:
        from models.shard import shard_over_ranks
    dtype = dtype_of(cfg.precision)
    policy = None
    other = None
    reference = None
    other_source = source
    if cfg.reference:
        other_source = find_model(cfg.reference, "reference")
        # the records' ids are made once, by the policy's tokenizer
        if tokenizer.hf.get_vocab() != Tokenizer(other_source).hf.get_vocab():
            raise BadInput(f"reference: {cfg.reference}: another tokenizer than {cfg.model}")
    if fabric.global_rank == 0 or not sharded:
        policy = load_model(source, dtype=dtype)
        other = load_model(other_source, dtype=dtype) if cfg.reference else None
    models = {"model weights": policy, "reference weights": other}.items()
    hashes = hashes | on_rank_0(
        fabric, lambda: {name: weights_hash(x.unique_parameters()) for name, x in models if x}
    )
    if cfg.reference:  # two models with the same weights may still compute differently
        config = (other_source.root / "config.json").read_bytes()
        hashes["reference config"] = hashlib.sha256(config).hexdigest()
    if other:
        round_matrices(other, cfg.precision)
    if policy:
        if cfg.lora.rank or source.base:
            round_matrices(policy, cfg.precision)
        add_adapters(policy, cfg.lora)
    # without cfg.reference, a run with adapters takes the policy with its adapters off
    is_model = cfg.reference or not cfg.lora.rank
    if objective.needs_reference and is_model:
        if sharded:
            frozen = shard_over_ranks(fabric, other or policy, other_source, cfg.precision)
        else:  # not wrapped: DDP refuses a module that never trains
            # copied on the device: the host may have no room for a second model
            other = other or copy.deepcopy(fabric.to_device(policy))
            frozen = fabric.to_device(freeze(other, cfg.precision))
        reference = FrozenModel(fabric, frozen)
    if cfg.lora.quantize:  # only now: the hashes are of the source's own weights
        from models.quantize import quantize_base

        quantize_base(policy, fabric.device)
    objective_module = objective.make_module(width)
    # from here on ranks may draw different random numbers (dropout)
    torch.manual_seed(cfg.seed + 1000003 * fabric.global_rank)
    if sharded:
        policy = shard_over_ranks(fabric, policy, source, cfg.precision, cfg.lora, objective_module)
    else:
        policy.objective_module = objective_module
        policy = fabric.setup_module(policy)
    policy.module.activation_checkpointing = cfg.activation_checkpointing
    if objective.needs_reference and not is_model:
        reference = AdaptersOff(policy)
    if cfg.reference_cache and reference:
        from reference_cache import CachedReference

        reference = CachedReference(reference, fabric, cfg, hashes)
    return policy.eval(), reference, hashes


@torch.no_grad()
def round_matrices(model: nn.Module, precision: str) -> None:
    """In bf16-mixed give a model's matrices numbers that bfloat16 has, by rounding at random. Autocast, which rounds
    matrices to nearest at each product, then changes nothing. This is no help in full fine-tuning: all small
    steps begin at a number of bfloat16, so they are not computed on average either."""
    if precision == "bf16-mixed":
        for name, p in model.unique_parameters().items():
            if p.dim() > 1:
                p.copy_(round_at_random(p, torch.bfloat16, name))
