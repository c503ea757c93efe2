//! Encoding by the longest match: a walk down the tree of all words, a pair of weights a step.

use std::sync::OnceLock;

use super::{PAIRS, WORDS, words};

/// No word extends this one by that pair. Code 0 is a single pair, so it extends nothing.
const NONE: u16 = 0;

/// The tree of the words.
pub struct Encoder {
    /// The words of one pair.
    first: [u16; PAIRS],
    /// The word that a pair makes of a word.
    longer: Vec<[u16; PAIRS]>,
}

impl Encoder {
    /// The encoder, built at its first use.
    pub fn get() -> &'static Encoder {
        static ENCODER: OnceLock<Encoder> = OnceLock::new();
        ENCODER.get_or_init(Encoder::new)
    }

    fn new() -> Encoder {
        let mut encoder = Encoder {
            first: [NONE; PAIRS],
            longer: vec![[NONE; PAIRS]; WORDS],
        };
        for (code, word) in words().iter().enumerate() {
            let pair = usize::from(word.pairs()[word.pairs().len() - 1]);
            match word.pairs().len() {
                1 => encoder.first[pair] = code as u16,
                _ => encoder.longer[usize::from(word.prefix)][pair] = code as u16,
            }
        }
        encoder
    }

    /// Appends the codes of a row of -1, 0 and 1 to `out`, two bytes each.
    pub fn encode(&self, row: &[i8], out: &mut Vec<u8>) {
        let mut pairs = row.chunks(2).map(pair);
        let Some(pair) = pairs.next() else { return };
        let mut code = self.first[pair];
        for pair in pairs {
            let longer = self.longer[usize::from(code)][pair];
            if longer == NONE {
                out.extend(code.to_le_bytes());
                code = self.first[pair];
            } else {
                code = longer;
            }
        }
        out.extend(code.to_le_bytes());
    }
}

/// The pair of two weights, or of the last one of an odd row and a zero.
#[inline(always)]
fn pair(codes: &[i8]) -> usize {
    let symbol = |code: i8| usize::from(code as u8 & 1) << (code == 1) as usize;
    symbol(codes[0]) + 3 * codes.get(1).map_or(0, |&code| symbol(code))
}
