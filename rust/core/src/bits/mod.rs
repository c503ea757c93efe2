//! Packing of small unsigned codes into 32-bit words without padding bits: 2, 3, 4 and 8 bits per code.
//!
//! The unit is 32 codes in as many words as a code has bits. The 32 codes are 8 *quads* of four neighbours: byte i of
//! quad j is code `4 j + i`. A quad is the operand of an integer dot product in a 32-bit lane. A word's byte i only
//! holds codes with that i, so a shift and a mask of the whole word extract four neighbours into its four bytes.
//!
//! ```text
//! bits  byte i of a word, low bits first
//!   8   word w: quad w
//!   4   word w: quads 2w, 2w+1
//!   2   word w: quads 4w, 4w+1, 4w+2, 4w+3
//!   3   word w: quads 2w, 2w+1, then two bits: word 0 and word 1 the low two bits of quads 6 and 7,
//!       word 2 the high bit of quad 6 and the high bit of quad 7
//! ```
//!
//! Three bits follow the idea of the MiLo paper (figure 6): each of three words holds eight whole codes, and the
//! remaining bits hold the last eight.

use crate::{Error, Result};

/// The number of codes packed together.
pub const UNIT: usize = 32;
/// The supported bits per code.
pub const WIDTHS: [u8; 4] = [2, 3, 4, 8];

/// The word and the shift of the low bits of a quad in each byte; for quads 6 and 7 of three bits, of their two low
/// bits.
#[inline(always)]
pub const fn place(bits: usize, quad: usize) -> (usize, u32) {
    match (bits, quad) {
        (3, 6) => (0, 6),
        (3, 7) => (1, 6),
        (3, _) => (quad / 2, 3 * (quad as u32 % 2)),
        (2, _) => (quad / 4, 2 * (quad as u32 % 4)),
        (4, _) => (quad / 2, 4 * (quad as u32 % 2)),
        _ => (quad, 0),
    }
}

/// Packs 32 codes into the first `bits` of `words`. Bits of codes beyond `bits` must be zero.
pub fn pack(bits: u8, codes: &[u8; UNIT], words: &mut [u32; 8]) {
    *words = [0; 8];
    for (quad, codes) in codes.as_chunks::<4>().0.iter().enumerate() {
        let codes = u32::from_le_bytes(*codes);
        let (word, shift) = place(usize::from(bits), quad);
        match (bits, quad) {
            (3, 6 | 7) => {
                words[word] |= (codes & 0x0303_0303) << shift;
                words[2] |= (codes >> 2 & 0x0101_0101) << quad;
            }
            _ => words[word] |= codes << shift,
        }
    }
}

/// The inverse of [`pack`]; accepts any words.
pub fn unpack(bits: u8, words: &[u32; 8], codes: &mut [u8; UNIT]) {
    let mask = 0x0101_0101 * ((1u32 << bits) - 1);
    for (quad, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let (word, shift) = place(usize::from(bits), quad);
        let four = match (bits, quad) {
            (3, 6 | 7) => words[word] >> 6 & 0x0303_0303 | (words[2] >> quad & 0x0101_0101) << 2,
            _ => words[word] >> shift & mask,
        };
        *codes = four.to_le_bytes();
    }
}

/// Packs codes of `bits` bits, 32 at a time: `bits` words per 32 codes.
///
/// # Errors
/// [`Error::InvalidArgument`] if the number of codes is not a multiple of 32, or a code or `bits` is out of range.
pub fn pack_all(bits: u8, codes: &[u8]) -> Result<Vec<u32>> {
    check(bits)?;
    let (units, rest) = codes.as_chunks::<UNIT>();
    if !rest.is_empty() {
        return Err(Error::InvalidArgument(format!(
            "{} codes: their number must be a multiple of {UNIT}",
            codes.len()
        )));
    }
    if let Some(at) = codes.iter().position(|&code| u32::from(code) >> bits != 0) {
        let message = format!("code {} at {at} has more than {bits} bits", codes[at]);
        return Err(Error::InvalidArgument(message));
    }
    let mut packed = Vec::with_capacity(units.len() * usize::from(bits));
    let mut words = [0; 8];
    for unit in units {
        pack(bits, unit, &mut words);
        packed.extend_from_slice(&words[..usize::from(bits)]);
    }
    Ok(packed)
}

/// The inverse of [`pack_all`]: 32 codes per `bits` words.
///
/// # Errors
/// [`Error::InvalidArgument`] if the number of words is not a multiple of `bits`, or `bits` is out of range.
pub fn unpack_all(bits: u8, words: &[u32]) -> Result<Vec<u8>> {
    check(bits)?;
    let width = usize::from(bits);
    if !words.len().is_multiple_of(width) {
        return Err(Error::InvalidArgument(format!(
            "{} words: their number must be a multiple of {bits}",
            words.len()
        )));
    }
    let mut codes = vec![0; words.len() / width * UNIT];
    let mut unit = [0; 8];
    for (codes, words) in codes
        .as_chunks_mut::<UNIT>()
        .0
        .iter_mut()
        .zip(words.chunks_exact(width))
    {
        unit[..width].copy_from_slice(words);
        unpack(bits, &unit, codes);
    }
    Ok(codes)
}

fn check(bits: u8) -> Result<()> {
    if WIDTHS.contains(&bits) {
        return Ok(());
    }
    let message = format!("codes must have 2, 3, 4 or 8 bits, not {bits}");
    Err(Error::InvalidArgument(message))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn codes_round_trip(codes in prop::collection::vec(any::<u8>(), 0..5 * UNIT), width in 0..4usize) {
            let bits = WIDTHS[width];
            let whole = codes.len() / UNIT * UNIT;
            let codes: Vec<u8> = codes[..whole].iter().map(|code| code & ((1u16 << bits) - 1) as u8).collect();
            let words = pack_all(bits, &codes).unwrap();
            prop_assert_eq!(words.len() * 32, codes.len() * usize::from(bits));
            prop_assert_eq!(unpack_all(bits, &words).unwrap(), codes);
        }

        #[test]
        fn any_words_are_codes_that_pack_to_them(words in prop::collection::vec(any::<u32>(), 8 * 3), width in 0..4usize) {
            let bits = WIDTHS[width];
            let codes = unpack_all(bits, &words).unwrap();
            prop_assert_eq!(pack_all(bits, &codes).unwrap(), words);
        }
    }

    #[test]
    fn three_bits_have_the_documented_layout() {
        let mut codes = [0u8; UNIT];
        codes[1] = 0b101; // quad 0, byte 1
        codes[6] = 0b011; // quad 1, byte 2
        codes[24] = 0b110; // quad 6, byte 0
        codes[31] = 0b101; // quad 7, byte 3
        let words = pack_all(3, &codes).unwrap();
        assert_eq!(words[0], 0b101 << 8 | 0b011 << 19 | 0b10 << 6);
        assert_eq!(words[1], 0b01 << 30);
        assert_eq!(words[2], 1 << 6 | 1 << 31);
    }

    #[test]
    fn bad_arguments_are_refused() {
        assert!(pack_all(3, &[8; UNIT]).is_err());
        assert!(pack_all(3, &[0; UNIT - 1]).is_err());
        assert!(pack_all(5, &[0; UNIT]).is_err());
        assert!(unpack_all(3, &[0; 4]).is_err());
        assert!(unpack_all(0, &[0; 4]).is_err());
    }
}
