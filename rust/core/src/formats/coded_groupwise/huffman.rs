//! Huffman codes over bytes, of at most 11 bits: canonical, little-endian, decoded by one look-up a byte.
//!
//! A code is its 256 lengths. Every code here is complete (each string of bits is a row of codewords), so a decoder
//! never meets bits that mean nothing: damaged bytes give wrong symbols and nothing else.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Longest codeword in bits. A table of 2^11 entries takes 4 KB; bytes of 2-bit codes have 6 to 8 bits of entropy.
pub const MAX_BITS: u32 = 11;
const ENTRIES: usize = 1 << MAX_BITS;

/// The length of each symbol's codeword; 0: the symbol does not occur.
pub type Lengths = [u8; 256];

/// Codeword lengths for symbols that occur `counts` times: optimal, unless codewords longer than [`MAX_BITS`] had to
/// be avoided by flattening the counts. At least two symbols get a codeword, so that the code is complete.
pub fn lengths(counts: &[u64; 256]) -> Lengths {
    let mut counts = *counts;
    for symbol in 0..2 {
        if counts.iter().filter(|&&count| count > 0).count() < 2 {
            counts[symbol] = counts[symbol].max(1);
        }
    }
    loop {
        let lengths = unlimited(&counts);
        if lengths.iter().all(|&length| u32::from(length) <= MAX_BITS) {
            return lengths;
        }
        counts.iter_mut().for_each(|count| *count = count.div_ceil(2));
    }
}

/// Huffman's algorithm; among equal counts the earlier node goes first, so the result is determined.
fn unlimited(counts: &[u64; 256]) -> Lengths {
    let mut heap: BinaryHeap<Reverse<(u64, usize)>> = (0..256)
        .filter(|&symbol| counts[symbol] > 0)
        .map(|symbol| Reverse((counts[symbol], symbol)))
        .collect();
    let mut parents = vec![0; 256];
    while let (Some(Reverse((a, left))), Some(Reverse((b, right)))) = (heap.pop(), heap.pop()) {
        let node = parents.len();
        (parents[left], parents[right]) = (node, node);
        parents.push(0);
        heap.push(Reverse((a + b, node)));
        if heap.len() == 1 {
            break;
        }
    }
    let root = parents.len() - 1;
    let mut depths = vec![0u8; parents.len()];
    for node in (256..root).rev() {
        depths[node] = depths[parents[node]] + 1;
    }
    std::array::from_fn(|symbol| match counts[symbol] {
        0 => 0,
        _ => depths[parents[symbol]] + 1,
    })
}

/// Whether the lengths make a complete code of at most [`MAX_BITS`].
pub fn complete(lengths: &Lengths) -> bool {
    let used = lengths.iter().filter(|&&length| length > 0);
    let mut sum = 0;
    for &length in used {
        if u32::from(length) > MAX_BITS {
            return false;
        }
        sum += ENTRIES >> length;
    }
    sum == ENTRIES
}

/// Each symbol's codeword, its first bit lowest.
pub fn codewords(lengths: &Lengths) -> [u16; 256] {
    let mut words = [0; 256];
    let mut next = 0u16;
    for bits in 1..=MAX_BITS as u8 {
        next <<= 1;
        for symbol in (0..256).filter(|&symbol| lengths[symbol] == bits) {
            words[symbol] = next.reverse_bits() >> (16 - bits);
            next = next.wrapping_add(1);
        }
    }
    words
}

/// What the next 11 bits begin with: `symbol << 4 | length`.
#[derive(Clone)]
pub struct Table(Box<[u16; ENTRIES]>);

impl Table {
    /// The table of a complete code.
    pub fn new(lengths: &Lengths) -> Table {
        let mut entries = Box::new([0; ENTRIES]);
        for (symbol, word) in codewords(lengths).into_iter().enumerate() {
            let length = lengths[symbol];
            if length > 0 {
                let entry = (symbol as u16) << 4 | u16::from(length);
                entries[usize::from(word)..]
                    .iter_mut()
                    .step_by(1 << length)
                    .for_each(|e| *e = entry);
            }
        }
        Table(entries)
    }
}

/// Writes codewords.
#[derive(Default)]
pub struct Writer {
    out: Vec<u8>,
    bits: u64,
    count: u32,
}

impl Writer {
    /// Appends a codeword.
    pub fn put(&mut self, word: u16, length: u8) {
        self.bits |= u64::from(word) << self.count;
        self.count += u32::from(length);
        while self.count >= 8 {
            self.out.push(self.bits as u8);
            self.bits >>= 8;
            self.count -= 8;
        }
    }

    /// The bytes, the last one filled up with zeros.
    pub fn finish(mut self) -> Vec<u8> {
        if self.count > 0 {
            self.out.push(self.bits as u8);
        }
        self.out
    }
}

/// Reads codewords. Behind the end there are zeros without end.
pub struct Reader<'a> {
    data: &'a [u8],
    at: usize,
    bits: u64,
    count: u32,
}

/// Symbols that can be read after one [`Reader::refill`]: it leaves 56 bits at least.
pub const PER_REFILL: usize = 5;

impl<'a> Reader<'a> {
    /// Starts at the beginning of `data`.
    pub fn new(data: &'a [u8]) -> Reader<'a> {
        Reader {
            data,
            at: 0,
            bits: 0,
            count: 0,
        }
    }

    /// Makes sure that [`PER_REFILL`] symbols can follow.
    #[inline(always)]
    pub fn refill(&mut self) {
        if let Some(word) = self.data.get(self.at..).and_then(|rest| rest.first_chunk::<8>()) {
            // Bits beyond the whole bytes that are counted are written again next time, with the same values.
            self.bits |= u64::from_le_bytes(*word) << self.count;
            let bytes = (63 - self.count) / 8;
            self.at += bytes as usize;
            self.count += 8 * bytes;
        } else {
            self.refill_at_the_end();
        }
    }

    #[cold]
    fn refill_at_the_end(&mut self) {
        // What is above the counted bits may have been set ahead by the fast path.
        self.bits &= (1 << self.count) - 1;
        while self.count < 56 {
            let byte = self.data.get(self.at).copied().unwrap_or(0);
            self.bits |= u64::from(byte) << self.count;
            self.at += 1;
            self.count += 8;
        }
    }

    /// The next symbol.
    #[inline(always)]
    pub fn next(&mut self, table: &Table) -> u8 {
        let entry = table.0[self.bits as usize % ENTRIES];
        let length = u32::from(entry & 15);
        self.bits >>= length;
        self.count = self.count.wrapping_sub(length);
        (entry >> 4) as u8
    }

    /// Whether exactly the last byte was reached, and what it holds behind the last codeword is zero.
    pub fn finished(&self) -> bool {
        let used = 8 * self.at - self.count as usize;
        let rest = (8 * self.data.len()).checked_sub(used);
        rest.is_some_and(|rest| rest < 8 && self.bits & ((1 << rest) - 1) == 0)
    }
}
