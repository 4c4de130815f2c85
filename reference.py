"""The frozen model that a policy is held against: its log-probs, or, once it has been asked, their memory on disk."""

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

import checkpoint
import model
from data import BadInput, Rows


class Reference:
    """Log-probs of a frozen model: a copy of the start, another model, or (frozen is None) the policy less its LoRA."""

    def __init__(self, fabric, policy, frozen):
        self.fabric, self.policy, self.frozen = fabric, policy, frozen

    def __call__(self, rows: Rows) -> torch.Tensor:
        """-> (B, K) log-probs"""
        if self.frozen is None:
            with model.lora_off(self.policy):
                return self.policy(rows)
        with self.fabric.autocast():  # the copy may be unwrapped; both sides must round the same way
            return self.frozen(rows)


class Remembered:
    """A reference's log-probs by the content of prompt and completion, kept in a folder.

    While it has a reference it asks that for what it does not know; then `leave`, and it answers by itself. `of` names
    what else the values depend on (weights, precision). A file holds what one save of one rank had new, under a name by
    its content, so runs and ranks can share the folder.
    """

    def __init__(self, fabric, reference, folder: Path, of: list, dtype: torch.dtype):
        self.fabric, self.reference, self.folder, self.dtype = fabric, reference, folder, dtype
        self.of = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]
        self.known: dict[bytes, float] = {}
        self.fresh: dict[bytes, float] = {}
        self.asked, self.saved = 0, time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise BadInput(f"reference_cache: {folder}: {e.strerror}: give a folder that can be written to") from None
        for file in sorted(folder.glob(f"{self.of}-*.safetensors")):
            try:
                state = load_file(file)
                self.known |= zip(map(bytes, state["key"].numpy()), state["logp"].tolist())
            except (SafetensorError, OSError, KeyError) as e:
                raise BadInput(f"reference_cache: {file}: {e}; delete it, what it held is computed again") from None

    def __call__(self, rows: Rows) -> torch.Tensor:
        keys = rows.contents()
        if self.reference is not None:
            missing = torch.tensor(float(any(key not in self.known for row in keys for key in row)))
            # a sharded reference is asked by all ranks or by none
            if self.fabric.all_reduce(missing.to(rows.token_N.device), reduce_op="sum") > 0:
                for row, values in zip(keys, self.reference(rows).tolist()):
                    new = {key: value for key, value in zip(row, values) if key not in self.known}
                    self.known |= new
                    self.fresh |= new
                    self.asked += len(new)
                if time.monotonic() - self.saved > 60:
                    self.save()
        known = [[self.known[key] for key in row] for row in keys]
        return torch.tensor(known, dtype=self.dtype, device=rows.token_N.device)

    def save(self) -> None:
        self.saved = time.monotonic()
        if self.fresh:
            key = torch.from_numpy(np.frombuffer(b"".join(self.fresh), np.uint8).reshape(len(self.fresh), -1).copy())
            blob = save({"key": key, "logp": torch.tensor(list(self.fresh.values()), dtype=torch.float64)})
            name = f"{self.of}-{hashlib.sha256(blob).hexdigest()[:16]}.safetensors"
            checkpoint.write_whole(self.folder / name, blob)
            self.fresh = {}

    def leave(self) -> None:
        """All has been asked: keep it, and let go of the reference."""
        self.save()
        self.reference = None
