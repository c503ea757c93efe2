//! A frequency table, in the forms that decoders look up.

use super::LANES;

/// The sum of the frequencies of a table.
pub(super) const SLOTS: usize = 256;
/// The slots of a bucket.
pub(super) const BUCKET: usize = 16;
/// The number by which buckets shift slots.
pub(super) const SHIFT: usize = BUCKET / 2;

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

/// The form for AVX2, whose lookups have 16 entries. Rare symbols lie at both ends. Slots are therefore shifted by
/// [`SHIFT`], so that the first eight and the last eight form bucket 0, which has a table of its own. Most other buckets
/// have one edge, a slot where the symbol rises by one. Shifted slots are compared as signed bytes.
#[derive(Debug, Clone)]
pub(super) struct Buckets {
    /// For each bucket, the symbol of its first slot (0 for bucket 0), minus the number of edges in `edges` before it
    /// in signed order.
    pub bases: [u8; BUCKET],
    /// For each bucket, the shifted slot before its first edge; the bucket's last one if there is no edge.
    pub first_edges: [u8; BUCKET],
    /// The symbol of each slot of bucket 0.
    pub outer: [u8; BUCKET],
    /// The shifted slots before all other edges.
    pub edges: Vec<[u8; 2 * BUCKET]>,
}

impl Buckets {
    fn new(symbols: &[u8; SLOTS]) -> Buckets {
        let mut shifted = *symbols;
        shifted.rotate_right(SHIFT);
        let (buckets, _) = shifted.as_chunks::<BUCKET>();
        let mut found = Buckets {
            bases: [0; BUCKET],
            first_edges: std::array::from_fn(|bucket| (bucket * BUCKET + BUCKET - 1) as u8),
            outer: buckets[0],
            edges: Vec::new(),
        };
        // The upper half of all bytes is negative.
        for bucket in (BUCKET / 2..BUCKET).chain(0..BUCKET / 2) {
            let first = if bucket == 0 { 0 } else { buckets[bucket][0] };
            found.bases[bucket] = first.wrapping_sub(found.edges.len() as u8);
            if bucket > 0 {
                found.add_edges(bucket, &buckets[bucket]);
            }
        }
        found
    }

    fn add_edges(&mut self, bucket: usize, symbols: &[u8; BUCKET]) {
        let pairs = symbols.windows(2).enumerate();
        let edges = pairs.flat_map(|(i, pair)| (pair[0]..pair[1]).map(move |_| (bucket * BUCKET + i) as u8));
        for (number, edge) in edges.enumerate() {
            match number {
                0 => self.first_edges[bucket] = edge,
                _ => self.edges.push([edge; 2 * BUCKET]),
            }
        }
    }
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
