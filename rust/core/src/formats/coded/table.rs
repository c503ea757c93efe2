//! A frequency table, in the forms that decoders look up.

use super::LANES;

/// The sum of the frequencies of a table.
pub(super) const SLOTS: usize = 256;
/// The slots of a bucket.
pub(super) const BUCKET: usize = 16;

/// A table. Symbols without slots are never decoded.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub struct Table {
    /// The symbol of each slot.
    pub(super) symbols: [u8; SLOTS],
    pub(super) frequencies: [u8; LANES],
    /// Each symbol's first slot.
    pub(super) starts: [u8; LANES],
    pub(super) buckets: Buckets,
    /// The number of symbols, including those without slots.
    pub(super) count: usize,
    /// The integer of symbol 0.
    pub(super) lowest: i8,
    /// True if a frequency is above 127 and does not fit a signed byte.
    pub(super) wide: bool,
}

/// The form for AVX2, whose lookups have 16 entries. Rare symbols lie at both ends, so the first and the last bucket
/// have their own tables. Most other buckets have one edge, a slot where the symbol rises by one.
#[derive(Debug, Clone)]
pub(super) struct Buckets {
    /// For each bucket, the symbol of its first slot, minus the number of edges in `edges` before it.
    pub bases: [u8; BUCKET],
    /// For each bucket, the slot before its first edge, as [`signed`]; the largest value if there is no edge.
    pub first_edges: [u8; BUCKET],
    /// For each slot of the first and the last bucket, its symbol minus that of the bucket's first slot.
    pub outer: [[u8; BUCKET]; 2],
    /// The slots before all other edges, encoded like `first_edges`.
    pub edges: Vec<[u8; 2 * BUCKET]>,
}

impl Buckets {
    fn new(symbols: &[u8; SLOTS]) -> Buckets {
        let (buckets, _) = symbols.as_chunks::<BUCKET>();
        let above = |bucket: usize| buckets[bucket].map(|symbol| symbol - buckets[bucket][0]);
        let mut found = Buckets {
            bases: [0; BUCKET],
            first_edges: [signed(SLOTS - 1); BUCKET],
            outer: [above(0), above(BUCKET - 1)],
            edges: Vec::new(),
        };
        for (bucket, symbols) in buckets.iter().enumerate() {
            found.bases[bucket] = symbols[0].wrapping_sub(found.edges.len() as u8);
            if (1..BUCKET - 1).contains(&bucket) {
                found.add_edges(bucket, symbols);
            }
        }
        found
    }

    fn add_edges(&mut self, bucket: usize, symbols: &[u8; BUCKET]) {
        let pairs = symbols.windows(2).enumerate();
        let edges = pairs.flat_map(|(i, pair)| (pair[0]..pair[1]).map(move |_| signed(bucket * BUCKET + i)));
        for (number, edge) in edges.enumerate() {
            match number {
                0 => self.first_edges[bucket] = edge,
                _ => self.edges.push([edge; 2 * BUCKET]),
            }
        }
    }
}

/// Maps a byte such that signed comparison orders the results like unsigned comparison orders the bytes.
fn signed(slot: usize) -> u8 {
    slot as u8 ^ 0x80
}

impl Table {
    /// The table of consecutive integers from `lowest` on; trailing ones without slots do not count. `None` if the
    /// frequencies do not add up to 256 or an integer does not fit a signed byte.
    pub(super) fn new(lowest: i8, frequencies: &[u8]) -> Option<Table> {
        let last = frequencies.iter().rposition(|&frequency| frequency > 0)?;
        let frequencies = &frequencies[..=last];
        let sum: usize = frequencies.iter().map(|&f| usize::from(f)).sum();
        let highest = i32::from(lowest) + frequencies.len() as i32 - 1;
        if sum != SLOTS || frequencies.len() > LANES || highest > i8::MAX.into() {
            return None;
        }
        let mut table = Table {
            symbols: [0; SLOTS],
            frequencies: [0; LANES],
            starts: [0; LANES],
            buckets: Buckets::new(&[0; SLOTS]),
            count: frequencies.len(),
            lowest,
            wide: frequencies.iter().any(|&f| f > 127),
        };
        let mut slot = 0;
        for (symbol, &frequency) in frequencies.iter().enumerate() {
            table.frequencies[symbol] = frequency;
            table.starts[symbol] = slot as u8;
            let end = slot + usize::from(frequency);
            table.symbols[slot..end].fill(symbol as u8);
            slot = end;
        }
        table.buckets = Buckets::new(&table.symbols);
        Some(table)
    }

    /// The integer of symbol 0; symbol n stands for this integer plus n.
    pub fn lowest(&self) -> i8 {
        self.lowest
    }

    /// The symbol of an integer that has slots.
    #[inline(always)]
    pub(super) fn symbol(&self, code: i32) -> Option<u8> {
        let symbol = usize::try_from(code - i32::from(self.lowest)).ok()?;
        let listed = symbol < self.count && self.frequencies[symbol] > 0;
        listed.then_some(symbol as u8)
    }

    /// The most frequent symbol among every `step`-th from `first` on; the lowest of equals.
    pub(super) fn favourite(&self, first: usize, step: usize) -> u8 {
        let symbols = (first..self.count).step_by(step);
        let better = |best: usize, next: usize| match self.frequencies[next] > self.frequencies[best] {
            true => next,
            false => best,
        };
        symbols.reduce(better).unwrap_or(0) as u8
    }
}
