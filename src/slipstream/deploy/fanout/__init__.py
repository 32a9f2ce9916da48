"""`slipstream fanout`: a file of prompts to a fleet, completions to a file. Start with `dispatch.py`."""
