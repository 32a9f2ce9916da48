"""The trainer's half of weight transfers into external vLLM and SGLang servers. Start with `gather.py`."""
