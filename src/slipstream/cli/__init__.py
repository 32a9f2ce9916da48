"""The `slipstream` command, one module per group of subcommands. Start with `main.py`."""
