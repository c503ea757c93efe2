//! Dependent codes: two mirrored quantizers, the values of one between those of the other, and a state that says which of
//! them codes a weight.
//!
//! Each lane has a state from 0 to 7, which is 0 at the start of each row. *Index* k stands for code `4 k + 1` in even
//! states and for `-(4 k + 1)` in odd ones, and its parity leads to the next state ([`NEXT`]). So codes are odd, and their
//! scale is a quarter of the quantizers' step; a code tells the parity of its state and its index. Indices of both
//! quantizers have one distribution, so tables and streams are those of plain codes, of indices instead of integers, and
//! states are a pass over what streams decode to. Tables lie within -32 to 31 and start at an even integer: a symbol has
//! the parity of its index, and codes fit signed bytes.
//!
//! Source: trellis-coded quantization (Marcellin and Fischer, 1990); the trellis is that of dependent quantization with
//! eight states in the models of video codecs after H.266 (Schwarz et al., 2019).

use super::decode::Register;
use super::encode::Code;
use super::table::Table;
use super::{LANES, QUAD};
use crate::simd::Isa;

/// The next state by twice the state plus the parity of the index.
pub const NEXT: [u8; 16] = [0, 2, 5, 7, 1, 3, 6, 4, 2, 0, 4, 6, 3, 1, 7, 5];
/// For each state all bits if it is odd. There are eight; vectors look states up among 16.
const ODD: [u8; 16] = [0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255];
/// The lowest index of a table; there are [`LANES`].
pub(super) const LOWEST: i8 = -32;
/// A code is twice a *half* plus this; halves, 0 to 127, are what integer dot products multiply.
pub const OFFSET: i32 = -127;

/// Whether a table can be one of dependent codes.
pub(super) fn holds(table: &Table) -> bool {
    let end = i32::from(LOWEST) + LANES as i32;
    let lowest = table.lowest();
    lowest >= LOWEST && lowest % 2 == 0 && i32::from(lowest) + table.count as i32 <= end
}

/// The indices of a row's codes; `None` if they follow no path of states.
pub(super) fn indices<T: Code>(codes: &[T], out: &mut Vec<T>) -> Option<()> {
    let (mut states, mut wrong) = ([0u8; QUAD], 0);
    out.resize(codes.len(), T::default());
    for (codes, out) in codes.chunks(QUAD).zip(out.chunks_mut(QUAD)) {
        for ((&code, out), state) in codes.iter().zip(out).zip(&mut states) {
            *out = code.index();
            wrong |= (code.low() & 3) ^ (1 + 2 * (*state & 1));
            *state = NEXT[usize::from(2 * (*state & 7) + (out.low() & 1))];
        }
    }
    (wrong == 0).then_some(())
}

/// The states of a stream's lanes.
///
/// Invariant: below 8.
#[derive(Debug, Clone)]
pub(super) struct States(Register);

impl States {
    /// The states at the start of a row block.
    pub const START: States = States(Register::ZERO);

    /// Makes of the symbols of registers that follow one another codes, signed bytes, or their halves. `isa` must have been
    /// found available.
    pub fn pass<const HALVES: bool>(&mut self, isa: Isa, lowest: i8, registers: &mut [Register]) {
        match isa {
            // SAFETY: the processor runs the set.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::avx2::<HALVES>(self, lowest, registers) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => unsafe { x86::avx512::<HALVES>(self, lowest, registers) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { neon::<HALVES>(self, lowest, registers) },
            _ => self.portable::<HALVES>(lowest, registers),
        }
    }

    fn portable<const HALVES: bool>(&mut self, lowest: i8, registers: &mut [Register]) {
        for register in registers {
            for (byte, state) in register.0.iter_mut().zip(&mut self.0.0) {
                let parity = *byte & 1;
                let half = byte.wrapping_add(lowest as u8).wrapping_mul(2) ^ ODD[usize::from(*state)];
                *byte = match HALVES {
                    true => half.wrapping_add(LANES as u8),
                    false => half.wrapping_mul(2) | 1,
                };
                *state = NEXT[usize::from(2 * *state + parity)];
            }
        }
    }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn neon<const HALVES: bool>(states: &mut States, lowest: i8, registers: &mut [Register]) {
    use std::arch::aarch64::*;

    let (one, middle) = (vdupq_n_u8(1), vdupq_n_u8(LANES as u8));
    let twice = vdupq_n_u8((lowest as u8).wrapping_mul(2));
    // SAFETY: both have 16 bytes.
    let [next, odd] = [&NEXT, &ODD].map(|table| unsafe { vld1q_u8(table.as_ptr()) });
    for part in 0..LANES / 16 {
        let states = &mut states.0.0[16 * part..][..16];
        // SAFETY: there are 16 bytes.
        let mut state = unsafe { vld1q_u8(states.as_ptr()) };
        for register in &mut *registers {
            let bytes = &mut register.0[16 * part..][..16];
            // SAFETY: there are 16 bytes.
            let symbols = unsafe { vld1q_u8(bytes.as_ptr()) };
            let half = veorq_u8(
                vaddq_u8(vaddq_u8(symbols, symbols), twice),
                vqtbl1q_u8(odd, state),
            );
            let found = match HALVES {
                true => vaddq_u8(half, middle),
                false => vorrq_u8(vaddq_u8(half, half), one),
            };
            // SAFETY: there are 16 bytes.
            unsafe { vst1q_u8(bytes.as_mut_ptr(), found) };
            state = vqtbl1q_u8(next, vorrq_u8(vaddq_u8(state, state), vandq_u8(symbols, one)));
        }
        // SAFETY: there are 16 bytes.
        unsafe { vst1q_u8(states.as_mut_ptr(), state) };
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::*;

    /// See [`States::pass`].
    ///
    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2<const HALVES: bool>(
        states: &mut States,
        lowest: i8,
        registers: &mut [Register],
    ) {
        let (one, middle) = (_mm256_set1_epi8(1), _mm256_set1_epi8(LANES as i8));
        let twice = _mm256_set1_epi8(lowest.wrapping_mul(2));
        // SAFETY: both have 16 bytes.
        let [next, odd] = [&NEXT, &ODD]
            .map(|table| unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) });
        for half in 0..2 {
            // SAFETY: a register has 64 bytes and is aligned.
            let mut state = unsafe { _mm256_load_si256(states.0.0.as_ptr().cast::<__m256i>().add(half)) };
            for register in &mut *registers {
                let place = register.0.as_mut_ptr().cast::<__m256i>();
                // SAFETY: as above.
                let symbols = unsafe { _mm256_load_si256(place.add(half)) };
                let doubled = _mm256_add_epi8(_mm256_add_epi8(symbols, symbols), twice);
                let halves = _mm256_xor_si256(doubled, _mm256_shuffle_epi8(odd, state));
                let found = match HALVES {
                    true => _mm256_add_epi8(halves, middle),
                    false => _mm256_or_si256(_mm256_add_epi8(halves, halves), one),
                };
                // SAFETY: as above.
                unsafe { _mm256_store_si256(place.add(half), found) };
                let edges = _mm256_or_si256(_mm256_add_epi8(state, state), _mm256_and_si256(symbols, one));
                state = _mm256_shuffle_epi8(next, edges);
            }
            // SAFETY: as above.
            unsafe { _mm256_store_si256(states.0.0.as_mut_ptr().cast::<__m256i>().add(half), state) };
        }
    }

    /// See [`States::pass`].
    ///
    /// # Safety
    /// The processor has AVX-512 BW.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn avx512<const HALVES: bool>(
        states: &mut States,
        lowest: i8,
        registers: &mut [Register],
    ) {
        let (one, middle) = (_mm512_set1_epi8(1), _mm512_set1_epi8(LANES as i8));
        let twice = _mm512_set1_epi8(lowest.wrapping_mul(2));
        // SAFETY: both have 16 bytes.
        let [next, odd] = [&NEXT, &ODD]
            .map(|table| unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())) });
        // SAFETY: a register has 64 bytes and is aligned.
        let mut state = unsafe { _mm512_load_si512(states.0.0.as_ptr().cast()) };
        for register in registers {
            let place = register.0.as_mut_ptr().cast::<__m512i>();
            // SAFETY: as above.
            let symbols = unsafe { _mm512_load_si512(place) };
            let doubled = _mm512_add_epi8(_mm512_add_epi8(symbols, symbols), twice);
            let halves = _mm512_xor_si512(doubled, _mm512_shuffle_epi8(odd, state));
            let found = match HALVES {
                true => _mm512_add_epi8(halves, middle),
                false => _mm512_or_si512(_mm512_add_epi8(halves, halves), one),
            };
            // SAFETY: as above.
            unsafe { _mm512_store_si512(place, found) };
            let edges = _mm512_or_si512(_mm512_add_epi8(state, state), _mm512_and_si512(symbols, one));
            state = _mm512_shuffle_epi8(next, edges);
        }
        // SAFETY: as above.
        unsafe { _mm512_store_si512(states.0.0.as_mut_ptr().cast(), state) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::coded::tests::Random;

    /// Any symbols.
    fn symbols(count: usize) -> Vec<Register> {
        let mut random = Random(5);
        let mut symbol = || (random.next() % LANES as u32) as u8;
        (0..count)
            .map(|_| Register(std::array::from_fn(|_| symbol())))
            .collect()
    }

    /// The bytes of a row of lanes, signed.
    fn row_of(registers: &[Register], row: usize) -> Vec<i32> {
        let lanes = registers
            .iter()
            .flat_map(|register| &register.0[QUAD * row..][..QUAD]);
        lanes.map(|&byte| i32::from(byte as i8)).collect()
    }

    #[test]
    fn codes_have_the_indices_of_their_symbols_and_halves() {
        let given = symbols(40);
        let (mut codes, mut halves) = (given.clone(), given.clone());
        States::START
            .clone()
            .pass::<false>(Isa::Scalar, LOWEST, &mut codes);
        States::START
            .clone()
            .pass::<true>(Isa::Scalar, LOWEST, &mut halves);
        for row in 0..LANES / QUAD {
            let (mut found, codes) = (Vec::new(), row_of(&codes, row));
            assert_eq!(indices(&codes, &mut found), Some(()));
            let wanted = row_of(&given, row).into_iter();
            assert!(
                found
                    .into_iter()
                    .eq(wanted.map(|symbol| symbol + i32::from(LOWEST)))
            );
            let halves = row_of(&halves, row).into_iter();
            assert!(codes.into_iter().eq(halves.map(|half| 2 * half + OFFSET)));
        }
    }

    #[test]
    fn codes_that_follow_no_path_are_refused() {
        let refused = |codes: &[i32]| indices(codes, &mut Vec::new()).is_none();
        assert!(refused(&[1, 1, 1, 1, 2, 1]));
        // Index 1 leads from state 0 to 2, and 1 again to 7, which is mirrored.
        assert!(!refused(&[5, 1, 1, 1, 5, 1]));
        assert!(refused(&[5, 5, 5, 5, 5, 7]));
        assert!(!refused(&[5, 5, 5, 5, 5, 5, 5, 5, -5, 3]));
    }

    #[test]
    fn instruction_sets_agree_and_pieces_follow_one_another() {
        let given = symbols(77);
        let mut wanted = given.clone();
        States::START
            .clone()
            .pass::<false>(Isa::Scalar, LOWEST, &mut wanted);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let (mut found, mut states) = (given.clone(), States::START);
            for registers in found.chunks_mut(9) {
                states.pass::<false>(isa, LOWEST, registers);
            }
            assert!(found == wanted, "{isa:?}");
        }
    }
}
