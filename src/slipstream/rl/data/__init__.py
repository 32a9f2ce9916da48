"""Tasks, prompts, tokenization and answer extraction. Read `tasks.py` first."""
