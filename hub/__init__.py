"""Everything that speaks Hugging Face, PEFT or litgpt. Reading order, each file uses those before it:

families.py (and families.yaml): config.json as litgpt's Config, and where each weight lies in the files;
folders.py: where a model lies on disk or on the hub; lora.py: litgpt's LoRA layers; transformers_models.py: models that
litgpt does not know, by transformers' own classes; peft.py: PEFT's adapter files;
weights.py: read a folder's weights; export.py: write a Hugging Face folder with its model card.
On its own: quantize.py (a frozen base in 4 bits).
"""
