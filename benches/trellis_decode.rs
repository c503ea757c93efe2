//! What the states of dependent quantization cost a decoder: 10^9 weights a second, without and with them.
//!
//!     rustc --edition=2024 -Copt-level=3 -Ctarget-cpu=native benches/trellis_decode.rs -o build/trellis_decode
//!     build/trellis_decode
//!
//! The coded format's own decoder gives symbols of Gaussian integers; what follows is a pass over them, while they are in
//! the first-level cache, that makes of symbol k and a lane's state the value `2 k + 1/2` or `-(2 k + 1/2)`, stored as the
//! integer below it, and of state and parity of k the next state (`trellis.py`, mirrored). One thread, streams of random
//! bytes, which decode to symbols of their frequencies; the fastest of many rounds. Values are checked against portable
//! code. AVX2, and AVX-512 where the processor has it.

#![allow(dead_code)]

use std::arch::x86_64::*;
use std::hint::black_box;
use std::time::Instant;

use formats::coded::decode::{Chain, Register, decode, side_by_side};
use formats::coded::{LANES, chain, table::Table};
use simd::Isa;

/// What the decoder asks of its crate.
mod simd {
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Isa {
        Scalar,
        Avx2,
        Avx512,
        Amx,
        Neon,
    }
}

#[path = "."]
mod formats {
    #[path = "."]
    pub mod coded {
        #[path = "../rust/core/src/formats/coded/decode/mod.rs"]
        pub mod decode;
        #[path = "../rust/core/src/formats/coded/table.rs"]
        pub mod table;

        pub const BLOCK_ROWS: usize = 16;
        pub const QUAD: usize = 4;
        pub const LANES: usize = BLOCK_ROWS * QUAD;

        pub mod layout {
            pub const STATE_BYTES: usize = 128;
        }

        /// A decoder of some bytes.
        pub fn chain<'a>(table: &'a table::Table, bytes: &'a [u8]) -> decode::Chain<'a> {
            decode::Chain::new(table, bytes, bytes.len() - LANES)
        }

        /// The table of frequencies from a lowest integer on.
        pub fn table_of(lowest: i8, frequencies: &[u8]) -> table::Table {
            table::Table::new(lowest, frequencies).expect("frequencies add up to 256")
        }
    }
}

/// Registers of a stream, and streams.
const REGISTERS: usize = 512;
const STREAMS: usize = 32;
const ROUNDS: usize = 60;
/// The next state by twice the state plus parity; the second quantizer is that of odd states.
const NEXT: [u8; 16] = [0, 2, 5, 7, 1, 3, 6, 4, 2, 0, 4, 6, 3, 1, 7, 5];
/// For each state all bits if its quantizer is the second.
const SECOND: [u8; 16] = [0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255];

/// Makes values of the symbols of a stream, from states of zero. `2 (symbol + lowest)`, or, of odd states, its complement.
fn portable(lowest: i8, registers: &mut [Register]) {
    let mut states = [0u8; LANES];
    for register in registers {
        for (value, state) in register.0.iter_mut().zip(&mut states) {
            let code = value.wrapping_add(lowest as u8);
            *value = code.wrapping_mul(2) ^ SECOND[usize::from(*state)];
            *state = NEXT[usize::from(2 * *state + (code & 1))];
        }
    }
}

/// As [`portable`]; `lowest` is even.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn avx2(lowest: i8, registers: &mut [Register]) {
    let (one, twice) = (_mm256_set1_epi8(1), _mm256_set1_epi8(lowest.wrapping_mul(2)));
    // SAFETY: both have 16 bytes.
    let [next, second] = [&NEXT, &SECOND]
        .map(|table| unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) });
    let mut states = [_mm256_setzero_si256(); 2];
    for register in registers {
        for (half, state) in states.iter_mut().enumerate() {
            // SAFETY: a register has 64 bytes and is aligned.
            unsafe {
                let place = register.0.as_mut_ptr().cast::<__m256i>().add(half);
                let symbols = _mm256_load_si256(place);
                let doubled = _mm256_add_epi8(_mm256_add_epi8(symbols, symbols), twice);
                _mm256_store_si256(
                    place,
                    _mm256_xor_si256(doubled, _mm256_shuffle_epi8(second, *state)),
                );
                let edges = _mm256_or_si256(_mm256_add_epi8(*state, *state), _mm256_and_si256(symbols, one));
                *state = _mm256_shuffle_epi8(next, edges);
            }
        }
    }
}

/// As [`avx2`].
///
/// # Safety
/// The processor has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn avx512(lowest: i8, registers: &mut [Register]) {
    let (one, twice) = (_mm512_set1_epi8(1), _mm512_set1_epi8(lowest.wrapping_mul(2)));
    // SAFETY: both have 16 bytes.
    let [next, second] = [&NEXT, &SECOND]
        .map(|table| unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())) });
    let mut state = _mm512_setzero_si512();
    for register in registers {
        // SAFETY: a register has 64 bytes and is aligned.
        unsafe {
            let place = register.0.as_mut_ptr().cast::<__m512i>();
            let symbols = _mm512_load_si512(place);
            let doubled = _mm512_add_epi8(_mm512_add_epi8(symbols, symbols), twice);
            _mm512_store_si512(
                place,
                _mm512_xor_si512(doubled, _mm512_shuffle_epi8(second, state)),
            );
            let edges = _mm512_or_si512(_mm512_add_epi8(state, state), _mm512_and_si512(symbols, one));
            state = _mm512_shuffle_epi8(next, edges);
        }
    }
}

/// The pass of an instruction set.
fn pass(isa: Isa, lowest: i8, registers: &mut [Register]) {
    match isa {
        // SAFETY: `main` found the sets available.
        Isa::Avx2 => unsafe { avx2(lowest, registers) },
        // SAFETY: as above.
        Isa::Avx512 => unsafe { avx512(lowest, registers) },
        _ => portable(lowest, registers),
    }
}

/// Slots of Gaussian integers of a step, those below a 3000th left out; and their entropy.
fn gaussian(step: f64) -> (i8, Vec<u8>, f64) {
    const MOST: usize = 30;
    let density = |k: i32| (-0.5 * (f64::from(k) * step).powi(2)).exp();
    let shares: Vec<f64> = (-(MOST as i32)..=MOST as i32).map(density).collect();
    let sum: f64 = shares.iter().sum();
    let entropy = shares
        .iter()
        .map(|share| -share / sum * (share / sum).max(1e-300).log2())
        .sum();
    let slots = |share: f64| {
        if share < 1.0 / 3000.0 {
            0
        } else {
            ((256.0 * share).round() as i32).clamp(1, 255)
        }
    };
    let mut slots: Vec<i32> = shares.iter().map(|share| slots(share / sum)).collect();
    slots[MOST] += 256 - slots.iter().sum::<i32>();
    let first = slots.iter().position(|&slots| slots > 0).unwrap_or(0) / 2 * 2;
    let slots = slots[first..].iter().map(|&slots| slots as u8).collect();
    ((first as i32 - MOST as i32) as i8, slots, entropy)
}

/// The seconds of the fastest round of decoding all streams, and the last stream's registers.
fn time(isa: Isa, table: &Table, streams: &[Vec<u8>], dependent: bool) -> (f64, Vec<Register>) {
    let group = side_by_side(isa);
    let mut out = vec![Register([0; LANES]); group * REGISTERS];
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let mut seconds = 0.0;
        for streams in streams.chunks_exact(group) {
            let mut chains: Vec<Chain> = streams.iter().map(|bytes| chain(table, bytes)).collect();
            let start = Instant::now();
            decode(isa, &mut chains, REGISTERS, &mut out);
            for registers in out.chunks_exact_mut(REGISTERS).filter(|_| dependent) {
                pass(isa, table.lowest(), registers);
            }
            black_box(&out);
            seconds += start.elapsed().as_secs_f64();
        }
        best = best.min(seconds);
    }
    (best, out.split_off((group - 1) * REGISTERS))
}

fn main() {
    let mut word = 88_172_645_463_325_252u64;
    let mut random = || {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        (word >> 32) as u8
    };
    let stream = |_| (0..REGISTERS * LANES + 192).map(|_| random()).collect();
    let streams: Vec<Vec<u8>> = (0..STREAMS).map(stream).collect();
    let wide = is_x86_feature_detected!("avx512vbmi2") && is_x86_feature_detected!("avx512bw");
    let isas = [(Isa::Avx2, is_x86_feature_detected!("avx2")), (Isa::Avx512, wide)];
    for isa in isas
        .into_iter()
        .filter_map(|(isa, available)| available.then_some(isa))
    {
        for step in [1.45, 1.03, 0.73, 0.515, 0.365, 0.258] {
            let (lowest, slots, entropy) = gaussian(step);
            let table = formats::coded::table_of(lowest, &slots);
            let (plain, mut symbols) = time(isa, &table, &streams, false);
            let (dependent, values) = time(isa, &table, &streams, true);
            portable(lowest, &mut symbols);
            assert!(symbols == values, "the pass differs from portable code");
            let speed = |seconds: f64| (STREAMS * REGISTERS * LANES) as f64 / seconds / 1e9;
            println!(
                "{isa:?}, entropy {entropy:.2}: {:.2} plain, {:.2} dependent: {:.2} of the speed",
                speed(plain),
                speed(dependent),
                plain / dependent
            );
        }
    }
}
