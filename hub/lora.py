"""litgpt's LoRA layers: switch the adapters off, start them again, add them to their matrices;
and PEFT's files."""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from litgpt.lora import LoRALayer, LoRALinear, LoRAQKVLinear, mark_only_lora_as_trainable
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from hub.families import must_equal, read_config, weight_layout
from runs.errors import BadInput
from runs.settings import Lora
from runs.tensors import LazyTensors, rename_tensors

GROUPS = {"attn.q": "query", "attn.k": "key", "attn.v": "value", "attn.proj": "projection"}
GROUPS |= {f"mlp.{x}": "mlp" for x in ("fc", "fc_1", "fc_2", "proj")} | {"lm_head": "head"}


def adapter_arguments(lora: Lora | None, names: dict | None) -> dict:
    """Arguments of litgpt's Config; none where there are to be no adapters. Targets have litgpt's
    names, or Hugging Face's in `names` (see families.py), as PEFT takes them."""
    if lora is None or not lora.rank:
        return {}
    here = {p: names[p] if names else "" for p in GROUPS if not names or p in names}
    chosen = set()
    for target in lora.targets.split(",") if isinstance(lora.targets, str) else lora.targets:
        every = here.keys() - {"lm_head"} if target == "all-linear" else set()
        found = every | {p for p, n in here.items() if GROUPS[p] == target or _ends(n, target)}
        if not found:
            known = {*(GROUPS[p] for p in here), *(n.split(".")[-1] for n in here.values())}
            known = ", ".join(sorted(known - {""}))
            raise BadInput(f"lora.targets: expected some of all-linear, {known}; got {target}")
        chosen |= found
    groups = {GROUPS[p] for p in chosen}
    if rest := {n for p, n in here.items() if names and GROUPS[p] in groups and p not in chosen}:
        rest = ", ".join(sorted(rest))
        raise BadInput(f"lora.targets: the mlp's layers get adapters together: add {rest}")
    alpha = lora.alpha * (math.sqrt(lora.rank) if lora.rslora else 1)
    arguments = dict(lora_r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout)
    return arguments | {f"lora_{group}": True for group in groups}


def _ends(name: str, suffix: str) -> bool:
    return f".{name}".endswith(f".{suffix}")


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


def plain_names(state: Mapping) -> LazyTensors:
    """Weights without adapters, by the names that they have in a model without."""
    return rename_tensors(state, {n.replace(".linear.", "."): n for n in state if "lora_" not in n})


def merge_adapters(state: Mapping, model: nn.Module) -> LazyTensors:
    """Full weights by their plain names: each adapter added to its base matrix. `state`, the
    model's weights by name, may be gathered from shards."""
    plain, blocks = plain_names(state), {}
    for (name, *rows), adapter in _blocks(state, model).items():
        blocks.setdefault(name, []).append((*rows, *adapter))

    def merged(name):
        w = plain[name]
        for first, end, a, b, scale in blocks.get(name, ()):
            delta = torch.zeros_like(w, dtype=a.dtype)
            delta[first:end] = b @ a * scale
            w = (w + delta).to(w.dtype)
        return w

    return LazyTensors(plain.like, merged)


def _blocks(state: Mapping, model: nn.Module) -> dict:
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

# fields of PEFT's that make another method of LoRA where they are set
VARIANT = re.compile("use_(?!rslora)|.*_config$|layer_replication|alora_|modules_to_save|lora_bias")


def read_adapter(folder: Path):
    """(name of a weight, B, A, scale) of a PEFT folder: B A scale is added. Raises BadInput."""
    try:
        c = json.loads((folder / "adapter_config.json").read_text())
        start = c.get("init_lora_weights")  # other starts change the base
        c |= {"init_lora_weights": start in (None, True, False, "gaussian") or start}
        other = {k: None for k in c if c[k] and VARIANT.match(k)}
        must_equal(c, peft_type="LORA", bias="none", init_lora_weights=True, **other)
        tensors = load_file(folder / "adapter_model.safetensors")
        for key, a in tensors.items():
            name = re.sub(r"^base_model\.model\.|\.lora_[AB]\.weight$", "", key)
            if not key.endswith((".lora_A.weight", ".lora_B.weight")):
                raise BadInput(f"model.safetensors: {name}: only LoRA's A and B are supported")
            if "lora_B" in key:
                continue
            alphas = [c["lora_alpha"], *(
                x for p, x in (c.get("alpha_pattern") or {}).items()
                if re.fullmatch(rf"(.*\.)?({p})", name)
            )]  # fmt: skip
            scale = alphas[-1] / (math.sqrt(len(a)) if c.get("use_rslora") else len(a))
            b = tensors[key.replace("lora_A", "lora_B")]
            yield f"{name}.weight", b.float(), a.float(), scale
    except BadInput as e:
        fault = str(e).removeprefix("config.json: ")
        raise BadInput(f"{folder}/adapter_config.json: {fault}") from None
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as e:
        raise BadInput(f"{folder}: no usable PEFT adapter: {e}") from None


def export_adapter(
    state: Mapping,
    out: Path | None,
    model: nn.Module,
    source: Path,
    base: str,
    lora: Lora,
    below=(),
) -> None:
    """Write the adapters in PEFT's format. A fused matrix has one adapter there: ours side by side,
    of a rank and an alpha of its own; so have those that the run started from, `below` (see
    read_adapter), and ours: their scales go into B."""
    (_, config, names), blocks = read_config(source), _blocks(state, model)
    scale, root = next(iter(blocks.values()))[2], 0.5 if lora.rslora else 1
    pairs = {}
    for name, pieces in weight_layout(model.config, names, plain_names(state).like).items():
        own = {k: x for n, at, _ in pieces for k, x in blocks.items() if _holds(k, n, at)}
        if not own:
            continue
        rows = [
            [
                b[at - k[1] : end - k[1]] if _holds(k, n, at) else b.new_zeros(end - at, len(a))
                for k, (a, b, _) in own.items()
            ]
            for n, at, end in pieces
        ]
        b = torch.cat([torch.cat(row, dim=1) for row in rows])
        pairs[name] = torch.cat([a for a, _, _ in own.values()]), b * (scale if below else 1)
    for name, b, a, factor in below:
        mine = pairs.get(name, (a[:0], b[:, :0]))
        pairs[name] = torch.cat([a, mine[0]]), torch.cat([b * factor, mine[1]], dim=1)
    if below:
        most = max(len(a) for a, _ in pairs.values())
        scale, root, lora = 1, 1, Lora(rank=most, alpha=most, dropout=lora.dropout)
    vision, tensors, ranks = config["model_type"] == "gemma3", {}, {}
    for name, (a, b) in pairs.items():
        module = name.removesuffix(".weight")
        path = module.replace("model.", "model.language_model.", 1) if vision else module
        key = f"base_model.model.{path}.lora_"
        tensors |= {f"{key}A.weight": a, f"{key}B.weight": b.contiguous()}
        # those below may be in some layers only
        ranks[path if below else ".".join(module.split(".")[-2:])] = len(a)
    fused, targets = {k: n for k, n in ranks.items() if n != lora.rank}, sorted(ranks)
    if vision and not below:
        targets = rf".*language_model.*({'|'.join(targets)})"
    config = dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, r=lora.rank,
        lora_alpha=lora.alpha, lora_dropout=lora.dropout, use_rslora=lora.rslora, bias="none",
        target_modules=targets,
        rank_pattern=fused, alpha_pattern={k: scale * n**root for k, n in fused.items()},
        fan_in_fan_out=config["model_type"] == "gpt2", inference_mode=True,
    )  # fmt: skip
    if out is None:
        return
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _holds(block: tuple, name: str, row: int) -> bool:
    return block[0] == name and block[1] <= row < block[2]
