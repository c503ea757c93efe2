#!/usr/bin/env bash
# Runs every fuzz target on its seeds and on some mutations of them, with checks of overflow, by the stable compiler.
#
# Without coverage to steer by, mutations are blind: this finds what breaks at once. run.sh looks deeper.
set -euo pipefail
cd "$(dirname "$0")"
export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true
cargo build --release --quiet
target=${CARGO_TARGET_DIR:-target}
for file in fuzz_targets/*.rs; do
    name=$(basename "$file" .rs)
    log=$(mktemp)
    "$target/release/$name" -runs=3000 -max_len=16384 -timeout=20 -detect_leaks=0 \
        seeds/* ../../tests/golden/{ternary,groupwise,codebook,compensated,coded} >"$log" 2>&1 || {
        tail -40 "$log"
        exit 1
    }
    grep -a "^Done" "$log" | sed "s/^/$name: /"
    rm "$log"
done
