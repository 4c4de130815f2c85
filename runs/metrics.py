"""The numbers that a row of metrics.csv is made of: means, AUC, speed, memory."""

import resource

import torch
from lightning.fabric.utilities.throughput import get_available_flops

from runs.errors import Failed

# Part of a GPU's name -> its dense bf16 FLOP/s by the data sheet. The first name that fits is
# taken, so "H100 PCIe" stands before "H100".
BF16_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "4090": 165e12,
}


def mean(x: torch.Tensor) -> float | None:
    """The mean of a 1-D tensor. None, which is an empty cell, when the tensor is empty."""
    return x.mean().item() if len(x) else None


def join_columns(own: dict, programs: dict) -> dict:
    """The columns of a loss of one's own and those of the program. Raises Failed if both have a name:
    one would silently replace the other."""
    if shared := sorted(own.keys() & programs.keys()):
        raise Failed(
            f"loss: {', '.join(shared)}: the program has a column of this name: rename yours"
        )
    return own | programs


def auc(high: torch.Tensor, low: torch.Tensor) -> float:
    """The probability that a value of `high` is above a value of `low`; a tie counts one half.

    Both are 1-D tensors with at least one value.
    """
    low = low.sort().values
    n_below = torch.searchsorted(low, high, right=False).double()
    n_below_or_equal = torch.searchsorted(low, high, right=True).double()
    return ((n_below + n_below_or_equal).mean() / 2 / len(low)).item()


# ---- speed and memory ---------------------------------------------------------------------------


def least_passes(kl_pairs: bool, reference: bool, lora: bool) -> tuple[int, int]:
    """The least work of a step: (passes over each prompt token, passes over each completion token).

    One pass is one forward. A backward counts as 2 passes, or as 1 with LoRA, where the weight
    matrices need no gradient. kl_pairs: each completion is scored a second time, as the borrowed
    completion of another prompt; that prompt's own pass serves both. reference: the reference
    runs in the step (it does not when its log-probs are precomputed).
    """
    policy_passes = 2 if lora else 3  # forward and backward
    reference_passes = 1 if reference else 0
    prompt_passes = policy_passes + reference_passes
    completion_passes = policy_passes + reference_passes
    if kl_pairs:
        completion_passes += 1 + reference_passes  # policy without gradient, and reference
    return prompt_passes, completion_passes


def count_tokens(examples) -> tuple[int, int]:
    """Of all prompts, and of all completions."""
    n_prompt = sum(len(e.prompt) for e in examples)
    return n_prompt, sum(len(y) for e in examples for y in e.completions)


class Throughput:
    """Speed over the steps from one row of metrics.csv to the next, and peak memory so far.

    policy: the model itself, before Fabric wraps it. passes: what least_passes returns. FLOPs are
    the useful ones: 2 for each weight, token and pass, without the attention scores.
    """

    def __init__(self, fabric, precision: str, policy, passes: tuple[int, int]):
        self.device = fabric.device
        self.prompt_passes, self.completion_passes = passes
        self.n_head_weights = policy.config.n_embd * policy.config.padded_vocab_size
        self.n_block_weights = 0
        for name, parameter in policy.blocks.named_parameters():
            if "lora_" not in name:
                # A 4-bit parameter is packed; its quant_state has the shape of the matrix.
                shape = getattr(parameter, "quant_state", parameter).shape
                self.n_block_weights += shape.numel()
        self.peak_flops = peak_flops(fabric.device, precision) * fabric.world_size
        self._start_again()

    def _start_again(self) -> None:
        self.tokens = 0
        self.flops = 0
        self.seconds = 0.0

    def add(self, examples, seconds: float) -> None:
        """Count an optimizer step. examples: those of all ranks. seconds: its wall-clock time."""
        n_prompt, n_completion = count_tokens(examples)
        prompt_work = self.prompt_passes * n_prompt
        completion_work = self.completion_passes * n_completion
        block_work = self.n_block_weights * (prompt_work + completion_work)
        head_work = self.n_head_weights * completion_work  # the head skips prompt tokens
        self.flops += 2 * (block_work + head_work)
        self.tokens += n_prompt + n_completion
        self.seconds += seconds

    def passed_tokens(self, examples) -> int:
        """Tokens that go through the blocks in a step of these examples, each as often as it does."""
        n_prompt, n_completion = count_tokens(examples)
        return self.prompt_passes * n_prompt + self.completion_passes * n_completion

    def read(self) -> dict:
        """The columns of a row: over the steps since the last call tokens and TFLOPs per second, mfu
        (the share of the peak FLOP/s; None without a known peak) and seconds; and the process's peak
        memory so far in GB."""
        flops_per_second = self.flops / self.seconds
        row = {
            "tokens/s": self.tokens / self.seconds,
            "seconds": self.seconds,
            "memory_gb": self.memory(),
            "tflops/s": flops_per_second / 1e12,
            "mfu": flops_per_second / self.peak_flops if self.peak_flops else None,
        }
        self._start_again()
        return row

    def memory(self) -> float:
        """Peak memory of this process so far, in GB: of PyTorch's allocator on a GPU, the resident
        set on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def peak_flops(device: torch.device, precision: str) -> float:
    """The peak FLOP/s of a known GPU by its data sheet, without sparsity; 0.0 for other devices."""
    if device.type != "cuda":
        return 0.0
    if "bf16" not in precision:
        return get_available_flops(device, torch.float32) or 0.0
    # Fabric's table is asked second: it matches longer GPU names than drivers report.
    gpu = torch.cuda.get_device_name(device)
    for name, peak in BF16_PEAKS.items():
        if name in gpu:
            return peak
    return get_available_flops(device, torch.bfloat16) or 0.0
