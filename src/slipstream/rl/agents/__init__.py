"""Multi-turn rollouts with environments. Read `environments.py` for the interface, `multi_turn.py` for the loop."""
