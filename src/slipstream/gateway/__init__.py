"""The gateway process, which connects trainers and engines. `service.py` has its gRPC methods, `client.py` is the trainer's
end, `engine_stream.py` the engine's. Weights do not pass through it."""
