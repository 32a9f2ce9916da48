"""A running vLLM or SGLang server as an engine, over HTTP; needs neither vLLM nor torch. Start with `engine.py`, which decides
what is asked of a server and when; a dialect (`vllm.py`, `sglang.py`) implements the calls."""
