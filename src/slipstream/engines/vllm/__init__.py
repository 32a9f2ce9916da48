"""vLLM as an engine. Only this folder imports vLLM and torch, and it runs in an environment that has both. Start with
`engine.py`, which hosts vLLM; `worker_extension.py` is what runs inside vLLM's workers."""
