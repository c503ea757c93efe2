//! AVX-512 with VBMI and VBMI2: one register at a time; tables are looked up by byte permutations.

#![allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.

use std::arch::x86_64::*;

use super::chain::Chain;
use crate::formats::coded::register::Register;
use crate::formats::coded::{LANES, QUAD};

/// The positions of the low bytes of words in two vectors that result from interleaving the low and high halves of
/// each 16 bytes: byte i of a lane of 16 is word i of the first vector's lane for i < 8, otherwise word i - 8 of the
/// second's.
pub(super) const LOW: Register = {
    let mut positions = [0; LANES];
    let mut i = 0;
    while i < LANES {
        let (lane, byte) = (i / 16 * 16, i % 16);
        positions[i] = (if byte < 8 {
            lane + 2 * byte
        } else {
            LANES + lane + 2 * (byte - 8)
        }) as u8;
        i += 1;
    }
    Register(positions)
};

/// See [`super::decode`].
///
/// # Safety
/// The processor has the features; `out` has room for all registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(super) unsafe fn decode(chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    let (mut chains, mut out) = (chains, out);
    while !chains.is_empty() {
        let count = [8, 4, 2, 1].into_iter().find(|&n| n <= chains.len()).unwrap_or(1);
        let (some, other) = chains.split_at_mut(count);
        let (target, behind) = out.split_at_mut(count * registers);
        // SAFETY: the caller checked the processor; there are `N` chains, and `target` has room for the registers of
        // each.
        unsafe {
            match (count, some.iter().any(|chain| chain.table.wide)) {
                (8, false) => run::<8, false>(some, registers, target),
                (8, true) => run::<8, true>(some, registers, target),
                (4, false) => run::<4, false>(some, registers, target),
                (4, true) => run::<4, true>(some, registers, target),
                (2, false) => run::<2, false>(some, registers, target),
                (2, true) => run::<2, true>(some, registers, target),
                (_, false) => run::<1, false>(some, registers, target),
                (_, true) => run::<1, true>(some, registers, target),
            }
        }
        (chains, out) = (other, behind);
    }
}

/// Decodes `N` chains.
///
/// # Safety
/// The processor has the features; there are `N` chains, and `N * registers` registers in `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
unsafe fn run<const N: usize, const WIDE: bool>(
    chains: &mut [Chain],
    registers: usize,
    out: &mut [Register],
) {
    let chains: &mut [Chain; N] = chains.try_into().expect("the caller passes N chains");
    let mut high = [_mm512_setzero_si512(); N];
    let mut low = high;
    for i in 0..N {
        // SAFETY: a register has 64 bytes and is aligned.
        unsafe {
            high[i] = _mm512_load_si512(chains[i].high.0.as_ptr().cast());
            low[i] = _mm512_load_si512(chains[i].low.0.as_ptr().cast());
        }
    }
    let active: [u64; N] =
        std::array::from_fn(|i| u64::MAX.unbounded_shr((LANES - chains[i].rows * QUAD) as u32));
    let mut at: [usize; N] = std::array::from_fn(|i| chains[i].at);
    for register in 0..registers {
        for i in 0..N {
            let chain = &chains[i];
            // SAFETY: `at <= length`, and 64 bytes follow the chain's `length` bytes; `out` has the register.
            unsafe {
                let bytes = _mm512_loadu_si512(chain.bytes.as_ptr().add(at[i]).cast());
                let (symbols, read) = next::<WIDE>(chain, &mut high[i], &mut low[i], active[i], bytes);
                _mm512_store_si512(out.as_mut_ptr().add(i * registers + register).cast(), symbols);
                at[i] = (at[i] + read).min(chain.length);
            }
        }
    }
    for i in 0..N {
        chains[i].at = at[i];
        // SAFETY: a register has 64 bytes and is aligned.
        unsafe {
            _mm512_store_si512(chains[i].high.0.as_mut_ptr().cast(), high[i]);
            _mm512_store_si512(chains[i].low.0.as_mut_ptr().cast(), low[i]);
        }
    }
}

/// Decodes a register; returns its symbols and the number of bytes read.
///
/// # Safety
/// The processor has the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
unsafe fn next<const WIDE: bool>(
    chain: &Chain,
    high: &mut __m512i,
    low: &mut __m512i,
    active: u64,
    bytes: __m512i,
) -> (__m512i, usize) {
    let table = chain.table;
    // SAFETY: the table's arrays have at least as many bytes as are read.
    let (symbols, frequencies, starts, low_positions) = unsafe {
        let part = |i: usize| _mm512_loadu_si512(table.symbols.as_ptr().add(i * LANES).cast());
        let lower = _mm512_permutex2var_epi8(part(0), *low, part(1));
        let upper = _mm512_permutex2var_epi8(part(2), *low, part(3));
        let symbols = _mm512_mask_mov_epi8(lower, _mm512_movepi8_mask(*low), upper);
        let look_up =
            |of: &[u8; LANES]| _mm512_permutexvar_epi8(symbols, _mm512_loadu_si512(of.as_ptr().cast()));
        let positions = _mm512_load_si512(LOW.0.as_ptr().cast());
        (
            symbols,
            look_up(&table.frequencies),
            look_up(&table.starts),
            positions,
        )
    };
    let rest = _mm512_sub_epi8(*low, starts);
    let [first, second] = states::<WIDE>(*high, frequencies, rest);
    let low_bytes = _mm512_permutex2var_epi8(first, low_positions, second);
    let high_positions = _mm512_or_si512(low_positions, _mm512_set1_epi8(1));
    let high_bytes = _mm512_permutex2var_epi8(first, high_positions, second);
    let short = _mm512_mask_testn_epi8_mask(active, high_bytes, high_bytes);
    *high = _mm512_mask_mov_epi8(high_bytes, short, low_bytes);
    *low = _mm512_mask_expand_epi8(low_bytes, short, bytes);
    (symbols, short.count_ones() as usize)
}

/// The new states `high * frequencies + rest` as words, of the low and the high half of each 16 lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
fn states<const WIDE: bool>(high: __m512i, frequencies: __m512i, rest: __m512i) -> [__m512i; 2] {
    if !WIDE {
        let one = _mm512_set1_epi8(1);
        return [
            _mm512_maddubs_epi16(
                _mm512_unpacklo_epi8(high, one),
                _mm512_unpacklo_epi8(frequencies, rest),
            ),
            _mm512_maddubs_epi16(
                _mm512_unpackhi_epi8(high, one),
                _mm512_unpackhi_epi8(frequencies, rest),
            ),
        ];
    }
    let zero = _mm512_setzero_si512();
    let words = |high, frequencies, rest| _mm512_add_epi16(_mm512_mullo_epi16(high, frequencies), rest);
    [
        words(
            _mm512_unpacklo_epi8(high, zero),
            _mm512_unpacklo_epi8(frequencies, zero),
            _mm512_unpacklo_epi8(rest, zero),
        ),
        words(
            _mm512_unpackhi_epi8(high, zero),
            _mm512_unpackhi_epi8(frequencies, zero),
            _mm512_unpackhi_epi8(rest, zero),
        ),
    ]
}
