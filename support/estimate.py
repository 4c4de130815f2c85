"""Will it fit? Bytes on a device, from config.json and the settings alone.

A block runs on fake tensors: what it keeps is counted, not written down.
"""

from types import SimpleNamespace

import torch
from lightning.fabric import Fabric
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention as sdpa

from support.examples import with_limits
from support.settings import DEFAULT_TOKENS, Run, Sampling

# bytes of adapters and states; of a weight; of what enters a product
BYTES = {"32-true": (4, 4, 4), "bf16-mixed": (4, 4, 2)}
BYTES |= {"64-true": (8, 8, 8), "bf16-true": (4, 2, 2)}
# nf4: half a byte, one for 64 of them, and four for 256 of those
BASE = {"nf4": 0.5 + (1 + 4 / 256) / 64, "int8": 1}
BACKWARD = 0.4  # of what a block keeps comes on top while its backward runs
CAUSAL = SimpleNamespace(
    attend=lambda _, *qkv: sdpa(*qkv, is_causal=True, enable_gqa=True).contiguous()
)  # contiguous: as tiles are put together


class Estimate:
    """make() -> the policy without weights; `head`: HEAD_LOGITS, HEAD_SAVED and
    HEAD_SOFTMAX of model.py."""

    def __init__(self, cfg: Run, make, tied: bool, reference: bool, head: tuple):
        self.cfg, self.head, self.lora = cfg, head, cfg.lora.rank > 0
        self.on_cpu = cfg.accelerator == "cpu"
        self.precision = cfg.precision or ("32-true" if self.on_cpu else "bf16-mixed")
        self.wide, self.held, self.used = BYTES[self.precision]
        copy = cfg.reference or not self.lora
        self.reference = bool(reference and copy and not cfg.reference_cache)
        fabric = Fabric(accelerator="cpu", devices=1, precision=self.precision)
        with FakeTensorMode(), fabric.init_module():
            model = make()
            self.count(model, tied)
            few, many = (self.block_bytes(model, n) for n in (512, 1024))
        # a token's; and, however many there are, a block's weights cast to bf16
        self.kept, self.casts = (many - few) / 512, 2 * few - many
        self.limits = with_limits(cfg.data, self.config.block_size)
        self.longest = self.limits.max_prompt + self.limits.max_completion

    def count(self, model, tied: bool) -> None:
        self.config, sizes = model.config, {True: 0, False: 0}
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name or not self.lora)
            sizes["lora_" in name] += p.numel()
        self.embedding = self.config.padded_vocab_size * self.config.n_embd
        self.adapters, self.total = sizes[True], sizes[False] - tied * self.embedding
        self.trained = self.adapters or self.total
        linears = [m for m in model.transformer.h.modules() if isinstance(m, nn.Linear)]
        self.matrices = sum(m.weight.numel() for m in linears)
        self.narrow = self.matrices + (not tied) * self.embedding
        self.rope = (model.cos.numel() + model.sin.numel()) * self.held

    def block_bytes(self, model, n: int) -> int:
        """What a block keeps of n tokens for its backward."""
        block, kept = model.transformer.h[-1], {}
        x = torch.empty(1, n, model.config.n_embd, requires_grad=True)
        rope = torch.empty(2, 1, n, *model.cos.shape[1:2])

        def pack(x):
            kept[x.untyped_storage()._cdata] = x.untyped_storage()
            return x

        mixed = torch.autocast("cpu", torch.bfloat16, self.used == 2)
        with mixed, saved_tensors_hooks(pack, lambda x: x):
            block(x, *rope, CAUSAL)
        for known in (rope, *block.parameters()):
            kept.pop(known.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values())

    def fixed(self, n: int, sharded: bool) -> dict[str, float]:
        """What lies on each of n devices whatever a micro-batch holds."""
        base, eight = self.cfg.lora.base, self.cfg.optim.name == "adamw8bit"
        outside, block = self.total - self.matrices, self.matrices / self.config.n_layer
        reference = self.total * self.held
        if not sharded:  # its matrices are held as they are used
            reference -= self.narrow * (self.held - self.used)
        weights = self.matrices * BASE.get(base, self.held) + outside * self.held
        parts = {
            "weights": weights + self.adapters * self.wide,
            "reference": reference * self.reference,
            "gradients": self.trained * self.wide,
            "optimizer": 2 * self.trained * (1 + 4 / 256 if eight else self.wide),
        }
        if sharded:  # two blocks, and all that is in none; and their gradients
            parts = {name: x / n for name, x in parts.items()}
            parts["gathered"] = 2 * block * self.used + outside * self.held
            parts["gathered"] += (block + outside) * self.wide * (not self.lora)
        elif n > 1:
            parts["gradients"] *= 2  # DDP has a copy
        parts["weights"] += self.rope * (1 + self.reference)
        return parts | {"CUDA itself": 1e9 * (not self.on_cpu)}

    def step(self, tokens: float, again: bool, sharded: bool) -> float:
        """Activations of a micro-batch, at most. `again`: activation checkpointing."""
        # FSDP2 gathers in bf16; rounded weights are made whole one by one
        casts = 0 if sharded or self.cfg.lora.base else self.casts
        kept = self.kept * tokens
        block = BACKWARD * kept
        if again:
            block += kept + casts
            kept = self.config.n_embd * tokens * self.held
            casts *= not self.lora  # autocast keeps what trains
        return self.config.n_layer * (kept + casts) + max(block, self.head_bytes(tokens))

    def head_bytes(self, tokens: float) -> float:
        """When the forward ends and all else is kept."""
        (logits, saved, softmax), C = self.head, self.config.n_embd
        V, used = self.config.padded_vocab_size, self.used
        scored = tokens * self.limits.max_completion / self.longest
        rows = min(scored, max(1, logits // V))
        chunk = rows * V * used + min(rows * V, softmax) * 8 * (1 + (used == 2))
        if self.lora:  # a chunk's logits live while the next one's are made
            return chunk + rows * V * used + scored * C * (used + self.wide)
        mine = min(scored, rows * (saved // logits)) * V * used
        matrix = self.embedding * used * (1 + (used < self.held))  # gradient, cast
        return chunk + mine + matrix + scored * C * 3 * used

    def sampling(self) -> float:
        """Keys, values and probabilities of the most answers sampled at once."""
        c, rows = self.config, []
        slot = 2 * c.n_query_groups * c.head_size * c.n_layer * self.used
        for s in (x for x in vars(self.cfg).values() if isinstance(x, Sampling)):
            few = getattr(s, "check", "") == "none"
            new = s.max_new_tokens or self.limits.max_completion
            row = slot * (self.limits.max_prompt + new) + 24 * c.padded_vocab_size
            rows.append(row * (s.samples if few else s.batch_size))
        return max(rows)

    def needs(self, tokens: float, again: bool, n: int, sharded: bool) -> float:
        parts = self.fixed(n, sharded)
        between = self.sampling() - parts["gradients"]
        return sum(parts.values()) + max(self.step(tokens, again, sharded), between)

    def table(self) -> str:
        cfg, n = self.cfg, self.cfg.devices * self.cfg.num_nodes
        asked = (cfg.micro_batch_size or 0) * self.longest
        asked = cfg.micro_batch_tokens or asked or DEFAULT_TOKENS
        cut, gb = (n, cfg.strategy == "fsdp"), cfg.estimate_gb
        how = f"{n} x {'fsdp' if cut[1] else 'ddp'}" if n > 1 else "one device"
        about = f"{how}, {self.precision}, {self.total:,} weights"
        lines = [f"an estimate: {about}; GB a device"]
        parts = self.fixed(*cut) | {"sampling, between steps": self.sampling()}
        lines += [f"  {name:<26}{x / 1e9:>8.2f}" for name, x in parts.items() if x]
        lines += [f"{'activations':>36}    total     checkpointing    total"]
        for t in sorted({1024, 4096, 16384, asked}):
            line = f"{t:>11,} tokens"
            for x in (False, True):
                step, total = self.step(t, x, cut[1]), self.needs(t, x, *cut)
                line += f"{step / 1e9:>18.2f}{total / 1e9:>9.2f}"
            lines.append(line)
        for x, name in enumerate(("", "checkpointing: ")):
            sizes = (t for t in range(2**20, 0, -256) if self.needs(t, x, *cut) <= gb * 1e9)
            line = f"{name}micro_batch_tokens {next(sizes, 0):,} fit {gb:g} GB"
            few = (m for m in range(1, 4097) if self.needs(asked, x, m, True) <= gb * 1e9)
            if not cfg.lora.base:
                line += f"; {asked:,} fit {next(few, '>4096')} with fsdp"
            lines.append(line)
        return "\n".join(lines)
