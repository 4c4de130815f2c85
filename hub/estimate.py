"""Will a run fit? The bytes that it takes on one device, from config.json and settings alone
(--estimate true). No weight is read, nothing is trained and no GPU is needed.

Weights, reference, gradients and optimizer states are arithmetic. What a block saves for its backward
is counted: one block runs on fake tensors, which have shapes but no memory. A block's backward, the
head and sampling are approximated; the constants below say where they come from.
benchmarks/RESULTS.md ("Will it fit?") compares with runs: 0.92 to 1.08 of what was measured.

Not counted: what loading the weights takes, and what a save copies on a CPU.
"""

from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from runs.settings import Eval, RunSettings, Sampling, most_tokens, with_limits


class ElementBytes(NamedTuple):
    """Bytes of one element, by what the tensor is for."""

    trained: int
    """Adapters, gradients and optimizer states."""
    weight: int
    """A weight of the model as it is held."""
    compute: int
    """Inputs and outputs of matrix products."""


PRECISIONS = {
    "32-true": ElementBytes(trained=4, weight=4, compute=4),
    "bf16-mixed": ElementBytes(trained=4, weight=4, compute=2),
    "bf16-true": ElementBytes(trained=4, weight=2, compute=2),  # adapters are in float32
    "64-true": ElementBytes(trained=8, weight=8, compute=8),
}
# Bytes of a weight in a quantised base (lora.quantize). nf4: half a byte, one byte of scale for 64
# weights, and four bytes for 256 of these scales. int8: its scales, one for each row, are left out.
QUANTIZED = {"nf4": 0.5 + (1 + 4 / 256) / 64, "int8": 1}
# Bytes of an element of 8-bit AdamW's states: one, and four for each 256 of them.
ADAMW8BIT = 1 + 4 / 256
# While a block's backward runs, gradients of its activations are there too: this share of what the
# block saved. Fitted to the measured peaks of runs on a CPU (benchmarks/RESULTS.md).
BACKWARD = 0.4
# CUDA's context, libraries and workspaces, a round number.
CUDA = 1e9
# Half of what is free is for keys and values while sampling; on a CPU it is taken to be 8 GB.
CPU_CACHE = 8e9
# Sampling holds three float64 tensors of the vocabulary for each answer: logits, probabilities and
# their cumulative sums.
SAMPLING_BYTES = 3 * 8


class CausalAttention:
    """Takes the place of model.PackedAttention: one sequence, each token sees those before it."""

    def attend(self, _attn, q, k, v):
        """q, k, v and the result: (1, heads, tokens, head size)."""
        sdpa = nn.functional.scaled_dot_product_attention
        y = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        return y.contiguous()  # PackedAttention makes a copy too when it joins its tiles


class Estimate:
    """The bytes that a run takes on one device.

    make(lora) -> the policy without weights. `tied`: the head is the embedding. `reference`: the
    objective needs a reference. `moves`: it changes the reference's weights. chunks(device, V) -> how the
    LM head cuts its work (head.Chunks.of).
    """

    def __init__(self, cfg: RunSettings, make, tied: bool, reference: bool, moves: bool, chunks):
        self.cfg = cfg
        self.tied = tied
        self.chunks = chunks
        self.lora = bool(cfg.lora.rank)
        self.on_gpu = cfg.accelerator != "cpu"
        self.precision = cfg.precision or ("bf16-mixed" if self.on_gpu else "32-true")
        self.bytes = PRECISIONS[self.precision]
        # With LoRA the reference is the policy without its adapters, unless it is another model;
        # with a cache it is released before the first step.
        has_own_weights = cfg.reference or not self.lora
        self.reference = bool(reference and has_own_weights and not cfg.reference_cache)
        self.reference_moves = moves

        held_in = "32-true" if self.precision == "bf16-mixed" else self.precision
        fabric = Fabric(accelerator="cpu", devices=1, precision=held_in)
        with FakeTensorMode(), fabric.init_module():
            model = make(cfg.lora)
            self._count_weights(model)
            of_512 = self._block_saves(model, 512)
            of_1024 = self._block_saves(model, 1024)
        # a straight line: a part by token, and under bf16-mixed the block's weights cast to bf16
        self.saved_by_token = (of_1024 - of_512) / 512
        self.casts = 2 * of_512 - of_1024

        self.limits = with_limits(cfg.data, self.config.block_size)
        self.longest = self.limits.max_prompt + self.limits.max_completion

    def _count_weights(self, model) -> None:
        """Numbers of weights, and which of them train."""
        self.config = model.config
        self.total = 0  # without adapters
        self.adapters = 0
        for name, p in model.named_parameters():
            is_adapter = "lora_" in name
            p.requires_grad_(is_adapter or not self.lora)
            if is_adapter:
                self.adapters += p.numel()
            else:
                self.total += p.numel()
        self.embedding = model.embedding.weight.numel()
        if self.tied:  # the model has a head of its own until weights are loaded
            self.total -= self.embedding
        self.trained = self.adapters if self.lora else self.total
        linears = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
        self.matrices = sum(m.weight.numel() for m in linears)
        # weights of a reference that are held in bf16 under bf16-mixed: all linear layers
        self.linear_weights = self.matrices + (0 if self.tied else self.embedding)
        # an untied head without bias and adapters: fsdp frees its weights after use
        self.head_apart = model.plain_head and not self.tied
        self.rope = (model.cos.numel() + model.sin.numel()) * self.bytes.weight

    def _block_saves(self, model, n: int) -> int:
        """Bytes that a block saves for its backward, of n tokens; its weights do not count."""
        block = model.blocks[-1]
        x = torch.empty(1, n, model.config.n_embd, requires_grad=True)
        rope = torch.empty(2, 1, n, *model.cos.shape[1:2])
        saved = {}  # tensors may share a storage, which counts once

        def save(tensor):
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage
            return tensor

        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.bytes.compute == 2)
        with autocast, saved_tensors_hooks(save, lambda tensor: tensor):
            block(x, *rope, CausalAttention())
        for tensor in (rope, *block.parameters()):
            saved.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in saved.values())

    def fixed(self, devices: int, sharded: bool) -> dict[str, float]:
        """Bytes by part that each device holds, whatever the size of a micro-batch."""
        size = self.bytes
        # embedding, head and norms are never quantised
        outside = self.total - self.matrices
        matrix_bytes = QUANTIZED.get(self.cfg.lora.quantize, size.weight)
        weights = self.matrices * matrix_bytes + outside * size.weight
        reference = self.total * size.weight
        if not self.reference_moves:
            reference -= self.linear_weights * (size.weight - size.compute)
        state = ADAMW8BIT if self.cfg.optim.name == "adamw8bit" else size.trained
        parts = {
            "weights": weights + self.adapters * size.trained,
            "reference": reference if self.reference else 0,
            "gradients": self.trained * size.trained,
            "optimizer": 2 * self.trained * state,  # AdamW's two moments
            "average": self.trained * size.trained if self.cfg.optim.ema is not None else 0,
        }
        if sharded:
            parts = {name: n / devices for name, n in parts.items()}
            parts["gathered"] = self._gathered()
        elif devices > 1:
            parts["gradients"] *= 2  # DDP's buckets are a copy
        parts["weights"] += self.rope * (2 if self.reference else 1)
        parts["CUDA itself"] = CUDA if self.on_gpu else 0
        return parts

    def _gathered(self) -> float:
        """Bytes that fsdp gathers at a time: two blocks (the second is fetched ahead), what is in no
        block, and where they train the gradients of one block and of what is in none."""
        block = self.matrices / self.config.n_layer
        outside = self.total - self.matrices
        if self.head_apart:  # either the embedding or the head is there
            outside -= self.embedding
        gathered = 2 * block * self.bytes.compute + outside * self.bytes.weight
        if not self.lora:
            gathered += (block + outside) * self.bytes.trained
        return gathered

    def activations(self, tokens: float, checkpointing: bool, sharded: bool) -> float:
        """Bytes of a micro-batch's forward and backward at their peak: what all blocks save, and the
        larger of a block's backward and the head."""
        saved = self.saved_by_token * tokens
        block = BACKWARD * self.saved_by_token * tokens
        # fsdp gathers the weights in bf16, and a quantised weight is unpacked when it is used:
        # no cast is kept
        casts = 0 if sharded or self.cfg.lora.quantize else self.casts
        if checkpointing:  # a block saves its input only, and runs again before its backward
            block += saved + casts
            saved = self.config.n_embd * tokens * self.bytes.weight
            if self.lora:  # autocast keeps the casts of weights that train, and of no others
                casts = 0
        return self.config.n_layer * (saved + casts) + max(block, self.head(tokens))

    def head(self, tokens: float) -> float:
        """Bytes of the LM head at the end of the forward, for a micro-batch of these tokens."""
        width = self.config.n_embd
        vocabulary = self.config.padded_vocab_size
        compute = self.bytes.compute
        chunks = self.chunks("cuda" if self.on_gpu else "cpu", vocabulary)
        # only completions are scored
        scored = tokens * self.limits.max_completion / self.longest
        rows = min(scored, chunks.size)
        # a chunk's logits; and of its softmax two float32 tensors, four where logits are in bf16
        chunk = rows * vocabulary * compute
        chunk += min(rows, chunks.softmax) * vocabulary * 8 * (2 if compute == 2 else 1)
        if self.lora:
            # a chunk's logits live while the next chunk's are made; a scored token saves its
            # hidden state and a gradient of that width
            return (
                chunk
                + rows * vocabulary * compute
                + scored * width * (compute + self.bytes.trained)
            )
        # the gradients by the logits that the first chunks save
        saved = min(scored, chunks.size * chunks.saved) * vocabulary
        # the gradient of the head's matrix, in float32 on a GPU; and its cast under bf16-mixed
        matrix_gradient = 4 if chunks.gpu else compute
        matrix_cast = compute if compute < self.bytes.weight else 0
        matrix = self.embedding * (matrix_gradient + matrix_cast)
        # hidden states of scored tokens, their gradient, and the product of the two
        hidden = scored * width * 3
        return chunk + matrix + (saved + hidden) * compute

    def sampling(self, fixed: float) -> float:
        """Bytes while answers are sampled, for the largest of the settings that sample: keys, values
        and probabilities of the answers that are made at once, beside `fixed` bytes."""
        config = self.config
        token = 2 * config.n_query_groups * config.head_size * config.n_layer * self.bytes.compute
        free = CPU_CACHE
        if self.on_gpu:
            free = max(0, self.cfg.estimate_gb * 1e9 - fixed) / 2
        most = 0
        for settings in vars(self.cfg).values():
            if not isinstance(settings, Sampling):
                continue
            max_new = settings.max_new_tokens or self.limits.max_completion
            answer = token * (self.limits.max_prompt + max_new)
            room = settings.cache_gb * 1e9 if settings.cache_gb else free
            # an evaluation without a checker samples a few answers to show
            only_shows = isinstance(settings, Eval) and settings.check is None
            asked = settings.samples if only_shows else settings.batch_size
            rows = min(asked, max(1, room // answer))
            most = max(most, rows * (answer + SAMPLING_BYTES * config.padded_vocab_size))
        return most

    def needed(self, tokens: float, checkpointing: bool, devices: int, sharded: bool) -> float:
        """Bytes that one device needs, with micro-batches of these tokens. A run samples between its
        steps, when there are no activations and no gradients."""
        parts = self.fixed(devices, sharded)
        fixed = sum(parts.values())
        step = self.activations(tokens, checkpointing, sharded)
        sampling = self.sampling(fixed) - parts["gradients"]
        return fixed + max(step, sampling)

    def describe(self) -> str:
        """What --estimate prints: a line for each part, a table by the size of a micro-batch, and
        the largest micro-batch that fits; without and with activation checkpointing."""
        cfg = self.cfg
        devices = cfg.devices * cfg.num_nodes
        sharded = cfg.strategy == "fsdp"
        tokens_set = most_tokens(cfg, self.config.n_layer, self.config.n_embd)
        tokens_set = tokens_set or cfg.micro_batch_size * self.longest
        lines = [
            f"an estimate: {devices} x {cfg.strategy}, {self.precision}, "
            f"{self.total:,} weights; GB a device"
        ]

        parts = self.fixed(devices, sharded)
        parts["sampling, between steps"] = self.sampling(sum(parts.values()))
        for name, n in parts.items():
            if n:
                lines.append(f"  {name:<26}{n / 1e9:>8.2f}")

        lines.append(f"{'activations':>36}    total     checkpointing    total")
        for tokens in sorted({1024, 4096, 16384, tokens_set}):
            line = f"{tokens:>11,} tokens"
            for checkpointing in (False, True):
                activations = self.activations(tokens, checkpointing, sharded)
                needed = self.needed(tokens, checkpointing, devices, sharded)
                line += f"{activations / 1e9:>18.2f}{needed / 1e9:>9.2f}"
            lines.append(line)

        for checkpointing in (False, True):
            largest = self._largest_micro_batch(checkpointing, devices, sharded)
            line = "checkpointing: " if checkpointing else ""
            line += f"micro_batch_tokens {largest:,} fit {cfg.estimate_gb:g} GB"
            if not cfg.lora.quantize:  # which does not work with fsdp
                fewest = self._fewest_devices(tokens_set, checkpointing)
                line += f"; {tokens_set:,} fit {fewest} with fsdp"
            lines.append(line)
        return "\n".join(lines)

    def _largest_micro_batch(self, checkpointing: bool, devices: int, sharded: bool) -> int:
        """Tokens, a multiple of 256; 0 if none fits."""
        for tokens in range(2**20, 0, -256):
            if self.needed(tokens, checkpointing, devices, sharded) <= self.cfg.estimate_gb * 1e9:
                return tokens
        return 0

    def _fewest_devices(self, tokens: int, checkpointing: bool) -> int | str:
        """How many devices are enough under fsdp."""
        for devices in range(1, 4097):
            if self.needed(tokens, checkpointing, devices, True) <= self.cfg.estimate_gb * 1e9:
                return devices
        return ">4096"
