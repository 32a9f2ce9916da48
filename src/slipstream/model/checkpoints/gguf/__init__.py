"""Convert GGUF files, and models that are distributed as GGUF files, to HF model directories. Start with `convert.py`."""
