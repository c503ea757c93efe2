//! NEON: the four quarters of a register advance in step, operation by operation, so that an in-order processor, too,
//! has independent work. Streams alternate register by register, with their states in memory.
//!
//! *Symbols* are looked up like with AVX2 ([`super::avx2`]): a slot's symbol is that of its bucket's first slot, plus
//! one if the slot lies after the bucket's edge. Bytes below 16 after the shift are in the bucket of the outermost slots,
//! whose symbols replace the others in the same lookup (`tbx` keeps lanes out of range). Frequencies and starts take
//! one lookup each in 16, 32 or 64 entries: the more registers a lookup has, the longer it takes, so that the 256
//! symbols of all slots (four lookups in 64 entries) would take most of the time.
//!
//! *Bytes.* The number of reading lanes before a lane, its position among the bytes to read, fits a nibble. Two quarters
//! are therefore counted together, one in the low and one in the high nibbles of a vector ([`positions`]).
//!
//! A quarter takes 24 vector operations, besides loads and stores: 9 for its symbols and their table entries, 6 for the
//! new states, 6 for the bytes to read, and 3 for their selection.

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use super::chain::Chain;
use crate::formats::coded::register::Register;
use crate::formats::coded::table::{BUCKET, SHIFT, Table};
use crate::formats::coded::{BLOCK_ROWS, LANES, QUAD};

/// The bytes of a vector.
const WIDTH: usize = 16;
/// The vectors of a register.
const PARTS: usize = LANES / WIDTH;
/// Nibbles that are 15 or 0, read as 32 bits, are 15 times the word u of bytes 0, 1, 16 or 17. The product with 0x01010101
/// / 15 mod 2^32 is 0x01010101 u: byte i of it is the sum of u's bytes up to i, at most 4 * 17.
const POSITIONS: u32 = 0x0101_0101_u32.wrapping_mul(0xeeee_eeef);
const _: () = assert!(0xeeee_eeef_u32.wrapping_mul(15) == 1);
/// The places whose sums are added to a lane's: the third byte of the lower four lanes for the upper four of each
/// eight, then that of the lower eight for the upper eight. There is nothing to add at places out of range.
static EIGHTS: [u8; WIDTH] = [255, 255, 255, 255, 3, 3, 3, 3, 255, 255, 255, 255, 11, 11, 11, 11];
static SIXTEENS: [u8; WIDTH] = [255, 255, 255, 255, 255, 255, 255, 255, 7, 7, 7, 7, 7, 7, 7, 7];

/// See [`super::decode`].
#[target_feature(enable = "neon")]
pub(super) fn decode(chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    let tables = || chains.iter().map(|chain| chain.table);
    let banks = tables().map(|table| table.count.div_ceil(BUCKET)).max();
    let more = chains.iter().any(|chain| chain.rows < BLOCK_ROWS)
        || tables().any(|table| !table.buckets.edges.is_empty());
    match (banks, more) {
        (Some(..=1), false) => rotate::<1, false>(chains, registers, out),
        (Some(..=1), true) => rotate::<1, true>(chains, registers, out),
        (Some(2), false) => rotate::<2, false>(chains, registers, out),
        (Some(2), true) => rotate::<2, true>(chains, registers, out),
        _ => rotate::<4, true>(chains, registers, out),
    }
}

/// Decodes chains whose tables have at most `16 * BANKS` symbols. `MORE` must be true if any lists edges or any chain
/// has fewer rows than a row block.
#[target_feature(enable = "neon")]
fn rotate<const BANKS: usize, const MORE: bool>(
    chains: &mut [Chain],
    registers: usize,
    out: &mut [Register],
) {
    for i in 0..registers {
        for (number, chain) in chains.iter_mut().enumerate() {
            next::<BANKS, MORE>(chain, &mut out[number * registers + i]);
        }
    }
}

/// A value for each quarter.
type All = [uint8x16_t; PARTS];

/// Decodes a register.
#[inline]
#[target_feature(enable = "neon")]
fn next<const BANKS: usize, const MORE: bool>(chain: &mut Chain, out: &mut Register) {
    let (high, low) = (load(&chain.high), load(&chain.low));
    let symbols = symbols::<MORE>(chain.table, low);
    store(symbols, out);
    let frequencies = look_up::<BANKS>(&chain.table.frequencies, symbols);
    let starts = look_up::<BANKS>(&chain.table.starts, symbols);
    let words: [[uint8x16_t; 2]; PARTS] = from_fn(|i| states(high[i], frequencies[i], low[i], starts[i]));
    let short: All = from_fn(|i| match MORE {
        true => vandq_u8(vceqzq_u8(words[i][1]), active(chain.rows * QUAD, WIDTH * i)),
        false => vceqzq_u8(words[i][1]),
    });
    let pairs: [([uint8x16_t; 2], [usize; 2]); PARTS / 2] =
        from_fn(|i| positions([short[2 * i], short[2 * i + 1]]));
    let mut at = chain.at;
    let given: All = from_fn(|i| {
        let (places, totals) = pairs[i / 2];
        // SAFETY: `chain.at <= length`, and 64 bytes follow the `length` bytes: a quarter takes 16 after at most 16 for
        // each of the quarters before it.
        let bytes = unsafe { vld1q_u8(chain.bytes.as_ptr().add(at)) };
        at += totals[i % 2];
        vqtbl1q_u8(bytes, places[i % 2])
    });
    store(
        from_fn(|i| vbslq_u8(short[i], words[i][0], words[i][1])),
        &mut chain.high,
    );
    store(
        from_fn(|i| vbslq_u8(short[i], given[i], words[i][0])),
        &mut chain.low,
    );
    chain.at = at.min(chain.length);
}

#[inline]
#[target_feature(enable = "neon")]
fn load(from: &Register) -> All {
    // SAFETY: a register has 64 bytes.
    from_fn(|i| unsafe { vld1q_u8(from.0.as_ptr().add(WIDTH * i)) })
}

#[inline]
#[target_feature(enable = "neon")]
fn store(bytes: All, to: &mut Register) {
    for (i, bytes) in bytes.into_iter().enumerate() {
        // SAFETY: a register has 64 bytes.
        unsafe { vst1q_u8(to.0.as_mut_ptr().add(WIDTH * i), bytes) }
    }
}

/// Returns the symbols of slots.
#[inline]
#[target_feature(enable = "neon")]
fn symbols<const EDGES: bool>(table: &Table, low: All) -> All {
    let [bases, edges, outer] = [
        &table.buckets.bases,
        &table.buckets.first_edges,
        &table.buckets.outer,
    ]
    // SAFETY: a table has 16 bytes.
    .map(|bytes: &[u8; BUCKET]| unsafe { vld1q_u8(bytes.as_ptr()) });
    let slots: All = from_fn(|i| vaddq_u8(low[i], vdupq_n_u8(SHIFT as u8)));
    let buckets: All = from_fn(|i| vshrq_n_u8::<4>(slots[i]));
    let mut symbols: All = from_fn(|i| {
        let after = greater(slots[i], vqtbl1q_u8(edges, buckets[i]));
        vsubq_u8(vqtbl1q_u8(bases, buckets[i]), after)
    });
    if EDGES {
        for edge in &table.buckets.edges {
            symbols = from_fn(|i| vsubq_u8(symbols[i], greater(slots[i], vdupq_n_u8(edge[0]))));
        }
    }
    from_fn(|i| vqtbx1q_u8(symbols[i], outer, slots[i]))
}

/// All ones where a byte is greater than another one, as signed bytes.
#[inline]
#[target_feature(enable = "neon")]
fn greater(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
    vcgtq_s8(vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b))
}

/// Looks up the entries of symbols in a table of at most `16 * BANKS`.
#[inline]
#[target_feature(enable = "neon")]
fn look_up<const BANKS: usize>(table: &[u8; LANES], symbols: All) -> All {
    // SAFETY: the table has the 64 bytes, of which 16, 32 or all are loaded.
    unsafe {
        match BANKS {
            1 => {
                let table = vld1q_u8(table.as_ptr());
                from_fn(|i| vqtbl1q_u8(table, symbols[i]))
            }
            2 => {
                let table = vld1q_u8_x2(table.as_ptr());
                from_fn(|i| vqtbl2q_u8(table, symbols[i]))
            }
            _ => {
                let table = vld1q_u8_x4(table.as_ptr());
                from_fn(|i| vqtbl4q_u8(table, symbols[i]))
            }
        }
    }
}

/// The low and the high bytes of the new states `high * frequencies + low - starts`. A slot is not before its symbol's
/// first one, so that no difference is negative.
#[inline]
#[target_feature(enable = "neon")]
fn states(high: uint8x16_t, frequencies: uint8x16_t, low: uint8x16_t, starts: uint8x16_t) -> [uint8x16_t; 2] {
    let rests = [
        vsubl_u8(vget_low_u8(low), vget_low_u8(starts)),
        vsubl_high_u8(low, starts),
    ];
    let [first, second] = add_products(rests, high, frequencies).map(|words| vreinterpretq_u8_u16(words));
    [vuzp1q_u8(first, second), vuzp2q_u8(first, second)]
}

/// Adds the products of bytes to words: those of the first eight lanes, and of the last eight. With intrinsics, compilers
/// would move the subtraction that makes the words behind the products, which takes an operation more.
#[inline]
#[target_feature(enable = "neon")]
fn add_products([mut first, mut second]: [uint16x8_t; 2], a: uint8x16_t, b: uint8x16_t) -> [uint16x8_t; 2] {
    // SAFETY: the instructions belong to NEON, which the function has, and only touch registers.
    unsafe {
        asm!(
            "umlal {first:v}.8h, {a:v}.8b, {b:v}.8b",
            "umlal2 {second:v}.8h, {a:v}.16b, {b:v}.16b",
            first = inout(vreg) first, second = inout(vreg) second, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    [first, second]
}

/// All ones in the lanes, counted from `first`, that are below `lanes`.
#[inline]
#[target_feature(enable = "neon")]
fn active(lanes: usize, first: usize) -> uint8x16_t {
    static MASKS: [[u8; LANES]; 2] = [[u8::MAX; LANES], [0; LANES]];
    let from = &MASKS.as_flattened()[LANES - lanes + first..][..WIDTH];
    // SAFETY: the slice has 16 bytes.
    unsafe { vld1q_u8(from.as_ptr()) }
}

/// For each lane of two vectors, the number of marked lanes (all ones) of its vector before it; and the number of marked
/// lanes of each vector.
#[inline]
#[target_feature(enable = "neon")]
fn positions([first, second]: [uint8x16_t; 2]) -> ([uint8x16_t; 2], [usize; 2]) {
    // SAFETY: the arrays have 16 bytes.
    let [eights, sixteens] = unsafe { [vld1q_u8(EIGHTS.as_ptr()), vld1q_u8(SIXTEENS.as_ptr())] };
    let nibbles = vdupq_n_u8(15);
    let marks = vbslq_u8(nibbles, first, second);
    let sums = vmulq_u32(vreinterpretq_u32_u8(marks), vdupq_n_u32(POSITIONS));
    let sums = vreinterpretq_u8_u32(sums);
    let sums = vaddq_u8(sums, vqtbl1q_u8(sums, eights));
    let sums = vaddq_u8(sums, vqtbl1q_u8(sums, sixteens));
    // Less the lane's own mark: 17 * 15 is -1 mod 256. At most 15 * 17 remain.
    let before = vmlaq_u8(sums, marks, vdupq_n_u8(17));
    // Lane 14's sum is at most 15 * 17, and lane 15's the same plus its marks, mod 256.
    let ends = usize::from(vgetq_lane_u16::<7>(vreinterpretq_u16_u8(sums)));
    let (most, last) = (ends & 255, ends >> 8);
    let own = last.wrapping_sub(most) & 0x11;
    (
        [vandq_u8(before, nibbles), vshrq_n_u8::<4>(before)],
        [(most & 15) + (own & 1), (most >> 4) + (own >> 4)],
    )
}
