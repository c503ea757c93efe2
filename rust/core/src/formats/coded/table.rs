//! A frequency table, in the forms that decoders look things up in.

use super::LANES;

/// What the frequencies of a table add up to.
pub(super) const SLOTS: usize = 256;
/// Slots of a bucket, of which AVX2 looks up the first one's symbol and one edge.
pub(super) const BUCKET: usize = 16;

/// A table. Symbols of no slots are never decoded.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub struct Table {
    /// The symbol of each slot.
    pub(super) symbols: [u8; SLOTS],
    pub(super) frequencies: [u8; LANES],
    /// Each symbol's first slot.
    pub(super) starts: [u8; LANES],
    /// For each bucket the symbol of its first slot, less the edges in `edges` before it.
    pub(super) bases: [u8; BUCKET],
    /// For each bucket the slot before the first at which the symbol rises by one, as [`signed`]; the largest for none.
    pub(super) first_edges: [u8; BUCKET],
    /// The slots before all other rises, in the same form.
    pub(super) edges: Vec<u8>,
    /// Symbols, those of no slots counted.
    pub(super) count: usize,
    /// The integer of symbol 0.
    pub(super) lowest: i8,
    /// A frequency is above 127: more than a signed byte.
    pub(super) wide: bool,
}

/// A byte for which signed comparison orders as unsigned comparison does the byte itself.
fn signed(slot: usize) -> u8 {
    slot as u8 ^ 0x80
}

impl Table {
    /// The table of neighbouring integers from `lowest` on, of which those behind the last with slots do not count; `None`
    /// if the frequencies do not add up to 256 or there is an integer that a signed byte does not hold.
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
            bases: [0; BUCKET],
            first_edges: [signed(SLOTS - 1); BUCKET],
            edges: Vec::new(),
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
        table.find_edges();
        Some(table)
    }

    /// Fills in what AVX2 finds symbols by.
    fn find_edges(&mut self) {
        for bucket in 0..BUCKET {
            let symbols = &self.symbols[bucket * BUCKET..][..BUCKET];
            self.bases[bucket] = symbols[0].wrapping_sub(self.edges.len() as u8);
            let mut first = true;
            for (i, pair) in symbols.windows(2).enumerate() {
                for _ in pair[0]..pair[1] {
                    let before = signed(bucket * BUCKET + i);
                    match std::mem::take(&mut first) {
                        true => self.first_edges[bucket] = before,
                        false => self.edges.push(before),
                    }
                }
            }
        }
    }

    /// The integer of symbol 0; that of symbol s is `lowest + s`.
    pub fn lowest(&self) -> i8 {
        self.lowest
    }

    /// The symbol of an integer that has slots.
    #[inline(always)]
    pub(super) fn symbol(&self, code: i32) -> Option<u8> {
        let symbol = usize::try_from(code - i32::from(self.lowest)).ok()?;
        (symbol < self.count && self.frequencies[symbol] > 0).then_some(symbol as u8)
    }

    /// The most frequent symbol, the lowest of them.
    pub(super) fn favourite(&self) -> u8 {
        let most = self.frequencies.iter().max();
        self.frequencies.iter().position(|f| Some(f) == most).unwrap_or(0) as u8
    }
}
