//! The dictionaries of FSV8: the word of every code byte in every state, and the stored form of dictionaries.
//!
//! A dictionary is data, found once by a search (`fsv8_dictionaries` of `rust/tools`). Reading it involves no
//! arithmetic with probabilities, so every machine reads the same words. The bytes of one dictionary are,
//! little-endian:
//!
//! ```text
//! u16 p0 in thousandths, u16 share of symbol 1 among the non-zeros in thousandths, u32 expected weights per code in 1/10000,
//! u8 most non-zeros of a word, u8 class bits, u8 states, u8 zero, u8 promise of each state (0 = none), u16 codes of each class,
//! then for each state the words of the codes 0 to 255:
//!     u8 length (0: no such word), u8 number of non-zeros << 6 | symbol of the i-th << 2i, u8 position of each non-zero
//! ```

use std::sync::OnceLock;

use crate::{Error, Result};

/// The number of embedded dictionaries.
pub const COUNT: usize = 36;

/// The number of codes, which are bytes.
pub const CODES: usize = 256;

/// The maximum number of non-zero weights of a word.
pub const MAX_NONZEROS: usize = 3;

/// The embedded dictionaries, written by `fsv8_dictionaries` of `rust/tools`.
static EMBEDDED: &[u8] = include_bytes!("dictionaries.bin");

/// A string of weights that one code stands for: its length, and the positions and symbols of its non-zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Word {
    /// The number of weights, 1 to 255.
    pub length: u8,
    nonzeros: u8,
    positions: [u8; MAX_NONZEROS],
    symbols: [u8; MAX_NONZEROS],
}

impl Word {
    /// Builds the word of a string of symbols 0, 1 and 2; `None` if it is empty, longer than 255 or has too many
    /// non-zeros.
    pub fn from_symbols(string: &[u8]) -> Option<Word> {
        let mut word = Word {
            length: u8::try_from(string.len()).ok().filter(|&n| n > 0)?,
            ..Word::default()
        };
        for (position, &symbol) in string.iter().enumerate().filter(|(_, symbol)| **symbol != 0) {
            word = word.with(position as u8, symbol)?;
        }
        Some(word)
    }

    fn with(mut self, position: u8, symbol: u8) -> Option<Word> {
        let i = usize::from(self.nonzeros);
        if i == MAX_NONZEROS || symbol == 0 || symbol > 2 || position >= self.length {
            return None;
        }
        self.positions[i] = position;
        self.symbols[i] = symbol;
        self.nonzeros += 1;
        Some(self)
    }

    /// The non-zero weights in order: (position, symbol 1 or 2).
    pub fn nonzeros(self) -> impl Iterator<Item = (u8, u8)> {
        (0..usize::from(self.nonzeros)).map(move |i| (self.positions[i], self.symbols[i]))
    }

    /// The string itself, one symbol per byte.
    pub fn symbols(&self) -> Vec<u8> {
        let mut string = vec![0; usize::from(self.length)];
        for (position, symbol) in self.nonzeros() {
            string[usize::from(position)] = symbol;
        }
        string
    }
}

/// One finite-state code. Probabilities and the expected length are stored integers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dictionary {
    /// The share of zeros that it was searched for, in thousandths.
    pub p0_thousandths: u16,
    /// The share of symbol 1 among the non-zeros that it was searched for, in thousandths.
    pub share_thousandths: u16,
    /// The average number of weights per code at these probabilities, in 1/10000.
    pub expected_length: u32,
    /// The maximum number of non-zeros of a word: 2 or 3.
    pub max_nonzeros: u8,
    /// The number of top bits of a code that name its class: 2 or 3.
    pub class_bits: u8,
    /// The promise d of each state: the next d weights are not all zero; 0 for state 0, which promises nothing.
    pub promises: Vec<u8>,
    /// The number of codes of each class. Classes are consecutive ranges of codes, and the class of a code is the
    /// state of the next code.
    pub class_sizes: Vec<u16>,
    /// The word of each code in each state; `None` if a state does not use a code.
    pub words: Vec<Vec<Option<Word>>>,
}

impl Dictionary {
    /// The 36 embedded dictionaries; a blob names them by their index here.
    pub fn all() -> &'static [Dictionary] {
        static ALL: OnceLock<Vec<Dictionary>> = OnceLock::new();
        ALL.get_or_init(|| read_all(EMBEDDED).expect("the embedded dictionaries are well-formed"))
    }

    /// The number of states.
    pub fn states(&self) -> usize {
        self.promises.len()
    }

    /// The state after a code.
    pub fn class_of(&self, code: u8) -> usize {
        let mut end = 0;
        self.class_sizes
            .iter()
            .position(|&size| {
                end += usize::from(size);
                usize::from(code) < end
            })
            .unwrap_or(0)
    }

    /// The probabilities of the symbols 0, 1 and 2 that the dictionary was searched for.
    pub fn probabilities(&self) -> [f64; 3] {
        let p0 = f64::from(self.p0_thousandths) / 1e3;
        let share = f64::from(self.share_thousandths) / 1e3;
        [p0, (1.0 - p0) * share, (1.0 - p0) * (1.0 - share)]
    }

    /// The length of the longest word.
    pub fn max_length(&self) -> u8 {
        self.words
            .iter()
            .flatten()
            .flatten()
            .map(|word| word.length)
            .max()
            .unwrap_or(0)
    }

    fn check(&self) -> Result<()> {
        let classes: usize = self.class_sizes.iter().map(|&n| usize::from(n)).sum();
        let unit = CODES >> self.class_bits;
        let aligned = self
            .class_sizes
            .iter()
            .all(|&n| n > 0 && usize::from(n) % unit == 0);
        if !(2..=3).contains(&self.class_bits) || !(2..=3).contains(&self.max_nonzeros) {
            return Err(malformed("class bits or non-zeros"));
        }
        if classes != CODES
            || !aligned
            || self.promises.first() != Some(&0)
            || self.promises[1..].contains(&0)
        {
            return Err(malformed("classes"));
        }
        let slots = usize::from(self.max_nonzeros);
        let fits = |word: &Word| {
            // A three-slot entry of a lookup table has 5 bits for a position.
            word.nonzeros().count() <= slots && (slots == 2 || word.nonzeros().all(|(at, _)| at < 32))
        };
        if !self.words.iter().flatten().flatten().all(fits) {
            return Err(malformed("a word"));
        }
        Ok(())
    }
}

fn malformed(what: &str) -> Error {
    Error::Corruption(format!("FSV8 dictionary: {what} out of range"))
}

/// Reads dictionaries until the bytes end.
pub fn read_all(mut bytes: &[u8]) -> Result<Vec<Dictionary>> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        all.push(read(&mut bytes)?);
    }
    Ok(all)
}

fn take<'a>(bytes: &mut &'a [u8], n: usize) -> Result<&'a [u8]> {
    let (head, tail) = bytes
        .split_at_checked(n)
        .ok_or_else(|| Error::InsufficientData("FSV8 dictionary ends too early".into()))?;
    *bytes = tail;
    Ok(head)
}

fn take_u16(bytes: &mut &[u8]) -> Result<u16> {
    take(bytes, 2).map(|b| u16::from_le_bytes([b[0], b[1]]))
}

fn read(bytes: &mut &[u8]) -> Result<Dictionary> {
    let p0_thousandths = take_u16(bytes)?;
    let share_thousandths = take_u16(bytes)?;
    let expected_length = u32::from(take_u16(bytes)?) | u32::from(take_u16(bytes)?) << 16;
    let &[max_nonzeros, class_bits, states, _] = take(bytes, 4)? else {
        unreachable!("four bytes were taken")
    };
    let promises = take(bytes, usize::from(states))?.to_vec();
    let class_sizes = (0..states).map(|_| take_u16(bytes)).collect::<Result<_>>()?;
    let words = (0..states)
        .map(|_| (0..CODES).map(|_| read_word(bytes)).collect::<Result<_>>())
        .collect::<Result<_>>()?;
    let dictionary = Dictionary {
        p0_thousandths,
        share_thousandths,
        expected_length,
        max_nonzeros,
        class_bits,
        promises,
        class_sizes,
        words,
    };
    dictionary.check()?;
    Ok(dictionary)
}

fn read_word(bytes: &mut &[u8]) -> Result<Option<Word>> {
    let length = take(bytes, 1)?[0];
    if length == 0 {
        return Ok(None);
    }
    let shape = take(bytes, 1)?[0];
    let mut word = Word {
        length,
        ..Word::default()
    };
    for i in 0..shape >> 6 {
        let position = take(bytes, 1)?[0];
        word = word
            .with(position, shape >> (2 * i) & 3)
            .ok_or_else(|| malformed("a word"))?;
    }
    Ok(Some(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_data_has_not_changed() {
        // FNV-1a, 64 bits. Every packed tensor depends on these bytes: they never change.
        let hash = EMBEDDED.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, &b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        });
        assert_eq!((EMBEDDED.len(), hash), (131_665, 0x6491_2bcd_3666_ad4e));
    }

    #[test]
    fn there_are_36_dictionaries() {
        assert_eq!(Dictionary::all().len(), COUNT);
    }

    #[test]
    fn truncated_data_is_refused() {
        let mut rest = EMBEDDED;
        read(&mut rest).unwrap();
        let first = &EMBEDDED[..EMBEDDED.len() - rest.len()];
        assert_eq!(read_all(first).unwrap().len(), 1);
        for length in 1..first.len() {
            assert!(read_all(&first[..length]).is_err());
        }
    }
}
