"""Models that litgpt does not know, by transformers' own classes: pip install '.[transformers]'.

transformers gives the blocks of such a model. Attention, key/value cache, LM head, LoRA layers, and the
reading and writing of weights are the same as for litgpt's models: model.TransformersGPT puts the two
together, and compares what they compute with transformers' own forward before they are used.

Weights have the names that transformers writes into files. config is litgpt's Config in which only the
sizes count; its hf_config holds the content of config.json. Shape letters are those of model.py.

Reading order: read_model_config, make_causal_lm, attention, TransformersBlocks.
"""

import contextlib
import functools
import importlib.util
import logging
from pathlib import Path
from typing import NamedTuple

import litgpt
import litgpt.lora
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hub.families import TABLE, ModelConfig, Unsupported, check_sizes, must_equal, read_config
from hub.lora import add_adapter_layers
from runs.errors import BadInput, printable
from runs.small_files import read_object

INSTALL = "pip install '.[transformers]' adds transformers' own classes"
ATTENTION = "packed"  # the name under which transformers finds our attention
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
ROPES = {"default", "linear", "llama3", "yarn", "longrope"}
# Arguments of attention that change nothing here: what they say is in the packed batch, or it is switched off.
NEUTRAL = {
    "cache_position", "dropout", "is_causal", "output_attentions", "position_embeddings", "position_ids",
    "sliding_window", "use_cache",
}  # fmt: skip


# ---- config.json ---------------------------------------------------------------------------------


def read_model_config(folder: Path) -> ModelConfig:
    """What a Hugging Face folder says about its model, as the code that is to compute it reads it: litgpt's where
    litgpt knows the model_type, else transformers'. Raises BadInput."""
    file = folder / "config.json"
    if not file.exists():
        return read_config(folder)
    config = read_object(file)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in TABLE:
        return read_config(folder)
    if importlib.util.find_spec("transformers") is None:
        raise BadInput(f"{file}: model_type: {printable(kind)!r} is not supported; {INSTALL}")
    with their_errors(file):
        return _read_transformers(config, file)


def _read_transformers(config: dict, file: Path) -> ModelConfig:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    kind = config["model_type"]
    if kind not in KNOWN:
        raise Unsupported(f"model_type: {printable(kind)!r} is not supported")
    must_equal(config, quantization_config=None, is_encoder_decoder=False)
    if isinstance(config.get("text_config"), dict):
        raise Unsupported("text_config: models of texts and images are not supported")
    c = hf_config(config, ATTENTION)
    arguments = {
        "name": kind,
        "block_size": _context(c),
        "n_layer": _whole_number(c, "num_hidden_layers"),
        "n_embd": _whole_number(c, "hidden_size"),
        "n_head": _whole_number(c, "num_attention_heads"),
        "n_query_groups": getattr(c, "num_key_value_heads", None) or c.num_attention_heads,
        "head_size": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "vocab_size": _whole_number(c, "vocab_size"),
        "padded_vocab_size": c.vocab_size,
        "final_logit_softcapping": getattr(c, "final_logit_softcapping", None),
        "hf_config": {"transformers": config},
    }
    check_sizes(arguments, file, {})
    for layer_type in getattr(c, "layer_types", None) or []:
        if layer_type not in LAYER_TYPES:
            raise Unsupported(f"layer_types: {printable(layer_type)} is not supported")
    config = config | {"tie_word_embeddings": bool(c.tie_word_embeddings)}
    return ModelConfig(arguments, config, names={})


def hf_config(config: dict, attention: str):
    """transformers' config object of a config.json, without dropout. Raises what transformers raises."""
    from transformers import CONFIG_MAPPING

    # whatever else a file names, nothing of it is imported: the class comes from transformers' own table
    c = CONFIG_MAPPING[config["model_type"]].from_dict(config, attn_implementation=attention)
    for name, value in c.to_dict().items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(c, name, 0.0)  # litgpt's models have none: policy and reference must be equal
    return c


def _whole_number(c, name: str) -> int:
    value = getattr(c, name, None)
    if type(value) is not int:
        raise Unsupported(f"{name}: expected a number, got {printable(value)}")
    return value


def _context(c) -> int:
    """Tokens of the longest text. Raises Unsupported where a token's numbers depend on the text's length or on its
    place in the batch: the comparison at the start has short texts only."""
    outer = getattr(c, "rope_parameters", None) or {}
    context = _whole_number(c, "max_position_embeddings")
    must_equal(vars(c), attn_temperature_tuning=False)
    for rope in (outer, *(x for x in outer.values() if isinstance(x, dict))):
        kind = rope.get("rope_type", "default")
        if kind not in ROPES:
            raise Unsupported(f"rope_parameters: {printable(kind)} is not supported")
        must_equal(rope, llama_4_scaling_beta=None)
        if kind == "longrope":  # a longer text would have other positions from its first token on
            own = rope.get("original_max_position_embeddings")
            context = min(context, own or _whole_number(c, "original_max_position_embeddings"))
    return context


@contextlib.contextmanager
def their_errors(where):
    """Turn what transformers raises, and Unsupported, into BadInput. Advice for its own users is not shown."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except BadInput:
        raise
    except Unsupported as e:
        raise BadInput(f"{where}: {e}") from None
    except Exception as e:  # its configs and classes fail in a dozen ways
        reason = f"{type(e).__name__}: {printable(' '.join(str(e).split()), 200)}"
        if e.args == (ATTENTION,):
            reason = "its class has an attention that cannot be replaced"
        raise BadInput(f"{where}: transformers: {reason}") from None
    finally:
        logger.setLevel(level)


# ---- transformers' class -------------------------------------------------------------------------


class _MetaWeights(TorchFunctionMode):
    """Weights, which modules make by torch.empty, go to the meta device. Tables of positions and other buffers are
    computed as always: no file has them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


def make_causal_lm(config: dict, attention: str) -> nn.Module:
    """transformers' model of a config.json, its weights on the meta device. attention: ATTENTION or one of
    transformers' own. Raises BadInput."""
    from transformers import AutoModelForCausalLM

    options = dict(attn_implementation=attention, dtype=torch.float32)
    with their_errors(f"model: {config['model_type']}"), torch.device("cpu"), _MetaWeights():
        return AutoModelForCausalLM.from_config(hf_config(config, attention), **options)


# ---- attention -----------------------------------------------------------------------------------


class Layer(NamedTuple):
    """What PackedAttention and KVCache need to know of an attention layer."""

    module: nn.Module
    window: int | None
    scale: float
    cap: float | None


class Slot:
    """Holds the attention of the current forward for all layers of one model: not every class of transformers hands
    arguments on to its layers."""

    attention = None
    checkpointing = False

    def __init__(self):
        self.called = set()  # modules that have asked for attention


def _mask(local_size: int | None = None, use_vmap: bool = False, **_unused) -> int | None:
    """In place of a mask: the window of the layers that it is for."""
    if use_vmap:
        raise Unsupported("attention: a mask of its own is not supported")
    return local_size


def _attend(module, query, key, value, attention_mask=None, scaling=None, softcap=None, **others):
    """Our attention in place of transformers': query (R, H, Q, D), key and value (R, key heads, Q, D) -> (R, Q, H, D).
    Raises Unsupported."""
    for name, x in others.items():
        if x is not None and name not in NEUTRAL:
            raise Unsupported(f"attention: {name} is not supported")
    window = attention_mask  # see _mask
    if window is not None and type(window) is not int:
        raise Unsupported("attention: a mask of its own is not supported")
    if not getattr(module, "is_causal", True) or getattr(module, "is_cross_attention", False):
        raise Unsupported("attention: only causal self-attention is supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    module.slot.called.add(module)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # transformers rotates queries and keys in float32 there. Attention would cast them anyway, but flash attention
        # is chosen by what it gets, and a cache holds it.
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out = module.slot.attention.attend(Layer(module, window, scale, softcap), query, key, value)
    return out.transpose(1, 2).contiguous(), None


def _register() -> None:
    """Make our attention known to transformers, by the name ATTENTION."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _mask)


# ---- the model -----------------------------------------------------------------------------------


class TransformersBlocks(nn.Module):
    """transformers' model up to the last hidden states, with our attention; and the head's layer.

    Its modules are those of transformers' class under the names that they have there, and so are its weights. With
    adapters every linear layer of the blocks is litgpt's LoRALinear, which keeps its matrix in .linear.
    """

    # True: the backward runs blocks again instead of saving their activations
    activation_checkpointing = False

    def __init__(self, config: litgpt.Config):
        super().__init__()
        self.config = config
        self.max_seq_length = config.block_size
        _register()
        hf = make_causal_lm(config.hf_config["transformers"], ATTENTION)
        kind = f"model: {config.name}:"
        if getattr(hf, "lm_head", None) is not hf.get_output_embeddings():
            raise BadInput(f"{kind} its head is not one layer named lm_head")
        self.base_name = hf.base_model_prefix
        for name, child in hf.named_children():
            self.add_module(name, child)
        # factors of the logits: the head is linear, so they may multiply the hidden states
        multiplier, divisor = (
            getattr(hf.config, x, None) for x in ("logit_scale", "logits_scaling")
        )
        self.hidden_scale = (multiplier or 1) / (divisor or 1)
        if len(self.blocks) != config.n_layer:
            raise BadInput(f"{kind} {len(self.blocks)} of {config.n_layer} blocks found")
        self.embedding.padding_idx = None  # that token's row would have no gradient
        self.slot = Slot()
        for module in self.modules():
            module.slot = self.slot
        for block in self.blocks:
            block.forward = functools.partial(_block_forward, self.slot, block)
        if isinstance(config, litgpt.lora.Config):
            add_adapter_layers(self)

    @property
    def base(self) -> nn.Module:
        """Everything but the head."""
        return getattr(self, self.base_name)

    @property
    def embedding(self) -> nn.Embedding:
        return self.base.get_input_embeddings()

    @property
    def blocks(self) -> nn.ModuleList:
        lists = [m for m in self.base.modules() if isinstance(m, nn.ModuleList)]
        return max(lists, key=lambda m: len(m) == self.config.n_layer, default=nn.ModuleList())

    def set_tables(self, dtype: torch.dtype) -> None:
        """transformers makes its tables of positions itself, in float32."""

    def load_state_dict(self, weights, **options):
        """Weights by their plain names, as litgpt's models take them."""
        own = {name.replace(".linear.", "."): name for name in self.state_dict()}
        renamed = {own.get(name, name): x for name, x in weights.items()}
        return super().load_state_dict(renamed, **options)

    def hidden(self, token_RQ, position_RQ, attention):
        """-> last hidden states (R, Q, C)."""
        self.slot.attention = attention
        self.slot.checkpointing = self.activation_checkpointing and torch.is_grad_enabled()
        y = self.base(input_ids=token_RQ, position_ids=position_RQ, use_cache=False)
        self.slot.attention = None
        h_RQC = y.last_hidden_state
        return h_RQC if self.hidden_scale == 1 else h_RQC * self.hidden_scale


def _block_forward(slot: Slot, block: nn.Module, *inputs, **options):
    """A block's forward. Under activation checkpointing the backward calls it again, after the forward has ended: so
    it puts the attention back."""
    attention = slot.attention

    def run(*inputs):
        before, slot.attention = slot.attention, attention
        try:
            return type(block).forward(block, *inputs, **options)
        finally:
            slot.attention = before

    if slot.checkpointing:
        return checkpoint(run, *inputs, use_reentrant=False)
    return run(*inputs)


def constants(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that files of weights have, by name. They are not trained."""
    saved = model.state_dict(keep_vars=True)
    return {name: x for name, x in model.named_buffers() if name in saved}
