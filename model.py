"""The forward of a GPT on a packed batch: log-probs of completions, or logits of the next token.

There are two implementations. GPT is the one to read and edit: GPT-2 and the Llama shape, with litgpt's config,
names and MLPs. models/other.py runs transformers' own classes, for every other type. Both have our attention
(attention.py), head (head.py) and LoRA layers (models/lora.py). models/load.py loads the weights.

Shape letters, besides those of attention.py:

    C  width of the hidden states
    V  vocabulary
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import litgpt
import litgpt.model
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from attention import Layer, PackedAttention, PromptCache
from head import Chunks, Head, autocast, logp_of
from infra.console import BadInput, Failed
from infra.kernels import RMSNorm, Rotation, SwiGLU
from models.hub import Rows
from packing import PackedBatch

if TYPE_CHECKING:
    from sampler import KVCache


class Scores(NamedTuple):
    """The results of a forward on a PackedBatch."""

    logps: Tensor
    """Log-probs of the completions in nats, float64 for a float64 model, else float32: (B, K) sums,
    or (B, K, L) by token, 0 beyond a completion's end. (B, K, L, n) if n tokens are scored at each place."""
    outputs: Tensor | None = None
    """(B, K, L, ...): outputs of the objective's module at each token; None without a module."""
    entropy: Tensor | None = None
    """(B, K), if the caller wants it: the entropy of the next-token distribution in nats, summed over the tokens of a
    completion. Without gradient."""
    prompts: PromptCache | None = None
    """Keys, values and hidden states of the prompts, if the caller asked for them."""
    targets: Tensor | None = None
    """The ids of the scored tokens: (T,), or (T, 1 + k) with the k most probable tokens at each place."""


class Packed(nn.Module):
    """The part that both implementations share. It reads a PackedBatch or a KVCache (sampler.py). Each adds: config,
    blocks, embedding, lm_head, max_seq_length, hidden."""

    # {transformers' name of a weight: our weight, and which rows of it}
    rows: dict[str, Rows]
    # True: the backward runs blocks again instead of saving their activations
    activation_checkpointing = False

    # made by objective.Objective.make_module: trained and saved with the model, never exported
    objective_module: nn.Module | None

    def forward(
        self,
        x: "PackedBatch | KVCache",
        prompts: PromptCache | None = None,
        keeps_prompts: bool = False,
        by_token: bool = False,
        entropy: bool = False,
        top_k: int = 0,
    ) -> Scores | Tensor:
        """PackedBatch -> Scores. prompts: of an earlier forward; then completions alone are computed.
        keeps_prompts: return this forward's prompts in the scores. by_token: log-probs of each token
        (B, K, L), not of completions (B, K). entropy: return the distributions' entropy, too. top_k: score the k most
        probable tokens at each place, too.

        KVCache -> (B, V) logits of the next tokens, in float32."""
        if not isinstance(x, PackedBatch):
            h_RQC = self.hidden(x.token_RQ, x.position_RQ, x)
            return self.head(h_RQC.flatten(0, 1)[x.last_B]).float()
        # transformers' classes would continue at positions that the model has never seen in training
        if x.max_keys > self.max_seq_length:
            raise BadInput(
                f"a text of {x.max_keys + 1} tokens, a prompt with a completion, exceeds the model's "
                f"context of {self.max_seq_length}"
            )
        attention = PackedAttention(x, prompts, keeps_prompts)
        token_Q = attention.queries(x.token_N)
        position_Q = attention.queries(x.position_N)
        h_QC = self.hidden(token_Q[None], position_Q[None], attention)[0]
        # the head runs only on hidden states that predict a target
        h_TC = attention.last_hidden(h_QC)[x.source_T]
        logp_T, entropy_T, targets = self.logp(h_TC, x.target_T, entropy, top_k)
        logps = x.tokens_of_completions(logp_T) if by_token else x.sums(logp_T)
        outputs = None
        if self.objective_module is not None:
            outputs = x.tokens_of_completions(self._module_outputs(h_TC))
        entropy_BK = x.sums(entropy_T) if entropy else None
        return Scores(logps, outputs, entropy_BK, attention.kept, targets)

    def _module_outputs(self, h_TC: Tensor) -> Tensor:
        """The objective's module applied to the hidden states: (T, ...), at least in float32. Raises
        Failed where the module does not return one output a token."""
        with torch.autocast(h_TC.device.type, enabled=False):
            out_T = self.objective_module(h_TC.to(torch.promote_types(h_TC.dtype, torch.float32)))
        if out_T.shape[:1] != h_TC.shape[:1]:
            expected = f"one output a token, shape ({len(h_TC)}, ...)"
            raise Failed(f"make_module: {expected}, not {tuple(out_T.shape)}")
        return out_T

    def run_block(self, block: Callable[..., Tensor], *inputs: object) -> Tensor:
        """block(*inputs), or the same under activation checkpointing."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def logp(
        self, h_TC: Tensor, target_T: Tensor, entropy: bool, top_k: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probs of the targets (T,) or (T, n), chunk by chunk: the (T, V) logits never exist together. And the
        entropy (T,), or None. And the ids of the targets: if top_k, the k most probable tokens are targets, too."""
        chunks = Chunks.of(h_TC.device.type, self.config.padded_vocab_size, entropy)
        if self.plain_head and target_T.dim() == 1 and not top_k:
            cap = self.config.final_logit_softcapping
            weight_VC = self.lm_head.weight
            return *Head.apply(autocast(h_TC), weight_VC, target_T, cap, chunks), target_T

        def chunk_logp(h_TC: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
            logits_TV = self.head(h_TC)
            if top_k:
                likeliest_Tk = logits_TV.topk(top_k).indices
                target_T = torch.cat([target_T[:, None], likeliest_Tk], dim=1)
            logp_T, logp_TV = logp_of(logits_TV, target_T)
            entropy_T = logp_T[:0]  # empty: nobody asks for it
            if entropy:
                # a token of probability 0 is 0 times infinity, and adds nothing
                with torch.no_grad():
                    entropy_T = -(logp_TV.exp() * logp_TV).nansum(1)
            return logp_T, entropy_T, target_T

        # A head with a bias or adapters, and several targets at a place, go through autograd. The backward computes
        # the logits of each chunk again.
        parts = zip(h_TC.split(chunks.size), target_T.split(chunks.size))
        results = [checkpoint(chunk_logp, *part, use_reentrant=False) for part in parts]
        return tuple(torch.cat(of_chunks) for of_chunks in zip(*results))

    def head(self, h: Tensor) -> Tensor:
        """Hidden states (..., C) -> logits (..., V), softcapped if the model's config says so."""
        logits = self.lm_head(h)
        cap = self.config.final_logit_softcapping
        if cap is None:
            return logits
        return cap * torch.tanh(logits / cap)

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts: transformers joins their matrices in one tensor."""
        return any(p.dim() > 2 for p in self.blocks.parameters())

    @property
    def plain_head(self) -> bool:
        """Whether the head is one matrix: no bias, no adapters."""
        return isinstance(self.lm_head, nn.Linear) and self.lm_head.bias is None

    @property
    def tied(self) -> bool:
        """Whether the head's matrix is the embedding."""
        return getattr(self.lm_head, "weight", None) is self.embedding.weight

    def to_empty(self, **options: object) -> "Packed":
        """nn.Module.to_empty, after which a tied head is tied again."""
        tied = self.tied
        super().to_empty(**options)
        if tied:
            self.lm_head.weight = self.embedding.weight
        return self

    def cache_bytes(self, slots: int) -> int:
        """Bytes of a KVCache for one sequence. Keys and values have the dtype of linear layers' outputs:
        autocast's dtype where autocast is on."""
        c = self.config
        numbers = 2 * c.n_layer * c.n_query_groups * c.head_size * slots
        weight = self.embedding.weight
        output = autocast(torch.empty(0, dtype=weight.dtype, device=weight.device))
        return numbers * output.element_size()

    def unique_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name. A tied head appears only as the embedding; the parameters of the
        objective's module are objective_module.*"""
        # after a forward without backward FSDP2 keeps gathered copies instead of the root's parameters
        if isinstance(self, FSDPModule):
            self.reshard()
        parameters = dict(self.named_parameters(remove_duplicate=False))
        if self.tied:
            del parameters["lm_head.weight"]
        return parameters


# ---- the GPT to read and edit --------------------------------------------------------------------


class GPT(Packed):
    """GPT-2, or a model of Llama's shape. Its modules have litgpt's names and litgpt's order, which is the order
    of named_parameters and of the random draws of a new model's weights. It ignores the fields of litgpt's Config that
    other shapes need, such as parallel_residual."""

    block_class: type[nn.Module]
    """The class of a layer: Block, or a fork's block (docs/forks.md, "Another architecture")."""

    def __init__(self, config: litgpt.Config):
        super().__init__()
        self.config = config
        self.max_seq_length = config.block_size
        self.objective_module = None
        V = config.padded_vocab_size
        C = config.n_embd
        self.lm_head = nn.Linear(C, V, bias=config.lm_head_bias)
        self.transformer = nn.ModuleDict()
        self.transformer["wte"] = nn.Embedding(V, C)
        self.transformer["h"] = nn.ModuleList()
        is_windowed = config.sliding_window_indices or [False] * config.n_layer
        for i in range(config.n_layer):
            window = config.sliding_window_size if is_windowed[i] else None
            self.transformer["h"].append(self.block_class(config, window))
        self.transformer["ln_f"] = Norm(config, C)
        if config.rope_n_elem == 0:  # GPT-2: learned positions instead of rotary ones
            self.transformer["wpe"] = nn.Embedding(config.block_size, C)
        cos, sin = litgpt.model.build_rope_cache(
            config.block_size,
            config.rope_n_elem,
            base=config.rope_base,
            condense_ratio=config.rope_condense_ratio,
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.h

    @property
    def embedding(self) -> nn.Embedding:
        return self.transformer.wte

    def hidden(
        self,
        token_RQ: Tensor,
        position_RQ: Tensor,
        attention: "PackedAttention | KVCache",
    ) -> Tensor:
        """-> last hidden states (R, Q, C)."""
        x_RQC = self.transformer.wte(token_RQ)
        if "wpe" in self.transformer:
            x_RQC = x_RQC + self.transformer.wpe(position_RQ)
        cos_RQD = self.cos[position_RQ]
        sin_RQD = self.sin[position_RQ]
        for block in self.blocks:
            x_RQC = self.run_block(block, x_RQC, cos_RQD, sin_RQD, attention)
        return self.transformer.ln_f(x_RQC)


class Block(nn.Module):
    """Attention, then an MLP. Each reads a norm of the hidden states and adds its output to them."""

    def __init__(self, config: litgpt.Config, window: int | None):
        super().__init__()
        self.norm_1 = Norm(config, config.n_embd)
        self.attn = Attention(config, window)
        self.norm_2 = Norm(config, config.n_embd)
        if config.mlp_class_name == "LLaMAMLP":
            self.mlp = GatedMLP(config)
        else:
            self.mlp = config.mlp_class(config)

    def forward(
        self,
        x_RQC: Tensor,
        cos_RQD: Tensor,
        sin_RQD: Tensor,
        attention: "PackedAttention | KVCache",
    ) -> Tensor:
        # autocast: once here, else each linear layer that reads the norm would cast the norm again
        y_RQC = self.attn(autocast(self.norm_1(x_RQC)), cos_RQD, sin_RQD, attention)
        x_RQC = x_RQC + y_RQC
        return x_RQC + self.mlp(autocast(self.norm_2(x_RQC)))


GPT.block_class = Block


class Attention(nn.Module):
    """Queries, keys and values of a layer, and the layer's output. Query heads may share a key head.
    attention.py decides which token attends to which.

    window: a token sees itself and the window - 1 tokens before it; None: all of them."""

    def __init__(self, config: litgpt.Config, window: int | None):
        super().__init__()
        self.window = window
        self.n_head = config.n_head
        self.n_keys = config.n_query_groups
        self.head_size = config.head_size
        n_heads = self.n_head + 2 * self.n_keys
        self.qkv = nn.Linear(
            config.n_embd, n_heads * self.head_size, bias=config.bias or config.attn_bias
        )
        self.proj = nn.Linear(self.n_head * self.head_size, config.n_embd, bias=config.bias)
        self.norm_q = None
        self.norm_k = None
        if config.norm_qk:
            self.norm_q = Norm(config, self.head_size)
            self.norm_k = Norm(config, self.head_size)
        self.rotates = config.rope_n_elem > 0

    def forward(
        self,
        x_RQC: Tensor,
        cos_RQD: Tensor,
        sin_RQD: Tensor,
        attention: "PackedAttention | KVCache",
    ) -> Tensor:
        """-> (R, Q, C). The cosines and sines are those of the tokens' positions."""
        heads = self.qkv(x_RQC).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q, k, v = heads.split([self.n_head, self.n_keys, self.n_keys], dim=1)  # (R, heads, Q, D)
        if self.norm_q is not None:
            q = self.norm_q(q)
            k = self.norm_k(k)
        if self.rotates:
            q = Rotation.apply(q, cos_RQD, sin_RQD)
            k = Rotation.apply(k, cos_RQD, sin_RQD)
        layer = Layer(self, self.window, 1 / math.sqrt(self.head_size), cap=None)
        out = attention.attend(layer, q, k, v)  # (R, heads, Q, D)
        return self.proj(out.transpose(1, 2).flatten(2))


class Norm(nn.Module):
    """RMSNorm or LayerNorm, as the config says, over the last dimension."""

    def __init__(self, config: litgpt.Config, size: int):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = None
        if config.norm_class_name == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """-> a tensor of x's shape and dtype."""
        size = self.weight.shape
        # the kernels want x and weight in one dtype
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        if self.bias is not None:
            y = nn.functional.layer_norm(x.to(dtype), size, self.weight, self.bias, self.eps)
            return y.to(x.dtype)
        # without autocast, which on a GPU would add kernels that cast to float32 and back
        with torch.autocast(x.device.type, enabled=False):
            return RMSNorm.apply(x.to(dtype), self.weight, self.eps).to(x.dtype)


class GatedMLP(litgpt.model.LLaMAMLP):
    """The Llama shape's MLP."""

    def forward(self, x_RQC: Tensor) -> Tensor:
        return self.proj(SwiGLU.apply(self.fc_1(x_RQC), self.fc_2(x_RQC)))
