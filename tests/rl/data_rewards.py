"""Reward functions for tests of own data."""


def near(prompt, completion, total, **facts):
    """1 for the row's total, less for others; the row's columns are facts."""
    assert prompt == f"{facts['question']}="
    return 1.0 if completion == str(total) else 0.25 * completion.isdigit()


def broken(prompt, completion):
    return {"nan": float("nan"), "text": "high"}[prompt[:-1]]


def raises(prompt, completion):
    raise ValueError("no digits")
