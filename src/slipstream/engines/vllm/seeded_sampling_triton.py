"""The Triton kernel of `seeded_sampling.draw`."""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl


@triton.jit
def draw_rows(probs, seeds, positions, out, vocabulary, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    # The odd factor spreads positions over all bits, so that similar (seed, position) pairs give unrelated keys.
    key = tl.load(seeds + row * stride) ^ ((tl.load(positions + row * stride) + 1) * 0x1E3779B97F4A7C15)
    best = tl.full((BLOCK,), -1.0, tl.float32)
    best_column = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        p = tl.load(probs + row * vocabulary + columns, mask=inside, other=-1.0)
        uniform = tl.rand(key, columns)  # in [0, 1)
        exponential = -tl.log(1.0 - uniform)
        # Where the exponential is 0, any probability above 0 wins, and a probability of 0 must not.
        value = tl.where(inside, tl.where(p > 0, p / tl.maximum(exponential, 1e-20), 0.0), -1.0)
        larger = value > best
        best = tl.where(larger, value, best)
        best_column = tl.where(larger, columns.to(tl.int64), best_column)
    top = tl.max(best, axis=0)
    # Ties go to the lowest column, whatever the block size.
    chosen = tl.min(tl.where(best == top, best_column, vocabulary), axis=0)
    tl.store(out + row, chosen)
