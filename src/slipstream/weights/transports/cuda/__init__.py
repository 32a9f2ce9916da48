"""The `cuda` transport: engines map the trainer's GPU memory and copy from it. Start with `mapped_memory.py`;
`wire_format.py` describes the messages."""
