"""Will it fit? Bytes on a device, from config.json and the settings alone.

A block runs on fake tensors: what it keeps is counted, not written down.
"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from runs.settings import DEFAULT_TOKENS, RunSettings, Sampling, with_limits

# bytes of adapters and states; of a weight; of what enters a product
BYTES = {"32-true": (4, 4, 4), "bf16-mixed": (4, 4, 2)}
BYTES |= {"64-true": (8, 8, 8), "bf16-true": (4, 2, 2)}
# nf4: half a byte, one for 64 of them, and four for 256 of those
BASE = {"nf4": 0.5 + (1 + 4 / 256) / 64, "int8": 1}
BACKWARD = 0.4  # of what a block keeps comes on top while its backward runs


class Attention:
    def attend(self, _attn, *qkv):
        sdpa = nn.functional.scaled_dot_product_attention
        y = sdpa(*qkv, is_causal=True, enable_gqa=True)
        return y.contiguous()  # as tiles are put together


class Estimate:
    """make(lora) -> a model without weights; chunks(device, V): how the head cuts its
    work."""

    def __init__(self, cfg: RunSettings, make, tied: bool, reference: bool, chunks):
        self.cfg, self.chunks, self.tied = cfg, chunks, tied
        self.lora = bool(cfg.lora.rank)
        self.cuda = 0 if cfg.accelerator == "cpu" else 1e9
        default = "bf16-mixed" if self.cuda else "32-true"
        self.precision = cfg.precision or default
        self.wide, self.held, self.used = BYTES[self.precision]
        copy = cfg.reference or not self.lora
        self.reference = bool(reference and copy and not cfg.reference_cache)
        plain = self.precision.replace("bf16-mixed", "32-true")
        fabric = Fabric(accelerator="cpu", devices=1, precision=plain)
        with FakeTensorMode(), fabric.init_module():
            model = make(cfg.lora)
            self.count(model)
            few, many = (self.block_bytes(model, n) for n in (512, 1024))
        # a token's; and, however many there are, a block's weights cast to bf16
        self.kept, self.casts = (many - few) / 512, 2 * few - many
        self.limits = with_limits(cfg.data, self.config.block_size)
        self.longest = self.limits.max_prompt + self.limits.max_completion

    def count(self, model) -> None:
        self.config, sizes = model.config, {True: 0, False: 0}
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name or not self.lora)
            sizes["lora_" in name] += p.numel()
        self.embedding = model.transformer.wte.weight.numel()
        self.apart = model.plain_head and not self.tied
        self.adapters, self.total = sizes[True], sizes[False] - self.tied * self.embedding
        self.trained = self.adapters or self.total
        blocks = model.transformer.h.modules()
        self.matrices = sum(m.weight.numel() for m in blocks if isinstance(m, nn.Linear))
        self.narrow = self.matrices + (not self.tied) * self.embedding
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
            block(x, *rope, Attention())
        for known in (rope, *block.parameters()):
            kept.pop(known.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values())

    def fixed(self, n: int, sharded: bool) -> dict[str, float]:
        """What lies on each of n devices whatever a micro-batch holds."""
        outside = self.total - self.matrices
        block = self.matrices / self.config.n_layer
        each = BASE.get(self.cfg.lora.base, self.held)
        weights = self.matrices * each + outside * self.held
        # a reference's matrices are held as they are used
        reference = self.total * self.held - self.narrow * (self.held - self.used)
        eight = self.cfg.optim.name == "adamw8bit"
        parts = {
            "weights": weights + self.adapters * self.wide,
            "reference": reference * self.reference,
            "gradients": self.trained * self.wide,
            "optimizer": 2 * self.trained * (1 + 4 / 256 if eight else self.wide),
        }
        if sharded:  # two blocks, embedding or head, what is in none; and their gradients
            parts = {name: x / n for name, x in parts.items()}
            outside -= self.embedding * self.apart
            learns = (block + outside) * self.wide * (not self.lora)
            parts["gathered"] = 2 * block * self.used + outside * self.held + learns
        elif n > 1:
            parts["gradients"] *= 2  # DDP has a copy
        parts["weights"] += self.rope * (1 + self.reference)
        return parts | {"CUDA itself": self.cuda}

    def step(self, tokens: float, again: bool, sharded: bool) -> float:
        """Activations. `again`: with activation checkpointing."""
        # FSDP2 gathers in bf16; rounded weights are made whole one by one
        casts = 0 if sharded or self.cfg.lora.base else self.casts
        kept, block = self.kept * tokens, BACKWARD * self.kept * tokens
        if again:
            block += kept + casts
            kept = self.config.n_embd * tokens * self.held
            casts *= not self.lora  # autocast keeps what trains
        top = max(block, self.head_bytes(tokens))
        return self.config.n_layer * (kept + casts) + top

    def head_bytes(self, tokens: float) -> float:
        """When the forward ends and all else is kept."""
        C, V, used = self.config.n_embd, self.config.padded_vocab_size, self.used
        chunks = self.chunks("cuda" if self.cuda else "cpu", V)
        scored = tokens * self.limits.max_completion / self.longest
        rows = min(scored, chunks.size)
        chunk = rows * V * used + min(rows, chunks.softmax) * V * 8 * (1 + (used == 2))
        if self.lora:  # a chunk's logits live while the next one's are made
            return chunk + rows * V * used + scored * C * (used + self.wide)
        saved = min(scored, chunks.size * chunks.saved) * V
        summed = 4 if chunks.gpu else used
        matrix = self.embedding * (summed + used * (used < self.held))  # its gradient, its cast
        return chunk + matrix + (saved + scored * C * 3) * used

    def sampling(self, fixed: float) -> float:
        """Keys, values, probabilities of answers sampled at once, beside `fixed` bytes."""
        c, most = self.config, 0
        slot = 2 * c.n_query_groups * c.head_size * c.n_layer * self.used
        free = max(0, self.cfg.estimate_gb * 1e9 - fixed) / 2 if self.cuda else 8e9
        for s in (x for x in vars(self.cfg).values() if isinstance(x, Sampling)):
            new = s.max_new_tokens or self.limits.max_completion
            row = slot * (self.limits.max_prompt + new)
            few = getattr(s, "check", "") == "none"
            room = s.cache_gb * 1e9 if s.cache_gb else free
            rows = min(s.samples if few else s.batch_size, max(1, room // row))
            most = max(most, rows * (row + 24 * c.padded_vocab_size))
        return most

    def needs(self, tokens: float, again: bool, n: int, sharded: bool) -> float:
        parts = self.fixed(n, sharded)
        fixed = sum(parts.values())
        step = self.step(tokens, again, sharded)
        between = self.sampling(fixed) - parts["gradients"]
        return fixed + max(step, between)

    def describe(self) -> str:
        cfg, room = self.cfg, self.cfg.estimate_gb * 1e9
        asked = cfg.micro_batch_tokens or (cfg.micro_batch_size or 0) * self.longest
        asked, cut = asked or DEFAULT_TOKENS, (cfg.devices * cfg.num_nodes, cfg.strategy == "fsdp")
        about = f"{cut[0]} x {cfg.strategy}, {self.precision}, {self.total:,} weights"
        lines = [f"an estimate: {about}; GB a device"]
        parts = self.fixed(*cut)
        sampling = self.sampling(sum(parts.values()))
        parts["sampling, between steps"] = sampling
        lines += [f"  {name:<26}{x / 1e9:>8.2f}" for name, x in parts.items() if x]
        head = f"{'activations':>36}    total"
        lines += [f"{head}     checkpointing    total"]
        for t in sorted({1024, 4096, 16384, asked}):
            ways = [(self.step(t, x, cut[1]), self.needs(t, x, *cut)) for x in (False, True)]
            cells = "".join(f"{a / 1e9:>18.2f}{b / 1e9:>9.2f}" for a, b in ways)
            lines += [f"{t:>11,} tokens{cells}"]
        for x, name in enumerate(("", "checkpointing: ")):
            most = (t for t in range(2**20, 0, -256) if self.needs(t, x, *cut) <= room)
            few = (n for n in range(1, 4097) if self.needs(asked, x, n, True) <= room)
            line = f"{name}micro_batch_tokens {next(most, 0):,} fit {cfg.estimate_gb:g} GB"
            fsdp = "" if cfg.lora.base else f"; {asked:,} fit {next(few, '>4096')} with fsdp"
            lines += [line + fsdp]
        return "\n".join(lines)
