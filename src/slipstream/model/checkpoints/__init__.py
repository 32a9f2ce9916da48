"""Read and write model directories in Hugging Face's format. Start with `hf_weights.py`."""
