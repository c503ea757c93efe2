//! Dependent codes: two mirrored quantizers with interleaved values, and a state that selects the quantizer of a
//! weight.
//!
//! Each lane has a state from 0 to 7, which is 0 at the start of each row. *Index* k stands for code `4 k + 1` in
//! even states and for `-(4 k + 1)` in odd ones, and its parity leads to the next state ([`NEXT`]). Codes are
//! therefore odd, their scale is a quarter of the quantizers' step, and a code determines the parity of its state and
//! its index. The indices of both quantizers have the same distribution, so they are entropy-coded with the same tables
//! and streams as the integers of plain codes. A pass over decoded indices applies the states. Tables lie within
//! -32 to 31 and start at an even integer: a symbol has the parity of its index, and codes fit signed bytes.
//!
//! Source: trellis-coded quantization (Marcellin and Fischer, 1990); the trellis is the eight-state one of dependent
//! quantization in video codecs after H.266 (Schwarz et al., 2019).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;
mod span;

use super::affine::Affine;
use super::code::Code;
use super::register::Register;
use super::table::Table;
use super::{LANES, QUAD};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::simd::Kind;
use crate::simd::{Isa, vectorized};
pub(super) use span::LOWEST;
pub use span::OFFSET;
use span::PERIOD;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use span::Span;

/// The next state, indexed by twice the state plus the parity of the index.
pub const NEXT: [u8; 16] = [0, 2, 5, 7, 1, 3, 6, 4, 2, 0, 4, 6, 3, 1, 7, 5];

/// Returns whether a table is valid for dependent codes.
pub(super) fn holds(table: &Table) -> bool {
    let end = i32::from(LOWEST) + LANES as i32;
    let lowest = table.lowest();
    lowest >= LOWEST && lowest % 2 == 0 && i32::from(lowest) + table.count as i32 <= end
}

/// Returns the indices of a row's codes; `None` if no sequence of states gives these codes.
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

/// Masks of the lanes whose state is odd, for the current register (64 symbols, one of each lane) and the next three.
///
/// A byte of a mask is 0xFF or 0; with AVX2, only its highest bit is used, with NEON only its lowest one. Masks of later registers contain what the
/// symbols decoded so far determine. The transitions of [`NEXT`] act like a linear-feedback shift register: an odd
/// index flips the lane's masks two and three registers ahead, and the mask four registers ahead starts as the current
/// one.
#[derive(Debug, Clone)]
pub(super) struct States([Register; PERIOD]);

impl States {
    /// The states at the start of a row block.
    pub const START: States = States([Register::ZERO; PERIOD]);

    /// Converts the symbols of consecutive registers to codes as signed bytes.
    pub fn codes(&mut self, isa: Isa, table: &Table, registers: &mut [Register]) {
        codes(
            isa,
            self,
            table.lowest().wrapping_mul(4).wrapping_add(1),
            registers,
        );
    }

    /// Converts the symbols of consecutive registers to bytes b (*halves*) and returns the [`Affine`] that maps b to
    /// codes: `factor * b + offset`.
    pub fn halves(&mut self, isa: Isa, table: &Table, registers: &mut [Register]) -> Affine {
        #[cfg(target_arch = "x86_64")]
        if isa.kind() == Kind::Avx2 {
            let span = Span::of(table);
            // SAFETY: `isa` proves that the processor has AVX2.
            unsafe { avx2::halves(&mut self.0, span, registers) }
            return span.affine();
        }
        #[cfg(target_arch = "aarch64")]
        if isa.kind() == Kind::Neon {
            let span = Span::of(table);
            // SAFETY: `isa` proves that the processor has NEON.
            unsafe { neon::halves(&mut self.0, span, table.count, registers) }
            return span.affine();
        }
        halves(isa, self, 2 * (table.lowest() - LOWEST), registers);
        Affine {
            factor: 2,
            offset: OFFSET,
            most: 128,
        }
    }

    /// Converts the symbols of the register at position `number` to codes, or to halves if `HALVES`. In even states,
    /// symbol 0 becomes `lowest`.
    #[inline(always)]
    fn register<const HALVES: bool>(&mut self, number: usize, lowest: i8, register: &mut Register) {
        let [now, ahead_two, ahead_three] = [0, 2, 3].map(|ahead| (number + ahead) % PERIOD);
        // Doubled and mirrored: half h becomes 127 - h, and code c becomes -c.
        let (double, mirror) = if HALVES { (1, 127) } else { (2, 254) };
        for (lane, byte) in register.0.iter_mut().enumerate() {
            let turn = (*byte & 1).wrapping_neg();
            *byte = (*byte << double).wrapping_add(lowest as u8) ^ (self.0[now].0[lane] & mirror);
            self.0[ahead_two].0[lane] ^= turn;
            self.0[ahead_three].0[lane] ^= turn;
        }
    }

    #[inline(always)]
    fn registers<const HALVES: bool>(&mut self, lowest: i8, registers: &mut [Register]) {
        // Compilers keep a local copy in vector registers.
        let mut states = self.clone();
        let (periods, rest) = registers.as_chunks_mut::<PERIOD>();
        for period in periods {
            for (number, register) in period.iter_mut().enumerate() {
                states.register::<HALVES>(number, lowest, register);
            }
        }
        for (number, register) in rest.iter_mut().enumerate() {
            states.register::<HALVES>(number, lowest, register);
        }
        states.0.rotate_left(rest.len());
        *self = states;
    }
}

vectorized! {
    /// See [`States::halves`].
    fn halves(states: &mut States, lowest: i8, registers: &mut [Register]) = States::registers::<true>;
}

vectorized! {
    /// See [`States::codes`].
    fn codes(states: &mut States, lowest: i8, registers: &mut [Register]) = States::registers::<false>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::coded::tests::Random;

    /// Arbitrary symbols.
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

    /// The table of `count` symbols from `lowest` on.
    fn table(lowest: i8, count: usize) -> Table {
        let mut frequencies = vec![1; count];
        frequencies[0] += 128;
        frequencies[1] += (128 - count) as u8;
        Table::new(lowest, &frequencies).unwrap()
    }

    /// A table of all symbols.
    fn whole() -> Table {
        table(LOWEST, LANES)
    }

    #[test]
    fn codes_have_the_indices_of_their_symbols() {
        let given = symbols(40);
        let mut codes = given.clone();
        States::START.clone().codes(Isa::SCALAR, &whole(), &mut codes);
        for row in 0..LANES / QUAD {
            let (mut found, codes) = (Vec::new(), row_of(&codes, row));
            assert_eq!(indices(&codes, &mut found), Some(()));
            let wanted = row_of(&given, row).into_iter();
            assert!(
                found
                    .into_iter()
                    .eq(wanted.map(|symbol| symbol + i32::from(LOWEST)))
            );
        }
    }

    #[test]
    fn halves_map_to_codes() {
        for (lowest, count) in [
            (LOWEST, LANES),
            (-32, 2),
            (30, 2),
            (-6, 12),
            (-6, 13),
            (-4, 13),
            (8, 20),
        ] {
            let (table, mut given) = (table(lowest, count), symbols(77));
            given
                .iter_mut()
                .flat_map(|register| &mut register.0)
                .for_each(|symbol| *symbol %= count as u8);
            let mut codes = given.clone();
            States::START.clone().codes(Isa::SCALAR, &table, &mut codes);
            for isa in Isa::all_available() {
                let (mut found, mut states) = (given.clone(), States::START);
                for (registers, codes) in found.chunks_mut(9).zip(codes.chunks(9)) {
                    let affine = states.halves(isa, &table, registers);
                    let pairs = registers
                        .iter()
                        .zip(codes)
                        .flat_map(|(a, b)| a.0.iter().zip(&b.0));
                    for (&half, &code) in pairs {
                        assert!(usize::from(half) < affine.most);
                        let value = affine.factor * i32::from(half) + affine.offset;
                        assert_eq!(value, i32::from(code as i8), "{lowest} {count} {isa:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn codes_that_follow_no_path_are_refused() {
        let refused = |codes: &[i32]| indices(codes, &mut Vec::new()).is_none();
        assert!(refused(&[1, 1, 1, 1, 2, 1]));
        // Index 1 leads from state 0 to 2; another 1 leads to 7, which is mirrored.
        assert!(!refused(&[5, 1, 1, 1, 5, 1]));
        assert!(refused(&[5, 5, 5, 5, 5, 7]));
        assert!(!refused(&[5, 5, 5, 5, 5, 5, 5, 5, -5, 3]));
    }

    #[test]
    fn instruction_sets_agree_and_pieces_follow_one_another() {
        let given = symbols(77);
        let mut wanted = given.clone();
        States::START.clone().codes(Isa::SCALAR, &whole(), &mut wanted);
        for isa in Isa::all_available() {
            let (mut found, mut states) = (given.clone(), States::START);
            for registers in found.chunks_mut(9) {
                states.codes(isa, &whole(), registers);
            }
            assert!(found == wanted, "{isa:?}");
        }
    }
}
