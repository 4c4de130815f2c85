"""How a model on disk becomes the model that computes: read, build, compare, adapt, shard.

transformers reads a folder and computes the log-probs of a few short texts. Then litgpt's GPT takes
its weights, or the same instance goes on with our attention. Either must give the same log-probs,
else it is refused."""

import copy
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn

from attention import KVCache, PromptCache
from hub import Source, find_model, read_config, read_whole, their_errors
from lora import add_adapters, fold_adapters, fold_peft
from model import Packed, TransformersGPT, copy_from, litgpt_model
from packing import pack
from reference import freeze
from runs.checkpoint import read_checkpoint_weights, read_settings
from runs.devices import set_weights
from runs.settings import Lora

# Largest difference of a log-prob, in nats. All are compared in float32 or float64: a model that is
# to be held in bfloat16 is read in float32, compared, and then rounded.
TOLERANCE = 1e-4


def load_model(
    source: Source | Path | str, lora: Lora | None = None, dtype: torch.dtype = torch.float32
) -> Packed:
    """A model on the CPU with its weights in `dtype`; new adapters start at zero, at least in
    float32. Raises BadInput."""
    if not isinstance(source, Source):
        source = find_model(str(source))
    with torch.random.fork_rng(
        devices=[]
    ):  # new adapters are drawn from torch's seed, whatever reading draws
        gpt = _load_plain(source, dtype)
    if lora and lora.rank:
        add_adapters(gpt, lora)
    return gpt


def _load_plain(source: Source, dtype: torch.dtype) -> Packed:
    """Without adapters of its own: those of a checkpoint or a PEFT folder are merged into its
    base."""
    folder = source.folder
    if source.base is None:
        return _read(source, dtype)
    gpt = _load_plain(source.base, dtype)
    if (folder / "adapter_config.json").exists():
        fold_peft(gpt, folder)
        return gpt
    lora = Lora(**read_settings(folder)["lora"])
    if lora.rank:
        add_adapters(gpt, lora)
    with their_errors(folder):
        unknown = gpt.load_state_dict(read_checkpoint_weights(folder), strict=False).unexpected_keys
        if unknown:
            raise ValueError(f"{unknown[0]}: not of this model")
    fold_adapters(gpt)
    return gpt.requires_grad_(True)


def _read(source: Source, dtype: torch.dtype) -> Packed:
    """The model of a folder with all weights."""
    config = read_config(source)
    wide = torch.promote_types(dtype, torch.float32)
    hf = read_whole(source.root, config, wide)
    with their_errors(f"model: {source.root}: {config.model_type}"):
        expected_T = _plain_logps(hf)
        gpt = litgpt_model(hf)
        if gpt:
            copy_from(gpt, hf)
        else:
            gpt = TransformersGPT(hf)
        _compare(gpt.eval(), expected_T)
    if isinstance(gpt, TransformersGPT):  # its tables of positions stay in float32
        for p in gpt.parameters():
            p.data = p.data.to(dtype)
    else:
        gpt.to(dtype)
    return gpt.train()


# ---- the comparison ------------------------------------------------------------------------------


def _texts(n_vocab: int) -> tuple[list, list]:
    """Three prompts with two completions each, as token ids."""
    r = np.random.default_rng(0)
    texts = [r.integers(n_vocab, size=n) for n in (9, 4, 7, 1, 2, 1, 5, 6, 3)]
    return texts[::3], list(zip(texts[1::3], texts[2::3]))


@torch.no_grad()
def _plain_logps(hf) -> torch.Tensor:
    """transformers' log-probs of the completions' tokens (T,), of each text in a forward of its
    own."""
    logps = []
    for prompt, pair in zip(*_texts(hf.config.get_text_config().vocab_size)):
        for completion in pair:
            ids = torch.tensor(np.concatenate([prompt, completion]))
            logp_NV = hf(input_ids=ids[None]).logits[0].double().log_softmax(-1)
            n = len(prompt)
            logps.append(logp_NV[n - 1 : -1].gather(1, ids[n:, None])[:, 0])
    return torch.cat(logps)


@torch.no_grad()
def _compare(gpt: Packed, expected_T: torch.Tensor) -> None:
    """Raise ValueError unless the model computes these log-probs: where completions share a prompt,
    where the prompts come from a PromptCache, and token by token with a KVCache."""
    prompts, completions = _texts(gpt.config.padded_vocab_size)
    batch, prompt_cache = pack(prompts, completions)._replace(by_token=True), PromptCache()
    expected_BKL = batch.tokens_of_completions(expected_T)

    # a mixture may choose another of two experts that are almost equal: then most tokens must agree
    share = 0.75 if gpt.has_experts else 1.0

    def check(name, logp, expected):
        if not (largest := (logp - expected).abs().quantile(share).item()) <= TOLERANCE:
            raise ValueError(
                f"log-probs {name} are up to {largest:.2g} nats from transformers' own, "
                f"expected at most {TOLERANCE:g}"
            )

    check("with shared prompts", gpt(batch, prompt_cache).logps, expected_BKL)  # fills the cache
    check("with cached prompts", gpt(batch, prompt_cache).logps, expected_BKL)
    first_BL = torch.tensor(np.array([pair[0][:2] for pair in completions]))
    size_B = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(size_B.max())
    kv_cache = KVCache(pack(prompts, [(pair[0][:1],) for pair in completions]), longest + 1)
    logits = [gpt(kv_cache)]
    kv_cache.at(first_BL[:, 0], size_B, longest)
    logits.append(gpt(kv_cache))
    logp_BLV = torch.stack(logits, 1).double().log_softmax(-1)
    logp_BL = logp_BLV.gather(2, first_BL[..., None])[..., 0]
    check("token by token", logp_BL, expected_BKL[:, 0, :2])


# ---- sharding -----------------------------------------------------------------


def shard_over_ranks(
    fabric,
    whole: Packed | None,
    source: Source,
    precision: str,
    lora: Lora | None,
    learns: bool,
    objective_module: nn.Module | None = None,
) -> nn.Module:
    """A model that rank 0 holds (elsewhere None), sharded over all ranks: no other rank ever has
    the whole of it. The objective's module, if there is one, is sharded with it. A collective."""
    about, first = None, fabric.global_rank == 0
    if first:
        whole.objective_module = copy.deepcopy(
            objective_module
        )  # its values count, not other ranks'
        about = whole.tied, whole.embedding.weight.dtype, dict(whole.named_buffers())
    tied, dtype, buffers = fabric.broadcast(about)
    config, options = read_config(source), dict(attn_implementation="eager", dtype=dtype)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(config, **options)
        shell = litgpt_model(hf) or TransformersGPT(hf)
    if tied:
        shell.tie()
    if lora and lora.rank:
        add_adapters(shell, lora)
    for name, x in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(shell.get_submodule(owner), attribute, x)
    shell.objective_module = objective_module
    if not learns:
        freeze(shell, precision)
    module = fabric.setup_module(shell)
    set_weights(module, whole.unique_parameters() if first else None)
    return module
