//! Bit planes: the low bits of codes, stored uncompressed apart from the symbols.

use super::LANES;
use super::layout::PLANE;
use super::register::Register;
use crate::simd::vectorized;

/// The lowest bit of each byte.
const ONES: u64 = 0x0101_0101_0101_0101;

vectorized! {
    /// Writes the low bits of the codes of registers from their bit planes.
    pub fn lows(planes: &[u8], out: &mut [Register]) = lows_portable;
}

#[inline(always)]
fn lows_portable(planes: &[u8], out: &mut [Register]) {
    let width = planes.len() / out.len().max(1);
    for (planes, out) in planes.chunks_exact(width.max(1)).zip(out) {
        let mut words = [0u64; PLANE];
        for (number, plane) in planes.as_chunks::<PLANE>().0.iter().enumerate() {
            for (word, &byte) in words.iter_mut().zip(plane) {
                *word |= spread(byte) << number;
            }
        }
        for (lanes, word) in out.0.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *lanes = word.to_le_bytes();
        }
    }
}

/// Spreads the bits of a byte to bytes, the lowest first.
#[inline(always)]
fn spread(byte: u8) -> u64 {
    // Isolates each bit in its byte, such that a carry into the highest bit tells that it is set.
    let alone = (u64::from(byte) * ONES) & 0x8040_2010_0804_0201;
    ((alone + 0x7f * ONES) >> 7) & ONES
}

/// Appends the planes of a register of low bits.
pub(super) fn append(lows: &Register, bits: usize, out: &mut Vec<u8>) {
    for number in 0..bits {
        let bytes = lows.0.as_chunks::<8>().0.iter();
        out.extend(bytes.map(|lanes| {
            let set = lanes.iter().enumerate();
            set.fold(0, |byte, (lane, low)| byte | (low >> number & 1) << lane)
        }));
    }
}

/// Returns whether only lanes of the first `rows` rows and `columns` columns have low bits.
pub(super) fn are_within(lows: &Register, rows: usize, columns: usize) -> bool {
    let quads = lows.0.as_chunks::<4>().0.iter().enumerate();
    quads
        .flat_map(|(row, quad)| {
            quad.iter()
                .enumerate()
                .map(move |(column, &low)| (row, column, low))
        })
        .all(|(row, column, low)| low == 0 || (row < rows && column < columns))
}

const _: () = assert!(PLANE * 8 == LANES);
