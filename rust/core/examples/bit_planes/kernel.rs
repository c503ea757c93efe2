//! The look-up product of a token, for AVX2 and AVX-512.
//!
//! A plane, a group of four columns and a register of rows cost two shuffles and two additions of bytes, and a quarter
//! of the widening: sums of bytes are added as 16-bit words, which hold `even + 256 odd` modulo 2^16, and their odd bytes
//! once more by themselves, so that both come out exactly ([`super::planes::MAX_COLUMNS`]).

// Registers of arrays, by number: as in the product's kernels, a closure would be compiled without the instructions.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::planes::{GROUP, Planes, STEP, Token};

/// Columns whose codes stay in the first cache while all planes pass over them: the best of 128, 256 and 512 on Zen 4.
const fn chunk(bits: usize) -> usize {
    if bits == 2 { 512 } else { 128 }
}

/// Most planes: those of 4 bits.
const MAX_PLANES: usize = 15;

/// A set of instructions: bytes and 16-bit words of a register. All functions require the set, and pointers that are good
/// for the bytes read or written.
trait Lanes: Copy {
    const BYTES: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
    /// A table for every lane.
    unsafe fn table(from: *const u8) -> Self;
    unsafe fn look_up(self, index: Self) -> Self;
    unsafe fn xor(self, other: Self) -> Self;
    unsafe fn low_nibbles(self) -> Self;
    unsafe fn high_nibbles(self) -> Self;
    unsafe fn add_bytes(self, other: Self) -> Self;
    unsafe fn add_words(self, other: Self) -> Self;
    unsafe fn odd_bytes(self) -> Self;
}

macro_rules! lanes {
    ($type:ty, $bytes:literal, $zero:ident, $load:ident, $store:ident, $table:ident, $shuffle:ident, $xor:ident,
     $and:ident, $splat:ident, $shift:ident, $add8:ident, $add16:ident) => {
        impl Lanes for $type {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: the processor runs the set.
                unsafe { $zero() }
            }
            #[inline(always)]
            unsafe fn load(from: *const u8) -> Self {
                // SAFETY: the processor runs the set; the pointer is the caller's.
                unsafe { $load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut u8) {
                // SAFETY: the processor runs the set; the pointer is the caller's.
                unsafe { $store(to.cast(), self) }
            }
            #[inline(always)]
            unsafe fn table(from: *const u8) -> Self {
                // SAFETY: the processor runs the set; the pointer is the caller's.
                unsafe { $table(_mm_loadu_si128(from.cast())) }
            }
            #[inline(always)]
            unsafe fn look_up(self, index: Self) -> Self {
                // SAFETY: the processor runs the set.
                unsafe { $shuffle(self, index) }
            }
            #[inline(always)]
            unsafe fn xor(self, other: Self) -> Self {
                // SAFETY: the processor runs the set.
                unsafe { $xor(self, other) }
            }
            #[inline(always)]
            unsafe fn low_nibbles(self) -> Self {
                // SAFETY: the processor runs the set.
                unsafe { $and(self, $splat(15)) }
            }
            #[inline(always)]
            unsafe fn high_nibbles(self) -> Self {
                // SAFETY: the processor runs the set.
                unsafe { $and($shift::<4>(self), $splat(15)) }
            }
            #[inline(always)]
            unsafe fn add_bytes(self, other: Self) -> Self {
                // SAFETY: the processor runs the set.
                unsafe { $add8(self, other) }
            }
            #[inline(always)]
            unsafe fn add_words(self, other: Self) -> Self {
                // SAFETY: the processor runs the set.
                unsafe { $add16(self, other) }
            }
            #[inline(always)]
            unsafe fn odd_bytes(self) -> Self {
                // SAFETY: the processor runs the set.
                unsafe { $shift::<8>(self) }
            }
        }
    };
}

lanes!(
    __m256i,
    32,
    _mm256_setzero_si256,
    _mm256_loadu_si256,
    _mm256_storeu_si256,
    _mm256_broadcastsi128_si256,
    _mm256_shuffle_epi8,
    _mm256_xor_si256,
    _mm256_and_si256,
    _mm256_set1_epi8,
    _mm256_srli_epi16,
    _mm256_add_epi8,
    _mm256_add_epi16
);
lanes!(
    __m512i,
    64,
    _mm512_setzero_si512,
    _mm512_loadu_si512,
    _mm512_storeu_si512,
    _mm512_broadcast_i32x4,
    _mm512_shuffle_epi8,
    _mm512_xor_si512,
    _mm512_and_si512,
    _mm512_set1_epi8,
    _mm512_srli_epi16,
    _mm512_add_epi8,
    _mm512_add_epi16
);

/// For each plane, of low and of high four bits of activations: words `even + 256 odd`, and words `odd`.
#[repr(align(64))]
struct Sums([[[u16; 32]; 4]; MAX_PLANES]);

/// Adds the planes of `N` masks from `FIRST` over the steps of `tables`.
///
/// # Safety
/// The processor runs the set of `V`; `codes` is good for the codes of the steps and `tables` for their tables.
#[inline(always)]
unsafe fn pass<V: Lanes, const BITS: usize, const FIRST: usize, const N: usize>(
    codes: *const u8,
    tables: &[[[u8; 16]; 2]],
    sums: &mut Sums,
) {
    // SAFETY: a step has two times `BITS` registers of codes and four pairs of tables; a plane's sums are 64 bytes each.
    unsafe {
        let mut words = [[V::zero(); 4]; N];
        for n in 0..N {
            for i in 0..4 {
                words[n][i] = V::load(sums.0[FIRST - 1 + n][i].as_ptr().cast());
            }
        }
        for step in 0..tables.len() / (STEP / GROUP) {
            let mut bytes = [[V::zero(); 2]; N];
            for pair in 0..2 {
                let at = codes.add((2 * step + pair) * BITS * V::BYTES);
                if FIRST == 1 {
                    for bit in 0..BITS {
                        let next = at.wrapping_add((chunk(BITS) / 8 * BITS + bit) * V::BYTES);
                        _mm_prefetch::<_MM_HINT_T0>(next.cast());
                    }
                }
                for half in 0..2 {
                    let table = tables.as_ptr().add(4 * step + 2 * pair + half).cast::<u8>();
                    let (low, high) = (V::table(table), V::table(table.add(16)));
                    let mut planes = [V::zero(); BITS];
                    for bit in 0..BITS {
                        let stored = V::load(at.add(bit * V::BYTES));
                        planes[bit] = if half == 0 {
                            stored.low_nibbles()
                        } else {
                            stored.high_nibbles()
                        };
                    }
                    for n in 0..N {
                        let mut index = V::zero();
                        for bit in 0..BITS {
                            if (FIRST + n) >> bit & 1 == 1 {
                                index = index.xor(planes[bit]);
                            }
                        }
                        bytes[n][0] = bytes[n][0].add_bytes(low.look_up(index));
                        bytes[n][1] = bytes[n][1].add_bytes(high.look_up(index));
                    }
                }
            }
            for n in 0..N {
                for part in 0..2 {
                    words[n][2 * part] = words[n][2 * part].add_words(bytes[n][part]);
                    words[n][2 * part + 1] = words[n][2 * part + 1].add_words(bytes[n][part].odd_bytes());
                }
            }
        }
        for n in 0..N {
            for i in 0..4 {
                words[n][i].store(sums.0[FIRST - 1 + n][i].as_mut_ptr().cast());
            }
        }
    }
}

/// A tile's outputs from its sums.
#[inline(always)]
fn finish<const HALF: usize>(planes: usize, sums: &Sums, token: &Token, parameters: &[f32], out: &mut [f32]) {
    let (first, coefficients) = parameters.split_at(4 * HALF);
    for (place, out) in out.iter_mut().enumerate() {
        *out = first[place] * token.sum - token.zero * first[2 * HALF + place];
    }
    let (even, odd) = out.split_at_mut(HALF);
    for (sums, coefficients) in sums.0[..planes].iter().zip(coefficients.chunks_exact(2 * HALF)) {
        let (for_even, for_odd) = coefficients.split_at(HALF);
        for i in 0..HALF {
            let [low, low_odd, high, high_odd] = [sums[0][i], sums[1][i], sums[2][i], sums[3][i]];
            let low = i32::from(low.wrapping_sub(low_odd << 8));
            let high = i32::from(high.wrapping_sub(high_odd << 8));
            even[i] += for_even[i] * (low + 16 * high) as f32;
            odd[i] += for_odd[i] * (i32::from(low_odd) + 16 * i32::from(high_odd)) as f32;
        }
    }
    out.iter_mut().for_each(|out| *out *= token.step);
}

macro_rules! kernel {
    ($name:ident, $type:ty, $features:literal, $half:literal,
     $two:tt, $three:tt, $four:tt) => {
        /// y = W x.
        ///
        /// # Safety
        /// The processor runs the set, and the planes' tiles are of its registers.
        #[target_feature(enable = $features)]
        pub unsafe fn $name(weights: &Planes, token: &Token, y: &mut [f32]) {
            let (bits, tile) = (weights.bits, weights.tile);
            assert!(tile == <$type>::BYTES && token.codes.len() == weights.columns);
            let codes = weights
                .codes
                .chunks_exact(tile * weights.columns / 8 * bits);
            let parameters = weights.parameters.chunks_exact(tile * ((1 << bits) + 1));
            for ((codes, parameters), out) in codes.zip(parameters).zip(y.chunks_exact_mut(tile)) {
                let mut sums = Sums([[[0; 32]; 4]; MAX_PLANES]);
                let chunks = codes.chunks(tile * chunk(bits) / 8 * bits);
                for (codes, tables) in chunks.zip(token.tables.chunks(chunk(bits) / GROUP)) {
                    match bits {
                        2 => passes!($type, 2, codes, tables, sums, $two),
                        3 => passes!($type, 3, codes, tables, sums, $three),
                        _ => passes!($type, 4, codes, tables, sums, $four),
                    }
                }
                finish::<$half>((1 << bits) - 1, &sums, token, parameters, out);
            }
        }
    };
}

macro_rules! passes {
    ($type:ty, $bits:literal, $codes:ident, $tables:ident, $sums:ident, [$($first:literal $count:literal),*]) => {{
        $(
            // SAFETY: the set is the caller's; a chunk has the codes of as many columns as its tables.
            unsafe { pass::<$type, $bits, $first, $count>($codes.as_ptr(), $tables, &mut $sums) }
        )*
    }};
}

kernel!(avx2, __m256i, "avx2", 16, [1 1, 2 2], [1 1, 2 2, 4 2, 6 2], [1 1, 2 2, 4 2, 6 2, 8 2, 10 2, 12 2, 14 2]);
kernel!(avx512, __m512i, "avx512f,avx512bw", 32, [1 3], [1 3, 4 4], [1 3, 4 4, 8 4, 12 4]);
