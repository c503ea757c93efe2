//! NEON: a quarter of a register at a time; tables are looked up 64 bytes at a time.
//!
//! Streams alternate register by register, so that out-of-order execution has several independent chains.

use std::arch::aarch64::*;

use super::chain::Chain;
use crate::formats::coded::register::Register;
use crate::formats::coded::table::Table;
use crate::formats::coded::{LANES, QUAD};

/// The bytes of a vector.
const WIDTH: usize = 16;

/// See [`super::decode`].
#[target_feature(enable = "neon")]
pub(super) fn decode(chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    for i in 0..registers {
        for (number, chain) in chains.iter_mut().enumerate() {
            next(chain, &mut out[number * registers + i]);
        }
    }
}

/// Decodes a register.
#[inline]
#[target_feature(enable = "neon")]
fn next(chain: &mut Chain, out: &mut Register) {
    let mut at = chain.at;
    for first in (0..LANES).step_by(WIDTH) {
        let (high, low) = (load(&chain.high.0, first), load(&chain.low.0, first));
        let symbols = symbols(chain.table, low);
        let frequencies = look_up(&chain.table.frequencies, symbols);
        let rest = vsubq_u8(low, look_up(&chain.table.starts, symbols));
        let [low, high] = states(high, frequencies, rest);
        let short = vandq_u8(vceqzq_u8(high), active(chain.rows * QUAD, first));
        let counts = running_count(short);
        let bytes = load(chain.bytes, at);
        let given = vqtbl1q_u8(bytes, vsubq_u8(counts, vdupq_n_u8(1)));
        store(vbslq_u8(short, low, high), &mut chain.high.0, first);
        store(vbslq_u8(short, given, low), &mut chain.low.0, first);
        store(symbols, &mut out.0, first);
        at += usize::from(vgetq_lane_u8::<15>(counts));
    }
    chain.at = at.min(chain.length);
}

#[inline]
#[target_feature(enable = "neon")]
fn load(from: &[u8], at: usize) -> uint8x16_t {
    let from: &[u8] = &from[at..at + WIDTH];
    // SAFETY: the slice has 16 bytes.
    unsafe { vld1q_u8(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(bytes: uint8x16_t, to: &mut [u8; LANES], at: usize) {
    let to = &mut to[at..at + WIDTH];
    // SAFETY: the slice has 16 bytes.
    unsafe { vst1q_u8(to.as_mut_ptr(), bytes) }
}

/// Returns the symbols of slots: each quarter of the table gives zero for slots of the other quarters.
#[inline]
#[target_feature(enable = "neon")]
fn symbols(table: &Table, slots: uint8x16_t) -> uint8x16_t {
    let quarters = table.symbols.as_chunks::<LANES>().0;
    let found: [uint8x16_t; 4] = std::array::from_fn(|i| {
        let within = vsubq_u8(slots, vdupq_n_u8((LANES * i) as u8));
        look_up(&quarters[i], within)
    });
    vorrq_u8(vorrq_u8(found[0], found[1]), vorrq_u8(found[2], found[3]))
}

/// Looks up the entries at indices; zero for indices of 64 and more.
#[inline]
#[target_feature(enable = "neon")]
fn look_up(table: &[u8; LANES], indices: uint8x16_t) -> uint8x16_t {
    // SAFETY: the table has the 64 bytes that are loaded.
    unsafe { vqtbl4q_u8(vld1q_u8_x4(table.as_ptr()), indices) }
}

/// The low and the high bytes of the new states `high * frequencies + rest`.
#[inline]
#[target_feature(enable = "neon")]
fn states(high: uint8x16_t, frequencies: uint8x16_t, rest: uint8x16_t) -> [uint8x16_t; 2] {
    let first = vmull_u8(vget_low_u8(high), vget_low_u8(frequencies));
    let first = vreinterpretq_u8_u16(vaddw_u8(first, vget_low_u8(rest)));
    let second = vmull_high_u8(high, frequencies);
    let second = vreinterpretq_u8_u16(vaddw_high_u8(second, rest));
    [vuzp1q_u8(first, second), vuzp2q_u8(first, second)]
}

/// All ones in the lanes, counted from `first`, that are below `lanes`.
#[inline]
#[target_feature(enable = "neon")]
fn active(lanes: usize, first: usize) -> uint8x16_t {
    static MASKS: [[u8; LANES]; 2] = [[u8::MAX; LANES], [0; LANES]];
    load(MASKS.as_flattened(), LANES - lanes + first)
}

/// For each lane, the number of marked lanes (all ones) up to and including it.
#[inline]
#[target_feature(enable = "neon")]
fn running_count(marks: uint8x16_t) -> uint8x16_t {
    let zero = vdupq_n_u8(0);
    let one = vsubq_u8(zero, marks);
    let two = vaddq_u8(one, vextq_u8::<15>(zero, one));
    let four = vaddq_u8(two, vextq_u8::<14>(zero, two));
    let eight = vaddq_u8(four, vextq_u8::<12>(zero, four));
    vaddq_u8(eight, vextq_u8::<8>(zero, eight))
}
