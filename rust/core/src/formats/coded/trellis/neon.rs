//! Halves with NEON: four operations for 16 of them in tables of up to 32 symbols, otherwise seven. Of the bytes of states,
//! only the lowest bits are valid afterwards: symbols are added to them without masks.

use std::arch::aarch64::*;
use std::array::from_fn;

use super::span::{PERIOD, Span};
use crate::formats::coded::LANES;
use crate::formats::coded::register::Register;
use crate::formats::coded::table::BUCKET;

/// The vectors of a register.
const PARTS: usize = LANES / 16;

type Vectors = [[uint8x16_t; PARTS]; PERIOD];

/// The bytes of halves, for symbols in even states and in odd ones.
struct Halves {
    /// Entry `2 s + odd` is that of symbol s, for the first 32 symbols.
    tables: uint8x16x4_t,
    /// The bytes of symbol 0.
    ends: [uint8x16_t; 2],
}

impl Halves {
    #[target_feature(enable = "neon")]
    fn new(span: Span) -> Halves {
        /// What the symbols of a vector of the table add to the bytes of symbol 0.
        static STEPS: [u8; LANES] = {
            let (mut steps, mut symbol) = ([0u8; LANES], 0);
            while symbol < LANES / 2 {
                steps[2 * symbol] = 2 * symbol as u8;
                steps[2 * symbol + 1] = (2 * symbol as u8).wrapping_neg();
                symbol += 1;
            }
            steps
        };
        let both = vreinterpretq_u8_u16(vdupq_n_u16(u16::from_le_bytes([span.even, span.odd])));
        // SAFETY: the array has 64 bytes.
        let uint8x16x4_t(a, b, c, d) = unsafe { vld1q_u8_x4(STEPS.as_ptr()) };
        Halves {
            tables: uint8x16x4_t(
                vaddq_u8(both, a),
                vaddq_u8(both, b),
                vaddq_u8(both, c),
                vaddq_u8(both, d),
            ),
            ends: [span.even, span.odd].map(|end| vdupq_n_u8(end)),
        }
    }

    /// The halves of symbols below `16 * BANKS` in states whose lowest bits count.
    #[inline]
    #[target_feature(enable = "neon")]
    fn of<const BANKS: usize>(&self, symbols: uint8x16_t, states: uint8x16_t) -> uint8x16_t {
        let index = vsliq_n_u8::<1>(states, symbols);
        match BANKS {
            1 => vqtbl2q_u8(uint8x16x2_t(self.tables.0, self.tables.1), index),
            2 => vqtbl4q_u8(self.tables, index),
            _ => {
                let [even, odd] = self.ends;
                let double = vaddq_u8(symbols, symbols);
                let is_odd = vtstq_u8(states, vdupq_n_u8(1));
                vbslq_u8(is_odd, vsubq_u8(odd, double), vaddq_u8(double, even))
            }
        }
    }
}

/// Converts the symbols, fewer than `count`, of consecutive registers to halves above the least of `span`.
#[target_feature(enable = "neon")]
pub(super) fn halves(states: &mut [Register; PERIOD], span: Span, count: usize, registers: &mut [Register]) {
    match count.div_ceil(BUCKET) {
        0 | 1 => pass::<1>(states, span, registers),
        2 => pass::<2>(states, span, registers),
        _ => pass::<4>(states, span, registers),
    }
}

/// See [`halves`]; symbols are below `16 * BANKS`.
#[target_feature(enable = "neon")]
fn pass<const BANKS: usize>(states: &mut [Register; PERIOD], span: Span, registers: &mut [Register]) {
    let halves = Halves::new(span);
    let mut vectors: Vectors = from_fn(|i| load(&states[i]));
    let (periods, rest) = registers.as_chunks_mut::<PERIOD>();
    for [first, second, third, fourth] in periods {
        register::<BANKS>(&mut vectors, 0, &halves, first);
        register::<BANKS>(&mut vectors, 1, &halves, second);
        register::<BANKS>(&mut vectors, 2, &halves, third);
        register::<BANKS>(&mut vectors, 3, &halves, fourth);
    }
    // An array that is indexed by a variable is in memory, so this is another one.
    let mut last = vectors;
    for (number, symbols) in rest.iter_mut().enumerate() {
        register::<BANKS>(&mut last, number, &halves, symbols);
    }
    last.rotate_left(rest.len());
    for (state, vectors) in states.iter_mut().zip(last) {
        store(vectors, state);
    }
}

/// Converts the symbols of register `number` of a consecutive run.
#[inline]
#[target_feature(enable = "neon")]
fn register<const BANKS: usize>(
    states: &mut Vectors,
    number: usize,
    halves: &Halves,
    register: &mut Register,
) {
    let [now, ahead_two, ahead_three] = [0, 2, 3].map(|ahead| (number + ahead) % PERIOD);
    let symbols = load(register);
    let mut found = symbols;
    for part in 0..PARTS {
        found[part] = halves.of::<BANKS>(symbols[part], states[now][part]);
        states[ahead_two][part] = veorq_u8(states[ahead_two][part], symbols[part]);
        states[ahead_three][part] = veorq_u8(states[ahead_three][part], symbols[part]);
    }
    store(found, register);
}

#[inline]
#[target_feature(enable = "neon")]
fn load(register: &Register) -> [uint8x16_t; PARTS] {
    // SAFETY: a register has 64 bytes.
    from_fn(|part| unsafe { vld1q_u8(register.0.as_ptr().add(16 * part)) })
}

#[inline]
#[target_feature(enable = "neon")]
fn store(vectors: [uint8x16_t; PARTS], register: &mut Register) {
    for (part, vector) in vectors.into_iter().enumerate() {
        // SAFETY: a register has 64 bytes.
        unsafe { vst1q_u8(register.0.as_mut_ptr().add(16 * part), vector) }
    }
}
