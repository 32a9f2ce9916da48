#!/bin/sh
# All tests, as `make test` runs them: tools/test.sh VENV VLLM_VENV
#
# Those against real vLLM come last: its environment is made while the others run. Where it cannot be made (there is no wheel
# for the platform), the summary says which tests did not run; with SLIPSTREAM_REQUIRE_VLLM=1 that is a failure. The same goes
# for several hosts, where the machine makes no network namespaces: SLIPSTREAM_REQUIRE_NETNS=1.
# SLIPSTREAM_TEST_WORKERS says how many run at a time (2).
set -u
venv=$1 vllm=$2
log=$vllm.log
report=$(mktemp)
trap 'rm -f "$report"' EXIT
line="=================================================================================================="

# A test process that crashes may leave processes behind that pytest would wait for: not for ever.
within() {
    limit=$1
    shift
    if command -v timeout > /dev/null; then
        timeout --foreground --signal=INT --kill-after=30 "$limit" "$@"
    else
        "$@"
    fi
}

"$venv/bin/slipstream" setup vllm --cpu --into "$vllm" > "$log" 2>&1 &
making=$!
# Two at a time, file by file: most of them wait for processes half of the time. What JAX compiles is shared.
within 60m "$venv/bin/python" -m pytest --ignore=tests/vllm --durations=15 \
    -n "${SLIPSTREAM_TEST_WORKERS:-2}" --dist loadfile --max-worker-restart=0 --junitxml="$report"
others=$?
echo "waiting for the environment with vLLM ($log) ..."
if wait "$making"; then
    export SLIPSTREAM_VLLM_PYTHON="$(pwd)/$vllm/bin/python"
    within 22m "$venv/bin/python" -m pytest tests/vllm --durations=15
    real=$?
else
    tail -n 20 "$log"
    echo "$line"
    echo "NOT RUN: the tests against real vLLM (tests/vllm), because its environment could not be made; see above."
    echo "$line"
    real=${SLIPSTREAM_REQUIRE_VLLM:-0}
fi
# Without a report the tests were killed, which is a failure already.
missed=$(test -s "$report" && "$venv/bin/python" -m tests.topology.lan "$report")
if test -n "$missed"; then
    echo "$line"
    echo "NOT RUN: these tests over several hosts, because network namespaces cannot be made here, neither as root with"
    echo "'ip netns' nor in a user namespace; SLIPSTREAM_REQUIRE_NETNS=1 makes that a failure:"
    echo "$missed"
    echo "$line"
fi
test "$others" -eq 0 && test "$real" -eq 0
