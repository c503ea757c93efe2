#!/usr/bin/env bash
# Runs every fuzz target for a while and says how often each ran. Usage: run.sh [SECONDS] [TARGET...]
#
# Needs a nightly compiler and cargo-fuzz, and installs what is missing. Inputs that were found are kept in libfuzzer/corpus/,
# a crash in libfuzzer/artifacts/; the exit code is 1 if there was one.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-60}
shift || true
rustup toolchain list | grep -q nightly || rustup toolchain install nightly --profile minimal
cargo fuzz --version >/dev/null 2>&1 || cargo install --quiet --locked cargo-fuzz
golden=../../tests/golden
declare -A seeds=(
    [coded_read]="$golden/groupwise"
    [coded_integers]="$golden/coded"
    [device_read]="seeds/device_read $golden/coded"
    [kernel_twins]="$golden/ternary $golden/groupwise $golden/codebook $golden/compensated $golden/coded $golden/channels"
    [tensor_changed]="seeds/tensor_changed"
    [tensor_open]="$golden/ternary $golden/groupwise $golden/codebook $golden/compensated $golden/coded $golden/channels"
    [tensor_read]="$golden/ternary $golden/groupwise $golden/codebook $golden/compensated $golden/coded $golden/channels"
    [ternary_round_trip]="$golden/ternary"
)
[ $# -gt 0 ] || set -- $(printf '%s\n' "${!seeds[@]}" | sort)
failed=0
cargo +nightly fuzz build --fuzz-dir libfuzzer --release --debug-assertions
for target in "$@"; do
    mkdir -p "libfuzzer/corpus/$target"
    log=$(mktemp)
    # The pool of the thread outlives the runs, so leaks are not looked for; ten seconds are a hang.
    cargo +nightly fuzz run --fuzz-dir libfuzzer --release --debug-assertions "$target" "libfuzzer/corpus/$target" ${seeds[$target]} -- \
        -max_total_time="$seconds" -max_len=16384 -timeout=10 -detect_leaks=0 -print_final_stats=1 >"$log" 2>&1 || {
        failed=1
        tail -40 "$log"
    }
    grep -aE 'stat::number_of_executed_units|cov:' "$log" | tail -2 | tr '\n' ' ' |
        sed -E "s/.*cov: ([0-9]+) .*units: +([0-9]+).*/$target: \2 runs, \1 edges/"
    echo
    rm "$log"
done
exit $failed
