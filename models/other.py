"""transformers' own classes with our packed attention, for every type of model that model.py does not compute.
Shape letters: attention.py and model.py."""

import functools
from types import SimpleNamespace

import litgpt
import torch
import transformers
from torch import Tensor, nn

from attention import Layer, PackedAttention
from head import autocast
from model import Packed
from models.hub import Rows, litgpt_sizes
from sampler import KVCache

ATTENTION = "packed"  # the name under which transformers finds our attention
# The current forward's attention, and the layers that have called it. A global, because not every class
# of transformers hands arguments on to its layers.
FORWARD = SimpleNamespace(attention=None, called=set())


def _window_as_mask(
    local_size: int | None = None, use_vmap: bool = False, **_unused: object
) -> int | None:
    """Replaces the mask that transformers passes to layers by their window (see Layer)."""
    if use_vmap:
        raise ValueError("attention: a separate mask is not supported")
    return local_size


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Our attention with transformers' interface: query (R, H, Q, D), key and value (R, key heads, Q,
    D) -> (R, Q, H, D). If something in _unused changes numbers, the comparison of models/load.py sees it."""
    window = attention_mask  # see _window_as_mask
    layer = Layer(module, window, scaling, softcap)
    FORWARD.called.add(module)
    # Under autocast transformers rotates queries and keys in float32. Attention would cast them anyway, but
    # flash attention is chosen by their dtype, and a cache stores that dtype.
    out = FORWARD.attention.attend(layer, autocast(query), autocast(key), autocast(value))
    return out.transpose(1, 2).contiguous(), None


class TransformersGPT(Packed):
    """transformers' decoder and head with our attention. Other parts of transformers' model, such as a
    vision tower, stay out."""

    def __init__(self, hf: transformers.PreTrainedModel):
        super().__init__()
        self.objective_module = None
        # transformers' layers call our attention, that of FORWARD
        transformers.AttentionInterface.register(ATTENTION, _attend)
        transformers.AttentionMaskInterface.register(ATTENTION, _window_as_mask)
        hf.set_attn_implementation(ATTENTION)
        c = hf.config.get_text_config()
        self.config = litgpt.Config(**litgpt_sizes(c))
        self.max_seq_length = self.config.block_size
        self.decoder = hf.get_decoder()
        self.lm_head = hf.get_output_embeddings()
        hf_names = {module: name for name, module in hf.named_modules()}
        self.rows = {}
        for name in self.state_dict():
            part, _, rest = name.partition(".")  # part: decoder or lm_head
            self.rows[f"{hf_names[self.get_submodule(part)]}.{rest}"] = Rows(name)
        # factors of the logits: the head is linear, so they may multiply the hidden states
        self.hidden_scale = getattr(c, "logit_scale", 1) / getattr(c, "logits_scaling", 1)
        self.embedding.padding_idx = None  # the padding token's row would have no gradient
        for block in self.blocks:
            block.forward = functools.partial(_block_forward, self, block)
        for module in self.blocks.modules():
            # layers that multiply by all experts in one product have this field
            if hasattr(module, "is_transposed"):
                module.forward = functools.partial(_experts_forward, module)

    @property
    def embedding(self) -> nn.Embedding:
        return self.decoder.get_input_embeddings()

    @property
    def blocks(self) -> nn.ModuleList:
        lists = (m for m in self.decoder.modules() if isinstance(m, nn.ModuleList))
        return next(m for m in lists if len(m) == self.config.n_layer)

    def hidden(
        self,
        token_RQ: Tensor,
        position_RQ: Tensor,
        attention: PackedAttention | KVCache,
    ) -> Tensor:
        """-> last hidden states (R, Q, C). Raises ValueError where layers do not call our attention."""
        FORWARD.attention = attention
        FORWARD.called = set()
        # Nothing is padded. Without a mask of ones transformers would read the positions to see whether the
        # row is packed, and so wait for the device.
        ones_RQ = torch.ones_like(token_RQ, dtype=torch.bool)
        y = self.decoder(
            input_ids=token_RQ, attention_mask=ones_RQ, position_ids=position_RQ, use_cache=False
        )
        FORWARD.attention = None
        n_called = len(FORWARD.called)
        n_layers = self.config.n_layer
        if n_called != n_layers:
            raise ValueError(
                f"{n_called} of {n_layers} layers have an attention that can be replaced"
            )
        return y.last_hidden_state * self.hidden_scale


class _InAutocast:
    """A module that gives its weights in the dtype of autocast's products."""

    def __init__(self, module: nn.Module):
        self._module = module

    def __getattr__(self, name: str):
        value = getattr(self._module, name)
        if isinstance(value, nn.Parameter):
            return autocast(value)
        return value


def _experts_forward(experts: nn.Module, *inputs: object, **options: object) -> Tensor:
    """The forward of a layer of experts. Autocast does not cast grouped_mm, the product of all experts,
    and transformers would cast its input to the weights' float32. A GPU then has a fifteenth of its speed
    in bfloat16, and the program waits for the device."""
    return type(experts).forward(_InAutocast(experts), *inputs, **options)


def _block_forward(
    model: TransformersGPT, block: nn.Module, *inputs: object, **options: object
) -> Tensor:
    """A block's forward. Under activation checkpointing the backward calls `run` again, after the
    forward of the model has ended: so `run` sets the attention again."""
    attention = FORWARD.attention

    def run(*inputs: object) -> Tensor:
        FORWARD.attention = attention
        return type(block).forward(block, *inputs, **options)

    return model.run_block(run, *inputs)
