"""A model on disk, in this order: hub.py (where it lies, its config, the names of its weights, what transformers
computes with it), load.py (how it becomes the model that computes), lora.py (its adapters, PEFT's folders), quantize.py
(4 bits), export.py (how it is written)."""
