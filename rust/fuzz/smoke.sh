#!/usr/bin/env bash
# Runs every fuzz target on the seeds and on mutations of them, with checks of overflow, by the stable compiler.
# Usage: smoke.sh [MUTATIONS]
#
# Without coverage to steer by, mutations are blind: this finds what breaks at once. run.sh looks deeper.
set -euo pipefail
cd "$(dirname "$0")"
export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true
cargo build --release --quiet
inputs=$(mktemp -d)
trap 'rm -rf "$inputs"' EXIT
python3 mutate.py "$inputs" "${1:-5000}"
for file in fuzz_targets/*.rs; do
    name=$(basename "$file" .rs)
    log=$inputs.$name
    "${CARGO_TARGET_DIR:-target}/release/$name" -runs=0 -timeout=20 -max_len=65536 "$inputs" >"$log" 2>&1 || {
        tail -40 "$log"
        exit 1
    }
    echo "$name: $(grep -ao '^#[0-9]*' "$log" | tail -1 | tr -d '#') runs"
    rm "$log"
done
