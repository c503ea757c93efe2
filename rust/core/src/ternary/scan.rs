//! Finding the non-zeros of a row: the first step of every encoder, eight weights at a time.
//!
//! A code is a byte of value 0, 1 or 0xff, so its lowest bit says whether the weight is not zero and its highest
//! whether it is negative. Eight codes are handled as one 64-bit word, which every 64-bit processor does well: the
//! scan takes a tenth of the time that encoding takes, and vector instructions would gain nothing worth their code.

use super::fsv8::SENTINEL;

const LOW: u64 = 0x0101_0101_0101_0101;

/// The codes of a row, by sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counts {
    pub negative: u32,
    pub positive: u32,
}

/// The low bits of eight codes: which are not zero, and which are negative. `None` if one is not -1, 0 or 1.
#[inline(always)]
fn flags(codes: u64) -> Option<(u64, u64)> {
    let nonzero = codes & LOW;
    let negative = codes >> 7 & LOW;
    // A negative code has all bits set, a positive one only the lowest.
    (codes == (nonzero | (negative * 0xfe)) && negative & !nonzero == 0).then_some((nonzero, negative))
}

/// Gathers the lowest bit of each byte into the lowest byte.
#[inline(always)]
fn gather(low_bits: u64) -> u64 {
    low_bits.wrapping_mul(0x0102_0408_1020_4080) >> 56
}

#[inline(always)]
fn words(row: &[i8]) -> impl Iterator<Item = u64> + '_ {
    let (whole, rest) = row.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let tail = (!rest.is_empty()).then_some(last);
    whole
        .iter()
        .copied()
        .chain(tail)
        .map(|codes| u64::from_le_bytes(codes.map(|code| code as u8)))
}

/// Counts the codes of a row by sign; `Err` with the column of the first that is not -1, 0 or 1.
pub(super) fn count(row: &[i8]) -> Result<Counts, usize> {
    let mut counts = Counts::default();
    for (i, word) in words(row).enumerate() {
        let (nonzero, negative) = flags(word).ok_or_else(|| first_invalid(row, 8 * i))?;
        counts.negative += negative.count_ones();
        counts.positive += (nonzero ^ negative).count_ones();
    }
    Ok(counts)
}

/// Lists the non-zeros of a row as `position << 1 | positive`, then [`SENTINEL`]; `Err` as in [`count`].
pub(super) fn list(row: &[i8], out: &mut Vec<u32>) -> Result<Counts, usize> {
    out.resize(row.len() + 8, 0);
    let mut counts = Counts::default();
    let mut n = 0;
    for (i, word) in words(row).enumerate() {
        let (nonzero, negative) = flags(word).ok_or_else(|| first_invalid(row, 8 * i))?;
        let positive = gather(nonzero ^ negative);
        let mut left = gather(nonzero);
        counts.negative += negative.count_ones();
        while left != 0 {
            let bit = left.trailing_zeros();
            out[n] = (8 * i as u32 + bit) << 1 | (positive >> bit & 1) as u32;
            n += 1;
            left &= left - 1;
        }
    }
    counts.positive = n as u32 - counts.negative;
    out.truncate(n);
    out.push(SENTINEL);
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
    fn every_byte_is_judged_as_a_code_at_every_place() {
        for place in 0..19 {
            for byte in i8::MIN..=i8::MAX {
                let mut row = [0; 19];
                row[place] = byte;
                let mut found = Vec::new();
                let result = list(&row, &mut found);
                assert_eq!(result, count(&row));
                match byte {
                    0 => assert_eq!(found, [SENTINEL]),
                    1 => assert_eq!(found, [(place as u32) << 1 | 1, SENTINEL]),
                    -1 => assert_eq!(found, [(place as u32) << 1, SENTINEL]),
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
        assert_eq!(found[..found.len() - 1], expected);
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
