//! Panels of weights rounded to bf16.
//!
//! A weight is `scale * code + offset`. Scale times code is exact in f32, so the sum is rounded to f32 once and then
//! to bf16, to nearest. AVX-512 inserts a code into the mantissa of a float, 256 + code, and computes `scale * (256 +
//! code) + (offset - 256 * scale)`. The result is the same unless the offset is below a 64th of the scale; the error
//! of the last term is then at most 2^-16 of the scale.

use super::part::{Part, QUADS};
use crate::bits::{UNIT, place};
use crate::formats::groupwise::REGISTER_BYTES;
use crate::gemm::panel::{LANES, Line, pair};
use crate::simd::Isa;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;

/// Decodes units (a chunk of bf16 each) into lines of neighbouring columns.
pub(super) fn decode(isa: Isa, part: &Part, to: &mut [Line]) {
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX-512, and bf16 has been detected.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 if is_x86_feature_detected!("avx512bf16") => unsafe { x86::avx512(part, to) },
        // SAFETY: `isa` proves that the processor has AVX2, which both sets include.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 | Kind::Avx512 => unsafe { x86::avx2(part, to) },
        _ => portable(part, to),
    }
}

/// Decodes with portable loops over the rows.
#[inline(always)]
fn portable(part: &Part, to: &mut [Line]) {
    let bits = part.layout.bits();
    let mut parameters = (usize::MAX, [[0.0; LANES]; 2]);
    for (unit, lines) in part.units.clone().zip(to.as_chunks_mut::<LANES>().0) {
        let registers = part.registers(unit);
        for quad in 0..QUADS {
            let group = part.group(unit * UNIT + 4 * quad);
            if group != parameters.0 {
                parameters = (group, part.parameters(group));
            }
            let codes = quad_codes(bits, registers, quad);
            let value = |byte: u32, i: usize| {
                let code = codes[i] >> (8 * byte) & 0xff;
                parameters.1[0][i] * code as f32 + parameters.1[1][i]
            };
            lines[2 * quad] = Line(std::array::from_fn(|i| pair(value(0, i), value(1, i))));
            lines[2 * quad + 1] = Line(std::array::from_fn(|i| pair(value(2, i), value(3, i))));
        }
    }
}

/// Four codes of each row, one byte each.
#[inline(always)]
fn quad_codes(bits: usize, registers: &[[u8; REGISTER_BYTES]], quad: usize) -> [u32; LANES] {
    let (word, shift) = place(bits, quad);
    let read = |word: usize, i: usize| u32::from_le_bytes(registers[word].as_chunks::<4>().0[i]);
    match (bits, quad) {
        (3, 6 | 7) => std::array::from_fn(|i| {
            read(word, i) >> 6 & 0x0303_0303 | (read(2, i) >> quad & 0x0101_0101) << 2
        }),
        _ => {
            let mask = 0x0101_0101 * ((1u32 << bits) - 1);
            std::array::from_fn(|i| read(word, i) >> shift & mask)
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.
mod x86 {
    use std::arch::x86_64::*;

    use super::*;

    /// The prefetch distance of codes, in bytes.
    const AHEAD: usize = 1536;

    #[target_feature(enable = "avx2")]
    pub fn avx2(part: &Part, to: &mut [Line]) {
        match part.layout.bits() {
            2 => decode_by_eight::<2>(part, to),
            3 => decode_by_eight::<3>(part, to),
            4 => decode_by_eight::<4>(part, to),
            _ => decode_by_eight::<8>(part, to),
        }
    }

    /// The bits of eight values rounded to bf16 like [`pair`].
    #[inline]
    #[target_feature(enable = "avx2")]
    fn rounded(values: __m256) -> __m256i {
        let bits = _mm256_castps_si256(values);
        let high = _mm256_srli_epi32::<16>(bits);
        let half = _mm256_add_epi32(
            _mm256_set1_epi32(0x7fff),
            _mm256_and_si256(high, _mm256_set1_epi32(1)),
        );
        let nearest = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
        let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        _mm256_blendv_epi8(nearest, quiet, is_nan)
    }

    /// Four codes, one byte each, of the rows in half `half` of a unit's registers.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn codes_of_eight<const BITS: usize>(
        registers: &[[u8; REGISTER_BYTES]],
        quad: usize,
        half: usize,
    ) -> __m256i {
        let load = |word: usize| {
            let bytes = &registers[word][half * REGISTER_BYTES / 2..][..REGISTER_BYTES / 2];
            // SAFETY: half of a register has 32 bytes; the load needs no alignment.
            unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
        };
        let shift = |words, count: u32| _mm256_srl_epi32(words, _mm_cvtsi32_si128(count as i32));
        let (word, low) = place(BITS, quad);
        match (BITS, quad) {
            (3, 6 | 7) => {
                let low = _mm256_and_si256(shift(load(word), 6), _mm256_set1_epi32(0x0303_0303));
                let high = _mm256_and_si256(shift(load(2), quad as u32), _mm256_set1_epi32(0x0101_0101));
                _mm256_or_si256(low, _mm256_slli_epi32::<2>(high))
            }
            (8, _) => load(word),
            _ => _mm256_and_si256(
                shift(load(word), low),
                _mm256_set1_epi32(0x0101_0101 * ((1 << BITS) - 1)),
            ),
        }
    }

    /// Decodes eight rows at a time, with the operations of [`portable`].
    #[target_feature(enable = "avx2")]
    fn decode_by_eight<const BITS: usize>(part: &Part, to: &mut [Line]) {
        let (mut last, mut parameters) = (usize::MAX, [[0.0; LANES]; 2]);
        for (unit, lines) in part.units.clone().zip(to.as_chunks_mut::<LANES>().0) {
            let registers = part.registers(unit);
            for place in 0..2 * QUADS {
                let (quad, half) = (place / 2, place % 2);
                let group = part.group(unit * UNIT + 4 * quad);
                if group != last {
                    (last, parameters) = (group, part.parameters(group));
                }
                // SAFETY: eight of a parameter's 16 values follow the offset.
                let [scales, offsets] = unsafe {
                    [
                        _mm256_loadu_ps(parameters[0].as_ptr().add(8 * half)),
                        _mm256_loadu_ps(parameters[1].as_ptr().add(8 * half)),
                    ]
                };
                let codes = codes_of_eight::<BITS>(registers, quad, half);
                let mut values = [_mm256_setzero_si256(); 4];
                for byte in 0..4 {
                    let code = _mm256_srl_epi32(codes, _mm_cvtsi32_si128(8 * byte as i32));
                    let code = _mm256_cvtepi32_ps(_mm256_and_si256(code, _mm256_set1_epi32(0xff)));
                    values[byte] = rounded(_mm256_add_ps(_mm256_mul_ps(scales, code), offsets));
                }
                for pair in 0..2 {
                    let high = _mm256_slli_epi32::<16>(values[2 * pair + 1]);
                    let both = _mm256_or_si256(values[2 * pair], high);
                    let to = &mut lines[2 * quad + pair].0[8 * half..][..8];
                    // SAFETY: eight words have 32 bytes; the store needs no alignment.
                    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), both) }
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
    pub fn avx512(part: &Part, to: &mut [Line]) {
        match part.layout.bits() {
            2 => decode::<2>(part, to),
            3 => decode::<3>(part, to),
            4 => decode::<4>(part, to),
            _ => decode::<8>(part, to),
        }
    }

    /// The codes of sixteen rows, which start at bit `from` of their words, as floats of 256 + code.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn float<const BITS: usize>(words: __m512i, from: u32) -> __m512 {
        // The unit of a float between 256 and 512 is bit 15.
        const UNIT_BIT: u32 = 15;
        let moved = match from.cmp(&UNIT_BIT) {
            std::cmp::Ordering::Less => _mm512_sll_epi32(words, _mm_cvtsi32_si128((UNIT_BIT - from) as i32)),
            std::cmp::Ordering::Equal => words,
            std::cmp::Ordering::Greater => {
                _mm512_srl_epi32(words, _mm_cvtsi32_si128((from - UNIT_BIT) as i32))
            }
        };
        let mask = _mm512_set1_epi32(((1 << BITS) - 1) << UNIT_BIT);
        // The ternary function 0xEA is (a & b) | c.
        let bits = _mm512_ternarylogic_epi32::<0xEA>(moved, mask, _mm512_set1_epi32(256f32.to_bits() as i32));
        _mm512_castsi512_ps(bits)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
    fn decode<const BITS: usize>(part: &Part, to: &mut [Line]) {
        let order: [u16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 16) as u16);
        // SAFETY: the array has 64 bytes.
        let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
        let mut last = usize::MAX;
        let (mut scales, mut offsets) = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for (unit, lines) in part.units.clone().zip(to.as_chunks_mut::<LANES>().0) {
            let mut words = [_mm512_setzero_si512(); BITS];
            for (register, words) in part.registers(unit).iter().zip(&mut words) {
                // SAFETY: a register has 64 bytes; a prefetch may use any address.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(register.as_ptr().wrapping_add(AHEAD).cast());
                    *words = _mm512_loadu_si512(register.as_ptr().cast());
                }
            }
            for quad in 0..QUADS {
                if quad % 4 == 0 {
                    let group = part.group(unit * UNIT + 4 * quad);
                    if group != last {
                        (scales, offsets) = part.vectors(group, 256.0);
                        last = group;
                    }
                }
                let (word, low) = place(BITS, quad);
                let (source, low) = match (BITS, quad) {
                    (3, 6 | 7) => (last_quads(&words, quad), 0),
                    _ => (words[word], low),
                };
                let mut values = [_mm512_setzero_ps(); 4];
                for (byte, value) in values.iter_mut().enumerate() {
                    *value = _mm512_fmadd_ps(float::<BITS>(source, low + 8 * byte as u32), scales, offsets);
                }
                for half in 0..2 {
                    let both = _mm512_cvtne2ps_pbh(values[2 * half + 1], values[2 * half]);
                    // SAFETY: both types are 512 bits; a line has 64 bytes.
                    unsafe {
                        let both =
                            _mm512_permutexvar_epi16(order, std::mem::transmute::<__m512bh, __m512i>(both));
                        _mm512_store_si512((&raw mut lines[2 * quad + half]).cast(), both);
                    }
                }
            }
        }
    }

    /// Quads 6 and 7 of three-bit codes, one byte each.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn last_quads<const BITS: usize>(words: &[__m512i; BITS], quad: usize) -> __m512i {
        let low = _mm512_and_si512(
            _mm512_srli_epi32::<6>(words[quad - 6]),
            _mm512_set1_epi32(0x0303_0303),
        );
        let high = match quad {
            6 => _mm512_srli_epi32::<4>(words[BITS - 1]),
            _ => _mm512_srli_epi32::<5>(words[BITS - 1]),
        };
        // The ternary function 0xEA is (a & b) | c.
        _mm512_ternarylogic_epi32::<0xEA>(high, _mm512_set1_epi32(0x0404_0404), low)
    }
}
