//! Codes to symbols by a table, and symbols to the bytes of a stream.

use super::decode::Register;
use super::encode::Code;
use super::fit::INTEGERS;
use super::give_off::{self, GiveOff};
use super::layout::STATE_BYTES;
use super::pairs::Pairing;
use super::table::Table;
use super::{LANES, QUAD};
use crate::simd::{Isa, vectorized};

/// What no symbol is.
pub(super) const NONE: u8 = u8::MAX;

/// A table as encoding needs it.
pub(super) struct Coder {
    pub table: Table,
    /// How pairs of digits find symbols, where these stand for two weights.
    pub pairing: Option<Pairing>,
    /// The symbol of each integer from -128 on, or its digit in symbols of two weights, or [`NONE`], which follows for
    /// all others.
    symbols: [u8; INTEGERS + 1],
    /// All integers from the lowest to the highest have slots.
    gapless: bool,
    steps: [Step; LANES],
}

impl Coder {
    pub fn new(table: Table) -> Coder {
        let mut coder = Coder {
            symbols: [NONE; INTEGERS + 1],
            gapless: table.pairs || table.frequencies[..table.count].iter().all(|&slots| slots > 0),
            pairing: table.pairs.then(|| Pairing::new(&table)),
            steps: [Step(0); LANES],
            table,
        };
        for (i, symbol) in coder.symbols[..INTEGERS].iter_mut().enumerate() {
            *symbol = coder.table.symbol(i as i32 - 128).unwrap_or(NONE);
        }
        let slots = coder.table.frequencies.iter().zip(&coder.table.starts);
        for (step, (&frequency, &start)) in coder.steps.iter_mut().zip(slots) {
            *step = Step::new(frequency, start);
        }
        coder
    }

    /// The symbols that stand in the place of exceptions whose integers are even, and odd.
    pub fn favourites(&self, dependent: bool) -> [u8; 2] {
        match dependent {
            true => [0, 1].map(|parity| self.table.favourite(parity, 2)),
            false => [self.table.favourite(0, 1); 2],
        }
    }

    /// The symbol, or digit, that stands behind the last column.
    pub fn padding(&self) -> u8 {
        let favourite = self.table.favourite(0, 1);
        match self.table.pairs {
            true => self.table.digits[0][usize::from(favourite)],
            false => favourite,
        }
    }

    /// Looks up the symbols, or digits, of codes; returns whether there are codes without one, which get [`NONE`].
    pub fn look_up<T: Code>(&self, codes: &[T], symbols: &mut [u8]) -> bool {
        if self.gapless {
            return self.subtract(codes, symbols);
        }
        let mut highest = 0;
        for (&code, symbol) in codes.iter().zip(symbols) {
            let index = code.into().wrapping_add(128) as u32 as usize;
            *symbol = self.symbols[index.min(INTEGERS)];
            highest = highest.max(*symbol);
        }
        highest == NONE
    }

    /// Does the same by subtracting the lowest integer.
    fn subtract<T: Code>(&self, codes: &[T], symbols: &mut [u8]) -> bool {
        let lowest = self.table.lowest();
        let highest = (i32::from(lowest) + self.table.levels as i32 - 1) as i8;
        let (first, last) = (T::from(lowest), T::from(highest));
        let mut outside = false;
        for (&code, symbol) in codes.iter().zip(symbols) {
            let none = (code < first) | (code > last);
            *symbol = if none {
                NONE
            } else {
                code.low().wrapping_sub(lowest as u8)
            };
            outside |= none;
        }
        outside
    }

    /// Encodes symbols from the last to the first; lanes of rows that do not exist stay at zero.
    pub fn encode(
        &self,
        isa: Isa,
        buffer: &mut Vec<u8>,
        symbols: &[Register],
        blocks: usize,
        rows: impl Fn(usize) -> usize,
    ) -> Vec<u8> {
        buffer.resize((symbols.len() + 1) * LANES, 0);
        let (mut at, mut states) = (buffer.len(), [0; LANES]);
        let registers = symbols.len() / blocks;
        for (block, symbols) in symbols.chunks_exact(registers).enumerate().rev() {
            let lanes = rows(block) * QUAD;
            let silent = states[..lanes].iter_mut().filter(|state| **state == 0);
            silent.for_each(|state| *state = 256);
            let give_off = give_off::fastest(isa);
            at = take_up(
                isa,
                &self.steps,
                symbols,
                lanes,
                &mut states,
                &mut buffer[..at],
                give_off,
            );
        }
        let mut bytes = Vec::with_capacity(STATE_BYTES + buffer.len() - at);
        bytes.extend(states.map(|state| (state >> 8) as u8));
        bytes.extend(states.map(|state| state as u8));
        bytes.extend(&buffer[at..]);
        bytes
    }
}

/// How a state takes up a symbol: from the low bits up its frequency (8 bits), its first slot (8) and the reciprocal of
/// the frequency, 2^16 / frequency rounded down (16, which 2^16 is clamped to).
#[derive(Clone, Copy)]
struct Step(u32);

impl Step {
    fn new(frequency: u8, start: u8) -> Step {
        let reciprocal = (1u32 << 16) / u32::from(frequency.max(1));
        Step(u32::from(frequency) | u32::from(start) << 8 | reciprocal.min(0xffff) << 16)
    }

    /// The next state, and whether the low byte of this one is given off first.
    #[inline(always)]
    fn next(self, state: u32) -> (u32, bool) {
        let (frequency, start, reciprocal) = (self.0 & 255, self.0 >> 8 & 255, self.0 >> 16);
        let full = state >= frequency << 8;
        let kept = if full { state >> 8 } else { state };
        // The reciprocal is short by less than one, or by one where it is clamped, and the state is below 2^16: the
        // quotient is exact or one too small.
        let quotient = (kept * reciprocal) >> 16;
        let rest = kept - quotient * frequency;
        let (quotient, rest) = match rest >= frequency {
            true => (quotient + 1, rest.wrapping_sub(frequency)),
            false => (quotient, rest),
        };
        ((quotient << 8) + rest + start, full)
    }
}

vectorized! {
    /// The states of `lanes` lanes take up registers of symbols from the last to the first, and give off bytes from the
    /// end of `buffer` on, which has a place for each and 64 more; returns where these start.
    fn take_up(
        steps: &[Step; LANES],
        symbols: &[Register],
        lanes: usize,
        states: &mut [u32; LANES],
        buffer: &mut [u8],
        give_off: GiveOff,
    ) -> usize = take_up_portable;
}

#[inline(always)]
fn take_up_portable(
    steps: &[Step; LANES],
    symbols: &[Register],
    lanes: usize,
    states: &mut [u32; LANES],
    buffer: &mut [u8],
    give_off: GiveOff,
) -> usize {
    let mut at = buffer.len();
    for register in symbols.iter().rev() {
        // Steps are looked up one by one; all else is done to all lanes at once.
        let steps: [Step; LANES] = std::array::from_fn(|lane| steps[usize::from(register.0[lane]) % LANES]);
        let (mut bytes, mut marks) = ([0u8; LANES], [0u8; LANES]);
        for lane in 0..LANES {
            bytes[lane] = states[lane] as u8;
            let (state, full) = steps[lane].next(states[lane]);
            (states[lane], marks[lane]) = (state, if full { u8::MAX } else { 0 });
        }
        states[lanes..].fill(0);
        marks[lanes..].fill(0);
        let Some((_, room)) = buffer[..at].split_last_chunk_mut::<LANES>() else {
            unreachable!("there is room for all symbols and a register more");
        };
        at -= give_off(&bytes, &marks, room);
    }
    at
}
