"""What a GPT computes on a packed batch: log-probs of completions, or logits of the next token.

Two codes compute it. GPT: litgpt's blocks, the GPT to read and edit, for GPT-2 and the Llama shape.
TransformersGPT: transformers' own class, for every other type. Both have our attention
(attention.py), head (head.py) and LoRA layers (lora.py). Where weights come from: load.py.

Shape letters, besides those of attention.py:

    C  width of the hidden states
    V  vocabulary
"""

import functools
import math
from types import SimpleNamespace
from typing import NamedTuple

import litgpt
import litgpt.model
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention import KVCache, PackedAttention, PromptCache
from head import Chunks, Head, autocast, entropy_of, logp_of
from hub import Rows, context_of, litgpt_rows
from packing import PackedBatch
from runs.console import BadInput, Failed


class Scores(NamedTuple):
    """What a forward gives for a PackedBatch."""

    logps: torch.Tensor
    """Log-probs of the completions in nats, float64 for a float64 model, else float32: (B, K) sums,
    with data.score_prompt the prompt's in each; or (B, K, L) by token, 0 beyond a completion's end."""
    outputs: torch.Tensor | None = None
    """(B, K, L, ...): what the objective's module gives at each token; None without a module."""
    entropy: torch.Tensor | None = None
    """(B, K), if the batch asks for it: for each completion the sum over its tokens of the entropy, in
    nats, of the distribution from which the token is drawn. Without gradient."""


class Packed:
    """What both codes do with a PackedBatch or a KVCache. A model has, besides: config, blocks,
    embedding, lm_head, max_seq_length, hidden."""

    # {transformers' name of a weight: our weight, and which rows of it}
    rows: dict[str, Rows]
    # True: the backward runs blocks again instead of saving their activations
    activation_checkpointing = False

    # of the objective's own (train.Objective.make_module): trained and saved with the model, never
    # exported
    objective_module: nn.Module | None

    def forward(self, x: PackedBatch | KVCache, prompt_cache: PromptCache | None = None):
        """PackedBatch -> Scores. prompt_cache: the first forward that gets it fills it; later ones
        read it and compute completions only.

        KVCache -> (B, V) logits of the next tokens, in float32."""
        if isinstance(x, KVCache):
            h_RQC = self.hidden(x.token_RQ, x.position_RQ, x)
            return self.head(h_RQC.flatten(0, 1)[x.last_B]).float()
        # transformers' classes would compute what no text of theirs has taught them
        if x.max_keys > self.max_seq_length:
            raise BadInput(
                f"a text of {x.max_keys + 1} tokens, a prompt with a completion, exceeds the model's "
                f"context of {self.max_seq_length}"
            )
        attention = PackedAttention(x, prompt_cache)
        token_Q = attention.queries(x.token_N)
        position_Q = attention.queries(x.position_N)
        h_QC = self.hidden(token_Q[None], position_Q[None], attention)[0]
        # The head runs only on hidden states that predict a target. With a filled cache those of the
        # prompts come from it.
        h_TC = attention.all_tokens("h", h_QC, 0)[x.source_T]
        logp_T, entropy_T = self.logp(h_TC, x.target_T, x.entropy)
        logps = x.tokens_of_completions(logp_T) if x.by_token else x.sums(logp_T)
        outputs, entropy = None, x.sums(entropy_T) if x.entropy else None
        if self.objective_module is not None:
            outputs = x.tokens_of_completions(self._module_outputs(h_TC))
        return Scores(logps, outputs, entropy)

    def _module_outputs(self, h_TC):
        """What the objective's module makes of the hidden states: (T, ...), at least in float32.
        Raises Failed."""
        with torch.autocast(h_TC.device.type, enabled=False):
            out_T = self.objective_module(h_TC.to(torch.promote_types(h_TC.dtype, torch.float32)))
        if out_T.shape[:1] != h_TC.shape[:1]:
            T, shape = len(h_TC), tuple(out_T.shape)
            raise Failed(f"make_module: one output a token, shape ({T}, ...), not {shape}")
        return out_T

    def run_block(self, block, *inputs):
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def logp(self, h_TC, target_T, entropy: bool = False):
        """Log-probs of the targets (T,), chunk by chunk: the (T, V) logits never exist together. And
        the entropy (T,), or None."""
        device, cap = h_TC.device.type, self.config.final_logit_softcapping
        chunks = Chunks.of(device, self.config.padded_vocab_size, entropy)
        if self.plain_head:
            return Head.apply(autocast(h_TC), self.lm_head.weight, target_T, cap, chunks)

        def chunk_logp(h_TC, target_T):
            logits_TV = self.head(h_TC)
            logp_T, logp_TV = logp_of(logits_TV, target_T)
            if not entropy:
                return logp_T, None
            with torch.no_grad():
                return logp_T, entropy_of(logits_TV, logp_TV.exp(), target_T, logp_T)

        # a head with a bias or adapters: autograd, with the logits of each chunk computed again in the
        # backward
        parts = zip(h_TC.split(chunks.size), target_T.split(chunks.size))
        logps, entropies = zip(
            *[checkpoint(chunk_logp, h, t, use_reentrant=False) for h, t in parts]
        )
        return torch.cat(logps), torch.cat(entropies) if entropy else None

    def head(self, h):
        """Hidden states (..., C) -> logits (..., V), softcapped where the model does that."""
        logits = self.lm_head(h)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts, which transformers holds joined."""
        return any(p.dim() > 2 for p in self.blocks.parameters())

    @property
    def plain_head(self) -> bool:
        """Whether the head is one matrix: no bias, no adapters."""
        return isinstance(self.lm_head, nn.Linear) and self.lm_head.bias is None

    @property
    def tied(self) -> bool:
        """Whether the head's matrix is the embedding."""
        return getattr(self.lm_head, "weight", None) is self.embedding.weight

    def to_empty(self, **options):
        """As torch's, but a tied head stays tied."""
        tied = self.tied
        super().to_empty(**options)
        if tied:
            self.lm_head.weight = self.embedding.weight
        return self

    def cache_bytes(self, slots: int) -> int:
        """Bytes of a KVCache for one sequence, in the dtype of the embedding."""
        c = self.config
        numbers = 2 * c.n_layer * c.n_query_groups * c.head_size * slots
        return numbers * self.embedding.weight.element_size()

    def unique_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name. A tied head appears only as the embedding; those of the objective's
        module are objective_module.*"""
        # after a forward without backward FSDP2 leaves gathered copies in place of the root's
        # parameters
        if hasattr(self, "reshard"):
            self.reshard()
        parameters = dict(self.named_parameters(remove_duplicate=False))
        if self.tied:
            del parameters["lm_head.weight"]
        return parameters


# ---- litgpt's blocks -----------------------------------------------------------------------------


class GPT(Packed, litgpt.model.GPT):
    """GPT-2, or a model of Llama's shape: litgpt's blocks with our attention."""

    def __init__(self, config: litgpt.Config):
        super().__init__(config)
        self.objective_module = None
        if config.rope_n_elem == 0:  # GPT-2: learned positions instead of rotary ones
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        for block in self.blocks:
            attn = block.attn
            attn.window = attn.cap = None
            attn.scale = 1 / math.sqrt(config.head_size)
            attn.forward = functools.partial(_attention_forward, attn)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.h

    @property
    def embedding(self) -> nn.Embedding:
        return self.transformer.wte

    def hidden(self, token_RQ, position_RQ, attention: PackedAttention | KVCache):
        """-> last hidden states (R, Q, C)."""
        x_RQC = self.transformer.wte(token_RQ)
        if "wpe" in self.transformer:
            x_RQC = x_RQC + self.transformer.wpe(position_RQ)
        cos, sin = self.cos[position_RQ], self.sin[position_RQ]
        for block in self.blocks:
            # litgpt's block hands its fourth argument, there a mask, to its attention
            x_RQC = self.run_block(block, x_RQC, cos, sin, attention)
        return self.transformer.ln_f(x_RQC)


def _attention_forward(attn, x, cos, sin, attention: PackedAttention | KVCache, *_unused):
    """The forward of litgpt's attention layer `attn`: (R, Q, C) -> (R, Q, C). Unlike litgpt's own
    it does not copy grouped keys."""
    config = attn.config
    n_keys = config.n_query_groups
    heads = attn.qkv(x).unflatten(-1, (-1, config.head_size)).transpose(1, 2)  # (R, heads, Q, D)
    q, k, v = heads.split([config.n_head, n_keys, n_keys], dim=1)
    if config.norm_qk:
        q, k = attn.norm_q(q), attn.norm_k(k)
    if config.rope_n_elem:
        q, k = (litgpt.model.apply_rope(y, cos, sin) for y in (q, k))
    return attn.proj(attention.attend(attn, q, k, v).transpose(1, 2).flatten(2))


def _sizes(c) -> dict:
    """What litgpt's Config says of every model, of a text config of transformers."""
    return dict(
        block_size=context_of(c), n_layer=c.num_hidden_layers, n_embd=c.hidden_size,
        n_head=c.num_attention_heads, n_query_groups=getattr(c, "num_key_value_heads", None),
        head_size=getattr(c, "head_dim", None), vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size,
        final_logit_softcapping=getattr(c, "final_logit_softcapping", None),
    )  # fmt: skip


def litgpt_config(c) -> litgpt.Config | None:
    """litgpt's Config for a config of transformers; None where litgpt's blocks would compute
    something else."""
    kind = c.model_type
    if kind == "gpt2" and c.activation_function == "gelu_new":
        own = dict(
            rotary_percentage=0.0, bias=True, norm_class_name="LayerNorm", norm_eps=c.layer_norm_epsilon,
            mlp_class_name="GptNeoxMLP", gelu_approximate="tanh", intermediate_size=c.n_inner,
        )  # fmt: skip
    elif kind in ("llama", "mistral", "qwen2", "qwen3") and c.hidden_act == "silu":
        own = dict(
            rotary_percentage=1.0, bias=getattr(c, "mlp_bias", False), norm_class_name="RMSNorm",
            norm_eps=c.rms_norm_eps, mlp_class_name="LLaMAMLP", intermediate_size=c.intermediate_size,
            attn_bias=kind == "qwen2" or getattr(c, "attention_bias", False), norm_qk=kind == "qwen3",
        )  # fmt: skip
    else:
        return None
    return litgpt.Config(**_sizes(c), parallel_residual=False, **own)


def litgpt_model(hf) -> GPT | None:
    """litgpt's model of the shape of transformers' model, on the meta device; None where it does
    not fit."""
    c = hf.config
    config = litgpt_config(c)
    if config is None:
        return None
    with torch.device("meta"):
        gpt = GPT(config).to(hf.dtype)
    if hf.get_output_embeddings().weight is hf.get_input_embeddings().weight:
        gpt.lm_head.weight = gpt.embedding.weight
    gpt.rows = litgpt_rows(hf.state_dict())
    ends = {r.name: r.span.stop for r in gpt.rows.values()}
    if ends != {name: len(x) for name, x in gpt.state_dict().items()}:
        return None  # such as biases of the attention's output alone
    if config.rope_n_elem and 2 * len(hf.model.rotary_emb.inv_freq) != config.head_size:
        return None  # only a part of each head is rotated
    kinds = getattr(c, "layer_types", None) or [c.model_type] * config.n_layer
    for block, kind in zip(gpt.blocks, kinds):
        if kind in ("sliding_attention", "mistral"):  # mistral: all layers, and no layer_types
            block.attn.window = c.sliding_window
    return gpt


@torch.no_grad()
def copy_from(gpt: GPT, hf) -> None:
    """Give a model of litgpt_model the weights of transformers' model, and its tables of rotary
    positions."""
    weights = hf.state_dict()
    gpt.to_empty(device="cpu")
    ours = gpt.state_dict()
    for name, r in gpt.rows.items():
        r.of(ours[r.name]).copy_(weights[name])
    if gpt.config.rope_n_elem:
        position_1N = torch.arange(gpt.config.block_size)[None]
        # in the dtype of its first argument
        gpt.cos, gpt.sin = (x[0] for x in hf.model.rotary_emb(hf.lm_head.weight, position_1N))


# ---- transformers' own class ---------------------------------------------------------------------

ATTENTION = "packed"  # the name under which transformers finds our attention
# The current forward's attention, and the layers that have asked for it: not every class of
# transformers hands arguments on to its layers.
FORWARD = SimpleNamespace(attention=None, called=set())


class Layer(NamedTuple):
    """What PackedAttention and KVCache need to know of an attention layer."""

    module: nn.Module
    window: int | None
    scale: float | None
    cap: float | None


class TransformersGPT(Packed, nn.Module):
    """transformers' decoder and head with our attention. What else its model has (a vision tower)
    stays out."""

    def __init__(self, hf):
        super().__init__()
        self.objective_module = None
        transformers.AttentionInterface.register(ATTENTION, _attend)
        transformers.AttentionMaskInterface.register(ATTENTION, _window_as_mask)
        hf.set_attn_implementation(ATTENTION)
        c = hf.config.get_text_config()
        self.config = litgpt.Config(**_sizes(c))
        self.max_seq_length = self.config.block_size
        self.decoder, self.lm_head = hf.get_decoder(), hf.get_output_embeddings()
        of_module = {module: name for name, module in hf.named_modules()}
        self.rows = {}
        for ours in self.state_dict():
            part, _, rest = ours.partition(".")
            self.rows[f"{of_module[getattr(self, part)]}.{rest}"] = Rows(ours)
        # factors of the logits: the head is linear, so they may multiply the hidden states
        self.hidden_scale = getattr(c, "logit_scale", 1) / getattr(c, "logits_scaling", 1)
        self.embedding.padding_idx = None  # that token's row would have no gradient
        for block in self.blocks:
            block.forward = functools.partial(_block_forward, self, block)

    @property
    def embedding(self) -> nn.Embedding:
        return self.decoder.get_input_embeddings()

    @property
    def blocks(self) -> nn.ModuleList:
        n = self.config.n_layer
        modules = self.decoder.modules()
        return next(m for m in modules if isinstance(m, nn.ModuleList) and len(m) == n)

    def hidden(self, token_RQ, position_RQ, attention):
        """-> last hidden states (R, Q, C)."""
        FORWARD.attention, FORWARD.called = attention, set()
        y = self.decoder(input_ids=token_RQ, position_ids=position_RQ, use_cache=False)
        FORWARD.attention = None
        called, n = len(FORWARD.called), self.config.n_layer
        if called != n:
            raise ValueError(f"{called} of {n} layers have an attention that can be replaced")
        return y.last_hidden_state * self.hidden_scale


def _window_as_mask(local_size: int | None = None, use_vmap: bool = False, **_unused) -> int | None:
    """In place of a mask: the window of the layers that it is for."""
    if use_vmap:
        raise ValueError("attention: a mask of its own is not supported")
    return local_size


def _attend(module, query, key, value, attention_mask=None, scaling=None, softcap=None, **_unused):
    """Our attention in place of transformers': query (R, H, Q, D), key and value (R, key heads, Q,
    D) -> (R, Q, H, D). If something in _unused changes numbers, the comparison of load.py sees it."""
    layer = Layer(module, attention_mask, scaling, softcap)  # the mask: see _window_as_mask
    FORWARD.called.add(module)
    # Under autocast transformers rotates queries and keys in float32. Attention would cast them
    # anyway, but flash attention is chosen by what it gets, and a cache holds it.
    query, key, value = map(autocast, (query, key, value))
    out = FORWARD.attention.attend(layer, query, key, value)
    return out.transpose(1, 2).contiguous(), None


def _block_forward(model: TransformersGPT, block: nn.Module, *inputs, **options):
    """A block's forward. Under activation checkpointing the backward calls it again, after the
    forward has ended: so it puts the attention back."""
    attention = FORWARD.attention

    def run(*inputs):
        FORWARD.attention = attention
        return type(block).forward(block, *inputs, **options)

    return model.run_block(run, *inputs)
