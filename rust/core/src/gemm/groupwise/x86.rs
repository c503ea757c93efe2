//! Sixteen lanes on x86-64: AVX2 (with or without AVX-VNNI) and AVX-512 with VNNI.

use std::arch::x86_64::*;

use super::Out;
use super::cursor::Weights;
use super::kernel::{self, Kernels, kernels};
use super::lanes::Lanes;
use super::tile::{Steps, Tile};

/// Expands the codes of a block to bytes.
///
/// # Safety
/// The processor has AVX-512, and `steps` belong to `weights.layout`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn expand(weights: &Weights, steps: &Steps, to: &mut [u8]) {
    // SAFETY: the function has the features of the lanes; the caller guarantees the steps.
    unsafe { kernel::expand::<Avx512>(weights, steps, to) }
}

/// Whether AVX2 kernels use the dot products of AVX-VNNI.
pub(super) fn has_avx_vnni() -> bool {
    is_x86_feature_detected!("avxvnni")
}

macro_rules! entry {
    ($name:ident, $kernel:ident, $blocks:literal, $lanes:ty, $features:literal) => {
        /// # Safety
        /// The processor has the features, `steps` belong to `weights.layout`, and the tile belongs to `steps`.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name(
            weights: &[Weights; $blocks],
            steps: &Steps,
            tile: &Tile,
            out: &mut [Out; $blocks],
        ) {
            // SAFETY: the function has the features of the lanes; the caller guarantees steps and tile.
            unsafe { kernel::$kernel::<$lanes>(weights, steps, tile, out) }
        }
    };
}

entry!(
    compute_avx512,
    compute,
    1,
    Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);
entry!(
    pair_avx512,
    compute_pair,
    2,
    Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);
entry!(compute_avx2, compute, 1, Avx2<false>, "avx2,fma,f16c");
entry!(compute_avx_vnni, compute, 1, Avx2<true>, "avx2,fma,f16c,avxvnni");

kernels!(
    Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);
kernels!(Avx2<false>, "avx2,fma,f16c");
kernels!(Avx2<true>, "avx2,fma,f16c,avxvnni");

/// A whole block.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

impl Lanes for Avx512 {
    type Int = __m512i;
    type Float = __m512;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn int_zero() -> __m512i {
        _mm512_setzero_si512()
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const u8) -> __m512i {
        // SAFETY: the caller guarantees 64 readable bytes at `from`.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn shift(words: __m512i, shift: u32) -> __m512i {
        _mm512_srl_epi32(words, _mm_cvtsi32_si128(shift as i32))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn mask(words: __m512i, mask: u32) -> __m512i {
        _mm512_and_si512(words, _mm512_set1_epi32(mask as i32))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn blend(low: __m512i, high: __m512i, mask: u32) -> __m512i {
        _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi32(mask as i32), low, high)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_int(words: __m512i, to: *mut u8) {
        // SAFETY: the caller guarantees 64 writable bytes at `to`.
        unsafe { _mm512_storeu_si512(to.cast(), words) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn int_add(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn dot<const BITS: usize>(sum: __m512i, codes: __m512i, x: *const i32) -> __m512i {
        // SAFETY: the caller guarantees a readable word at `x`.
        unsafe { _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(x.read_unaligned())) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn to_float(words: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(words)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn zero() -> __m512 {
        _mm512_setzero_ps()
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn broadcast(from: *const f32) -> __m512 {
        // SAFETY: the caller guarantees a readable float at `from`.
        unsafe { _mm512_set1_ps(from.read_unaligned()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_f16(from: *const u8) -> __m512 {
        // SAFETY: the caller guarantees 32 readable bytes at `from`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_bf16(from: *const u8) -> __m512 {
        // SAFETY: the caller guarantees 32 readable bytes at `from`.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add_product(sum: __m512, a: __m512, b: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, sum)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(values: __m512, to: *mut f32) {
        // SAFETY: the caller guarantees 64 writable bytes at `to`.
        unsafe { _mm512_storeu_ps(to, values) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// The AVX2 registers of 16 lanes.
const PARTS: usize = 2;

/// An array of an expression's values for each register's index. Not a closure, which would lack the instruction set
/// of its caller: if it is not inlined, each intrinsic becomes a call.
macro_rules! parts {
    (|$i:ident| $value:expr) => {
        [
            {
                let $i = 0;
                $value
            },
            {
                let $i = 1;
                $value
            },
        ]
    };
}

/// A whole block, with the dot product of AVX-VNNI or with multiplications of bytes into 16 bits. Both registers
/// share each broadcast of activations, and a cache line is read once.
///
/// Its operations are always inlined. As `#[target_feature]` functions, which are inlined later, they made exact products
/// of 8 and 16 tokens with 2 to 4 bits 1.1 to 1.2 times as slow (one thread of Zen 5).
#[derive(Clone, Copy)]
struct Avx2<const VNNI: bool>;

impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    const CHAINS: bool = VNNI;
    type Int = [__m256i; PARTS];
    type Float = [__m256; PARTS];

    #[inline(always)]
    unsafe fn int_zero() -> Self::Int {
        // SAFETY: the caller guarantees AVX2.
        [unsafe { _mm256_setzero_si256() }; PARTS]
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self::Int {
        // SAFETY: the caller guarantees AVX2 and 64 readable bytes at `from`.
        parts!(|i| unsafe { _mm256_loadu_si256(from.add(32 * i).cast()) })
    }
    #[inline(always)]
    unsafe fn shift(words: Self::Int, shift: u32) -> Self::Int {
        // SAFETY: the caller guarantees AVX2.
        parts!(|i| unsafe { _mm256_srl_epi32(words[i], _mm_cvtsi32_si128(shift as i32)) })
    }
    #[inline(always)]
    unsafe fn mask(words: Self::Int, mask: u32) -> Self::Int {
        // SAFETY: the caller guarantees AVX2.
        parts!(|i| unsafe { _mm256_and_si256(words[i], _mm256_set1_epi32(mask as i32)) })
    }
    #[inline(always)]
    unsafe fn blend(low: Self::Int, high: Self::Int, mask: u32) -> Self::Int {
        // SAFETY: the caller guarantees AVX2.
        parts!(|i| unsafe {
            let mask = _mm256_set1_epi32(mask as i32);
            _mm256_or_si256(_mm256_and_si256(mask, low[i]), _mm256_andnot_si256(mask, high[i]))
        })
    }
    #[inline(always)]
    unsafe fn store_int(words: Self::Int, to: *mut u8) {
        for (i, words) in words.into_iter().enumerate() {
            // SAFETY: the caller guarantees AVX2 and 64 writable bytes at `to`.
            unsafe { _mm256_storeu_si256(to.add(32 * i).cast(), words) }
        }
    }
    #[inline(always)]
    unsafe fn int_add(a: Self::Int, b: Self::Int) -> Self::Int {
        // SAFETY: the caller guarantees AVX2.
        parts!(|i| unsafe { _mm256_add_epi32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn begin<const BITS: usize>(sum: Self::Int) -> Self::Int {
        match sums_pairs::<VNNI, BITS>() {
            // SAFETY: the caller guarantees AVX2.
            true => unsafe { Self::int_zero() },
            false => sum,
        }
    }
    #[inline(always)]
    unsafe fn dot<const BITS: usize>(sum: Self::Int, codes: Self::Int, x: *const i32) -> Self::Int {
        // SAFETY: the caller guarantees AVX2, AVX-VNNI if `VNNI`, and a readable word at `x`.
        parts!(|i| unsafe {
            let x = _mm256_set1_epi32(x.read_unaligned());
            if VNNI {
                _mm256_dpbusd_avx_epi32(sum[i], codes[i], x)
            } else if BITS < 8 {
                _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(codes[i], x))
            } else {
                // 2 * 255 * 128 would saturate, so codes are split into halves of four bits.
                let (mask, shifted) = (_mm256_set1_epi8(15), _mm256_srli_epi32::<4>(codes[i]));
                let low = _mm256_maddubs_epi16(_mm256_and_si256(codes[i], mask), x);
                let high = _mm256_maddubs_epi16(_mm256_and_si256(shifted, mask), x);
                let low = _mm256_madd_epi16(low, _mm256_set1_epi16(1));
                let high = _mm256_madd_epi16(high, _mm256_set1_epi16(16));
                _mm256_add_epi32(sum[i], _mm256_add_epi32(low, high))
            }
        })
    }
    #[inline(always)]
    unsafe fn end<const BITS: usize>(sum: Self::Int, dots: Self::Int) -> Self::Int {
        if !sums_pairs::<VNNI, BITS>() {
            return dots;
        }
        // SAFETY: the caller guarantees AVX2.
        parts!(|i| unsafe { _mm256_add_epi32(sum[i], _mm256_madd_epi16(dots[i], _mm256_set1_epi16(1))) })
    }
    #[inline(always)]
    unsafe fn to_float(words: Self::Int) -> Self::Float {
        // SAFETY: the caller guarantees AVX2.
        parts!(|i| unsafe { _mm256_cvtepi32_ps(words[i]) })
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Float {
        // SAFETY: the caller guarantees AVX2.
        [unsafe { _mm256_setzero_ps() }; PARTS]
    }
    #[inline(always)]
    unsafe fn broadcast(from: *const f32) -> Self::Float {
        // SAFETY: the caller guarantees AVX2 and a readable float at `from`.
        [unsafe { _mm256_set1_ps(from.read_unaligned()) }; PARTS]
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self::Float {
        // SAFETY: the caller guarantees AVX2, F16C and 32 readable bytes at `from`.
        parts!(|i| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.add(16 * i).cast())) })
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self::Float {
        // SAFETY: the caller guarantees AVX2 and 32 readable bytes at `from`.
        parts!(|i| unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16 * i).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: the caller guarantees AVX2.
        parts!(|i| unsafe { _mm256_mul_ps(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn add_product(sum: Self::Float, a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: the caller guarantees AVX2 and FMA.
        parts!(|i| unsafe { _mm256_fmadd_ps(a[i], b[i], sum[i]) })
    }
    #[inline(always)]
    unsafe fn store(values: Self::Float, to: *mut f32) {
        for (i, values) in values.into_iter().enumerate() {
            // SAFETY: the caller guarantees AVX2 and 64 writable bytes at `to`.
            unsafe { _mm256_storeu_ps(to.add(8 * i), values) }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// Whether products of bytes add up in 16 bits over a unit: for codes below 16 they are at most 8 quads * 2 * 15 *
/// 128 = 30,720 in magnitude.
const fn sums_pairs<const VNNI: bool, const BITS: usize>() -> bool {
    !VNNI && BITS < 8
}
