//! AVX-512 with VBMI and VBMI2: one register at a time; tables are looked up by byte permutations.

#![allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.

use std::arch::x86_64::*;

use super::chain::Chain;
use crate::formats::coded::register::Register;
use crate::formats::coded::{LANES, QUAD};

/// See [`super::decode`].
///
/// # Safety
/// The processor has the features; `out` has room for all registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(super) unsafe fn decode(chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    let (mut chains, mut out) = (chains, out);
    while !chains.is_empty() {
        let count = chains.len().min(8);
        let (some, other) = chains.split_at_mut(count);
        let (target, behind) = out.split_at_mut(count * registers);
        // SAFETY: the caller checked the processor; there are `N` chains, and `target` has room for the registers of
        // each.
        unsafe {
            let wide = some.iter().any(|chain| chain.table.wide);
            match count {
                8 => of_width::<8>(wide, some, registers, target),
                7 => of_width::<7>(wide, some, registers, target),
                6 => of_width::<6>(wide, some, registers, target),
                5 => of_width::<5>(wide, some, registers, target),
                4 => of_width::<4>(wide, some, registers, target),
                3 => of_width::<3>(wide, some, registers, target),
                2 => of_width::<2>(wide, some, registers, target),
                _ => of_width::<1>(wide, some, registers, target),
            }
        }
        (chains, out) = (other, behind);
    }
}

/// Decodes `N` chains; `wide` as for [`states`].
///
/// # Safety
/// As for [`run`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
unsafe fn of_width<const N: usize>(wide: bool, chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match wide {
            true => run::<N, true>(chains, registers, out),
            false => run::<N, false>(chains, registers, out),
        }
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
    let (symbols, frequencies, starts) = unsafe {
        let part = |i: usize| _mm512_loadu_si512(table.symbols.as_ptr().add(i * LANES).cast());
        let lower = _mm512_permutex2var_epi8(part(0), *low, part(1));
        let upper = _mm512_permutex2var_epi8(part(2), *low, part(3));
        let symbols = _mm512_mask_mov_epi8(lower, _mm512_movepi8_mask(*low), upper);
        let look_up =
            |of: &[u8; LANES]| _mm512_permutexvar_epi8(symbols, _mm512_loadu_si512(of.as_ptr().cast()));
        (symbols, look_up(&table.frequencies), look_up(&table.starts))
    };
    let rest = _mm512_sub_epi8(*low, starts);
    let [high_bytes, low_bytes] = states::<WIDE>(*high, frequencies, rest);
    let short = _mm512_mask_testn_epi8_mask(active, high_bytes, high_bytes);
    *high = _mm512_mask_mov_epi8(high_bytes, short, low_bytes);
    *low = _mm512_mask_expand_epi8(low_bytes, short, bytes);
    (symbols, short.count_ones() as usize)
}

/// The high and the low bytes of the new states `high * frequencies + rest`. Even and odd lanes are multiplied
/// separately, which takes no shuffles: those have one port on Intel's processors, which the look-ups occupy.
///
/// The multiplication takes frequencies as signed; `WIDE` corrects the products of those above 127.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
fn states<const WIDE: bool>(high: __m512i, frequencies: __m512i, rest: __m512i) -> [__m512i; 2] {
    const ODD: u64 = 0xaaaa_aaaa_aaaa_aaaa;
    // One of the two products of each word is zero, and 255 * -128 and 255 * 127 fit.
    let even = _mm512_maddubs_epi16(high, _mm512_maskz_mov_epi8(!ODD, frequencies));
    let odd = _mm512_maddubs_epi16(high, _mm512_maskz_mov_epi8(ODD, frequencies));
    let even = _mm512_add_epi16(even, _mm512_maskz_mov_epi8(!ODD, rest));
    let odd = _mm512_add_epi16(odd, _mm512_srli_epi16::<8>(rest));
    let mut upper = _mm512_mask_mov_epi8(_mm512_srli_epi16::<8>(even), ODD, odd);
    if WIDE {
        // A frequency f above 127 has been taken as f - 256, so 256 times the high byte is missing.
        upper = _mm512_mask_add_epi8(upper, _mm512_movepi8_mask(frequencies), upper, high);
    }
    [
        upper,
        _mm512_mask_mov_epi8(even, ODD, _mm512_slli_epi16::<8>(odd)),
    ]
}
