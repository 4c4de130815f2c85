"""How fast and how large: useful tokens and FLOPs a second, peak memory."""

import resource

import torch
from lightning.fabric.utilities.throughput import get_available_flops

BF16_PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "4090": 165e12}


def least_passes(kl_pairs: bool, reference: bool, lora: bool) -> tuple[int, int]:
    """Forward passes over (prompt tokens, completion tokens) that no implementation
    can save; a backward counts as two, or one where only adapters learn. A KL
    pair's prompt is its example's, its completion another's."""
    learn, ref = 2 if lora else 3, int(reference)
    return learn + ref, learn + ref * (1 + kl_pairs) + kl_pairs


class Throughput:
    """Collects steps between two lines of metrics.csv."""

    def __init__(self, fabric, precision: str, policy, passes: tuple[int, int]):
        self.device, self.passes, config = fabric.device, passes, policy.config
        self.head = config.n_embd * config.padded_vocab_size
        blocks = policy.transformer.h.named_parameters()
        shapes = (getattr(p, "quant_state", p).shape for n, p in blocks if "lora_" not in n)
        self.body = sum(shape.numel() for shape in shapes)
        self.peak = peak_flops(fabric.device, precision) * fabric.world_size
        self.tokens, self.flops, self.seconds = 0, 0, 0.0

    def add(self, examples, seconds: float) -> None:
        x = sum(len(e.prompt) for e in examples)
        y = sum(len(c) for e in examples for c in e.completions)
        over_x, over_y = self.passes  # attention scores are not counted
        body = self.body * (over_x * x + over_y * y)
        self.flops += 2 * (body + self.head * over_y * y)
        self.tokens += x + y
        self.seconds += seconds

    def read(self) -> dict:
        """Columns of a line, since the last call."""
        rate = self.flops / self.seconds
        row = {
            "tokens/s": self.tokens / self.seconds,
            "seconds": self.seconds,
            "memory_gb": self.memory(),
            "tflops/s": rate / 1e12,
            "mfu": rate / self.peak if self.peak else None,
        }
        self.tokens, self.flops, self.seconds = 0, 0, 0.0
        return row

    def memory(self) -> float:
        """Peak, in GB: the allocator's on a GPU, the resident set's on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def peak_flops(device, precision: str) -> float:
    """The data sheet's peak of a known GPU, without sparsity; 0 for everything else."""
    if device.type != "cuda":
        return 0.0
    if "bf16" not in precision:
        return get_available_flops(device, torch.float32) or 0.0
    # Fabric's table asks for more of a name than a driver gives
    known = (x for words, x in BF16_PEAKS.items() if words in torch.cuda.get_device_name(device))
    return next(known, None) or get_available_flops(device, torch.bfloat16) or 0.0
