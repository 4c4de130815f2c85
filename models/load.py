"""How a model on disk becomes the model that computes: read, build, compare, adapt, shard.

transformers reads a folder and computes the log-probs of a few short texts. Then our GPT takes
the weights, or transformers' model gets our attention. Both must give the same log-probs, or the model
is refused. Before that, the adapters of a PEFT folder are merged into transformers' model,
and compared in the same way. The texts are random ids: this sees no fault of a tokenizer or chat template."""

from collections import defaultdict
from pathlib import Path

import litgpt
import torch
import transformers
from torch import Tensor, nn

from head import logp_of
from infra.checkpoint import read_settings, read_tensors
from infra.console import BadInput, say, user_error
from infra.random_numbers import round_at_random
from infra.settings import Lora
from model import GPT, Block, Packed
from models.hub import (
    Source,
    check_logps,
    find_model,
    litgpt_rows,
    litgpt_sizes,
    plain_logps,
    read_config,
    read_whole,
    short_texts,
)
from models.lora import (
    add_adapters,
    merge_adapters,
    take_out_adapters,
)
from packing import PackedBatch, pack
from sampler import KVCache


def load_model(source: Source | Path | str, dtype: torch.dtype = torch.float32) -> Packed:
    """A model on the CPU, in eval mode. It is read at least in float32, and its weights are rounded at random to
    `dtype`. Raises BadInput."""
    if not isinstance(source, Source):
        source = find_model(str(source))
    # reading may draw random numbers; adapters, drawn later, must depend on torch's seed alone
    with torch.random.fork_rng(devices=[]):
        gpt = _load_plain(source, torch.promote_types(dtype, torch.float32)).eval()
    for name, p in gpt.unique_parameters().items():
        # A copy: the weights of a file that is mapped into memory lie at odd addresses, where some products round
        # otherwise than those of the reference, which is a copy; and another program may write the file.
        p.data = round_at_random(p.data, dtype, name).clone()
        # A router only chooses by its bias, which never has a gradient: DDP waits for one of every trained weight.
        p.requires_grad = not name.endswith(("e_score_correction_bias", "expert_bias"))
    if isinstance(gpt, GPT):
        return gpt.to(dtype)
    for x in gpt.buffers():
        x.data = x.data.clone()  # tables of positions stay in float32
    return gpt


def _load_plain(source: Source, dtype: torch.dtype) -> Packed:
    """A model with all adapters merged: transformers' model with the adapters of PEFT folders, compared, and then with
    the trained weights of checkpoints. dtype: at least float32."""
    if source.base and not (source.folder / "adapter_config.json").exists():
        gpt = _load_plain(source.base, dtype)
        put_on(gpt, source.folder)
        return gpt
    hf = _read_adapted(source, dtype)
    blocks = hf.config.blocks
    with user_error(f"model: {source.root}: {hf.config.model_type}"):
        batch = short_texts(hf)
        expected_T = plain_logps(hf, batch)
        gpt = model_of(hf)
        if isinstance(gpt, GPT):
            share_weights(gpt, hf)
        if not _has_own_blocks(gpt, blocks):
            _compare(gpt, batch, expected_T)
    return gpt


def model_of(hf: transformers.PreTrainedModel) -> Packed:
    """A GPT of the shape of transformers' model, on the meta device; for a type that GPT does not compute transformers'
    model with our attention."""
    gpt = litgpt_model(hf)
    if gpt is not None:
        return gpt
    from models.other import TransformersGPT

    return TransformersGPT(hf)


def _has_own_blocks(gpt: Packed, blocks: str) -> bool:
    """Whether the model computes with blocks of a fork's own (GPT.block_class), which nothing can be compared
    with. blocks: the name of those that the folder's model was made with. Raises BadInput if the model would compute
    something else than the folder's."""
    block_name = "" if GPT.block_class is Block else GPT.block_class.__name__
    if blocks not in ("", block_name):
        raise BadInput(
            f"its blocks are {blocks}: it can be loaded where GPT.block_class is that class"
        )
    if block_name and not isinstance(gpt, GPT):
        raise BadInput(
            f"transformers' own class computes this type: {block_name} would have no effect"
        )
    if block_name:
        say(f"the blocks are {block_name}: log-probs are not compared with those of transformers")
    return bool(block_name)


@torch.no_grad()
def put_on(gpt: Packed, folder: Path) -> None:
    """Put a checkpoint's trained weights into its base, a model without adapters, and merge its adapters. Raises
    BadInput."""
    with user_error(f"{folder}: does not fit its base"):
        add_adapters(gpt, Lora(**read_settings(folder)["lora"]))
        params = gpt.unique_parameters()

        def place(kind: str, name: str, *_) -> Tensor | None:
            if kind == "weights" and not name.startswith("objective_module."):
                return params[name].detach()  # shares the weight's memory

        read_tensors(folder, place)
        adapters = take_out_adapters(gpt)
        merge_adapters(gpt.state_dict(), adapters, gpt)


# ---- PEFT's folders ------------------------------------------------------------------------------


def _read_adapted(source: Source, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """transformers' model of a folder; for PEFT folders, of their base, with their changes.
    Raises BadInput."""
    if source.base is None:
        return read_whole(source.root, read_config(source), dtype)
    from models.peft_folders import merge_peft

    hf = _read_adapted(source.base, dtype)
    with user_error(f"{source.folder}: does not fit its base"):
        return merge_peft(hf, source)


# ---- the comparison ------------------------------------------------------------------------------


@torch.no_grad()
def _compare(gpt: Packed, batch: PackedBatch, expected_T: Tensor) -> None:
    """Raise ValueError unless the model computes these log-probs in three ways: with completions that share
    a prompt, with the prompts of an earlier forward, and token by token with a KVCache."""
    expected_BKL = batch.tokens_of_completions(expected_T)
    scores = gpt(batch, keeps_prompts=True, by_token=True)
    shared = scores.logps
    cached = gpt(batch, scores.prompts, by_token=True).logps

    # sampling: the second tokens of the first completions, after the first ones
    prompts, completions = zip(*batch.ids)
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
        check_logps(name, logp, expected, "transformers' own", gpt.has_experts)


# ---- our GPT of transformers' model ---------------------------------------------------------------


def litgpt_config(c: transformers.PretrainedConfig) -> litgpt.Config | None:
    """litgpt's Config for a config of transformers; None where GPT would compute something
    else."""
    kind = c.model_type
    if kind == "gpt2" and c.activation_function == "gelu_new":
        shape = dict(
            rotary_percentage=0.0, bias=True, norm_class_name="LayerNorm", norm_eps=c.layer_norm_epsilon,
            mlp_class_name="GptNeoxMLP", gelu_approximate="tanh", intermediate_size=c.n_inner,
        )  # fmt: skip
    elif kind in ("llama", "mistral", "qwen2", "qwen3") and c.hidden_act == "silu":
        shape = dict(
            rotary_percentage=1.0, bias=getattr(c, "mlp_bias", False), norm_class_name="RMSNorm",
            norm_eps=c.rms_norm_eps, mlp_class_name="LLaMAMLP", intermediate_size=c.intermediate_size,
            attn_bias=kind == "qwen2" or getattr(c, "attention_bias", False), norm_qk=kind == "qwen3",
        )  # fmt: skip
    else:
        return None
    layers = getattr(c, "layer_types", None) or [kind] * c.num_hidden_layers
    # mistral has no layer_types, and a window in all layers
    is_windowed = [layer in ("sliding_attention", "mistral") for layer in layers]
    window = c.sliding_window if any(is_windowed) else None
    return litgpt.Config(
        **litgpt_sizes(c), **shape,
        sliding_window_size=window, sliding_window_indices=is_windowed,
    )  # fmt: skip


def litgpt_model(hf: transformers.PreTrainedModel) -> GPT | None:
    """A GPT of the shape of transformers' model, on the meta device; None where it does not fit."""
    config = litgpt_config(hf.config)
    if config is None:
        return None
    with torch.device("meta"):
        gpt = GPT(config).to(hf.dtype)
    if hf.get_output_embeddings().weight is hf.get_input_embeddings().weight:
        gpt.lm_head.weight = gpt.embedding.weight
    gpt.rows = litgpt_rows(hf.state_dict())
    # of each of our weights all rows must come from transformers' weights
    ends = {rows.name: rows.span.stop for rows in gpt.rows.values()}
    if ends != {name: len(weight) for name, weight in gpt.state_dict().items()}:
        return None  # for example if only the attention's output has a bias
    if config.rope_n_elem and 2 * len(hf.model.rotary_emb.inv_freq) != config.head_size:
        return None  # only a part of each head is rotated
    return gpt


@torch.no_grad()
def share_weights(gpt: GPT, hf: transformers.PreTrainedModel) -> None:
    """Give a model that litgpt_model made the weights of transformers' model, and its tables of rotary positions. It
    is then on the same device. The models share all weights but q, k and v: a large one must not be in memory twice."""
    hf_weights = hf.state_dict()
    parts = defaultdict(list)
    for name, rows in gpt.rows.items():
        weight = hf_weights[name]
        parts[rows.name].append(weight.T if rows.transposed else weight)
    weights = {name: x[0] if len(x) == 1 else torch.cat(x) for name, x in parts.items()}
    gpt.to_empty(device=hf.device)
    is_tied = gpt.tied
    gpt.load_state_dict(weights, assign=True)
    if is_tied:
        gpt.lm_head.weight = gpt.embedding.weight
    if gpt.config.rope_n_elem:
        position_1N = torch.arange(gpt.config.block_size, device=hf.device)[None]
        # rotary_emb returns the dtype of its first argument
        cos_1ND, sin_1ND = hf.model.rotary_emb(torch.empty(0, device=hf.device), position_1N)
        gpt.cos = cos_1ND[0]
        gpt.sin = sin_1ND[0]


@torch.no_grad()
def freeze(model: nn.Module, precision: str) -> nn.Module:
    """Make a model a reference: without gradients, and in bf16-mixed with its linear layers held in bfloat16, except a
    head that is tied to the embedding. Autocast would cast these layers at each use: log-probs stay the same bits."""
    model.requires_grad_(False).eval()
    if precision == "bf16-mixed":
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.weight is not model.embedding.weight:
                module.to(torch.bfloat16)
    return model
