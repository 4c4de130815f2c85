"""A model on disk: its place, its config, the names of its weights, its log-probs.

transformers reads and computes all of it. A checkpoint and a PEFT folder hold only trained weights:
their Source has a base, and models/load.py puts the trained weights into the base's model. This file
does not import our model classes."""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from head import logp_of
from infra.checkpoint import read_settings
from infra.console import BadInput, user_error
from infra.files import write_json
from infra.random_numbers import round_at_random
from infra.settings import find_path, read_text, refuse_unless
from packing import PackedBatch, pack

transformers.logging.set_verbosity(logging.CRITICAL)  # advice for its own users
transformers.logging.disable_progress_bar()
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # the same, and PEFT imports it

# Quantised weights, by any method.
QUANTISED = re.compile(r'"(quantization|compression)_config":\s*\{\s*"')
# Refused in a config: attention or rotary positions that change with the
# length of the text, because models/load.py compares short texts only. longrope's positions change only
# beyond the original context, and context_of allows no longer text.
REFUSED = re.compile(  # the fields with any value but null and false
    '"(attn_temperature_tuning|attention_chunk_size|llama_4_scaling_beta)"(?=: [^nf])'
    '|"rope_type": "(?!default|linear|llama3|yarn|longrope).+"'
)
# Files that an export takes over from its source. Those of the model are its config.json (transformers would write our
# changes into it, and other versions may not read it), the index of its weights, files of sampling and of image
# processors, and code that a config may name.
MODEL_FILES = re.compile(
    r"config.json|model.safetensors.index|generation_config|(pre)?processor|.*\.py$"
)
TOKENIZER_FILES = re.compile(
    r"tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|.*\.py$"
)

# transformers' name of a part of GPT-2 or of a Llama-shaped model, and litgpt's. q, k and v are one
# matrix in litgpt.
NAMES = """
    model.embed_tokens        transformer.wte
    model.norm                transformer.ln_f
    lm_head                   lm_head
    input_layernorm           norm_1
    post_attention_layernorm  norm_2
    self_attn.q_proj          attn.qkv
    self_attn.k_proj          attn.qkv
    self_attn.v_proj          attn.qkv
    self_attn.o_proj          attn.proj
    self_attn.q_norm          attn.norm_q
    self_attn.k_norm          attn.norm_k
    mlp.gate_proj             mlp.fc_1
    mlp.up_proj               mlp.fc_2
    mlp.down_proj             mlp.proj
    transformer.wte           transformer.wte
    transformer.wpe           transformer.wpe
    transformer.ln_f          transformer.ln_f
    ln_1                      norm_1
    ln_2                      norm_2
    attn.c_attn               attn.qkv
    attn.c_proj               attn.proj
    mlp.c_fc                  mlp.fc
    mlp.c_proj                mlp.proj
"""
LITGPT_NAMES = dict(line.split() for line in NAMES.strip().splitlines())


# ---- where a model lies --------------------------------------------------------------------------


class Source(NamedTuple):
    """A model on disk."""

    folder: Path
    """A Hugging Face folder; or, if `base` is given, a checkpoint of a run or a PEFT folder."""
    base: "Source | None" = None

    @property
    def root(self) -> Path:
        """The folder that holds config.json and all weights."""
        return self.base.root if self.base else self.folder

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer: many PEFT folders have their own."""
        if self.base and not (self.folder / "tokenizer_config.json").exists():
            return self.base.tokenizer
        return self.folder

    @property
    def files(self) -> list[Path]:
        """The files of config, sampling, tokenizer and code. An export copies these files, a resume compares
        them. The code is never run."""
        files = []
        for folder, names in ((self.root, MODEL_FILES), (self.tokenizer, TOKENIZER_FILES)):
            files += [x for x in sorted(folder.iterdir()) if names.match(x.name) and x.is_file()]
        return list(dict.fromkeys(files))  # code is in both lists

    @property
    def chat_template(self) -> Path | None:
        """The template of a checkpoint (its run's data.chat_template) or of an adapter, otherwise the base's."""
        if self.base is None:
            return None
        file = self.folder / "chat_template.jinja"
        return file if file.exists() else self.base.chat_template


def find_model(name: str, what: str = "model", weights: bool = True) -> Source:
    """The model that a setting names: a Hugging Face folder or id, a run (its
    `final`), a checkpoint of a run, or a PEFT folder. `what`: the setting. weights=False: a
    download leaves them out. Raises BadInput."""
    folder = find_path(name)
    if (folder / "settings.yaml").exists() and not (folder / "state.json").exists():
        folder = folder / "final"
        if not folder.is_dir():
            raise BadInput(
                f"{what}: {name}: a run without a `final` folder: resume it, or name one of its checkpoints"
            )
    if not folder.is_dir():
        folder = _download(name, what, weights)
    base = None  # the model that a checkpoint or an adapter belongs to, as it was given
    if (folder / "state.json").exists():
        base = read_settings(folder)["model"]
    elif (folder / "adapter_config.json").exists():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        what = f"{what}: {folder}/adapter_config.json: base_model_name_or_path"
    if base:
        refuse_unless(
            find_path(base).resolve() != folder.resolve(),
            f"{what}: {base}: names itself as its base",
        )
        return Source(folder, find_model(base, what, weights))
    if not (folder / "config.json").exists():
        raise BadInput(
            f"{what}: {name}: a folder without config.json, and no adapter that names its base"
        )
    if weights:  # now, not after the records are read
        if QUANTISED.search((folder / "config.json").read_text()):
            raise BadInput(
                f"{what}: {name}: config.json has a quantization_config: the weights are quantised, and only weights "
                "in 16 or 32 bits are read; name the same model in bfloat16 (--lora.quantize nf4 holds it in 4 bits)"
            )
        weight_files(folder)
    return Source(folder)


def _download(name: str, what: str, weights: bool) -> Path:
    """The folder of a model of the Hub. See find_model."""
    wanted = ["*.json", "*.jinja", "*.txt", "*.py", "tokenizer.model", "README.md"]
    if weights:
        wanted.append("*.safetensors")
    # Mistral's second copy of the weights, and folders with other formats (onnx/, original/)
    unwanted = ["consolidated*", "*/*"]
    with user_error(
        f"{what}: {name}: no such folder here, and not fetched from huggingface.co; without a network, "
        "download it elsewhere and give the folder that holds config.json and model.safetensors"
    ):
        download = huggingface_hub.snapshot_download
        return Path(download(name, allow_patterns=wanted, ignore_patterns=unwanted))


def read_json(file: Path) -> dict:
    with user_error(None, file):
        return json.loads(read_text(file))


# ---- its config ----------------------------------------------------------------------------------


def read_config(source: Source) -> transformers.PretrainedConfig:
    """transformers' config of a model, without dropout: policy and reference must be equal. `blocks` is the name of the
    fork's blocks that the model was made with, or empty. Raises BadInput, also for a config that REFUSED matches."""
    file = source.root / "config.json"
    with user_error(None, file):
        about = read_json(file)
        about["model_type"], _, blocks = about.get("model_type", "").partition(BLOCKS_MARK)
        if blocks:
            config = transformers.AutoConfig.for_model(**about)
        else:
            config = transformers.AutoConfig.from_pretrained(source.root, trust_remote_code=False)
        config.blocks = blocks
        text = config.get_text_config()
        # The config of a model with images also describes its encoder, which is not computed.
        refused = REFUSED.search(text.to_json_string(use_diff=False))
        if refused:
            raise BadInput(f"{file}: {refused[0]} is not supported")
        int(context_of(config))  # raises for a type without a longest text
    for name, value in text.to_dict().items():
        is_random = "drop" in name or "jitter" in name
        if is_random and isinstance(value, float):
            setattr(text, name, 0.0)
    return config


# In config.json: "gpt2+ParallelBlock" is a GPT-2 with blocks of a fork's own. No other program loads it as a GPT-2.
BLOCKS_MARK = "+"


def mark_blocks(folder: Path, blocks: str) -> None:
    """Let the config.json of an exported model say that it was made with blocks of a fork's own."""
    config = read_json(folder / "config.json")
    model_type = config["model_type"].partition(BLOCKS_MARK)[0]
    config["model_type"] = f"{model_type}{BLOCKS_MARK}{blocks}"
    write_json(folder / "config.json", config)


def context_of(config: transformers.PretrainedConfig) -> int:
    """Tokens of the longest text that a model takes."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # a longer text would have other positions from its first token on
        return rope["original_max_position_embeddings"]
    return text.max_position_embeddings


def litgpt_sizes(c: transformers.PretrainedConfig) -> dict:
    """The fields of litgpt's Config that every model needs, from a text config of transformers."""
    return dict(
        block_size=context_of(c), n_layer=c.num_hidden_layers, n_embd=c.hidden_size,
        n_head=c.num_attention_heads, n_query_groups=getattr(c, "num_key_value_heads", None),
        head_size=getattr(c, "head_dim", None), vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size,
        final_logit_softcapping=getattr(c, "final_logit_softcapping", None),
    )  # fmt: skip


# ---- names of weights, and their hash -------------------------------------------------------------


class Rows(NamedTuple):
    """The place of a weight of transformers' model in ours."""

    name: str
    """Our name of the weight."""
    span: slice = slice(None)
    """Which of its rows."""
    transposed: bool = False
    """Whether transformers stores the weight as (inputs, outputs), as in GPT-2."""

    def of(self, weight: Tensor) -> Tensor:
        """These rows of our weight, as transformers has them."""
        rows = weight[self.span]
        return rows.T if self.transposed else rows


def litgpt_rows(hf_weights: Mapping[str, Tensor]) -> dict[str, Rows]:
    """The rows of litgpt's weight for each weight of transformers' GPT-2 or Llama-shaped models. Raises KeyError for a
    weight that litgpt's model does not have."""
    rows = {}
    ends = {}  # {litgpt's name: how many of its rows have a weight so far}
    for name, weight in hf_weights.items():
        # model.layers.0.mlp.up_proj.weight: layer 0, part mlp.up_proj, weight
        layer, part, kind = re.fullmatch(r"(?:.+\.(\d+)\.)?(.+)\.(.+)", name).groups()
        litgpt_name = f"{LITGPT_NAMES[part]}.{kind}"
        if layer:
            litgpt_name = f"transformer.h.{layer}.{litgpt_name}"
        transposed = ".c_" in name and weight.dim() == 2
        first = ends.get(litgpt_name, 0)
        end = first + weight.shape[int(transposed)]
        ends[litgpt_name] = end
        rows[name] = Rows(litgpt_name, slice(first, end), transposed)
    return rows


def weights_hash(weights: dict[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """A hash of weights with their names, shapes and dtypes; their order does not matter. dtype: hash the
    weights as load_model reads them in this type."""
    h = hashlib.sha256()
    for name, x in sorted(weights.items()):
        x = round_at_random(x.detach().cpu(), dtype or x.dtype, name)
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.flatten().view(torch.uint8).numpy())
    return h.hexdigest()


# ---- read a whole model --------------------------------------------------------------------------


def stored_types(folder: Path) -> dict[str, torch.dtype]:
    """The type of each weight in the files of a Hugging Face folder, by the names that they have there. config.json may
    say another one."""
    types = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():
                dtype = weights.get_tensor(name).dtype
                if dtype.is_floating_point:
                    types[name] = dtype
    return types


def names_in_model(hf: transformers.PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Maps names of weights in files to names of tensors in transformers' model. One tensor may join many weights,
    such as those of all experts."""
    conversions = get_model_conversion_mapping(hf)
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    converters = [x for x in conversions if isinstance(x, WeightConverter)]
    tensors = hf.state_dict()
    name_of = {}
    for name in names:
        new_name, _ = rename_source_key(name, renamings, converters, hf.base_model_prefix, tensors)
        is_unchanged = name in tensors and new_name not in tensors
        name_of[name] = name if is_unchanged else new_name
    return name_of


def _unused_weights(text: transformers.PretrainedConfig) -> re.Pattern:
    """Names of weights that may lie in the files though transformers has no place for them: constants in GPT-2's old
    files, and layers that predict more than one token (multi-token prediction)."""
    first = text.num_hidden_layers
    n_more = getattr(text, "num_nextn_predict_layers", None) or 0
    patterns = ["masked_bias$", r"(^|\.)mtp"]
    patterns += [rf"\blayers\.{i}\." for i in range(first, first + n_more)]
    return re.compile("|".join(patterns))


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a Hugging Face folder. Raises BadInput if one of them is missing."""
    names = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists() and not (folder / names[0]).exists():
        names = sorted(set(read_json(index)["weight_map"].values()))
    files = [folder / name for name in names]
    refuse_missing_weights(folder, files)
    return files


def refuse_missing_weights(folder: Path, files: list[Path]) -> None:
    """Raise BadInput if one of these files of weights is missing in a folder."""
    names = [file.name for file in files if not file.exists()]
    refuse_unless(
        not names,
        f"{folder}: weights are missing: no {', '.join(names)[:200]}; hf download fetches them, and no other "
        "format is read (save_pretrained of transformers and PEFT turns a .bin file into this one)",
    )


def read_whole(
    folder: Path, config: transformers.PretrainedConfig, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """transformers' model of a Hugging Face folder, on the CPU, with its weights in `dtype`. Raises BadInput where
    weights are missing, unknown or of another shape: transformers would only log this."""
    auto = transformers.AutoModelForCausalLM
    with user_error(None, folder):
        options = dict(attn_implementation="eager", dtype=dtype)
        options |= dict(use_safetensors=True, trust_remote_code=False, ignore_mismatched_sizes=True)
        hf, info = auto.from_pretrained(folder, config=config, output_loading_info=True, **options)
    unused = _unused_weights(config.get_text_config())
    info["unexpected_keys"] = {x for x in info["unexpected_keys"] if not unused.search(x)}
    faults = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if faults:
        raise BadInput(f"{folder}: the weights do not fit config.json: {str(faults)[:300]}")
    return hf


# ---- what transformers computes -------------------------------------------------------------------

# Largest difference of a log-prob, in nats, between models that compute in float32 or float64
TOLERANCE = 1e-4


def short_texts(hf: transformers.PreTrainedModel) -> PackedBatch:
    """Three prompts of random ids, with two completions each."""
    random = np.random.default_rng(0)
    n_vocab = hf.config.get_text_config().vocab_size
    texts = [random.integers(n_vocab, size=n) for n in (9, 4, 7, 1, 2, 1, 5, 6, 3)]
    return pack(texts[::3], list(zip(texts[1::3], texts[2::3])))


@torch.no_grad()
def plain_logps(hf: transformers.PreTrainedModel, batch: PackedBatch) -> Tensor:
    """transformers' log-probs of the completions' tokens (T,)."""
    texts = []  # prompt and completion
    starts = []  # of the completions
    for prompt, completions in batch.ids:
        for completion in completions:
            texts.append(torch.tensor(np.concatenate([prompt, completion])))
            starts.append(len(prompt))
    # no token sees the padding, which stands behind all of them
    logits_BLV = hf(input_ids=nn.utils.rnn.pad_sequence(texts, batch_first=True)).logits
    logps = []
    for ids, start, logits_LV in zip(texts, starts, logits_BLV):
        logits_TV = logits_LV[start - 1 : len(ids) - 1]
        logps.append(logp_of(logits_TV.double(), ids[start:])[0])
    return torch.cat(logps)


def check_logps(name: str, logp: Tensor, expected: Tensor, rule: str, has_experts: bool) -> None:
    """Raise ValueError if log-probs differ from the expected ones by more than TOLERANCE. rule: where the
    expected ones come from."""
    # of two experts with almost equal scores a mixture may choose the other: so only most tokens must agree
    share = 0.75 if has_experts else 1.0
    # two of minus infinity are equal: their difference would be nan
    difference = torch.where(logp == expected, 0, logp - expected).abs()
    largest = difference.quantile(share).item()
    if not largest <= TOLERANCE:  # nan, too
        raise ValueError(
            f"log-probs {name} are up to {largest:.2g} nats from {rule}, expected at most {TOLERANCE:g}"
        )
