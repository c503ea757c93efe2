//! Maps codes to symbols by a table, and encodes symbols into the bytes of a stream.

use super::code::Code;
use super::compact::{self, Compact};
use super::histogram::INTEGERS;
use super::layout::STATE_BYTES;
use super::register::Register;
use super::table::Table;
use super::{LANES, QUAD};
use crate::simd::{Isa, vectorized};

/// Marks integers without a symbol.
pub(super) const NONE: u8 = u8::MAX;

/// A table in the form that encoding needs.
pub(super) struct Coder {
    pub table: Table,
    /// The symbol of each integer from -128 on; [`NONE`] for integers without one. The last entry stands for all
    /// integers outside of this range.
    symbols: [u8; INTEGERS + 1],
    /// True if every integer from the lowest to the highest has slots.
    gapless: bool,
    steps: [Step; LANES],
}

impl Coder {
    pub fn new(table: Table) -> Coder {
        let mut coder = Coder {
            symbols: [NONE; INTEGERS + 1],
            gapless: table.frequencies[..table.count].iter().all(|&slots| slots > 0),
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

    /// The placeholder symbols of exceptions, for even and for odd integers.
    pub fn favourites(&self, dependent: bool) -> [u8; 2] {
        match dependent {
            true => [0, 1].map(|parity| self.table.favourite(parity, 2)),
            false => [self.table.favourite(0, 1); 2],
        }
    }

    /// The symbol that pads rows after the last column.
    pub fn padding(&self) -> u8 {
        self.table.favourite(0, 1)
    }

    /// Looks up the symbols of codes. Returns true if some code has none; such codes get [`NONE`].
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

    /// Like [`look_up`](Self::look_up) for gapless tables, by subtracting the lowest integer.
    fn subtract<T: Code>(&self, codes: &[T], symbols: &mut [u8]) -> bool {
        let lowest = self.table.lowest();
        let highest = (i32::from(lowest) + self.table.count as i32 - 1) as i8;
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

    /// Encodes symbols from the last to the first; lanes without a row stay at zero.
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
            let compact = compact::fastest(isa);
            at = take_up(
                isa,
                &self.steps,
                symbols,
                lanes,
                &mut states,
                &mut buffer[..at],
                compact,
            );
        }
        let mut bytes = Vec::with_capacity(STATE_BYTES + buffer.len() - at);
        bytes.extend(states.map(|state| (state >> 8) as u8));
        bytes.extend(states.map(|state| state as u8));
        bytes.extend(&buffer[at..]);
        bytes
    }
}

/// An encoding step of a symbol. From the low bits up: its frequency (8 bits), its first slot (8) and the reciprocal
/// of the frequency, 2^16 / frequency rounded down (16, clamped from 2^16).
#[derive(Clone, Copy)]
struct Step(u32);

impl Step {
    fn new(frequency: u8, start: u8) -> Step {
        let reciprocal = (1u32 << 16) / u32::from(frequency.max(1));
        Step(u32::from(frequency) | u32::from(start) << 8 | reciprocal.min(0xffff) << 16)
    }

    /// Returns the next state, and whether the low byte of the current state is emitted first.
    #[inline(always)]
    fn next(self, state: u32) -> (u32, bool) {
        let (frequency, start, reciprocal) = (self.0 & 255, self.0 >> 8 & 255, self.0 >> 16);
        let full = state >= frequency << 8;
        let kept = if full { state >> 8 } else { state };
        // The reciprocal is short by less than one, or by one if it is clamped, and the state is below 2^16: the
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
    /// Encodes registers of symbols from the last to the first into the states of `lanes` lanes. Bytes are emitted
    /// from the end of `buffer` towards its start; it has room for one byte per symbol and 64 more. Returns the
    /// offset of the first byte.
    fn take_up(
        steps: &[Step; LANES],
        symbols: &[Register],
        lanes: usize,
        states: &mut [u32; LANES],
        buffer: &mut [u8],
        compact: Compact,
    ) -> usize = take_up_portable;
}

#[inline(always)]
fn take_up_portable(
    steps: &[Step; LANES],
    symbols: &[Register],
    lanes: usize,
    states: &mut [u32; LANES],
    buffer: &mut [u8],
    compact: Compact,
) -> usize {
    let mut at = buffer.len();
    for register in symbols.iter().rev() {
        // Steps are looked up one by one; everything else is done for all lanes at once.
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
            unreachable!("there is room for all symbols and one more register");
        };
        at -= compact(&bytes, &marks, room);
    }
    at
}
