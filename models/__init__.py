"""A model on disk, in this order: hub.py (its place, its config, the names of its weights, transformers'
log-probs), load.py (from files to the model that computes), lora.py (its adapters, and QLoRA), peft_folders.py
(adapters of others), export.py (writing it), other.py (types that model.py does not compute)."""
