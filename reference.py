"""The frozen model that a policy is compared with: its log-probs, or their cache on disk."""

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

from data import PackedBatch
from hub.lora import disable_adapters
from runs.devices import all_reduce
from runs.errors import BadInput, user_error
from runs.files import write_atomically


class Reference:
    """Log-probs of a frozen model: a copy of the start, another model, or (frozen is None) the
    policy with its adapters off."""

    def __init__(self, fabric, policy, frozen):
        self.fabric, self.policy, self.frozen = fabric, policy, frozen

    def __call__(self, packed: PackedBatch) -> torch.Tensor:
        """-> (B, K) log-probs"""
        if self.frozen is None:
            with disable_adapters(self.policy):
                return self.policy(packed)
        with self.fabric.autocast():  # the copy may be unwrapped; both sides must round alike
            return self.frozen(packed)


class CachedReference:
    """A reference's log-probs by the content of prompt and completion, kept in a folder.

    While it has a reference it computes what it does not know; after `release` it answers by
    itself. `of` names what else the values depend on (weights, precision). A file holds what one
    save of one rank had new, under a name by its content, so runs and ranks can share the folder.
    """

    def __init__(self, fabric, reference, folder: Path, of: list):
        self.fabric, self.reference = fabric, reference
        self.folder, self.dtype = folder, torch.get_default_dtype()
        self.of = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]
        self.known: dict[bytes, float] = {}
        self.unsaved: dict[bytes, float] = {}
        self.computed, self.saved_at = 0, time.monotonic()
        with user_error("reference_cache", folder, Exception):
            folder.mkdir(parents=True, exist_ok=True)
            self._read()

    def _read(self) -> None:
        for file in sorted(self.folder.glob(f"{self.of}-*.safetensors")):
            blob = file.read_bytes()
            if file.name != self._name(blob):
                why = "damaged: delete it, what it held is computed again"
                raise BadInput(f"reference_cache: {file}: {why}")
            state = load(blob)
            keys = map(bytes, state["key"].numpy())
            self.known |= zip(keys, state["logp"].tolist())

    def _name(self, blob: bytes) -> str:
        return f"{self.of}-{hashlib.sha256(blob).hexdigest()[:16]}.safetensors"

    def __call__(self, packed: PackedBatch) -> torch.Tensor:
        keys, device = packed.digests(), packed.token_N.device
        if self.reference is not None:
            missing = any(key not in self.known for row in keys for key in row)
            # a sharded reference runs on all ranks or on none
            votes = torch.tensor(float(missing), device=device)
            if all_reduce(votes) > 0:
                self._compute(packed, keys)
        elif any(key not in self.known for row in keys for key in row):
            why = "fit: other examples than the first ones, and their reference is released"
            raise BadInput(f"reference_cache: {why}: leave the cache out")
        known = [[self.known[key] for key in row] for row in keys]
        return torch.tensor(known, dtype=self.dtype, device=device)

    def _compute(self, packed: PackedBatch, keys: list[list[bytes]]) -> None:
        for row, values in zip(keys, self.reference(packed).tolist()):
            new = {key: x for key, x in zip(row, values) if key not in self.known}
            self.known |= new
            self.unsaved |= new
            self.computed += len(new)
        if time.monotonic() - self.saved_at > 60:
            self.save()

    def save(self) -> None:
        self.saved_at = time.monotonic()
        if not self.unsaved:
            return
        n = len(self.unsaved)
        key = np.frombuffer(b"".join(self.unsaved), np.uint8).reshape(n, -1).copy()
        logp = torch.tensor(list(self.unsaved.values()), dtype=torch.float64)
        blob = save({"key": torch.from_numpy(key), "logp": logp})
        write_atomically(self.folder / self._name(blob), blob)
        self.unsaved = {}

    def release(self) -> None:
        """All that the run needs is known: keep it, and free the reference."""
        self.save()
        self.fabric.barrier()
        self._read()  # what ranks computed twice: the value that a resume will find
        self.reference = None
