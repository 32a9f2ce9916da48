"""The trainer's parameters as named HF tensors that can be read box by box. Start with `named_tensors.py`; trees with
other names or layouts go through `tree_mapping.py`."""
