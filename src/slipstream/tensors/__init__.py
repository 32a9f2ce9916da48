"""Tensor geometry and storage without any transport: boxes, strided views, DLPack, safetensors. Start with
`boxes.py`."""
