"""A model on disk, in this order: hub.py (where it lies, its config, the names of its weights, what transformers
computes with it, how it is written), load.py (how it becomes the model that computes, and back), lora.py (its
adapters, PEFT's folders)."""
