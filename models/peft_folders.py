"""PEFT's folders, read and merged by PEFT itself. This file is imported only if a model is such a folder, because PEFT
is slow to import."""

import dataclasses
import warnings
from pathlib import Path

import peft
import torch
import transformers
from torch import nn

from infra.console import BadInput
from models.hub import (
    Source,
    check_logps,
    plain_logps,
    read_json,
    refuse_missing_weights,
    short_texts,
)

# Allowed values of fields that could change the base (a start by a decomposition of its weights, replicated layers) or
# name code to import.
VALUES = {
    "peft_type": ["LORA"],
    "init_lora_weights": [True, False, None, "gaussian", "eva", "orthogonal"],
    "revision": [None, "main"],
    "layer_replication": [None],
    "megatron_config": [None],
}


def _check_folder(folder: Path) -> None:
    """Raises BadInput if the adapter is of a kind that PEFT would not read as it was trained."""
    file = folder / "adapter_config.json"
    config = read_json(file)
    known_fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    for name, value in {"peft_type": None, **config}.items():  # the type first: it has the others
        if value not in VALUES.get(name, [value]) or (value and name not in known_fields):
            raise BadInput(f"{file}: {name}: {value} is not supported")
    # before PEFT looks for a pickle
    refuse_missing_weights(folder, [folder / "adapter_model.safetensors"])


@torch.no_grad()
def merge_peft(hf: transformers.PreTrainedModel, source: Source) -> transformers.PreTrainedModel:
    """transformers' model with a PEFT folder merged into its weights. Raises BadInput if a part of the folder would be
    lost, or if the merge changes log-probs."""
    folder = source.folder
    _check_folder(folder)
    head = hf.get_output_embeddings()
    is_tied = head.weight is hf.get_input_embeddings().weight
    if is_tied:  # PEFT would add an adapter of one of the two to both
        head.weight = nn.Parameter(head.weight.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this file refuses whatever PEFT would only warn about
        config = peft.LoraConfig.from_pretrained(folder)
        config.inference_mode = False  # so that exactly the adapter's weights require a gradient
        model = peft.PeftModel(hf, config)
        # a vision tower, which is not computed, stays as it is
        parts = hf.get_decoder(), hf.get_output_embeddings()
        computed = {p for part in parts for p in part.parameters()}
        lost = [n for n, p in model.named_parameters() if p.requires_grad and p not in computed]
        keys = model.load_adapter(folder, "default", torch_device="cpu")
        lost += keys.unexpected_keys + keys.missing_keys
        if lost:
            raise BadInput(f"{folder}: its base has no place for {', '.join(lost)[:200]}")
        batch = short_texts(hf)
        expected_T = plain_logps(model.eval(), batch)
        hf = model.merge_and_unload()
    if is_tied:
        head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
        if not torch.equal(head.weight, embedding.weight):
            raise BadInput(
                f"{folder}: lm_head and the embedding differ with this adapter, but are one matrix in its "
                "base; name a copy of the base with a separate lm_head.weight and tie_word_embeddings false"
            )
        head.weight = embedding.weight
    has_experts = any(p.dim() > 2 for p in hf.get_decoder().parameters())
    check_logps("merged", plain_logps(hf, batch), expected_T, "PEFT's own", has_experts)
    return hf
