"""The frozen model that a policy is compared with: its log-probs, or a cache of them on the disk."""

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

from data import PackedBatch, to_device
from hub.lora import disable_adapters
from runs.devices import all_reduce
from runs.errors import BadInput, user_error
from runs.files import write_atomically
from runs.settings import RunSettings

SAVE_EVERY = 60  # seconds between two saves of a cache that grows


class Reference:
    """Log-probs of the frozen model: a copy of the start or another model; or, where `frozen` is
    None, the policy with its adapters off."""

    def __init__(self, fabric, policy, frozen):
        self.fabric, self.policy, self.frozen = fabric, policy, frozen

    def compute(self, packed: PackedBatch, prompt_cache=None) -> torch.Tensor:
        """-> what the policy's forward would give: log-probs in nats (see model.py)"""
        if self.frozen is None:
            with disable_adapters(self.policy):
                return self.policy(packed, prompt_cache)
        # Unless it is sharded, Fabric does not wrap the copy: without its autocast it would round
        # differently from the policy.
        with self.fabric.autocast():
            return self.frozen(packed, prompt_cache)

    __call__ = compute


class CachedReference:
    """A reference whose log-probs are kept in a folder, by the content of prompt and completion.

    It computes what the folder does not have, until `release` frees the model. Runs and ranks can
    share a folder: a save of one rank is a file named by its content. Raises BadInput.
    """

    def __init__(self, fabric, reference: Reference, cfg: RunSettings, identity: dict[str, str]):
        self.fabric, self.reference, self.dtype = fabric, reference, torch.get_default_dtype()
        self.folder = Path(cfg.reference_cache).expanduser()
        # what the values depend on, besides prompt and completion
        models = [x for k, x in sorted(identity.items()) if k.startswith(("model ", "reference "))]
        depends = [*models, cfg.precision + (cfg.lora.quantize or ""), cfg.data.score_prompt]
        self.key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16]
        self.known: dict[bytes, float] = {}
        self.unsaved: dict[bytes, float] = {}
        self.n_computed, self.saved_at = 0, time.monotonic()
        with user_error("reference_cache", self.folder, Exception):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._read()

    @property
    def released(self) -> bool:
        return self.reference is None

    def compute(self, packed: PackedBatch, prompt_cache=None) -> torch.Tensor:
        """Log-probs (B, K) by the model itself, not from the cache."""
        return self.reference.compute(packed, prompt_cache)

    def __call__(self, packed: PackedBatch, prompt_cache=None) -> torch.Tensor:
        """-> log-probs (B, K) in nats, from the folder where it has them. prompt_cache is not used: the
        prompts' keys may never have been computed."""
        keys, device = packed.digests(), packed.token_N.device
        is_missing = any(key not in self.known for row in keys for key in row)
        if self.released:
            if is_missing:
                raise BadInput(
                    "reference_cache: these examples, or their mismatched pairs, are not those of the "
                    "first fit, and the reference is no longer in memory: run without the cache"
                )
        else:
            # all ranks compute if one rank must: a sharded reference is a collective
            votes = torch.tensor(float(is_missing), device=device)
            if all_reduce(votes) > 0:
                self._add(keys, self.compute(packed).tolist())
        logps = [[self.known[key] for key in row] for row in keys]
        return to_device(torch.tensor(logps, dtype=self.dtype), device)

    def _add(self, keys: list[list[bytes]], logps: list[list[float]]) -> None:
        for row, values in zip(keys, logps):
            new = {key: value for key, value in zip(row, values) if key not in self.known}
            self.known |= new
            self.unsaved |= new
            self.n_computed += len(new)
        if time.monotonic() - self.saved_at > SAVE_EVERY:
            self.save()

    def release(self) -> None:
        """Free the model: everything that the run needs is known now."""
        self.save()
        self.fabric.barrier()
        # Two ranks may have computed the same value: take the one that a resume will find.
        self._read()
        self.reference = None

    def summary(self) -> str:
        return f"{self.n_computed:,} log-probs computed, {len(self.known):,} known in {self.folder}"

    # ---- the folder

    def _read(self) -> None:
        for file in sorted(self.folder.glob(f"{self.key}-*.safetensors")):
            content = file.read_bytes()
            if file.name != self._file_name(content):
                raise BadInput(
                    f"reference_cache: {file}: damaged: delete it, its log-probs are computed again"
                )
            tensors = load(content)
            keys = map(bytes, tensors["key"].numpy())
            self.known |= zip(keys, tensors["logp"].tolist())

    def _file_name(self, content: bytes) -> str:
        return f"{self.key}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"

    def save(self) -> None:
        """Write what is not written yet."""
        self.saved_at = time.monotonic()
        if not self.unsaved:
            return
        keys = np.frombuffer(b"".join(self.unsaved), np.uint8).reshape(len(self.unsaved), -1).copy()
        logps = torch.tensor(list(self.unsaved.values()), dtype=torch.float64)
        content = save({"key": torch.from_numpy(keys), "logp": logps})
        write_atomically(self.folder / self._file_name(content), content)
        self.unsaved = {}
