"""litgpt's LoRA layers: switch the adapters off, start them again, add them to their matrices;
and PEFT's files."""

import contextlib
import json
import math
import re
from pathlib import Path

import torch
from litgpt.lora import LoRALayer, LoRALinear, LoRAQKVLinear, mark_only_lora_as_trainable
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from support.errors import BadInput
from support.families import layout, must, read_config
from support.settings import Lora

GROUPS = dict(query="attn.q", key="attn.k", value="attn.v", projection="attn.proj", head="lm_head")


def _targets(lora: Lora, names: dict | None) -> set[str]:
    """litgpt's groups of layers, of which `mlp` is all of them, by its own or Hugging Face's names."""
    names = names or {}
    linear = {p: n for p, n in names.items() if p in GROUPS.values() or p.startswith("mlp.")}
    mlp = {p for p in linear if p.startswith("mlp.")}
    moe, parts = "mlp.gate" in mlp, set()
    for target in [lora.targets] if isinstance(lora.targets, str) else lora.targets:
        ours = {GROUPS[target]} if target in GROUPS else mlp if target == "mlp" else set()
        if target == "all-linear":
            ours = linear.keys() - {"lm_head"} - (mlp if moe else set())
        found = ours or {p for p, n in linear.items() if f".{n}".endswith(f".{target}")}
        if not found or moe and found & mlp:
            known = sorted({n.split(".")[-1] for p, n in linear.items() if not moe or p not in mlp})
            known = ", ".join([*GROUPS, *([] if moe else ["mlp"]), "all-linear", *known])
            raise BadInput(f"lora.targets: {target}: not a target here; these are: {known}")
        parts |= found
    if parts & mlp and (rest := mlp - parts):
        rest = ", ".join(sorted({names[p].split(".")[-1] for p in rest}))
        raise BadInput(f"lora.targets: mlp's layers get adapters together: add {rest}")
    groups = {k for k, p in GROUPS.items() if p in parts}
    return groups | ({"mlp"} if parts & mlp or not names and "mlp" in lora.targets else set())


def adapter_arguments(lora: Lora | None, names: dict | None) -> dict:
    """Arguments of litgpt's Config; none where there are to be no adapters. `names` of the weights:
    see families.py."""
    if lora is None or not lora.rank:
        return {}
    targets = {f"lora_{target}": True for target in _targets(lora, names)}
    alpha = lora.alpha * (math.sqrt(lora.rank) if lora.rslora else 1)
    return targets | dict(lora_r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout)


def create_adapters(model: nn.Module, dtype: torch.dtype) -> None:
    """Put real adapters, which alone are trained, in place of those on the meta device. A starts
    random (torch's global seed), B zero."""
    # in bfloat16 AdamW's small steps would round to nothing
    wide = torch.promote_types(dtype, torch.float32)
    for m in model.modules():
        if isinstance(m, LoRALinear) and hasattr(m, "lora_A"):
            a, b = (torch.empty_like(x, device="cpu", dtype=wide) for x in (m.lora_A, m.lora_B))
            m.lora_A, m.lora_B = nn.Parameter(a), nn.Parameter(b)
            m.reset_parameters()
    mark_only_lora_as_trainable(model)


@contextlib.contextmanager
def disable_adapters(model: nn.Module):
    """The model without its adapters, to the bit: a layer that is told that it is merged runs its
    base matrix alone."""
    layers = [m for m in model.modules() if isinstance(m, LoRALayer)]
    assert layers, "no LoRA layers here: the reference would be the policy itself"
    for layer in layers:
        layer.merged = True
    try:
        yield
    finally:
        for layer in layers:
            layer.merged = False


@torch.no_grad()
def reset_adapters(model: nn.Module, seed: int, place) -> None:
    """Adapters as they start: A random, alike on all ranks, B zero. place(x, like) lays a tensor
    out as another, which may be sharded."""
    generator = torch.Generator().manual_seed(seed)
    for m in model.modules():
        if isinstance(m, LoRALinear) and hasattr(m, "lora_A"):
            bound = 1 / math.sqrt(m.lora_A.shape[1])  # litgpt's: kaiming_uniform, a = sqrt(5)
            a = torch.rand(m.lora_A.shape, generator=generator, dtype=torch.float32)
            a = a * 2 * bound - bound
            m.lora_A.copy_(place(a.to(m.lora_A.dtype), m.lora_A))
            m.lora_B.zero_()


def merge_adapters(state: dict, model: nn.Module) -> dict:
    """Full weights by their plain names: each adapter added to its base matrix. `state`, the
    model's weights by name, may be gathered from shards."""
    out = {n.replace(".linear.", "."): x for n, x in state.items() if "lora_" not in n}
    for (name, first, end), (a, b, scale) in _blocks(state, model).items():
        w = out[name]
        delta = torch.zeros_like(w, dtype=a.dtype)
        delta[first:end] = b @ a * scale
        out[name] = (w + delta).to(w.dtype)
    return out


def _blocks(state: dict, model: nn.Module) -> dict:
    """{(name of a plain weight, first row, end): (A, B, scale)} of the adapters, q, k, v apart."""
    out = {}
    for name, m in model.named_modules():
        a, b = (state.get(f"{name}.lora_{x}") for x in "AB")
        if not isinstance(m, LoRALinear) or a is None:
            continue
        parts = [(0, len(b))]
        if isinstance(m, LoRAQKVLinear):
            sizes = [m.head_size * n for n in (m.n_head, m.n_query_groups, m.n_query_groups)]
            ends = [sum(sizes[: i + 1]) for i in range(3)]
            parts = [(e - n, e) for n, e, on in zip(sizes, ends, m.enable_lora) if on]
        pairs = zip(a.chunk(len(parts)), b.split([end - at for at, end in parts]))
        out |= {(f"{name}.weight", *p): (*ab, m.scaling) for p, ab in zip(parts, pairs)}
    return out


# ---- PEFT's files --------------------------------------------------------------------------------


def read_adapter(folder: Path):
    """(name of a weight, what is added to it, rows x columns) of a PEFT folder. Raises BadInput."""
    file = folder / "adapter_config.json"
    try:
        c, tensors = json.loads(file.read_text()), load_file(folder / "adapter_model.safetensors")
        must(
            c, peft_type="LORA", use_dora=False, bias="none", lora_bias=False, layer_replication=[]
        )
        must(c, use_qalora=False, target_parameters=[], trainable_token_indices={})
        must(c, init_lora_weights=True if str(c.get("init_lora_weights")) in STARTS else ...)
        for key, a in tensors.items():
            found = re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", key)
            if not found:
                if not key.endswith(".lora_B.weight"):
                    raise BadInput(f"config.json: {key}: not supported, only lora_A and lora_B")
                continue
            b, alpha = tensors[key.replace("lora_A", "lora_B")], c["lora_alpha"]
            for pattern, value in (c.get("alpha_pattern") or {}).items():
                if re.match(rf"(.*\.)?({pattern})$", found[1]):
                    alpha = value
            scale = alpha / (math.sqrt(len(a)) if c.get("use_rslora") else len(a))
            yield f"{found[1]}.weight", b.float() @ a.float() * scale
    except BadInput as e:
        raise BadInput(f"{folder}/adapter_{e}") from None
    except (OSError, KeyError, ValueError, SafetensorError) as e:
        raise BadInput(f"{folder}: no usable PEFT adapter: {e}") from None


STARTS = ("True", "False", "None", "gaussian", "eva", "orthogonal")


def export_adapter(
    state: dict, out: Path, model: nn.Module, source: Path, base: str, lora: Lora
) -> None:
    """Write the adapters in PEFT's format. A fused matrix has one adapter there: ours side by side,
    of a rank and an alpha of its own."""
    (_, config, names), blocks = read_config(source), _blocks(state, model)
    plain = {n.replace(".linear.", "."): x for n, x in state.items() if "lora_" not in n}
    tensors, ranks = {}, {}
    for name, pieces in layout(model.config, names, plain).items():
        own = [k for k in blocks if any(n == k[0] and k[1] <= at < k[2] for n, at, _ in pieces)]
        if not own or name.endswith("bias"):
            continue
        a = torch.cat([blocks[k][0] for k in own])
        b, row = a.new_zeros(sum(end - at for _, at, end in pieces), len(a)), 0
        for n, at, end in pieces:
            for i, k in enumerate(own):
                if n == k[0] and k[1] <= at < k[2]:
                    columns = slice(i * lora.rank, (i + 1) * lora.rank)
                    b[row : row + end - at, columns] = blocks[k][1][at - k[1] : end - k[1]]
            row += end - at
        module = name.removesuffix(".weight")
        if config["model_type"] == "gemma3":  # in memory it stands beside the vision tower
            module = module.replace("model.", "model.language_model.", 1)
        key = f"base_model.model.{module}.lora_"
        tensors |= {f"{key}A.weight": a.contiguous(), f"{key}B.weight": b}
        ranks[".".join(module.split(".")[-2:])] = len(a)
    scale = next(iter(blocks.values()))[2]
    other = {k: n for k, n in ranks.items() if n != lora.rank}
    targets = sorted(ranks)
    if config["model_type"] == "gemma3":
        targets = rf".*\.language_model\..*\.({'|'.join(targets)})"
    config = dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, r=lora.rank,
        lora_alpha=lora.alpha, lora_dropout=lora.dropout, use_rslora=lora.rslora, bias="none",
        target_modules=targets, rank_pattern=other, inference_mode=True,
        alpha_pattern={k: scale * (math.sqrt(n) if lora.rslora else n) for k, n in other.items()},
        fan_in_fan_out=any(".c_" in k for k in ranks),
    )  # fmt: skip
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
