"""Will it fit? Bytes on a device, from config.json and the settings alone.

A block runs forward and backward on fake tensors, so that what it keeps between the
two is counted, whatever the family; all else is arithmetic.
"""

import math
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.examples import with_limits
from support.settings import DEFAULT_TOKENS, Run, Sampling

GB, MOST = 1e9, 4096
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Live(TorchDispatchMode):
    """Bytes of what operations make, now and at most; `known` does not count."""

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {x.untyped_storage()._cdata: 0 for x in known}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.add(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def add(self, storage) -> None:
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = n = storage.nbytes()
            self.now += n
            weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, key) -> None:
        self.now -= self.sizes.pop(key)


class Attention(torch.autograd.Function):
    """What attention keeps: queries, keys, values and its output."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])

    @classmethod
    def attend(cls, _attn, q, k, v):
        return cls.apply(q, k, v)


class Estimate:
    """`make` builds the policy without weights; `head`: HEAD_LOGITS, HEAD_SAVED and
    HEAD_SOFTMAX of model.py."""

    def __init__(self, cfg: Run, make: Callable, tied: bool, reference: bool, head: tuple):
        self.cfg, self.tied, self.head, self.gpu = cfg, tied, head, cfg.accelerator != "cpu"
        self.precision = cfg.precision or ("bf16-mixed" if self.gpu else "32-true")
        bf16 = "bf16" in self.precision
        self.wide = 8 if self.precision == "64-true" else 4  # bytes of adapters, of states
        self.held = 2 if self.precision == "bf16-true" else self.wide  # of a weight
        self.used = 2 if bf16 else self.wide  # of what enters a product
        default = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[self.held])
        try:
            with FakeTensorMode(), torch.device("cpu"):
                model = make()
                self.count(model)
                block = model.transformer.h[-1].requires_grad_(True)
                if cfg.lora.rank:
                    for name, p in block.named_parameters():
                        p.requires_grad_("lora_" in name)
                few, many = (self.block_bytes(block, model, 512 * n) for n in (1, 2))
        finally:
            torch.set_default_dtype(default)
        # of a token; and of a block, however many tokens: weights cast to bf16
        self.kept, self.peak = ((b - a) / 512 for a, b in zip(few, many))
        self.copies, self.peak_copies = (2 * a - b for a, b in zip(few, many))
        self.has_reference = reference and (cfg.reference or not cfg.lora.rank)
        self.has_reference = self.has_reference and not cfg.reference_cache

    def count(self, model) -> None:
        lora, c = self.cfg.lora, model.config
        copies = ("lm_head.weight", "lm_head.linear.weight") if self.tied else ()
        sizes = {n: p.numel() for n, p in model.named_parameters() if n not in copies}
        self.adapters = sum(n for name, n in sizes.items() if "lora_" in name)
        self.total = sum(sizes.values()) - self.adapters
        self.trained = self.adapters if lora.rank else self.total
        linears = [m for m in model.transformer.h.modules() if isinstance(m, nn.Linear)]
        self.inputs = sum(m.in_features for m in linears) / c.n_layer
        self.matrices = sum(m.weight.numel() for m in linears)
        self.largest = max(m.weight.numel() for m in linears)
        self.rope = (model.cos.numel() + model.sin.numel()) * self.held
        self.config, self.limits = c, with_limits(self.cfg.data, c.block_size)

    def block_bytes(self, block, model, n: int) -> tuple[int, int]:
        """-> bytes kept from forward to backward, and at most in either, of n tokens."""
        for p in block.parameters():
            p.grad = torch.empty_like(p) if p.requires_grad else None
        x = torch.empty(1, n, model.config.n_embd, requires_grad=True)
        rope = torch.empty(2, 1, n, *model.cos.shape[1:2])
        grads = [p.grad for p in block.parameters() if p.requires_grad]
        with Live([x, rope, *block.parameters(), *grads]) as live:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.used < self.wide):
                y = block(x, *rope, Attention)
            kept = live.now
            y.backward(torch.empty_like(y))
        return kept, live.peak

    def fixed(self, n: int, sharded: bool) -> dict[str, float]:
        """What lies on each of n devices whatever a micro-batch holds."""
        base, unused = self.cfg.lora.base, self.held - self.used
        # nf4: half a byte, one for 64 of them, and four for 256 of those
        each = {"": self.held, "nf4": 0.5 + (1 + 4 / 256) / 64, "int8": 1}[base]
        weights = self.matrices * each + (self.total - self.matrices) * self.held
        weights += self.adapters * self.wide
        reference = self.total * self.held * self.has_reference
        if not sharded and reference:  # its matrices are held as they are used
            head = 0 if self.tied else self.config.padded_vocab_size * self.config.n_embd
            reference -= (self.matrices + head) * unused
        states = 2 * self.trained * self.wide
        if self.cfg.optim.name == "adamw8bit":
            states = 2 * self.trained * (1 + 4 / 256)
        buckets = 2 if n > 1 and not sharded else 1  # DDP keeps a second copy
        parts = {"weights": weights, "reference": reference}
        parts |= {"gradients": self.trained * self.wide * buckets, "optimizer": states}
        if sharded:
            parts = {name: x / n for name, x in parts.items()}
            blocks = self.matrices / self.config.n_layer
            root = self.total - self.matrices  # embedding and head: whole for the step
            trains = not self.cfg.lora.rank
            parts["gathered"] = 2 * blocks * self.used + root * self.held
            parts["gathered"] += trains * (blocks + root) * self.wide
        parts["weights"] += self.rope * (1 + bool(reference))
        return parts | {"CUDA itself": self.gpu * GB}

    def head_bytes(self, tokens: float) -> float:
        """At the end of a forward, when everything else is kept."""
        logits, saved, softmax = self.head
        V, C = self.config.padded_vocab_size, self.config.n_embd
        rows = max(1, logits // V)
        chunk = rows * V * self.used + min(rows * V, softmax) * 8 * (1 + (self.used == 2))
        if self.cfg.lora.rank:
            return chunk + tokens * C * (self.used + self.wide)
        mine = min(tokens, rows * (saved // logits)) * V * self.used
        matrix = V * C * self.used * (1 + (self.used < self.held))  # its gradient, its cast
        return chunk + mine + matrix + tokens * C * 3 * self.used

    def step(self, tokens: float, checkpointing: bool, sharded: bool) -> float:
        """Activations of a micro-batch, at most."""
        d, n, casts = self.limits, self.config.n_layer, self.copies
        if sharded or self.cfg.lora.base:  # FSDP2 gathers in bf16; bitsandbytes' are rounded anew
            casts = 0
        kept = self.kept * tokens
        if self.cfg.lora.base == "int8":
            kept += self.inputs * tokens * self.used
        block = self.peak * tokens + self.peak_copies - self.kept * tokens - self.copies
        if self.cfg.lora.base:
            block += self.largest * self.used
        if checkpointing:
            trains = 0 if self.cfg.lora.rank else casts  # autocast keeps what trains
            block, layers = kept + block + casts, self.config.n_embd * tokens * self.held + trains
        else:
            layers = kept + casts
        scored = tokens * d.max_completion / (d.max_prompt + d.max_completion)
        return n * layers + max(block, self.head_bytes(scored))

    def sampling(self, n: int) -> float:
        """Keys and values, and what is drawn from, of the largest batch of answers."""
        most, c, cfg = 0, self.config, self.cfg
        for s in (x for x in vars(cfg).values() if isinstance(x, Sampling)):
            asked = getattr(s, "rollout_batch_size", None)
            asked = asked or (s.prompts if s.check != "none" else s.samples)
            rows = min(s.batch_size, math.ceil(asked / n))
            new = s.max_new_tokens or self.limits.max_completion
            slots = min(c.block_size, self.limits.max_prompt + new)
            row = 2 * slots * c.n_query_groups * c.head_size * c.n_layer * self.used
            most = max(most, rows * (row + 3 * 8 * c.padded_vocab_size))
        return most

    def needs(self, tokens: float, checkpointing: bool, n: int, sharded: bool) -> float:
        parts = self.fixed(n, sharded)
        drawing = self.sampling(n) - parts["gradients"]
        return sum(parts.values()) + max(self.step(tokens, checkpointing, sharded), drawing)

    def table(self) -> str:
        cfg, n = self.cfg, self.cfg.devices * self.cfg.num_nodes
        sharded, room = cfg.strategy == "fsdp", cfg.estimate_gb * GB
        longest = self.limits.max_prompt + self.limits.max_completion
        asked = cfg.micro_batch_tokens or (cfg.micro_batch_size or 0) * longest or DEFAULT_TOKENS
        how = f"{n} x {cfg.strategy}" if n > 1 else "one device"
        lines = [f"an estimate: {how}, {self.precision}, {self.total:,} weights; GB a device"]
        parts = self.fixed(n, sharded) | {"sampling, between steps": self.sampling(n)}
        lines += [f"  {name:<24}{x / GB:>9.2f}" for name, x in parts.items() if x]
        head = "activations    total   with activation_checkpointing"
        lines += [f"micro_batch_tokens  {head}"]
        for tokens in sorted({1024, 4096, 16384, asked}):
            cells = []
            for again in (False, True):
                cells += [self.step(tokens, again, sharded), self.needs(tokens, again, n, sharded)]
            cells = [x / GB for x in cells]
            lines.append("{:>18,}{:>13.2f}{:>9.2f}{:>18.2f}{:>9.2f}".format(tokens, *cells))

        def fits(tokens, again, n, sharded) -> bool:
            return self.needs(tokens, again, n, sharded) <= room

        tokens = [most(lambda t: fits(t, again, n, sharded)) for again in (False, True)]
        some = [f"{t:,}" if t else "none" for t in tokens]
        what = f"largest micro_batch_tokens in {cfg.estimate_gb:g} GB"
        lines.append(f"{what}: {some[0]}; checkpointing {some[1]}")
        if not cfg.lora.base:
            counts = (
                next((m for m in range(1, MOST) if fits(asked, again, m, True)), None)
                for again in (False, True)
            )
            some = [f"{m:,}" if m else "none" for m in counts]
            what = f"fewest devices under fsdp at {asked:,} tokens"
            lines.append(f"{what}: {some[0]}; checkpointing {some[1]}")
        return "\n".join(lines)


def most(fits: Callable) -> int:
    """The largest number that fits, to three digits; 0: none does."""
    low, high = 0, 2**24
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
