"""The frozen model that a policy is compared with: its log-probs, or a cache of them on the disk."""

import contextlib
import hashlib
import json
import time
from pathlib import Path

import torch
from torch import nn

from lora import disable_adapters
from packing import PackedBatch, to_device
from runs.checkpoint import write_whole
from runs.console import rank, say, user_error
from runs.devices import all_reduce
from runs.settings import RunSettings, refuse_unless


class Reference:
    """Log-probs of the frozen model: a copy of the start or another model; or, where `frozen` is
    None, the policy with its adapters off."""

    def __init__(self, fabric, policy, frozen):
        self.fabric, self.policy, self.frozen = fabric, policy, frozen
        # a context with the policy's own base, where Run.exported_weights has put another one there
        self.with_own_base = contextlib.nullcontext

    def compute(self, packed: PackedBatch, prompt_cache=None) -> torch.Tensor:
        """-> log-probs in nats (see model.Scores)"""
        if self.frozen is None:
            with disable_adapters(self.policy), self.with_own_base():
                return self.policy(packed, prompt_cache).logps
        # Unless it is sharded, Fabric does not wrap the copy: without its autocast it would round
        # differently from the policy.
        with self.fabric.autocast():
            return self.frozen(packed, prompt_cache).logps

    __call__ = compute


@torch.no_grad()
def freeze(model: nn.Module, precision: str) -> nn.Module:
    """Make a model a reference: without gradients, and in bf16-mixed with its linear layers held in bfloat16, except a
    head that is tied to the embedding. Autocast would cast them at each use: log-probs stay the same bits."""
    model.requires_grad_(False).eval()
    if precision == "bf16-mixed":
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.weight is not model.embedding.weight:
                module.to(torch.bfloat16)
    return model


class CachedReference(Reference):
    """A reference whose log-probs are kept in a folder, by the content of prompt and completion.

    It computes what the folder does not have, until `release` frees the model and writes them. Runs and
    ranks can share a folder: each writes a file of its own.
    """

    def __init__(self, fabric, policy, frozen, cfg: RunSettings, hashes: dict[str, str]):
        super().__init__(fabric, policy, frozen)
        self.folder = Path(cfg.reference_cache).expanduser()
        # what the values depend on, besides prompt and completion
        models = [x for name, x in sorted(hashes.items()) if name not in ("program", "records")]
        depends = [*models, cfg.precision, cfg.lora.quantize, cfg.data.score_prompt]
        self.key = hashlib.sha256(repr(depends).encode()).hexdigest()[:16]
        self.known, self.computed, self.released = {}, {}, False  # hash of an example: its log-prob
        with user_error("reference_cache", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._read()

    def __call__(self, packed: PackedBatch, prompt_cache=None) -> torch.Tensor:
        """-> log-probs (B, K) in nats, from the folder where it has them. prompt_cache is not used: the
        prompts' keys may never have been computed. Raises BadInput."""
        keys = packed.digests()
        device = packed.token_N.device
        is_missing = any(key not in self.known for key in keys)
        if self.released:
            refuse_unless(
                not is_missing,
                "reference_cache: these examples, or their mismatched pairs, are not those of the "
                "first fit, and the reference is no longer in memory: run without the cache",
            )
        # all ranks compute if one rank must: a sharded reference is a collective
        elif all_reduce(torch.tensor(float(is_missing), device=device)) > 0:
            for key, x in zip(keys, self.compute(packed).flatten().tolist()):
                if key not in self.known:
                    self.known[key] = self.computed[key] = x
        logps = torch.tensor([self.known[key] for key in keys])
        return to_device(logps.view(packed.length_BK.shape), device)

    def release(self) -> None:
        """Write what was computed, and free the model: everything that the run needs is known now."""
        if self.computed:
            name = f"{self.key}-{rank()}-{time.time_ns()}.json"
            write_whole(self.folder / name, json.dumps(self.computed))
        self.fabric.barrier()
        # Two ranks may have computed the same value: take the one that a resume will find.
        self._read()
        self.released = True
        del self.policy, self.frozen
        n, known = len(self.computed), len(self.known)
        say(f"reference: {n:,} log-probs computed, {known:,} known in {self.folder}")

    def _read(self) -> None:
        for file in sorted(self.folder.glob(f"{self.key}-*.json")):
            self.known |= json.loads(file.read_text())
