"""The layout of vLLM's parameters: which part of which HF tensor is where in the parameters of each rank.

vLLM concatenates a rank's rows of q, k and v to `qkv_proj`, and of gate and up to `gate_up_proj`. It shards `o_proj` and
`down_proj` by columns. It pads the vocabulary to a multiple of 64 and shards it by rows. With more ranks than KV heads,
neighboring ranks replicate a head. A rank is `pp_rank * tp + tp_rank`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

from slipstream.errors import ConfigError
from slipstream.model import families
from slipstream.model.config import ModelConfig
from slipstream.model.families.family import Mlp
from slipstream.tensors.boxes import full_box, shape_of, shift, split
from slipstream.types import Box, Parameter, ParameterPart

VOCABULARY_MULTIPLE = 64
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text")


def has_layout(config: ModelConfig) -> bool:
    """Return whether the layout of vLLM's parameters is known."""
    return config.family in _FAMILIES and not config.num_labels


def vllm_parameters(config: ModelConfig, tp: int = 1, pp: int = 1, ep: bool = False) -> tuple[Parameter, ...]:
    """Return the parameters of `tp * pp` ranks. Raise `ConfigError` for a split that vLLM refuses as well."""
    _check(config, tp, pp, ep)
    parameters: list[Parameter] = []
    layers = _stages(config.num_layers, pp)
    for stage in range(pp):
        first, last = stage == 0, stage == pp - 1
        for tp_rank in range(tp):
            rank = stage * tp + tp_rank
            # A tied head is the embedding, so the last stage has a copy of it.
            if first or (last and config.tie_word_embeddings):
                parameters.append(_vocabulary("model.embed_tokens.weight", config, rank, tp_rank, tp))
            for layer in layers[stage]:
                parameters += _layer(config, f"model.layers.{layer}.", rank, tp_rank, tp, ep)
            if last:
                parameters.append(_single("model.norm.weight", rank, full_box((config.hidden_size,))))
                if not config.tie_word_embeddings:
                    parameters.append(_vocabulary("lm_head.weight", config, rank, tp_rank, tp))
    return tuple(parameters)


def written_parameters(
    config: ModelConfig, tp: int, failed: Collection[str], pp: int = 1, ep: bool = False
) -> tuple[tuple[Parameter, ...], frozenset[str]]:
    """Return the parameters that the ranks of a running vLLM receive: those in `failed`, which cannot be written directly,
    are replaced by the HF tensors that they consist of, for vLLM's own loader. Also return the names of these tensors."""
    live = vllm_parameters(config, tp, pp, ep)
    by_stage = {(part.tensor, p.rank // tp) for p in live if p.name in failed for part in p.parts}
    kept = [p for p in live if p.name not in failed]
    for rank in range(tp * pp):
        for tensor in families.tensors(config):
            if (tensor.name, rank // tp) in by_stage:
                part = ParameterPart(tensor.name, full_box(tensor.shape), full_box(tensor.shape))
                kept.append(Parameter(tensor.name, rank, tensor.shape, (part,)))
    return tuple(kept), frozenset(name for name, _ in by_stage)


def expert_parameters(
    at: str,
    num_experts: int,
    inner: int,
    hidden: int,
    rank: int,
    tp_rank: int,
    tp: int,
    ep: bool,
    names: Mlp = Mlp(),  # noqa: B008  # frozen
) -> tuple[Parameter, Parameter]:
    """Return `w13_weight` and `w2_weight` of one layer's experts on one rank. `at` is the layer's `….mlp.experts.`, the
    prefix of HF's `{expert}.gate_proj.weight` and so on.

    Without `ep` a rank holds its rows (columns for w2) of every expert. With `ep` it holds consecutive whole experts; if
    they do not divide evenly, the first ranks have one more."""
    own = _shares(num_experts, tp)[tp_rank] if ep else range(num_experts)
    index, count = (0, 1) if ep else (tp_rank, tp)
    if inner % count:
        raise ConfigError(f"tp={tp} does not divide the experts' inner size ({inner}); choose another tp, or use ep")
    rows, columns = split(full_box((inner, hidden)), 0, index, count), split(full_box((hidden, inner)), 1, index, count)
    size = inner // count
    w13, w2 = [], []
    for slot, expert in enumerate(own):
        for offset, name in ((0, names.gate), (size, names.up)):
            local = ((slot, slot + 1), (offset, offset + size), (0, hidden))
            w13.append(ParameterPart(f"{at}{expert}.{name}.weight", rows, local))
        w2.append(
            ParameterPart(f"{at}{expert}.{names.down}.weight", columns, ((slot, slot + 1), *shift(columns, columns)))
        )
    return (
        Parameter(at + "routed_experts.w13_weight", rank, (len(own), 2 * size, hidden), tuple(w13)),
        Parameter(at + "routed_experts.w2_weight", rank, (len(own), hidden, size), tuple(w2)),
    )


def _layer(config: ModelConfig, at: str, rank: int, tp_rank: int, tp: int, ep: bool) -> Iterator[Parameter]:
    """Yield the parameters of a layer. The family's tensors determine its norms, biases and experts."""
    shapes = {name: shape for name, shape in _shapes(config).items() if name.startswith(at)}
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    attn = at + "self_attn."
    rows = {"q": _heads(config.num_heads, config.head_dim, tp_rank, tp)}
    rows["k"] = rows["v"] = _heads(config.num_kv_heads, config.head_dim, tp_rank, tp)

    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            yield _single(name, rank, full_box(shape))
    qkv = [(f"{attn}{x}_proj.weight", (rows[x], (0, hidden))) for x in "qkv"]
    yield _stack(attn + "qkv_proj.weight", rank, qkv)
    if attn + "q_proj.bias" in shapes:
        yield _stack(attn + "qkv_proj.bias", rank, [(f"{attn}{x}_proj.bias", (rows[x],)) for x in "qkv"])
    columns = split(full_box((hidden, width)), 1, tp_rank, tp)
    yield _single(attn + "o_proj.weight", rank, columns)
    names = families.family_of(config).mlp
    router, mlp, moe = f"{at}{names.block}.gate.weight", at + "mlp.", config.moe
    if moe is not None and router in shapes:
        yield _single(router, rank, full_box(shapes[router]))
        experts = f"{at}{names.block}.experts."
        yield from expert_parameters(
            experts, moe.num_experts, moe.intermediate_size, hidden, rank, tp_rank, tp, ep, names
        )
        return
    box = split(full_box(shapes[mlp + "gate_proj.weight"]), 0, tp_rank, tp)
    gate_up = [(f"{mlp}{name}.weight", box) for name in ("gate_proj", "up_proj")]
    yield _stack(mlp + "gate_up_proj.weight", rank, gate_up)
    columns = split(full_box(shapes[mlp + "down_proj.weight"]), 1, tp_rank, tp)
    yield _single(mlp + "down_proj.weight", rank, columns)


@lru_cache(8)
def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in families.tensors(config)}


def _stack(name: str, rank: int, parts: Sequence[tuple[str, Box]]) -> Parameter:
    """Return a parameter of boxes that are concatenated by rows."""
    placed, at = [], 0
    for tensor, box in parts:
        rows, *rest = shape_of(box)
        placed.append(ParameterPart(tensor, box, ((at, at + rows), *full_box(tuple(rest)))))
        at += rows
    return Parameter(name, rank, (at, *shape_of(parts[0][1])[1:]), tuple(placed))


def _single(name: str, rank: int, box: Box) -> Parameter:
    return _stack(name, rank, [(name, box)])


def _heads(heads: int, head_dim: int, tp_rank: int, tp: int) -> tuple[int, int]:
    """Return the rows of a rank's heads. With fewer heads than ranks, `tp / heads` neighbors share one."""
    if heads < tp:
        head = tp_rank // (tp // heads)
        return head * head_dim, (head + 1) * head_dim
    rows = heads // tp * head_dim
    return tp_rank * rows, (tp_rank + 1) * rows


def _vocabulary(name: str, config: ModelConfig, rank: int, tp_rank: int, tp: int) -> Parameter:
    """Return a rank's rows of the padded vocabulary; the last ranks may have padding only."""
    vocab, hidden = config.vocab_size, config.hidden_size
    rows = _padded(vocab) // tp
    start, stop = tp_rank * rows, min((tp_rank + 1) * rows, vocab)
    filled = max(0, stop - start)
    parts = (ParameterPart(name, ((start, stop), (0, hidden)), ((0, filled), (0, hidden))),) if filled else ()
    padding: tuple[Box, ...] = (((filled, rows), (0, hidden)),) if filled < rows else ()
    return Parameter(name, rank, (rows, hidden), parts, padding)


def _padded(vocab: int) -> int:
    return -(-vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _stages(num_layers: int, pp: int) -> list[range]:
    """Return the layers of each pipeline stage. Remaining layers go to the stages before the last, from the back, because the
    last computes the head and the first the embedding. `VLLM_PP_LAYER_PARTITION`, which overrides this, must not be set."""
    sizes = [num_layers // pp] * pp
    for extra in range(num_layers % pp):
        sizes[-2 - extra] += 1
    return _ranges(sizes)


def _shares(count: int, ranks: int) -> list[range]:
    return _ranges([count // ranks + (rank < count % ranks) for rank in range(ranks)])


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]


def _check(config: ModelConfig, tp: int, pp: int, ep: bool) -> None:
    if not has_layout(config):
        raise ConfigError(f"vLLM's layout of {config.family} models is unknown; known: {', '.join(_FAMILIES)}")
    if ep and config.moe is None:
        raise ConfigError(f"ep is set, but a {config.family} model has no experts")
    if tp < 1 or not 1 <= pp <= config.num_layers:
        raise ConfigError(f"tp={tp} and pp={pp} must be positive, and pp at most num_layers ({config.num_layers})")
    problems = [
        f"{name} ({size})"
        for name, size in (("num_heads", config.num_heads), ("intermediate_size", config.intermediate_size))
        if size % tp and not (name == "intermediate_size" and config.moe is not None and not config.moe.dense_layers)
    ]
    if max(config.num_kv_heads, tp) % min(config.num_kv_heads, tp):
        problems.append(f"num_kv_heads ({config.num_kv_heads}), of which it must be a multiple or a divisor")
    if _padded(config.vocab_size) % tp:
        problems.append(f"the padded vocabulary ({_padded(config.vocab_size)})")
    if problems:
        raise ConfigError(
            f"tp={tp} does not divide {', '.join(problems)}; choose a tp that vLLM can split this model by"
        )
