//! Encodes by the longest match: walks the tree of all words, one step per run of zeros or pair of weights.
//!
//! Most pairs are zeros, so a word and its extensions by one, two, ... pairs of zeros are stored consecutively, as a
//! *chain*: a whole run of zeros takes one step.

use std::sync::OnceLock;

use super::super::fsv8::SENTINEL;
use super::{PAIRS, WORDS, Word, words};

/// Marks an extension that is not a word. Code 0 is free for this purpose: it is a single pair, which extends no
/// word.
const NONE: u16 = 0;

/// The tree of the words.
pub struct Encoder {
    /// The code of each single pair.
    first: [u16; PAIRS],
    /// The code of each word's extension by each pair other than 0.
    longer: Vec<[u16; PAIRS - 1]>,
    /// The chains: codes, each followed by that of its extension by a pair of zeros if there is such a word.
    chains: Vec<u16>,
    /// The position of each word in `chains`.
    places: Vec<Place>,
}

/// The position of a word in its chain.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    at: u16,
    /// The number of words after it in the chain: the pairs of zeros that can extend it.
    left: u16,
}

impl Encoder {
    /// Returns the encoder, which is built on first use.
    pub fn get() -> &'static Encoder {
        static ENCODER: OnceLock<Encoder> = OnceLock::new();
        ENCODER.get_or_init(Encoder::new)
    }

    fn new() -> Encoder {
        let mut encoder = Encoder {
            first: [NONE; PAIRS],
            longer: vec![[NONE; PAIRS - 1]; WORDS],
            chains: Vec::with_capacity(WORDS),
            places: vec![Place::default(); WORDS],
        };
        let mut by_zeros = vec![NONE; WORDS];
        for (code, word) in words().iter().enumerate() {
            let (prefix, last) = (usize::from(word.prefix), last_pair(word));
            match (word.pairs().len(), last) {
                (1, _) => encoder.first[last] = code as u16,
                (_, 0) => by_zeros[prefix] = code as u16,
                _ => encoder.longer[prefix][last - 1] = code as u16,
            }
        }
        for (code, word) in words().iter().enumerate() {
            if word.pairs().len() == 1 || last_pair(word) != 0 {
                encoder.add_chain(code as u16, &by_zeros);
            }
        }
        encoder
    }

    fn add_chain(&mut self, first: u16, by_zeros: &[u16]) {
        let start = self.chains.len();
        let next = |&code: &u16| Some(by_zeros[usize::from(code)]).filter(|&next| next != NONE);
        self.chains.extend(std::iter::successors(Some(first), next));
        for (at, &code) in self.chains.iter().enumerate().skip(start) {
            self.places[usize::from(code)] = Place {
                at: at as u16,
                left: (self.chains.len() - 1 - at) as u16,
            };
        }
    }

    /// Appends the codes of a row of `columns` weights to `out`, two bytes each.
    ///
    /// `nonzeros` holds `position << 1 | positive` of each non-zero weight in order, followed by [`SENTINEL`].
    pub fn encode(&self, nonzeros: &[u32], columns: usize, out: &mut Vec<u8>) {
        let mut walk = Walk {
            encoder: self,
            code: None,
            out,
        };
        let (mut pair, mut next) = (0, 0);
        while nonzeros[next] != SENTINEL {
            let (position, mut symbols) = (nonzeros[next] >> 2, pair_term(nonzeros[next]));
            next += 1;
            if nonzeros[next] >> 2 == position {
                symbols += pair_term(nonzeros[next]);
                next += 1;
            }
            walk.zeros(position - pair);
            walk.pair(symbols);
            pair = position + 1;
        }
        walk.zeros(columns.div_ceil(2) as u32 - pair);
        walk.end();
    }
}

fn last_pair(word: &Word) -> usize {
    usize::from(word.pairs()[word.pairs().len() - 1])
}

/// The term of a non-zero weight in `first + 3 * second` of its pair; its symbol is 1 if negative, 2 if positive.
#[inline(always)]
fn pair_term(nonzero: u32) -> usize {
    let symbol = 1 + (nonzero & 1) as usize;
    if nonzero & 2 == 0 { symbol } else { 3 * symbol }
}

/// A row being encoded.
struct Walk<'a> {
    encoder: &'a Encoder,
    /// The longest word that matches so far.
    code: Option<u16>,
    out: &'a mut Vec<u8>,
}

impl Walk<'_> {
    #[inline(always)]
    fn end(&mut self) {
        if let Some(code) = self.code.take() {
            self.out.extend(code.to_le_bytes());
        }
    }

    /// Encodes one pair that is not 0.
    #[inline(always)]
    fn pair(&mut self, pair: usize) {
        let longer = self
            .code
            .map_or(NONE, |code| self.encoder.longer[usize::from(code)][pair - 1]);
        if longer == NONE {
            self.end();
            self.code = Some(self.encoder.first[pair]);
        } else {
            self.code = Some(longer);
        }
    }

    /// Encodes `count` pairs of zeros.
    #[inline(always)]
    fn zeros(&mut self, mut count: u32) {
        while count > 0 {
            let code = *self.code.get_or_insert_with(|| {
                count -= 1;
                self.encoder.first[0]
            });
            let place = self.encoder.places[usize::from(code)];
            let taken = count.min(place.left.into());
            self.code = Some(self.encoder.chains[usize::from(place.at) + taken as usize]);
            count -= taken;
            if count > 0 {
                self.end();
            }
        }
    }
}
