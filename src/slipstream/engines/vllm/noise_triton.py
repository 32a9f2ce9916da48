"""The kernel of `noise.draw`."""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl


@triton.jit
def draw_rows(probs, seeds, positions, out, vocabulary, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    # The odd factor spreads positions over all bits, so that (seed, position) pairs that are near give keys that are not.
    key = tl.load(seeds + row * stride) ^ ((tl.load(positions + row * stride) + 1) * 0x1E3779B97F4A7C15)
    best = tl.full((BLOCK,), -1.0, tl.float32)
    found = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        p = tl.load(probs + row * vocabulary + columns, mask=inside, other=-1.0)
        uniform = tl.rand(key, columns)  # in [0, 1)
        noise = -tl.log(1.0 - uniform)
        # Where the noise is 0, any probability above 0 wins, and one of 0 must not.
        value = tl.where(inside, tl.where(p > 0, p / tl.maximum(noise, 1e-20), 0.0), -1.0)
        larger = value > best
        best = tl.where(larger, value, best)
        found = tl.where(larger, columns.to(tl.int64), found)
    top = tl.max(best, axis=0)
    # Of equals the lowest: the same choice whatever the block size.
    chosen = tl.min(tl.where(best == top, found, vocabulary), axis=0)
    tl.store(out + row, chosen)
