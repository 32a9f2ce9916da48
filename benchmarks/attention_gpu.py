"""Paged attention and a decode step on one GPU, compared with alternatives and hardware limits.

    python benchmarks/attention_gpu.py [--only decode,prefill,...] [--budget 90] [--json out.json] [--tiny]

Sections, in order of importance. Each runs in its own process, so that a faulting kernel ends only its section:
  decode    GB/s of decode attention: naive, our kernel with several tiles and page sizes, JAX's kernel, cuDNN's
  step      a bare 1.24B decode step with 512 rows, scan and while_loop; at the end again without CUDA graphs, and with
            graphs for WHILE
  loop      8 steps x 16 layers of write + attend with the cache as carry: ms per step, temporary memory (shows copies)
  prefill   TFLOP/s of prefill blocks, compared with cuDNN's dense attention
  matmul    lower bound of a step: the model's matrix products with 64, 512, 1024 rows
  sampling  inverse CDF and argmax over [512, 128256]
A failing variant prints its error, and the others still run. The last line is JSON. `--tiny` runs small shapes with
interpreted kernels on any machine, to test this script; its times are meaningless."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

GRAPHS = {
    "step": None,
    "step-no-graphs": "--xla_gpu_enable_command_buffer=",
    "step-while-graphs": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE",
}
SECTIONS = ["decode", "step", "loop", "prefill", "matmul", "sampling", "step-no-graphs", "step-while-graphs"]
PEAK_GB = 4800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--budget", type=float, default=90.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        run_section(arguments.section, arguments.tiny, arguments.json, arguments.budget)
        return
    results: dict[str, Any] = {}
    end = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as folder:
        for section in arguments.only.split(","):
            left = end - time.monotonic()
            if left < 8:
                results[section] = {"skipped": "no time left"}
                continue
            results[section] = section_in_process(section, arguments.tiny, Path(folder), left)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


def section_in_process(section: str, tiny: bool, folder: Path, left: float) -> dict[str, Any]:
    environment = dict(os.environ, JAX_COMPILATION_CACHE_DIR=str(folder / "cache"), PYTHONUNBUFFERED="1")
    flags = GRAPHS.get(section)
    if flags is not None and not tiny:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    path = folder / f"{section}.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--section", section, "--json", str(path)]
    command += ["--budget", str(left)] + (["--tiny"] if tiny else [])
    began = time.monotonic()
    print(f"== {section}", flush=True)
    try:
        code = subprocess.run(command, env=environment, timeout=left, check=False).returncode
        status: dict[str, float] = {} if code == 0 else {"exit": code}
    except subprocess.TimeoutExpired:
        status = {"timeout_s": left}
    found = json.loads(path.read_text()) if path.exists() else {}
    return {**found, **status, "seconds": round(time.monotonic() - began, 1)}


# ---- everything below runs in the process of one section


class AttentionSpec(NamedTuple):
    scale: float = 0.125
    window: int | None = None
    softcap: float | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 16
    hidden: int = 2048
    inner: int = 8192
    vocabulary: int = 128256
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    batch: int = 512
    context: int = 384
    longest: int = 512
    iterations: int = 40


TINY = Sizes(2, 64, 128, 512, 4, 2, 32, 4, 20, 32, 2)

sizes = Sizes()
interpret = False
deadline = float("inf")
results: dict[str, Any] = {}


def run_section(section: str, tiny: bool, path: Path, budget: float) -> None:
    global sizes, interpret, deadline
    began = time.monotonic()
    deadline = began + budget - 4
    if tiny:
        sizes, interpret = TINY, True
    import jax

    device = jax.devices()[0]
    results.update(jax=jax.__version__, device=device.device_kind, start_s=round(time.monotonic() - began, 1))
    names = dict.fromkeys(GRAPHS, measure_step)
    names |= {"decode": measure_decode, "loop": measure_loop, "prefill": measure_prefill}
    names |= {"matmul": measure_matmul, "sampling": measure_sampling}
    try:
        for _ in names[section]():
            path.write_text(json.dumps(results))
    except Exception:
        traceback.print_exc()
        results["error"] = traceback.format_exc()[-1500:]
    path.write_text(json.dumps(results))


def load_kernels() -> Any:
    """Load the module of the kernels without its package, whose dependencies a GPU image may lack."""
    path = Path(__file__).resolve().parents[1] / "src/slipstream/engines/embedded/compute/attention_gpu.py"
    spec = importlib.util.spec_from_file_location("attention_gpu", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["attention_gpu"] = module
    spec.loader.exec_module(module)
    return module


def record(name: str, **numbers: Any) -> None:
    results[name] = numbers
    shown = "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in numbers.items()
    )
    print(f"{name:<46} {shown}", flush=True)


def fail(name: str, error: BaseException) -> None:
    record(name, failed=f"{type(error).__name__}: {str(error)[:300]}")


def can_run(name: str, compiled: Any) -> bool:
    """Return whether compilation succeeded and time is left. Otherwise record the reason as the result."""
    if time.monotonic() > deadline:
        record(name, skipped="no time left")
        return False
    if isinstance(compiled, Exception):
        fail(name, compiled)
        return False
    return True


@dataclasses.dataclass
class Candidate:
    """A measured variant. `run(*args)` applies the operation `times` times on the device, each to the previous result.

    `check` returns the error of the output of `run`."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    times: int
    report: Callable[[float, Any], dict[str, Any]]
    check: Callable[[Any], float] | None = None


def measure(candidates: list[Candidate]) -> Iterator[None]:
    """Compile all candidates in parallel, then time one after another, and record the best of 4 calls."""
    import jax

    def compile_one(candidate: Candidate) -> Any:
        try:
            return jax.jit(candidate.run).lower(*candidate.args).compile()
        except Exception as error:
            return error

    with ThreadPoolExecutor(1 if interpret else 12) as pool:
        for candidate, compiled in zip(candidates, pool.map(compile_one, candidates)):
            if not can_run(candidate.name, compiled):
                continue
            try:
                out = jax.block_until_ready(compiled(*candidate.args))
                best = float("inf")
                for _ in range(4):
                    began = time.perf_counter()
                    jax.block_until_ready(compiled(*candidate.args))
                    best = min(best, time.perf_counter() - began)
                seconds = best / candidate.times
                error = {} if candidate.check is None else {"max_error": candidate.check(out)}
                record(candidate.name, us=seconds * 1e6, **candidate.report(seconds, compiled), **error)
            except Exception as error:
                fail(candidate.name, error)
            yield


def repeated(attend: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Chain `attend`, with each output as the next query, so that XLA cannot skip work. Returns first and last
    output."""
    from jax import lax

    def run(q: Any, *rest: Any) -> tuple[Any, Any]:
        first = attend(q, *rest).astype(q.dtype)
        return first, lax.fori_loop(1, times, lambda _, query: attend(query, *rest).astype(q.dtype), first)

    return run


class Cache(NamedTuple):
    layer: tuple[Any, Any]
    tables: Any


def random_cache(num_sequences: int, longest: int, page_size: int, seed: int = 0, spare: int = 0) -> Cache:
    """Return a cache whose sequences have disjoint, randomly assigned pages, plus `spare` unused pages."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    width = -(-longest // page_size)
    num_pages = num_sequences * width + spare
    tables = np.random.default_rng(seed).permutation(num_pages)[: num_sequences * width]
    shape = (num_pages, sizes.kv_heads, page_size, sizes.head_dim)
    keys, values = (jax.random.normal(jax.random.key(seed + i), shape, jnp.bfloat16) for i in range(2))
    return Cache((keys, values), jnp.asarray(tables.reshape(num_sequences, width), jnp.int32))


def naive(q: Any, layer: tuple[Any, Any], tables: Any, positions: Any, spec: AttentionSpec, dtype: Any = None) -> Any:
    """Attention in plain JAX: gather the keys of the whole table, einsum, mask. Computes in `dtype` if it is given."""
    import jax
    import jax.numpy as jnp

    num_blocks, _, heads, head_dim = q.shape
    kv_heads = layer[0].shape[1]
    k, v = (jnp.moveaxis(pages[tables], 2, 1).reshape(num_blocks, kv_heads, -1, head_dim) for pages in layer)
    precision = None
    if dtype is not None:
        q, k, v, precision = q.astype(dtype), k.astype(dtype), v.astype(dtype), jax.lax.Precision.HIGHEST
    grouped = q.reshape(*q.shape[:2], kv_heads, heads // kv_heads, head_dim)
    f32 = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    logits = f32("bqkgd,bktd->bkgqt", grouped, k) * spec.scale
    seen = jnp.arange(k.shape[2]) <= positions[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1).astype(v.dtype)
    return f32("bkgqt,bktd->bqkgd", weights, v).reshape(q.shape)


def error_against(wanted: Any, part: slice, out: tuple[Any, Any]) -> float:
    import jax.numpy as jnp

    return float(jnp.max(jnp.abs(out[0][part].astype(jnp.float32) - wanted)))


def gigabytes(tokens: int, seconds: float) -> dict[str, float]:
    moved = tokens * sizes.kv_heads * sizes.head_dim * 2 * 2 / 1e9
    return {"GB/s": moved / seconds, "of_peak": moved / seconds / PEAK_GB}


def measure_decode() -> Iterator[None]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    kernels = load_kernels()
    tile, attention = kernels.Tile, partial(kernels.PallasAttention, interpret=interpret)
    rng = np.random.default_rng(1)

    def case(batch: int, shortest: int, longest: int, page_size: int) -> tuple[tuple[Any, ...], int, Any]:
        cache = random_cache(batch, longest, page_size)
        lengths = rng.integers(shortest, longest + 1, batch)
        positions = jnp.asarray(lengths[:, None] - 1, jnp.int32)
        q = jax.random.normal(jax.random.key(7), (batch, 1, sizes.heads, sizes.head_dim), jnp.bfloat16)
        args = (q, cache.layer, cache.tables, positions)
        return args, int(lengths.sum()), jax.jit(partial(naive, spec=AttentionSpec(), dtype=jnp.float32))(*args)

    def candidate(name: str, attend: Callable[..., Any], given: tuple[Any, ...], times: int | None = None) -> Candidate:
        args, tokens, wanted = given
        times = times or sizes.iterations
        return Candidate(
            name,
            repeated(attend, times),
            args,
            times,
            lambda seconds, _: gigabytes(tokens, seconds),
            partial(error_against, wanted, slice(None)),
        )

    def ours(name: str, given: tuple[Any, ...], **options: Any) -> Candidate:
        return candidate(name, partial(attention(**options).attend, spec=AttentionSpec()), given)

    half = sizes.longest // 2
    page_sizes = (16, 32, 64, 128) if not interpret else (8, 16)
    main_case = {size: case(sizes.batch, half, sizes.longest, size) for size in page_sizes}
    yield from measure([ours(f"decode ours p{size} default", given) for size, given in main_case.items()])
    tiles = [
        (32, 1, 2), (32, 2, 3), (32, 4, 3), (64, 1, 3), (64, 2, 2), (64, 2, 3), (64, 2, 4), (64, 4, 1), (64, 4, 2),
        (64, 4, 4), (64, 4, 5), (64, 8, 3), (128, 2, 3), (128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3),
    ]  # fmt: skip
    few, many = (page_sizes[0], page_sizes[-2])
    chosen = tiles if not interpret else tiles[:1]
    yield from measure(
        [
            ours(
                f"decode ours p{size} k{keys} w{warps} s{stages}", main_case[size], decode=tile(16, keys, warps, stages)
            )
            for size in (few, many)
            for keys, warps, stages in chosen
        ]
    )
    alternatives = [candidate(f"decode naive p{few}", partial(naive, spec=AttentionSpec()), main_case[few], 4)]
    for size in (few, many):
        alternatives.append(candidate(f"decode cudnn paged p{size}", cudnn_paged, main_case[size]))
        args, tokens, wanted = main_case[size]
        heads_first = tuple(jnp.swapaxes(pages, 0, 1) for pages in args[1])
        for splits, per_block in ((1, 64 // size or 1), (1, 128 // size or 1), (2, 64 // size or 1)):
            attend = partial(jax_paged, k_splits=splits, pages_per_compute_block=per_block)
            given = ((args[0], heads_first, *args[2:]), tokens, wanted)
            alternatives.append(candidate(f"decode jax paged p{size} splits{splits} x{per_block}", attend, given))
    yield from measure(alternatives)
    del main_case, alternatives
    shapes = [(1024, 64, 128), (64, 256, 512), (8, 3500, 4096), (64, 2048, 4096)] if not interpret else [(2, 30, 40)]
    for batch, shortest, longest in shapes:
        given = case(batch, shortest, longest, many)
        name = f"decode B{batch} {shortest}..{longest} p{many}"
        options: list[tuple[str, dict[str, Any]]] = [("", {}), (" splits auto", {"deterministic": False})]
        options += [(f" splits{n}", {"deterministic": False, "splits": n}) for n in (2, 4, 8, 16) if batch <= 64]
        yield from measure([ours(name + label, given, **option) for label, option in options])


def cudnn_paged(q: Any, layer: tuple[Any, Any], tables: Any, positions: Any) -> Any:
    import jax.numpy as jnp
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    table = tables[:, None, :, None]
    out = cudnn.paged_attention(
        jnp.swapaxes(q, 1, 2), *layer, jnp.ones(q.shape[0], jnp.int32), positions[:, 0] + 1, table, table,
        scale=AttentionSpec().scale, mask_type=cudnn.MaskType.PADDING, qkv_layout="BNTH",
    )  # fmt: skip
    return jnp.swapaxes(out[0] if isinstance(out, (tuple, list)) else out, 1, 2)


def jax_paged(q: Any, layer: tuple[Any, Any], tables: Any, positions: Any, **options: Any) -> Any:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    scaled = (q[:, 0] * AttentionSpec().scale).astype(q.dtype)
    out = paged_attention(scaled, *layer, tables, positions[:, 0] + 1, interpret=interpret, num_warps=4, **options)
    return out[:, None].astype(jnp.bfloat16)


def measure_prefill() -> Iterator[None]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    kernels = load_kernels()
    tile, attention = kernels.Tile, partial(kernels.PallasAttention, interpret=interpret)
    page_size = 16 if interpret else 64
    times = sizes.iterations // 2

    def case(sequences: int, begin: int, end: int, per_block: int) -> tuple[tuple[Any, ...], float, Any]:
        cache = random_cache(sequences, end, page_size)
        where = np.tile(np.arange(begin, end, dtype=np.int32), sequences).reshape(-1, per_block)
        tables = jnp.repeat(cache.tables, (end - begin) // per_block, axis=0)
        q = jax.random.normal(jax.random.key(3), (*where.shape, sizes.heads, sizes.head_dim), jnp.bfloat16)
        args = (q, cache.layer, tables, jnp.asarray(where))
        flops = float((where + 1).sum()) * 4 * sizes.heads * sizes.head_dim
        pick = slice(None, None, max(1, len(where) // 4))  # check only a few blocks, which fit in memory
        part = (q[pick], cache.layer, tables[pick], args[3][pick])
        return args, flops, (pick, jax.jit(partial(naive, spec=AttentionSpec(), dtype=jnp.float32))(*part))

    def candidate(name: str, attend: Callable[..., Any], given: tuple[Any, ...]) -> Candidate:
        args, flops, (pick, wanted) = given

        report = lambda seconds, _: {"TFLOP/s": flops / seconds / 1e12}  # noqa: E731
        return Candidate(name, repeated(attend, times), args, times, report, partial(error_against, wanted, pick))

    shapes = [(8, 0, 512), (2, 0, 2048), (1, 3072, 4096)] if not interpret else [(2, 0, 32)]
    settings = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3),
                (128, 128, 8, 2), (128, 128, 8, 3), (64, 32, 4, 3), (128, 32, 4, 3)]  # fmt: skip
    for sequences, begin, end in shapes:
        first = (sequences, begin, end) == shapes[0]
        for per_block in (16, 32, 64) if first and not interpret else (32,) if not interpret else (8,):
            given = case(sequences, begin, end, per_block)
            name = f"prefill {sequences}x{begin}..{end} Q{per_block}"
            exact = candidate(f"{name} deterministic", partial(attention().attend, spec=AttentionSpec()), given)
            chosen = settings if per_block == 32 else settings[1:2] + settings[5:6]
            free = [
                candidate(
                    f"{name} r{rows} k{keys} w{warps} s{stages}",
                    partial(
                        attention(deterministic=False, prefill=tile(rows, keys, warps, stages)).attend,
                        spec=AttentionSpec(),
                    ),
                    given,
                )
                for rows, keys, warps, stages in (chosen if not interpret else chosen[:1])
            ]
            plain = (
                [candidate(f"{name} naive", partial(naive, spec=AttentionSpec()), given)]
                if sequences > 1 and first
                else []
            )
            yield from measure([exact, *free, *plain])
        if begin == 0 and not interpret:
            yield from measure([dense_attention(sequences, end, times)])


def dense_attention(sequences: int, length: int, times: int) -> Candidate:
    """cuDNN attention on contiguous sequences, as a reference without pages."""
    import jax
    import jax.numpy as jnp

    shapes = [(sequences, length, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    args = tuple(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    attend = partial(jax.nn.dot_product_attention, scale=AttentionSpec().scale, is_causal=True, implementation="cudnn")
    flops = sequences * length * (length + 1) / 2 * 4 * sizes.heads * sizes.head_dim
    report = lambda seconds, _: {"TFLOP/s": flops / seconds / 1e12}  # noqa: E731
    return Candidate(f"prefill {sequences}x0..{length} cudnn dense", repeated(attend, times), args, times, report)


def memory_of(compiled: Any) -> dict[str, float]:
    with contextlib.suppress(Exception):
        memory = compiled.memory_analysis()
        return {"temp_MB": memory.temp_size_in_bytes / 1e6, "aliased_MB": memory.alias_size_in_bytes / 1e6}
    return {}


class Loop(NamedTuple):
    """A measured loop of `steps` steps: `run(carried, *rest)` returns the new `carried`."""

    name: str
    run: Callable[..., Any]
    steps: int


def measure_loops(loops: list[Loop], carried: Any, rest: tuple[Any, ...]) -> Iterator[None]:
    """Run the loops with `carried` donated, and record ms per step and the program's memory besides it."""
    import jax

    def compile_one(loop: Loop) -> Any:
        try:
            began = time.perf_counter()
            return jax.jit(loop.run, donate_argnums=0).lower(carried, *rest).compile(), time.perf_counter() - began
        except Exception as error:
            return error

    with ThreadPoolExecutor(1 if interpret else 8) as pool:
        programs = list(pool.map(compile_one, loops))  # compile all before the first run, which donates `carried`
    for loop, program in zip(loops, programs):
        if not can_run(loop.name, program):
            continue
        try:
            compiled, compile_s = program
            best = float("inf")
            for _ in range(5):
                began = time.perf_counter()
                carried = jax.block_until_ready(compiled(carried, *rest))
                best = min(best, time.perf_counter() - began)
            record(loop.name, ms_per_step=best / loop.steps * 1e3, compile_s=compile_s, **memory_of(compiled))
        except Exception as error:
            fail(loop.name, error)
        yield


def measure_loop() -> Iterator[None]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    kernels = load_kernels()
    page_size, steps, batch = (8 if interpret else 64), 8, sizes.batch
    cache = random_cache(batch, sizes.context + 2 * steps, page_size)
    layers = tuple(jax.tree.map(jnp.copy, cache.layer) for _ in range(sizes.layers))
    cache_mb = sum(pages.nbytes for layer in layers for pages in layer) / 1e6
    heads = jax.random.normal(jax.random.key(5), (batch, 1, sizes.heads, sizes.head_dim), jnp.bfloat16)
    start = jnp.full((batch, 1), sizes.context, jnp.int32)

    def steps_of(attention: Any, do_write: bool, do_attend: bool, dynamic: bool) -> Callable[..., Any]:
        def one(state: Any, position: Any) -> Any:
            layers, q = state
            new = []
            for layer in layers:
                if do_write:
                    part = q[:, :, : sizes.kv_heads]
                    layer = attention.write(layer, part, part, cache.tables, position)
                if do_attend:
                    q = attention.attend(q, layer, cache.tables, position, AttentionSpec())
                else:  # a small operation that depends on the write
                    q = q + layer[0][0, 0, 0, 0] * 1e-3
                new.append(layer)
            return tuple(new), q

        def run(state: Any, position: Any, count: Any) -> Any:
            if dynamic:
                return lax.fori_loop(0, count, lambda i, state: one(state, position + i), state)
            return lax.scan(lambda state, i: (one(state, position + i), None), state, jnp.arange(steps))[0]

        return run

    tokens = batch * (sizes.context + steps // 2) * sizes.layers
    floor_ms = tokens * sizes.kv_heads * sizes.head_dim * 4 / (PEAK_GB * 1e9) * 1e3
    record("loop sizes", cache_MB=cache_mb, read_at_peak_ms=floor_ms)
    attention = kernels.PallasAttention(interpret=interpret)
    loops = [
        Loop("loop write by scatter + attend, scan", steps_of(attention, True, True, False), steps),
        Loop("loop write by scatter + attend, dynamic loop", steps_of(attention, True, True, True), steps),
        Loop("loop write by scatter alone, scan", steps_of(attention, True, False, False), steps),
        Loop("loop attend alone, scan", steps_of(attention, False, True, False), steps),
    ]
    yield from measure_loops(loops, (layers, heads), (start, jnp.int32(steps)))


def random_model() -> Any:
    import jax
    import jax.numpy as jnp

    q_width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "qkv": (q_width + 2 * kv_width, sizes.hidden),
        "o": (sizes.hidden, q_width),
        "gate_up": (2 * sizes.inner, sizes.hidden),
        "down": (sizes.hidden, sizes.inner),
    }
    make = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * 0.02, static_argnums=1)
    layers = [
        {name: make(jax.random.key(100 * i + j), shape) for j, (name, shape) in enumerate(shapes.items())}
        for i in range(sizes.layers)
    ]
    return {"layers": layers, "embed": make(jax.random.key(9999), (sizes.vocabulary, sizes.hidden))}


def decode_step(params: Any, attention: Any, layers: Any, tokens: Any, tables: Any, positions: Any) -> Any:
    """Run a bare Llama step, and return the next tokens (argmax) and the pages of the layers."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)

    def times(x: Any, w: Any) -> Any:
        return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=x.dtype)

    half = sizes.head_dim // 2
    angles = positions.astype(jnp.float32) * (500000.0 ** (-jnp.arange(half) / half))
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]

    def rotate(x: Any) -> Any:
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    x = params["embed"][tokens]
    q_end, k_end = sizes.heads, sizes.heads + sizes.kv_heads
    new = []
    for weights, layer in zip(params["layers"], layers):
        qkv = times(norm(x), weights["qkv"]).reshape(len(tokens), -1, sizes.head_dim)
        q, k, v = rotate(qkv[:, :q_end]), rotate(qkv[:, q_end:k_end]), qkv[:, k_end:]
        layer = attention.write(layer, k[:, None], v[:, None], tables, positions)
        out = attention.attend(q[:, None], layer, tables, positions, AttentionSpec())
        x = x + times(out.reshape(len(tokens), -1), weights["o"])
        gate, up = jnp.split(times(norm(x), weights["gate_up"]), 2, axis=-1)
        x = x + times(jax.nn.silu(gate) * up, weights["down"])
        new.append(layer)
    logits = times(norm(x), params["embed"])
    return jnp.argmax(logits, -1).astype(jnp.int32), tuple(new)


def measure_step() -> Iterator[None]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    kernels = load_kernels()
    page_size, steps, batch = (8 if interpret else 64), 8, sizes.batch
    params = random_model()
    cache = random_cache(batch, sizes.context + 2 * steps, page_size)
    layers = tuple(jax.tree.map(jnp.copy, cache.layer) for _ in range(sizes.layers))
    tokens = jnp.arange(batch, dtype=jnp.int32)
    start = jnp.full((batch, 1), sizes.context, jnp.int32)

    def run_of(attention: Any, kind: str) -> Callable[..., Any]:
        def one(i: Any, state: Any, params: Any, position: Any) -> Any:
            layers, tokens = state
            tokens, layers = decode_step(params, attention, layers, tokens, cache.tables, position + i)
            return layers, tokens

        def run(state: Any, params: Any, position: Any, count: Any) -> Any:
            if kind == "one":
                return one(0, state, params, position)
            if kind == "while":
                return lax.fori_loop(0, count, lambda i, state: one(i, state, params, position), state)
            body = lambda state, i: (one(i, state, params, position), None)  # noqa: E731
            return lax.scan(body, state, jnp.arange(steps))[0]

        return run

    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    read = weights + batch * (sizes.context + steps // 2) * sizes.layers * sizes.kv_heads * sizes.head_dim * 4
    record("step sizes", weights_GB=weights / 1e9, read_at_peak_ms=read / (PEAK_GB * 1e9) * 1e3)
    yield
    attention = kernels.PallasAttention(interpret=interpret)
    loops = [
        Loop("step scan", run_of(attention, "scan"), steps),
        Loop("step while", run_of(attention, "while"), steps),
        Loop("step one at a time", run_of(attention, "one"), 1),
    ]
    yield from measure_loops(loops, (layers, tokens), (params, start, jnp.int32(steps)))


def measure_matmul() -> Iterator[None]:
    """Measure matrix products, each with its own x and W, and enough of them to exceed the L2 cache."""
    import jax
    import jax.numpy as jnp

    widths = [(2048, 2048), (2048, 512), (2048, 8192), (8192, 2048), (2048, 3072), (2048, 16384), (2048, 128256)]
    rows: tuple[int, ...] = (64, 512, 1024)
    if interpret:
        widths, rows = [(64, 32)], (8,)
    random = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)

    def products(xs: Any, ws: Any) -> Any:
        last = (((1,), (1,)), ((), ()))
        return [jax.lax.dot_general(x, w, last, preferred_element_type=jnp.bfloat16) for x, w in zip(xs, ws)]

    candidates = []
    for width, out in widths:
        count = max(2, min(64, 256_000_000 // (width * out * 2)))
        ws = [random(jax.random.key(i), (out, width)) for i in range(count)]
        for m in rows:
            xs = [random(jax.random.key(i), (m, width)) for i in range(count)]
            flops, moved = 2.0 * m * width * out, 2.0 * (width * out + m * (width + out))

            def report(seconds: float, _: Any, flops: float = flops, moved: float = moved) -> dict[str, float]:
                return {"TFLOP/s": flops / seconds / 1e12, "GB/s": moved / seconds / 1e9}

            candidates.append(Candidate(f"matmul M{m} {width}->{out}", products, (xs, ws), count, report))
    yield from measure(candidates)


def measure_sampling() -> Iterator[None]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    batch, vocabulary, times = sizes.batch, sizes.vocabulary, max(2, sizes.iterations // 4)
    logits = jax.random.normal(jax.random.key(0), (batch, vocabulary), jnp.float32) * 3
    uniform = jax.random.uniform(jax.random.key(1), (batch,))

    def by_blocks(block: int, logits: Any, u: Any) -> Any:
        """Sum only the chosen block of each row token by token."""
        tiles = logits.reshape(batch, -1, block)
        peak = jnp.max(logits, -1)
        sums = jnp.sum(jnp.exp(tiles - peak[:, None, None]), -1)
        upto = jnp.cumsum(sums, -1)
        target = u * upto[:, -1]
        index = jnp.minimum(jnp.sum(upto <= target[:, None], -1), upto.shape[-1] - 1)
        before = jnp.take_along_axis(upto - sums, index[:, None], 1)
        inside = jnp.take_along_axis(tiles, index[:, None, None], 1)[:, 0]
        within = before + jnp.cumsum(jnp.exp(inside - peak[:, None]), -1)
        return index * block + jnp.minimum(jnp.sum(within <= target[:, None], -1), block - 1)

    def by_cumsum(logits: Any, u: Any) -> Any:
        upto = jnp.cumsum(jnp.exp(logits - jnp.max(logits, -1, keepdims=True)), -1)
        return jnp.sum(upto <= (u * upto[:, -1])[:, None], -1)

    def by_argmax(logits: Any, u: Any) -> Any:
        return jnp.argmax(logits + u[:, None] * 1e-6, -1)

    def chained(sample: Callable[..., Any]) -> Callable[..., Any]:
        def run(logits: Any, u: Any) -> Any:
            step = lambda _, u: (sample(logits, u) % 997).astype(jnp.float32) / 997.0  # noqa: E731
            return lax.fori_loop(0, times, step, u)

        return run

    report = lambda seconds, _: {"GB/s": batch * vocabulary * 4 / seconds / 1e9}  # noqa: E731
    choices = {"argmax": by_argmax, "inverse CDF, whole cumsum": by_cumsum}
    blocks = [block for block in (32, 64, 96, 128, 256, 334, 668) if vocabulary % block == 0]
    choices |= {f"inverse CDF, blocks of {block}": partial(by_blocks, block) for block in blocks}
    args = (logits, uniform)
    yield from measure(
        [Candidate(f"sampling {name}", chained(fn), args, times, report) for name, fn in choices.items()]
    )


if __name__ == "__main__":
    main()
