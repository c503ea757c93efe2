//! Halves with NEON: six operations for 16 of them if the halves of even states start at the least half, otherwise
//! seven.

use std::arch::aarch64::*;
use std::array::from_fn;

use super::span::{PERIOD, Span};
use crate::formats::coded::LANES;
use crate::formats::coded::register::Register;

/// The vectors of a register.
const PARTS: usize = LANES / 16;

type Vectors = [[uint8x16_t; PARTS]; PERIOD];

/// Converts the symbols of consecutive registers to halves above the least of `span`.
#[target_feature(enable = "neon")]
pub(super) fn halves(states: &mut [Register; PERIOD], span: Span, registers: &mut [Register]) {
    match span.even {
        0 => pass::<false>(states, span, registers),
        _ => pass::<true>(states, span, registers),
    }
}

/// See [`halves`]; `SHIFTED` must be true if `span.even` is not zero.
#[target_feature(enable = "neon")]
fn pass<const SHIFTED: bool>(states: &mut [Register; PERIOD], span: Span, registers: &mut [Register]) {
    let ends = [span.even, span.odd].map(|end| vdupq_n_u8(end));
    let mut vectors: Vectors = from_fn(|i| load(&states[i]));
    let (periods, rest) = registers.as_chunks_mut::<PERIOD>();
    for [first, second, third, fourth] in periods {
        register::<SHIFTED>(&mut vectors, 0, ends, first);
        register::<SHIFTED>(&mut vectors, 1, ends, second);
        register::<SHIFTED>(&mut vectors, 2, ends, third);
        register::<SHIFTED>(&mut vectors, 3, ends, fourth);
    }
    // An array that is indexed by a variable is in memory, so this is another one.
    let mut last = vectors;
    for (number, symbols) in rest.iter_mut().enumerate() {
        register::<SHIFTED>(&mut last, number, ends, symbols);
    }
    last.rotate_left(rest.len());
    for (state, vectors) in states.iter_mut().zip(last) {
        store(vectors, state);
    }
}

/// Converts the symbols of register `number` of a consecutive run.
#[inline]
#[target_feature(enable = "neon")]
fn register<const SHIFTED: bool>(
    states: &mut Vectors,
    number: usize,
    [even, odd]: [uint8x16_t; 2],
    register: &mut Register,
) {
    let [now, ahead_two, ahead_three] = [0, 2, 3].map(|ahead| (number + ahead) % PERIOD);
    let symbols = load(register);
    let mut found = symbols;
    for part in 0..PARTS {
        let double = vaddq_u8(symbols[part], symbols[part]);
        let of_even = match SHIFTED {
            true => vaddq_u8(double, even),
            false => double,
        };
        found[part] = vbslq_u8(states[now][part], vsubq_u8(odd, double), of_even);
        // All ones if the lowest bit is set.
        let turn = vtstq_u8(symbols[part], vdupq_n_u8(1));
        states[ahead_two][part] = veorq_u8(states[ahead_two][part], turn);
        states[ahead_three][part] = veorq_u8(states[ahead_three][part], turn);
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
