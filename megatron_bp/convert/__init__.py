"""Streaming converters between Hugging Face safetensors and Megatron `torch_dist` checkpoints.

Owns formats, key names and row orders; builds no model and imports neither megatron nor
transformers. Start at `plan.py` (what maps to what), then `ar_to_bdlm.py` and `export.py` (the two
directions). Specified by tests/convert/.
"""
