"""The `nccl` transport: one two-rank communicator per trainer rank and engine rank. Start with `transport.py`;
`wire_format.py` describes what is sent."""
