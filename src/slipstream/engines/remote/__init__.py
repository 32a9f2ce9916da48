"""A vLLM or SGLang server that somebody else started, as an engine. Speaks HTTP to it; needs neither vLLM nor torch."""
