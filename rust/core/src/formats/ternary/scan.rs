//! Finds the non-zeros of a row, the first step of every encoder, eight weights at a time.
//!
//! A code is a byte of value 0, 1 or 0xff, so its lowest bit tells whether the weight is not zero, and its highest
//! whether it is negative. Eight codes are processed as one 64-bit word, which is efficient on every 64-bit
//! processor.

use super::fsv8::SENTINEL;

/// The codes whose flags fill one 64-bit mask.
const CHUNK: usize = 64;

const LOW: u64 = 0x0101_0101_0101_0101;

/// The number of non-zero codes of a row, by sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counts {
    pub negative: u32,
    pub positive: u32,
}

/// The flags of eight codes, in the lowest bit of each byte.
struct Flags {
    nonzero: u64,
    negative: u64,
    /// Whether all codes are -1, 0 or 1.
    valid: bool,
}

#[inline(always)]
fn flags(codes: u64) -> Flags {
    let nonzero = codes & LOW;
    let negative = codes >> 7 & LOW;
    // A negative code has all bits set, a positive one only the lowest.
    let valid = codes == (nonzero | (negative * 0xfe)) && negative & !nonzero == 0;
    Flags {
        nonzero,
        negative,
        valid,
    }
}

/// Gathers the lowest bits of the eight bytes into the lowest byte.
#[inline(always)]
fn gather(low_bits: u64) -> u64 {
    low_bits.wrapping_mul(0x0102_0408_1020_4080) >> 56
}

/// The flags of 64 codes, one bit each: non-zero, and negative.
#[inline(always)]
fn masks(codes: &[i8; CHUNK]) -> Option<(u64, u64)> {
    let (mut nonzero, mut negative, mut valid) = (0, 0, true);
    let (words, _) = codes.as_chunks::<8>();
    for (i, eight) in words.iter().enumerate() {
        let flags = flags(u64::from_le_bytes(eight.map(|code| code as u8)));
        valid &= flags.valid;
        nonzero |= gather(flags.nonzero) << (8 * i);
        negative |= gather(flags.negative) << (8 * i);
    }
    valid.then_some((nonzero, negative))
}

/// Calls `found(first column, mask of non-zeros, mask of negatives)` for every 64 codes, the last padded with zeros.
/// `Err` holds the column of the first code that is not -1, 0 or 1.
#[inline(always)]
fn chunks(row: &[i8], mut found: impl FnMut(usize, u64, u64)) -> Result<(), usize> {
    let (whole, rest) = row.as_chunks::<CHUNK>();
    let mut last = [0; CHUNK];
    last[..rest.len()].copy_from_slice(rest);
    for (i, codes) in whole.iter().chain([&last]).enumerate() {
        let (nonzero, negative) = masks(codes).ok_or_else(|| first_invalid(row, CHUNK * i))?;
        found(CHUNK * i, nonzero, negative);
    }
    Ok(())
}

/// Counts the non-zero codes of a row by sign; `Err` holds the column of the first that is not -1, 0 or 1.
pub(super) fn count(row: &[i8]) -> Result<Counts, usize> {
    let mut counts = Counts::default();
    chunks(row, |_, nonzero, negative| {
        counts.negative += negative.count_ones();
        counts.positive += (nonzero ^ negative).count_ones();
    })?;
    Ok(counts)
}

/// Lists the non-zeros of a row at the beginning of `out` as `position << 1 | positive`, followed by [`SENTINEL`]
/// twice; `Err` holds the column of the first code that is not -1, 0 or 1.
pub(super) fn list(row: &[i8], out: &mut Vec<u32>) -> Result<Counts, usize> {
    // Entries are written four at a time, up to three past the last non-zero.
    out.resize(out.len().max(row.len() + 5), 0);
    let mut counts = Counts::default();
    let mut n = 0;
    chunks(row, |column, mut nonzero, negative| {
        counts.negative += negative.count_ones();
        let mut at = n;
        n += nonzero.count_ones() as usize;
        while at < n {
            for place in &mut out[at..at + 4] {
                let bit = nonzero.trailing_zeros() & 63;
                *place = (column as u32 + bit) << 1 | (!negative >> bit & 1) as u32;
                nonzero &= nonzero.wrapping_sub(1);
            }
            at += 4;
        }
    })?;
    counts.positive = n as u32 - counts.negative;
    out[n..n + 2].fill(SENTINEL);
    Ok(counts)
}

#[cold]
fn first_invalid(row: &[i8], from: usize) -> usize {
    row[from..]
        .iter()
        .position(|code| !(-1..=1).contains(code))
        .map_or(from, |i| from + i)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_checked_as_a_code_at_every_position() {
        for place in 0..19 {
            for byte in i8::MIN..=i8::MAX {
                let mut row = [0; 19];
                row[place] = byte;
                let mut found = Vec::new();
                let result = list(&row, &mut found);
                assert_eq!(result, count(&row));
                match byte {
                    0 => assert_eq!(found[..2], [SENTINEL; 2]),
                    1 => assert_eq!(found[..3], [(place as u32) << 1 | 1, SENTINEL, SENTINEL]),
                    -1 => assert_eq!(found[..3], [(place as u32) << 1, SENTINEL, SENTINEL]),
                    _ => assert_eq!(result, Err(place)),
                }
            }
        }
    }

    #[test]
    fn dense_rows_are_listed_in_order() {
        let row: Vec<i8> = (0..1001).map(|i| (i * 7 % 3 - 1) as i8).collect();
        let mut found = Vec::new();
        let counts = list(&row, &mut found).unwrap();
        let expected: Vec<u32> = (0..1001)
            .filter(|&i| row[i] != 0)
            .map(|i| (i as u32) << 1 | u32::from(row[i] > 0))
            .collect();
        assert_eq!(found[..expected.len()], expected);
        assert_eq!(
            counts.negative as usize,
            row.iter().filter(|&&code| code < 0).count()
        );
        assert_eq!(
            counts.positive as usize,
            row.iter().filter(|&&code| code > 0).count()
        );
    }
}
