"""A reference with its log-probs in a folder, which are computed before the first step (setting reference_cache)."""

import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from torch import nn

from data import step_examples
from infra.console import BadInput, progress, rank, say
from infra.devices import all_reduce, to_device
from infra.files import write_whole
from infra.optimizer import Plan
from infra.settings import RunSettings
from model import Scores
from packing import PackedBatch
from records.examples import Example

if TYPE_CHECKING:
    from reference import AdaptersOff, FrozenModel
    from trainer import Trainer


class CachedReference:
    """A reference with its log-probs in a folder, by the content of prompt and completion.

    It computes the log-probs that the folder lacks, until `release` writes them and frees the model.
    Runs and ranks can share a folder: each writes separate files.
    """

    def __init__(
        self,
        reference: "FrozenModel | AdaptersOff",
        fabric: Fabric,
        cfg: RunSettings,
        hashes: dict[str, str],
    ):
        self.reference: FrozenModel | AdaptersOff | None = reference
        self.fabric = fabric
        self.folder = Path(cfg.reference_cache).expanduser()
        # the inputs of the values besides prompt and completion
        models = [x for name, x in sorted(hashes.items()) if name not in ("program", "records")]
        depends = [*models, cfg.precision, cfg.lora.quantize]
        self.key = hashlib.sha256(repr(depends).encode()).hexdigest()[:16]
        # hash of an example: its log-prob. All that are known, and those that this rank has computed
        self.known: dict[str, float] = {}
        self.computed: dict[str, float] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read()

    @property
    def released(self) -> bool:
        """Whether the model is no longer in memory."""
        return self.reference is None

    def compute(self, packed: PackedBatch, **options: Any) -> Scores:
        """By the model, not from the folder."""
        return self.reference.compute(packed, **options)

    def own_weights(self) -> dict[str, nn.Parameter]:
        """The weights that a checkpoint must hold: none, a cached reference never moves."""
        return {}

    def __call__(self, packed: PackedBatch, **_options: Any) -> Scores:
        """Log-probs (B, K) in nats, from the folder where it has them. Prompts are neither used nor kept, because their
        keys may never have been computed; the folder has no log-probs by token. Raises BadInput."""
        keys = digests(packed)
        device = packed.token_N.device
        is_missing = any(key not in self.known for key in keys)
        if self.released:
            if is_missing:
                raise BadInput(
                    "reference_cache: these examples, or their mismatched pairs, are not those of the "
                    "first fit, and the reference is no longer in memory: run without the cache"
                )
        # all ranks compute if one rank must: a sharded reference is a collective
        elif all_reduce(torch.tensor(float(is_missing), device=device)) > 0:
            for key, x in zip(keys, self.compute(packed).logps.flatten().tolist()):
                if key not in self.known:
                    self.known[key] = self.computed[key] = x
        logps = torch.tensor([self.known[key] for key in keys])
        return Scores(to_device(logps.view(packed.length_BK.shape), device))

    def release(self) -> None:
        """Write the new log-probs and free the model. All log-probs that the run needs are known now."""
        if self.computed:
            name = f"{self.key}-{rank()}-{time.time_ns()}.json"
            write_whole(self.folder / name, json.dumps(self.computed))
        self.fabric.barrier()
        # Two ranks may have computed the same value: take the one that a resume will find.
        self._read()
        self.reference = None
        computed = f"{len(self.computed):,} log-probs computed"
        say(f"reference: {computed}, {len(self.known):,} known in {self.folder}")

    def _read(self) -> None:
        for file in sorted(self.folder.glob(f"{self.key}-*.json")):
            self.known |= json.loads(file.read_text())


def digests(packed: PackedBatch) -> list[str]:
    """Hashes of the token ids of each prompt with each of its completions: B * K, as in length_BK."""
    digests = []
    for prompt, completions in packed.ids:
        # its length says where the prompt ends
        head = len(prompt).to_bytes(8, "big") + prompt.tobytes()
        for completion in completions:
            ids = head + completion.tobytes()
            digests.append(hashlib.blake2b(ids, digest_size=16).hexdigest())
    return digests


@torch.no_grad()
def precompute(loop: "Trainer", examples: list[Example], plan: Plan) -> None:
    """Compute all log-probs of a cached reference that the run will need, and release it."""
    run = loop.run
    of_steps = list(step_examples(examples, run.cfg, plan, run.state.step))
    of_steps += [part for part in (run.examples["val"], run.examples["test"]) if part]
    n = sum(map(len, of_steps))
    with progress("precomputing log-probs", n // run.fabric.world_size):
        for part in of_steps:
            step = loop.make_step(part)
            for micro in loop.on_device(step):
                run.reference(micro.packed)
                if micro.mismatched is not None:
                    run.reference(micro.mismatched.to(run.fabric.device))
    run.reference.release()
