"""How a model on disk becomes the model that computes: read, build, compare, adapt, shard.

transformers reads a folder and computes the log-probs of a few short texts. Then litgpt's GPT takes
its weights, or the same instance goes on with our attention. Either must give the same log-probs,
else it is refused. Before that, the adapters of a PEFT folder are merged into transformers' model, and
compared in the same way. The texts are random ids: this sees no fault of a tokenizer or chat template."""

import copy
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers.pytorch_utils import Conv1D

from attention import KVCache, PromptCache
from head import logp_of
from hub import Source, find_model, read_config, read_whole
from lora import Adapter, add_adapters, fold_adapters, read_peft
from model import Packed, TransformersGPT, copy_from, litgpt_model
from packing import pack
from reference import freeze
from runs.checkpoint import read_settings, read_tensors
from runs.console import user_error
from runs.devices import set_weights
from runs.settings import Lora, refuse_unless

# Largest difference of a log-prob, in nats. All are compared in float32 or float64: a model that is
# to be held in bfloat16 is read in float32, compared, and then rounded.
TOLERANCE = 1e-4


def load_model(source: Source | Path | str, dtype: torch.dtype = torch.float32) -> Packed:
    """A model on the CPU, in eval mode, with its weights in `dtype`. Raises BadInput."""
    if not isinstance(source, Source):
        source = find_model(str(source))
    # adapters are drawn from torch's seed afterwards, whatever reading draws
    with torch.random.fork_rng(devices=[]):
        gpt = _load_plain(source, torch.promote_types(dtype, torch.float32)).eval()
    if isinstance(gpt, TransformersGPT):  # its tables of positions stay in float32
        for p in gpt.parameters():
            p.data = p.data.to(dtype)
    else:
        gpt.to(dtype)
    return gpt


def _load_plain(source: Source, dtype: torch.dtype) -> Packed:
    """A model without adapters of its own: transformers' model with the adapters of PEFT folders in its
    weights, read and compared, on which the weights of a checkpoint are put."""
    if source.base and not _is_peft(source):
        gpt = _load_plain(source.base, dtype)
        put_on(gpt, source.folder)
        return gpt
    hf = _read_adapted(source, dtype)
    with user_error(f"model: {source.root}: {hf.config.model_type}"):
        prompts, completions = _short_texts(hf)
        expected_T = _plain_logps(hf, prompts, completions)
        if gpt := litgpt_model(hf):
            copy_from(gpt, hf)
        gpt = gpt or TransformersGPT(hf)
        _compare(gpt, prompts, completions, expected_T)
    return gpt


def put_on(gpt: Packed, folder: Path) -> None:
    """Put on a plain model what a checkpoint has learned on it; adapters are merged. Raises BadInput."""
    with user_error(f"{folder}: does not fit its base"):
        add_adapters(gpt, Lora(**read_settings(folder)["lora"]))
        params = gpt.unique_parameters()

        def place(kind, name, size, dtype):
            if kind == "weights" and not name.startswith("objective_module."):
                return params[name].detach()  # it shares the weight's memory

        read_tensors(folder, place)
        fold_adapters(gpt)


# ---- PEFT's folders ------------------------------------------------------------------------------


def _is_peft(source: Source) -> bool:
    return (source.folder / "adapter_config.json").exists()


def _read_adapted(source: Source, dtype: torch.dtype):
    """transformers' model of a folder, or of the base of PEFT folders with what they change. Raises
    BadInput."""
    if source.base is None:
        return read_whole(source.root, read_config(source), dtype)
    refuse_unless(
        _is_peft(source),
        f"model: {source.folder}: a checkpoint cannot be the base of an adapter; export it first",
    )
    hf = _read_adapted(source.base, dtype)
    with user_error(f"{source.folder}: does not fit its base"):
        _put_peft(hf, source)
    return hf


@torch.no_grad()
def _put_peft(hf, source: Source) -> None:
    """Change the weights of transformers' model as a PEFT folder says. Raises BadInput where the model
    would have other weights than its config says, and where its log-probs are not those by PEFT's rule:
    the layers of the base as they are, and the adapters beside them."""
    peft = read_peft(source.folder)
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    text_model = {
        *hf.get_decoder().modules(),
        head,
    }  # without a vision tower, which we do not compute
    layers = {name: module for name, module in hf.named_modules() if module in text_model}

    def weight_of(name: str) -> tuple[nn.Module, str]:
        """-> the layer, and the weight's name in it."""
        layer, _, kind = name.rpartition(".")
        module = layers.get(layer)
        refuse_unless(
            isinstance(getattr(module, kind, None), nn.Parameter),
            f"{source.folder}: {name}: its base has no such weight to adapt",
        )
        return module, kind

    for name, value in peft.weights.items():
        module, kind = weight_of(name)
        old = getattr(module, kind)
        refuse_unless(
            value.shape == old.shape,
            f"{source.folder}: {name}: {tuple(value.shape)}, but {tuple(old.shape)} in its base. For an "
            "enlarged vocabulary: resize_token_embeddings of the base, then merge_and_unload by PEFT",
        )
        # PEFT copies these layers; what else is whole it writes into the base, also into a tied matrix
        if name.removesuffix(f".{kind}").endswith(tuple(peft.modules_to_save)):
            setattr(module, kind, nn.Parameter(value.to(old.dtype)))
        else:
            old.copy_(value)
    for layer, rows in peft.token_rows.items():
        module, _ = weight_of(f"{layer}.weight")
        weight = module.weight.clone()
        weight[list(rows)] = torch.stack(list(rows.values())).to(weight.dtype)
        module.weight = nn.Parameter(weight)
        if is_tied and module is embedding and len(peft.token_rows) == 1:
            head.weight = module.weight  # PEFT's rule, too, unless the head has rows of its own

    beside, hooks = [], []
    for layer, adapter in peft.adapters.items():
        module, _ = weight_of(f"{layer}.weight")
        if isinstance(module, nn.Linear | Conv1D | nn.Embedding):
            beside.append((module, adapter))
            hooks.append(module.register_forward_hook(partial(_add_adapter, adapter)))
        else:  # PEFT, too, adds it to such a matrix, which is no layer's (a mixture's router)
            _merge_adapter(adapter, module)
    texts = _short_texts(hf)
    expected_T = _plain_logps(hf, *texts)
    for hook in hooks:
        hook.remove()
    for module, adapter in beside:
        _merge_adapter(adapter, module)
    if is_tied and head.weight is not embedding.weight:
        refuse_unless(
            torch.equal(head.weight, embedding.weight),
            f"{source.folder}: lm_head and the embedding differ with this adapter, but are one matrix in its "
            "base; name a copy of the base with a lm_head.weight of its own and tie_word_embeddings false",
        )
        head.weight = embedding.weight
    has_experts = any(p.dim() > 2 for p in hf.get_decoder().parameters())
    _check_logps("merged", _plain_logps(hf, *texts), expected_T, "PEFT's rule", has_experts)


def _merge_adapter(adapter: Adapter, module: nn.Module) -> None:
    """Add an adapter to the matrix of one layer: a tied one becomes the layer's own, as in PEFT."""
    a, b, scale = adapter
    delta = b @ a * scale
    if isinstance(module, Conv1D):
        delta = delta.T
    module.weight = nn.Parameter(module.weight + delta)


def _add_adapter(
    adapter: Adapter, module: nn.Module, inputs: tuple, output: torch.Tensor
) -> torch.Tensor:
    """A layer's output with an adapter beside its matrix: a hook of the layer's forward."""
    a, b, scale = adapter
    a, b = a.to(output.dtype), b.to(output.dtype)
    if isinstance(module, nn.Embedding):
        scale = scale * getattr(module, "embed_scale", 1)  # Gemma's factor of the embedding
        return output + nn.functional.embedding(inputs[0], b) @ a * scale
    return output + inputs[0] @ a.T @ b.T * scale


# ---- the comparison ------------------------------------------------------------------------------


def _short_texts(hf) -> tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
    """Three prompts of random ids, with two completions each."""
    r, n_vocab = np.random.default_rng(0), hf.config.get_text_config().vocab_size
    texts = [r.integers(n_vocab, size=n) for n in (9, 4, 7, 1, 2, 1, 5, 6, 3)]
    return texts[::3], list(zip(texts[1::3], texts[2::3]))


@torch.no_grad()
def _plain_logps(hf, prompts, completions) -> torch.Tensor:
    """transformers' log-probs of the completions' tokens (T,), of each text in a forward of its
    own."""
    logps = []
    for prompt, pair in zip(prompts, completions):
        for completion in pair:
            ids = torch.tensor(np.concatenate([prompt, completion]))
            logits_LV = hf(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
            logps.append(logp_of(logits_LV.double(), ids[len(prompt) :])[0])
    return torch.cat(logps)


@torch.no_grad()
def _compare(gpt: Packed, prompts, completions, expected_T: torch.Tensor) -> None:
    """Raise ValueError unless the model computes these log-probs: where completions share a prompt,
    where the prompts come from a PromptCache, and token by token with a KVCache."""
    batch, prompt_cache = pack(prompts, completions)._replace(by_token=True), PromptCache()
    expected_BKL = batch.tokens_of_completions(expected_T)
    shared = gpt(batch, prompt_cache).logps  # and fills the cache
    cached = gpt(batch, prompt_cache).logps

    # sampling: the second tokens of the first completions, after the first ones
    first_B, second_B = torch.tensor([pair[0][:2].tolist() for pair in completions]).T
    sizes = list(map(len, prompts))
    kv_cache = KVCache(pack(prompts, [(pair[0][:1],) for pair in completions]), max(sizes) + 1)
    gpt(kv_cache)
    kv_cache.at(first_B, torch.tensor(sizes), max(sizes))
    sampled_B, _ = logp_of(gpt(kv_cache).double(), second_B)

    for name, logp, expected in (
        ("with shared prompts", shared, expected_BKL),
        ("with cached prompts", cached, expected_BKL),
        ("token by token", sampled_B, expected_BKL[:, 0, 1]),
    ):
        _check_logps(name, logp, expected, "transformers' own", gpt.has_experts)


def _check_logps(
    name: str, logp: torch.Tensor, expected: torch.Tensor, rule: str, has_experts: bool
) -> None:
    """Raise ValueError unless these log-probs are equal to the tolerance."""
    # a mixture may choose another of two experts that are almost equal: then most tokens must agree
    share = 0.75 if has_experts else 1.0
    largest = (logp - expected).abs().quantile(share).item()
    if not largest <= TOLERANCE:  # nan, too
        raise ValueError(
            f"log-probs {name} are up to {largest:.2g} nats from {rule}, expected at most {TOLERANCE:g}"
        )


# ---- sharding ------------------------------------------------------------------------------------


def shard_over_ranks(
    fabric,
    whole: Packed | None,
    source: Source,
    precision: str,
    lora: Lora | None = None,
    objective_module: nn.Module | None = None,
) -> nn.Module:
    """A model that rank 0 holds (elsewhere None), sharded over all ranks: no other rank ever has
    the whole of it. Without `lora` it is a frozen one. The objective's module, if there is one, is
    sharded with it. A collective."""
    about, weights, config = None, None, read_config(source)
    if whole:
        # its values count, not other ranks'
        whole.objective_module = copy.deepcopy(objective_module)
        weights = whole.unique_parameters()
        about = whole.tied, whole.embedding.weight.dtype, dict(whole.named_buffers())
    config.tie_word_embeddings, dtype, buffers = fabric.broadcast(about)
    auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        hf = auto.from_config(config, attn_implementation="eager", dtype=dtype)
        shell = litgpt_model(hf) or TransformersGPT(hf)
    add_adapters(shell, lora)
    shell.objective_module = objective_module
    if lora is None:
        freeze(shell, precision)
    module = fabric.setup_module(shell)
    for name, x in buffers.items():
        shell.get_buffer(name).copy_(x)
    set_weights(module, weights)
    return module


def shard_module(module, mesh, bf16: bool):
    """Shard a model on the meta device with FSDP2: each block, an untied embedding and head by
    themselves, then what is left. `bf16`: linear layers are gathered in bfloat16, as autocast would
    cast them; norms, embedding and adapters stay float32."""
    # FSDP2 warns of views that a hook might change in place; no hook of ours does
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = mesh["data_parallel"]
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in module.blocks:
        if bf16:
            linears = [m for m in block.modules() if isinstance(m, nn.Linear)]
            fully_shard(linears, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh)
    if not module.tied and module.plain_head:
        fully_shard(module.embedding, mesh=mesh)
        fully_shard(module.lm_head, mesh=mesh, mp_policy=policy)
        # The model's logp reads the head's weight, and FSDP2 gathers a weight only before a method
        # of its own layer: so the model calls its logp as a method of the head.
        module.lm_head.logp = module.logp
        register_fsdp_forward_method(module.lm_head, "logp")
        module.logp = module.lm_head.logp
    # By default a root stays gathered for its backward; a frozen model has no backward.
    is_frozen = not any(p.requires_grad for p in module.parameters())
    fully_shard(module, mesh=mesh, reshard_after_forward=True if is_frozen else None)
    return module.to_empty(device=mesh.device_type)
