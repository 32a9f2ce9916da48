"""GGUF files in: `file.py` reads the container, `weights.py` and `tokenizer.py` say what its contents are in Hugging Face
terms, `convert.py` writes the directory."""
