"""A reward function for `sums.jsonl`: 1 for the right sum, partial credit for a number near it."""


def near(prompt: str, completion: str, sum: int) -> float:
    """`sum` is the column of that name."""
    if not completion.isdigit():
        return 0.0
    distance = abs(int(completion) - sum)
    return 1.0 if distance == 0 else 0.2 / distance
