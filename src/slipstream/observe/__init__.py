"""Diagnosis: `doctor.py` checks a machine and a fleet, `mismatch.py` the logprobs of trainer and engines."""
