"""vLLM as an engine. Everything that imports vLLM or torch is in here, and runs in an environment that has them."""
