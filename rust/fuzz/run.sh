#!/usr/bin/env bash
# Runs every fuzz target under AddressSanitizer and prints the number of runs of each.
# Usage: run.sh [SECONDS] [TARGET...]
#
# Installs the nightly compiler if it is missing. New inputs are kept in libfuzzer/corpus/, crashes in
# libfuzzer/artifacts/; the exit code is 1 if there was a crash.
set -euo pipefail
cd "$(dirname "$0")/libfuzzer"
seconds=${1:-60}
shift || true
rustup toolchain list | grep -q nightly || rustup toolchain install nightly --profile minimal
golden=../../../tests/golden
tensors="$golden/ternary $golden/groupwise $golden/codebook $golden/compensated $golden/coded $golden/channels"
declare -A seeds=(
    [coded_integers]="$golden/coded"
    [device_read]="../seeds/device_read $golden/coded"
    [kernel_twins]="$tensors"
    [tensor_changed]="../seeds/tensor_changed"
    [tensor_open]="$tensors"
    [tensor_read]="$tensors"
    [ternary_round_trip]="$golden/ternary"
)
[ $# -gt 0 ] || set -- $(printf '%s\n' "${!seeds[@]}" | sort)

# Low optimization and many codegen units: in one unit at -O3, kernels with coverage counters did not compile within a
# quarter of an hour.
export CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_LTO=false
coverage="-sanitizer-coverage-level=3 -sanitizer-coverage-inline-8bit-counters -sanitizer-coverage-pc-table"
coverage="$coverage -sanitizer-coverage-trace-compares"
export RUSTFLAGS="-Cpasses=sancov-module$(printf ' -Cllvm-args=%s' $coverage) --cfg fuzzing -Zsanitizer=address"
cargo +nightly build --quiet --release --target x86_64-unknown-linux-gnu --bins

# Leak detection is off, because the thread pool outlives the runs; a run of ten seconds counts as a hang.
export ASAN_OPTIONS=detect_leaks=0
failed=0
for target in "$@"; do
    mkdir -p "corpus/$target" artifacts
    log=$(mktemp)
    "${CARGO_TARGET_DIR:-target}/x86_64-unknown-linux-gnu/release/$target" "corpus/$target" ${seeds[$target]} \
        -max_total_time="$seconds" -max_len=16384 -timeout=10 -detect_leaks=0 -print_final_stats=1 \
        -artifact_prefix="artifacts/$target-" >"$log" 2>&1 || {
        failed=1
        tail -40 "$log"
    }
    grep -aE 'stat::number_of_executed_units|cov:' "$log" | tail -2 | tr '\n' ' ' |
        sed -E "s/.*cov: ([0-9]+) .*units: +([0-9]+).*/$target: \2 runs, \1 edges/"
    echo
    rm "$log"
done
exit $failed
