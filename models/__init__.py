"""A model on disk, in this order: hub.py (its place, its config, the names of its weights, transformers'
log-probs), load.py (from files to the model that computes), lora.py (its adapters), export.py (writing it). Only some
runs need peft_folders.py (adapters of others), quantize.py (QLoRA), shard.py (FSDP) and other.py (types that model.py
does not compute)."""
