"""The gateway's HTTP server: OpenAI's API, vLLM's RL endpoints and a small API for local trainers, built on FastAPI.
Start with `app.py`, which lists the routers; `server.py` runs the application beside the gateway."""
