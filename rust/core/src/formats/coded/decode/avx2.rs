//! AVX2: half a register at a time. The symbol of a slot is that of its bucket's first slot and one more for each edge
//! that the slot is behind: one edge of each bucket is looked up, all others are compared with one after the other.

#![allow(clippy::needless_range_loop)] // Registers in arrays: an index says best which.

use std::arch::x86_64::*;

use super::{Chain, Register};
use crate::formats::coded::table::BUCKET;
use crate::formats::coded::{LANES, QUAD};

/// For each mask of eight bytes the positions that spread so many bytes over it, 0x80 elsewhere.
static SPREAD: [[u8; 8]; 256] = {
    let mut spread = [[0x80; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut bit, mut next) = (0, 0);
        while bit < 8 {
            if mask >> bit & 1 == 1 {
                spread[mask][bit] = next;
                next += 1;
            }
            bit += 1;
        }
        mask += 1;
    }
    spread
};

/// See [`super::decode`].
///
/// # Safety
/// The processor has the features; `out` has room for all registers.
#[target_feature(enable = "avx2,popcnt")]
pub(super) unsafe fn decode(chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    let (mut chains, mut out) = (chains, out);
    while !chains.is_empty() {
        let count = if chains.len() >= SIDE { SIDE } else { 1 };
        let (some, other) = chains.split_at_mut(count);
        let (target, behind) = out.split_at_mut(count * registers);
        let wide = some.iter().any(|chain| chain.table.wide);
        let symbols = some.iter().map(|chain| chain.table.count).max().unwrap_or(0);
        // SAFETY: the caller's processor; there are so many chains, and as many times the registers in `target`.
        unsafe {
            match (symbols.div_ceil(BUCKET), wide) {
                (..=1, false) => some_or_one::<1, false>(some, registers, target),
                (..=1, true) => some_or_one::<1, true>(some, registers, target),
                (2, false) => some_or_one::<2, false>(some, registers, target),
                (2, true) => some_or_one::<2, true>(some, registers, target),
                (_, false) => some_or_one::<4, false>(some, registers, target),
                (_, true) => some_or_one::<4, true>(some, registers, target),
            }
        }
        (chains, out) = (other, behind);
    }
}

/// Chains that are decoded side by side.
const SIDE: usize = 2;

/// Decodes [`SIDE`] chains, or one.
///
/// # Safety
/// As of [`run`], for the chains that there are.
#[target_feature(enable = "avx2,popcnt")]
unsafe fn some_or_one<const BANKS: usize, const WIDE: bool>(
    chains: &mut [Chain],
    registers: usize,
    out: &mut [Register],
) {
    // SAFETY: the caller's.
    unsafe {
        match chains.len() {
            SIDE => run::<SIDE, BANKS, WIDE>(chains, registers, out),
            _ => run::<1, BANKS, WIDE>(chains, registers, out),
        }
    }
}

/// Decodes `N` chains whose tables have at most `16 * BANKS` symbols.
///
/// # Safety
/// The processor has the features; there are `N` chains, and `N * registers` registers in `out`.
#[target_feature(enable = "avx2,popcnt")]
unsafe fn run<const N: usize, const BANKS: usize, const WIDE: bool>(
    chains: &mut [Chain],
    registers: usize,
    out: &mut [Register],
) {
    let chains: &mut [Chain; N] = chains.try_into().expect("the caller gives N chains");
    let mut high = [[_mm256_setzero_si256(); 2]; N];
    let (mut low, mut active) = (high, high);
    for (i, half) in (0..N).flat_map(|i| [(i, 0), (i, 1)]) {
        // SAFETY: a register has 64 bytes and is aligned.
        unsafe {
            high[i][half] = _mm256_load_si256(chains[i].high.0.as_ptr().cast::<__m256i>().add(half));
            low[i][half] = _mm256_load_si256(chains[i].low.0.as_ptr().cast::<__m256i>().add(half));
            let lanes = Register(std::array::from_fn(|lane| lane as u8));
            let lanes = _mm256_load_si256(lanes.0.as_ptr().cast::<__m256i>().add(half));
            active[i][half] = _mm256_cmpgt_epi8(_mm256_set1_epi8((chains[i].rows * QUAD) as i8), lanes);
        }
    }
    let mut at: [usize; N] = std::array::from_fn(|i| chains[i].at);
    for register in 0..registers {
        for i in 0..N {
            let chain = &chains[i];
            let mut read = 0;
            for half in 0..2 {
                // SAFETY: `at <= length`, and 64 bytes follow the chain's `length` bytes, of which each half takes at
                // most 32; `out` has the register.
                unsafe {
                    let bytes = chain.bytes.as_ptr().add(at[i] + read);
                    let (symbols, taken) = next::<BANKS, WIDE>(
                        chain,
                        &mut high[i][half],
                        &mut low[i][half],
                        active[i][half],
                        bytes,
                    );
                    let to: *mut Register = out.as_mut_ptr().add(i * registers + register);
                    _mm256_store_si256(to.cast::<__m256i>().add(half), symbols);
                    read += taken;
                }
            }
            at[i] = (at[i] + read).min(chain.length);
        }
    }
    for (i, half) in (0..N).flat_map(|i| [(i, 0), (i, 1)]) {
        chains[i].at = at[i];
        // SAFETY: a register has 64 bytes and is aligned.
        unsafe {
            _mm256_store_si256(
                chains[i].high.0.as_mut_ptr().cast::<__m256i>().add(half),
                high[i][half],
            );
            _mm256_store_si256(
                chains[i].low.0.as_mut_ptr().cast::<__m256i>().add(half),
                low[i][half],
            );
        }
    }
}

/// Decodes half a register: its symbols, and how many bytes it took.
///
/// # Safety
/// The processor has the features; 32 bytes at `bytes` are readable; the table has at most `16 * BANKS` symbols.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
unsafe fn next<const BANKS: usize, const WIDE: bool>(
    chain: &Chain,
    high: &mut __m256i,
    low: &mut __m256i,
    active: __m256i,
    bytes: *const u8,
) -> (__m256i, usize) {
    let table = chain.table;
    // SAFETY: the table's arrays have 16 bytes, or 16 for each bank.
    let (symbols, frequencies, starts) = unsafe {
        let bucket = _mm256_and_si256(_mm256_srli_epi16::<4>(*low), _mm256_set1_epi8(15));
        let slot = _mm256_xor_si256(*low, _mm256_set1_epi8(-128));
        let edge = _mm256_shuffle_epi8(bank(&table.first_edges, 0), bucket);
        let base = _mm256_shuffle_epi8(bank(&table.bases, 0), bucket);
        let mut symbols = _mm256_sub_epi8(base, _mm256_cmpgt_epi8(slot, edge));
        for &edge in &table.edges {
            symbols = _mm256_sub_epi8(symbols, _mm256_cmpgt_epi8(slot, _mm256_set1_epi8(edge as i8)));
        }
        let look_up = |of: &[u8; LANES]| {
            let mut found = _mm256_shuffle_epi8(bank(of, 0), symbols);
            for i in 1..BANKS {
                let above = _mm256_cmpgt_epi8(symbols, _mm256_set1_epi8((BUCKET * i) as i8 - 1));
                found = _mm256_blendv_epi8(found, _mm256_shuffle_epi8(bank(of, i), symbols), above);
            }
            found
        };
        (symbols, look_up(&table.frequencies), look_up(&table.starts))
    };
    let rest = _mm256_sub_epi8(*low, starts);
    let [first, second] = states::<WIDE>(*high, frequencies, rest);
    let byte = _mm256_set1_epi16(255);
    let low_bytes = _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte));
    let high_bytes = _mm256_packus_epi16(_mm256_srli_epi16::<8>(first), _mm256_srli_epi16::<8>(second));
    let short = _mm256_and_si256(_mm256_cmpeq_epi8(high_bytes, _mm256_setzero_si256()), active);
    // SAFETY: the caller's bytes.
    let (spread, taken) = unsafe { spread(_mm256_movemask_epi8(short) as u32, bytes) };
    *high = _mm256_blendv_epi8(high_bytes, low_bytes, short);
    *low = _mm256_blendv_epi8(low_bytes, spread, short);
    (symbols, taken)
}

/// The new states `high * frequencies + rest` as words, of the low and of the high half of each 16 lanes.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn states<const WIDE: bool>(high: __m256i, frequencies: __m256i, rest: __m256i) -> [__m256i; 2] {
    if !WIDE {
        let one = _mm256_set1_epi8(1);
        return [
            _mm256_maddubs_epi16(
                _mm256_unpacklo_epi8(high, one),
                _mm256_unpacklo_epi8(frequencies, rest),
            ),
            _mm256_maddubs_epi16(
                _mm256_unpackhi_epi8(high, one),
                _mm256_unpackhi_epi8(frequencies, rest),
            ),
        ];
    }
    let zero = _mm256_setzero_si256();
    let words = |high, frequencies, rest| _mm256_add_epi16(_mm256_mullo_epi16(high, frequencies), rest);
    [
        words(
            _mm256_unpacklo_epi8(high, zero),
            _mm256_unpacklo_epi8(frequencies, zero),
            _mm256_unpacklo_epi8(rest, zero),
        ),
        words(
            _mm256_unpackhi_epi8(high, zero),
            _mm256_unpackhi_epi8(frequencies, zero),
            _mm256_unpackhi_epi8(rest, zero),
        ),
    ]
}

/// Sixteen bytes of a table in both halves.
///
/// # Safety
/// The processor has AVX2, and the table has `16 * (i + 1)` bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn bank<const N: usize>(table: &[u8; N], i: usize) -> __m256i {
    // SAFETY: the caller's table.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().add(BUCKET * i).cast())) }
}

/// The next bytes, spread over the set bits of a mask, and how many they are.
///
/// # Safety
/// The processor has the features, and 32 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
unsafe fn spread(mask: u32, bytes: *const u8) -> (__m256i, usize) {
    // SAFETY: before eight lanes at most as many bytes have been taken as there are lanes before them, at most 24.
    let (sources, positions) = unsafe {
        let source = |lanes: u32| {
            let before = mask & ((1 << lanes) - 1);
            _mm_loadl_epi64(bytes.add(before.count_ones() as usize).cast())
        };
        let position = |lanes: u32| _mm_loadl_epi64(SPREAD[(mask >> lanes & 255) as usize].as_ptr().cast());
        let pair = |low, high| _mm_unpacklo_epi64(low, high);
        (
            _mm256_set_m128i(pair(source(16), source(24)), pair(source(0), source(8))),
            _mm256_set_m128i(pair(position(16), position(24)), pair(position(0), position(8))),
        )
    };
    let upper = _mm256_set_epi64x(0x0808_0808_0808_0808, 0, 0x0808_0808_0808_0808, 0);
    let spread = _mm256_shuffle_epi8(sources, _mm256_add_epi8(positions, upper));
    (spread, mask.count_ones() as usize)
}
