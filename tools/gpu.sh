#!/usr/bin/env bash
# Run GPU tests and benchmarks, with logs in FOLDER: tools/gpu.sh WHAT [FOLDER]
#
#   decode   decoding benchmark: vLLM through the gateway compared with plain vLLM, alone on the GPU; 5 minutes
#   nano     decoding benchmark with the workload of nano-vllm's bench.py: the embedded engine compared with vLLM; not timed yet
#   experts  the same with 64 experts; not timed yet
#   speculative  the same with prompt lookup and a draft model; not timed yet
#   start    from the start of an engine's process to its first token, beside vLLM; not timed yet
#   sync     weight sync benchmark: 1.2B, 0.1B and 8B; 5 minutes
#   embeddedsync  weight sync benchmark of the embedded engine, in its own process and in the trainer's: 2.47 GB and 16 GB;
#            not timed yet
#   load     200 syncs to an engine with 64 requests running and 192 waiting: embedded engine, then vLLM; not timed yet
#   tests    tests that can share the GPU, and a SmolLM2 run if models/smollm2 exists, in parallel; then GRPO with
#            vLLM; 5 minutes
#   alone    tests that measure the memory of the whole GPU; 5 minutes
#   embedded tests of the embedded engine, in parallel; 5 minutes
#   arguments  float16, determinism, and the conformance suite with arguments of vLLM; results in arguments.json; 10 minutes
#   trust    checksums on the device; three vLLM engines, of which one computes something else, one freezes and one is
#            killed; 4 minutes
#   ranks    trainers of one and two processes and engines of one and two ranks, in parallel; 5 minutes
#   torch    a PyTorch trainer: its CUDA tensors over mapped memory and NCCL, two ranks, weights shared with vLLM; 5 minutes
#   torchsync  weight sync benchmark of 1.2B, from JAX and from PyTorch; 4 minutes
#   loader   weights through vLLM's own loader: an unknown architecture, and engines that quantize, four at a time;
#            compared with cold starts; 8 minutes
#   train    tests of the train step, and its benchmark: 1.24B, 8 × 1,024 tokens; 9 minutes
#   trainlong  the same benchmark with 4 × 8,192 tokens; 9 minutes
#   adapters LoRA adapters: tests with vLLM, then the benchmark with the embedded engine and with vLLM; not timed yet
#   onpolicy deltas, logprobs equal to the bit, and routing replay; not timed yet
#   trl      TRL's unmodified GRPOTrainer, with weights over NCCL. Needs TRL: installed, or as wheels in carry/trl*/
#   grpo     whole GRPO steps with the embedded engine and with vLLM, compared with TRL; 9 minutes. Needs TRL as well
#
# Wheels of TRL, for a machine without network that has torch, transformers and accelerate. Two folders, since pyarrow alone
# has 55 MB, and uploads may be limited:
#   get() { pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 -d "$@"; }
#   get carry/trl1 pyarrow
#   get carry/trl2 trl==1.16.0 datasets==5.2.0 pandas python-dateutil six 'dill<0.4.2' 'multiprocess<0.70.20' xxhash
#
# Needs a GPU with at least 80 GB (embeddedsync: 120 GB), and an environment with JAX for CUDA, vLLM and the test
# dependencies. The environment variable PYTHON selects the interpreter (default: python3).
set -uo pipefail
what=${1:-} out=${2:-runs/gpu}
python=$(command -v "${PYTHON:-python3}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
export JAX_PLATFORMS=cuda SLIPSTREAM_REQUIRE_GPU=1 SLIPSTREAM_VLLM_PYTHON=$python PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}

logged() { # logged NAME COMMAND...: run the command with output in NAME.log, return its exit code
    local name=$1
    shift
    { time "$@"; } > "$out/$name.log" 2>&1
    local code=$?
    echo "$name: exit $code" >> "$out/exits"
    return $code
}

pytest() { "$python" -m pytest -q -rs -s -p no:cacheprovider "$@"; }

trl_wheels() {
    # A folder of another name would not do: dill pickles modules outside of "site-packages" by value, and pyarrow cannot.
    local site
    site=$(realpath "$out")/trl/site-packages
    for wheel in carry/trl*/*.whl; do
        [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$site" || exit
    done
    export PYTHONPATH=$PYTHONPATH:$site
}

smollm() {
    "$python" -m slipstream.cli train examples/smollm_grpo.toml "run_dir=$out/smollm" &&
        "$python" examples/check_export.py "$out/smollm/checkpoint" --vllm-python "$python" --device cuda
}

: > "$out/exits"
case $what in
    decode)
        logged decode "$python" benchmarks/decode.py --gpu --sides vllm,gateway --cases 512 --in-turn --rounds 5 \
            --vllm-python "$python" --json "$out/decode.json"
        ;;
    nano | experts | speculative)
        logged "$what" "$python" benchmarks/decode.py --gpu --workload "$what" --vllm-python "$python" \
            --json "$out/decode_$what.json"
        ;;
    start)
        logged start "$python" benchmarks/start.py --gpu --vllm-python "$python" --json "$out/start.json"
        ;;
    sync)
        logged sync "$python" benchmarks/weight_sync.py --gpu --shapes 1.2B,0.1B,8B --repeats 11 --json "$out/sync.json"
        ;;
    embeddedsync)
        logged embeddedsync "$python" benchmarks/weight_sync.py --gpu --engine embedded --shapes 1.2B,8B --repeats 11 \
            --json "$out/embeddedsync.json"
        ;;
    load)
        for engine in embedded vllm; do
            logged "load-$engine" "$python" benchmarks/weight_sync.py --load --gpu --engine "$engine" \
                --json "$out/load_$engine.json"
        done
        ;;
    tests)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false # several trainers share the GPU
        logged conformance pytest tests/gpu/test_vllm_conformance_gpu.py &
        logged nccl pytest tests/gpu/test_nccl_gpu.py &
        logged direct pytest tests/gpu/test_vllm_gpu.py -k direct_write &
        logged vllm pytest tests/gpu/test_vllm_gpu.py -k "not direct_write and not sleep and not killed" &
        [ ! -e models/smollm2 ] || logged smollm smollm &
        wait
        # Not in parallel: vLLM fails to start if another process frees GPU memory meanwhile.
        logged grpo "$python" examples/grpo_vllm.py --steps 60 --every 1 --python "$python"
        ;;
    alone)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false
        logged shared pytest tests/gpu/test_shared_gpu.py
        logged faults pytest tests/gpu/test_vllm_gpu.py -k "sleep or killed"
        ;;
    embedded)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false
        logged attention pytest tests/gpu/test_engine_gpu.py -k attention &
        logged engine pytest tests/gpu/test_engine_gpu.py -k "not attention" &
        logged conformance pytest tests/gpu/test_conformance_gpu.py &
        wait
        ;;
    trust)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false
        logged checksums pytest tests/gpu/test_device_checksum_gpu.py
        logged trust pytest tests/gpu/test_vllm_trust_gpu.py
        ;;
    ranks)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false
        for layout in tp1 tp2 pp2 engines2 experts2; do
            logged "ranks-$layout" pytest tests/gpu/test_ranks_gpu.py -k "[$layout" &
        done
        wait
        ;;
    torch)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false NCCL_MULTI_RANK_GPU_ENABLE=1
        logged checksums pytest tests/gpu/test_device_checksum_gpu.py
        logged torch pytest tests/gpu/test_torch_gpu.py
        ;;
    torchsync)
        export NCCL_MULTI_RANK_GPU_ENABLE=1
        logged torchsync "$python" benchmarks/weight_sync.py --gpu --shapes 1.2B --repeats 11 --no-native \
            --json "$out/torchsync.json"
        ;;
    arguments)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false SLIPSTREAM_VLLM_ARGUMENTS=1
        cp docs/vllm_arguments.json "$out/arguments.json"
        SLIPSTREAM_ARGUMENT_RESULTS=$(realpath "$out/arguments.json")
        export SLIPSTREAM_ARGUMENT_RESULTS
        logged settings pytest tests/gpu/test_vllm_settings_gpu.py
        for variants in "kept graphs two-ranks" "pipeline v1-pipeline experts" "ngram fp8-cache deterministic"; do
            for variant in $variants; do
                logged "arguments-$variant" pytest tests/gpu/test_vllm_conformance_gpu.py -k "[$variant" &
            done
            wait
        done
        ;;
    loader)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false
        for case in llama_direct granite_loaded granite_fp8 llama_fp8; do
            logged "$case" pytest tests/gpu/test_vllm_loader_gpu.py -k "$case" &
        done
        wait
        ;;
    train)
        logged train pytest tests/gpu/test_train_step_gpu.py
        logged train_step "$python" benchmarks/train_step.py --gpu --cases 8x1024 --json "$out/train_step.json"
        ;;
    trainlong)
        logged train_step_long "$python" benchmarks/train_step.py --gpu --cases 4x8192 --json "$out/train_step_long.json"
        ;;
    adapters)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false
        logged vllm pytest tests/gpu/test_vllm_lora_gpu.py
        for engine in embedded vllm; do
            logged "lora-$engine" "$python" benchmarks/lora.py --engine "$engine" --vllm-python "$python" --slots 8 \
                --json "$out/lora_$engine.json"
        done
        ;;
    onpolicy)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false
        logged delta pytest tests/gpu/test_delta_gpu.py
        logged onpolicy pytest tests/gpu/test_on_policy_gpu.py
        logged routes "$python" benchmarks/routing_replay.py --gpu --json "$out/routing_replay_gpu.json"
        ;;
    trl)
        export XLA_PYTHON_CLIENT_PREALLOCATE=false
        trl_wheels
        logged trl pytest tests/gpu/test_trl_gpu.py
        ;;
    grpo)
        trl_wheels
        logged grpo_step "$python" benchmarks/grpo_step.py --gpu --sides ours,ours-vllm,trl --vllm-python "$python" \
            --json "$out/grpo_step_gpu.json"
        ;;
    *)
        sed -n '2,/^[^#]/{/^#/p}' "$0"
        exit 2
        ;;
esac
for log in "$out"/*.log; do echo "--- $log" && tail -n 12 "$log"; done
cat "$out/exits"
! grep -qv "exit 0$" "$out/exits"
