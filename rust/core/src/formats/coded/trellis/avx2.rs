//! Halves with AVX2: six operations for 32 of them if the halves of even states start at the least half, otherwise
//! seven. Of the bytes of states, only the highest bits are valid afterwards.

use std::arch::x86_64::*;
use std::array::from_fn;

use super::span::{PERIOD, Span};
use crate::formats::coded::register::Register;

type Vectors = [[__m256i; 2]; PERIOD];

/// Converts the symbols of consecutive registers to halves above the least of `span`.
#[target_feature(enable = "avx2")]
pub(super) fn halves(states: &mut [Register; PERIOD], span: Span, registers: &mut [Register]) {
    match span.even {
        0 => pass::<false>(states, span, registers),
        _ => pass::<true>(states, span, registers),
    }
}

/// See [`halves`]; `SHIFTED` must be true if `span.even` is not zero.
#[target_feature(enable = "avx2")]
fn pass<const SHIFTED: bool>(states: &mut [Register; PERIOD], span: Span, registers: &mut [Register]) {
    let ends = [span.even, span.odd].map(|end| _mm256_set1_epi8(end as i8));
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
#[target_feature(enable = "avx2")]
fn register<const SHIFTED: bool>(
    states: &mut Vectors,
    number: usize,
    [even, odd]: [__m256i; 2],
    register: &mut Register,
) {
    let [now, ahead_two, ahead_three] = [0, 2, 3].map(|ahead| (number + ahead) % PERIOD);
    let symbols = load(register);
    let found = from_fn(|half| {
        let double = _mm256_add_epi8(symbols[half], symbols[half]);
        let of_even = match SHIFTED {
            true => _mm256_add_epi8(double, even),
            false => double,
        };
        // Selects by the highest bits.
        _mm256_blendv_epi8(of_even, _mm256_sub_epi8(odd, double), states[now][half])
    });
    for half in 0..2 {
        // The lowest bit of each byte becomes its highest.
        let turn = _mm256_slli_epi16::<7>(symbols[half]);
        states[ahead_two][half] = _mm256_xor_si256(states[ahead_two][half], turn);
        states[ahead_three][half] = _mm256_xor_si256(states[ahead_three][half], turn);
    }
    store(found, register);
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(register: &Register) -> [__m256i; 2] {
    let from = register.0.as_ptr().cast::<__m256i>();
    // SAFETY: a register has 64 bytes and is aligned.
    unsafe { [_mm256_load_si256(from), _mm256_load_si256(from.add(1))] }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store([first, second]: [__m256i; 2], register: &mut Register) {
    let to = register.0.as_mut_ptr().cast::<__m256i>();
    // SAFETY: a register has 64 bytes and is aligned.
    unsafe {
        _mm256_store_si256(to, first);
        _mm256_store_si256(to.add(1), second);
    }
}
