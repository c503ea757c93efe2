//! The dictionary code of the QMoE paper (section 4.3): 65,536 strings of ternary weights with 16-bit codes.
//!
//! The dictionary is the 2^16 most probable strings of at most 14 pairs of weights at P(0) = 0.885, found with a
//! priority queue (the paper's algorithm 1, which keeps strings of 14 pairs and does not extend them). It is not
//! stored: it is generated at first use, so its order is part of the format:
//!
//! * a pair is `first + 3 * second`, its probability the product of the two symbols' in double precision;
//! * a string's probability is that of the string without its last pair times that of the pair, in double precision;
//! * more probable strings come first; equal ones in the lexicographic order of their lists of pairs.
//!
//! Only multiplications of doubles are involved, so every machine generates the same words. The set is closed under
//! prefixes and suffixes, so the greedy longest match is the shortest parse. An odd row is padded by one zero.

mod encoder;

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::OnceLock;

pub use encoder::Encoder;

/// The number of words.
pub const WORDS: usize = 1 << 16;

/// The length of the longest word in pairs.
pub const MAX_PAIRS: usize = 14;

/// The number of different pairs.
const PAIRS: usize = 9;

/// The probabilities of the symbols 0, 1 and 2 that the dictionary is generated for.
const PROBABILITIES: [f64; 3] = [0.885, (1.0 - 0.885) / 2.0, (1.0 - 0.885) / 2.0];

/// A string of pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    pairs: [u8; MAX_PAIRS],
    length: u8,
    /// The code of the word without its last pair; the word's own code for a single pair.
    prefix: u16,
}

impl Word {
    /// The pairs, `first + 3 * second` each.
    pub fn pairs(&self) -> &[u8] {
        &self.pairs[..usize::from(self.length)]
    }

    /// The word in the layout of the paper's figure 4: both numbers have the length in pairs in bits 0-3 and pair j
    /// of seven from bit 4 + 4j, with the second weight two bits above the first.
    pub fn packed(&self) -> [u32; 2] {
        [0, 7].map(|from| {
            let half = self.pairs().iter().skip(from).take(7);
            half.enumerate().fold(u32::from(self.length), |word, (j, &pair)| {
                word | u32::from(pair % 3) << (4 + 4 * j) | u32::from(pair / 3) << (6 + 4 * j)
            })
        })
    }

    /// The word's entry in a decoder's table: its non-zeros, at most three at this P(0), in a three-slot entry
    /// ([`super::fsv8::Lut`]), with the length in weights.
    pub fn sparse(&self) -> u32 {
        let weights = self.pairs().iter().flat_map(|&pair| [pair % 3, pair / 3]);
        let nonzeros = weights.enumerate().filter(|&(_, symbol)| symbol != 0);
        nonzeros.enumerate().fold(
            u32::from(2 * self.length) << 24,
            |entry, (slot, (position, symbol))| {
                entry | (position as u32) << (5 * slot) | u32::from(symbol) << (16 + 2 * slot)
            },
        )
    }
}

/// All words in the order of their codes.
pub fn words() -> &'static [Word] {
    static WORDS: OnceLock<Vec<Word>> = OnceLock::new();
    WORDS.get_or_init(generate)
}

/// The entries of all words in a decoder's table ([`Word::sparse`]): 256 KiB.
pub fn sparse() -> &'static [u32] {
    static SPARSE: OnceLock<Vec<u32>> = OnceLock::new();
    SPARSE.get_or_init(|| words().iter().map(Word::sparse).collect())
}

/// A string that may become the next word.
struct Candidate {
    probability: f64,
    word: Word,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        let lexicographic = || other.word.pairs().cmp(self.word.pairs());
        self.probability
            .total_cmp(&other.probability)
            .then_with(lexicographic)
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

/// Adds the nine strings that extend `word`, whose probability is given, by one pair.
fn extend(queue: &mut BinaryHeap<Candidate>, probability: f64, word: Word) {
    for pair in 0..PAIRS {
        let mut longer = Word {
            length: word.length + 1,
            ..word
        };
        longer.pairs[usize::from(word.length)] = pair as u8;
        let pair_probability = PROBABILITIES[pair % 3] * PROBABILITIES[pair / 3];
        queue.push(Candidate {
            probability: probability * pair_probability,
            word: longer,
        });
    }
}

fn generate() -> Vec<Word> {
    let mut queue = BinaryHeap::new();
    extend(
        &mut queue,
        1.0,
        Word {
            pairs: [0; MAX_PAIRS],
            length: 0,
            prefix: 0,
        },
    );
    let mut words = Vec::with_capacity(WORDS);
    while words.len() < WORDS
        && let Some(Candidate { probability, word }) = queue.pop()
    {
        let code = words.len() as u16;
        words.push(if word.length == 1 {
            Word { prefix: code, ..word }
        } else {
            word
        });
        if usize::from(word.length) < MAX_PAIRS {
            extend(&mut queue, probability, Word { prefix: code, ..word });
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_the_lengths_of_the_paper() {
        let mut counts = [0; MAX_PAIRS];
        words()
            .iter()
            .for_each(|word| counts[usize::from(word.length) - 1] += 1);
        let expected = [
            9, 65, 233, 577, 1161, 2049, 3305, 4993, 7177, 9921, 13289, 17345, 3843, 1569,
        ];
        assert_eq!(counts, expected);
    }

    #[test]
    fn the_order_of_the_words_is_pinned() {
        assert_eq!(words()[0].pairs(), [0]);
        let bytes = words().iter().flat_map(Word::packed).flat_map(u32::to_le_bytes);
        // FNV-1a, 64 bits.
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        });
        assert_eq!(hash, 0x1a8a_6bce_1bcd_5e4f);
    }

    #[test]
    fn sparse_entries_equal_the_words() {
        for word in words() {
            let mut string = vec![0; 2 * word.pairs().len()];
            let entry = word.sparse();
            assert_eq!((entry >> 24) as usize, string.len());
            for (position, symbol) in crate::formats::ternary::fsv8::lut::nonzeros(entry, true) {
                string[position] = symbol;
            }
            let expected: Vec<u8> = word
                .pairs()
                .iter()
                .flat_map(|&pair| [pair % 3, pair / 3])
                .collect();
            assert_eq!(string, expected);
        }
    }
}
