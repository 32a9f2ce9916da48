#!/bin/sh
# Run all tests, for `make test`: tools/test.sh VENV VLLM_VENV
#
# The environment with real vLLM is created while the requirements of the tests are installed, and its tests run beside the
# others. If it cannot be created, the summary lists the tests that did not run. Environment variables:
#   SLIPSTREAM_REQUIRE_VLLM=1     fail if the vLLM environment cannot be created
#   SLIPSTREAM_REQUIRE_BROWSER=1  fail if Chromium, which the dashboard's tests need, is missing and cannot be installed
#   SLIPSTREAM_REQUIRE_NETNS=1    fail if network namespaces, which the multi-host tests need, are unavailable
#   SLIPSTREAM_TEST_RETRY=1       repeat tests that failed, if they are few; those that pass then are listed as unstable
#   SLIPSTREAM_TEST_MINUTES=80    stop tests that still run then (default: 150), so that there is a summary of the others
#   SLIPSTREAM_TEST_WORKERS       number of pytest workers beside the tests of vLLM (default: 3, as tests also wait)
set -u
minutes=${SLIPSTREAM_TEST_MINUTES:-150}
deadline=$(($(date +%s) + 60 * minutes))
venv=$1 vllm=$2
log=$vllm.log
work=$(mktemp -d)
report=$work/report.xml unstable=$work/unstable stopped=$work/stopped
export JAX_COMPILATION_CACHE_DIR="$work/jax" # programs are compiled once for all tests below
mkdir "$JAX_COMPILATION_CACHE_DIR"
trap 'rm -rf "$work"' EXIT
line="=================================================================================================="

within_time() {
    left=$((deadline - $(date +%s)))
    if command -v timeout > /dev/null; then set -- timeout --foreground --signal=INT --kill-after=30 $((left > 1 ? left : 1)) "$@"; fi
    "$@"
}

# Run pytest until the deadline, as it may wait forever for children of a crashed test process: run_tests NAME ARGUMENTS...
run_tests() {
    name=$1
    shift
    set -- "$venv/bin/python" -m pytest -o cache_dir="$work/$name" "$@"
    within_time "$@"
    status=$?
    if test "$status" -eq 124; then echo "STOPPED after $minutes minutes: not all tests of part '$name' ran." >> "$stopped"; fi
    if test "$status" -ne 1 -o "${SLIPSTREAM_TEST_RETRY:-0}" = 0; then return "$status"; fi
    names=$work/$name.failed # JSON has a line for each test that failed; all tests of a module fail with its fixture
    sed -n 's/^  "\(.*\)": true,*$/\1/p' "$work/$name/v/cache/lastfailed" > "$names"
    if test "$(sed 's/::.*//' "$names" | sort -u | wc -l)" -gt 3; then return "$status"; fi
    within_time "$@" --last-failed -n 0 --junitxml="$work/again.xml" && cat "$names" >> "$unstable"
}

# Beside the other tests: those of determinism, with the optimizations that users get, those under faults, and those with vLLM.
(
    tools/chromium.sh
    "$venv/bin/slipstream" setup vllm --cpu --into "$vllm"
    setup=$?
    until test -e "$venv/.installed-test"; do sleep 1; done
    failed=0
    SLIPSTREAM_TEST_OPTIMIZED=1 run_tests determinism tests/engines/test_determinism.py || failed=1
    run_tests chaos tests/chaos || failed=1 # here, as the other tests take longer than those with vLLM
    test "$setup" -eq 0 || exit $((200 + failed))
    # One thread that does not spin is enough for tiny models, and leaves the processor to the other tests. So does not compiling
    # the few functions that vLLM would have compiled.
    export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1
    SLIPSTREAM_VLLM_PYTHON="$(pwd)/$vllm/bin/python" run_tests vllm tests/vllm && exit "$failed"
) > "$log" 2>&1 &
beside=$!
make VENV="$venv" "$venv/.installed-test" || { kill "$beside"; exit 1; }
run_tests main --ignore=tests/vllm --ignore=tests/gpu --ignore=tests/engines/test_determinism.py \
    --ignore=tests/chaos -n "${SLIPSTREAM_TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder \
    --max-worker-restart=0 --junitxml="$report"
other_tests=$?
wait "$beside"
tests_beside=$?
if test "$tests_beside" -eq 0; then tail -n 80 "$log"; else cat "$log"; fi
if test "$tests_beside" -ge 200; then
    echo "$line"
    echo "NOT RUN: the tests against real vLLM (tests/vllm): the vLLM environment could not be created, see above."
    echo "$line"
    tests_beside=$((tests_beside - 200 + ${SLIPSTREAM_REQUIRE_VLLM:-0}))
fi
if ! tools/chromium.sh --check; then
    echo "$line"
    echo "NOT RUN: the tests of the dashboard in a browser (tests/observe/dashboard): there is no Chromium here, and it could"
    echo "not be installed. As root: apt-get install chromium. Set SLIPSTREAM_REQUIRE_BROWSER=1 to make this a failure."
    echo "$line"
fi
# Without a report, the tests were killed, and the run already counts as failed.
not_run=$(test -s "$report" && "$venv/bin/python" -m tests.deploy.lan "$report")
if test -n "$not_run"; then
    echo "$line"
    echo "NOT RUN: these multi-host tests, because network namespaces cannot be created here, neither as root with"
    echo "'ip netns' nor in a user namespace. Set SLIPSTREAM_REQUIRE_NETNS=1 to make this a failure."
    echo "$not_run"
    echo "$line"
fi
if test -s "$stopped"; then
    echo "$line"
    cat "$stopped"
    echo "$line"
fi
if test -s "$unstable"; then
    echo "$line"
    echo "UNSTABLE: these tests failed, and passed when they were repeated. Each has a fault, or depends on the machine's load:"
    cat "$unstable"
    echo "$line"
fi
test "$other_tests" -eq 0 && test "$tests_beside" -eq 0
