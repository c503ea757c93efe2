//! A stream during decoding, and the step from its symbols to codes.

use std::ops::Range;

use crate::formats::coded::affine::Affine;
use crate::formats::coded::layout::STATE_BYTES;
use crate::formats::coded::register::Register;
use crate::formats::coded::table::Table;
use crate::formats::coded::trellis::States;
use crate::formats::coded::{BLOCK_ROWS, LANES, QUAD};
use crate::simd::{Isa, vectorized};

/// A stream during decoding.
///
/// Invariants: `at <= length`, and `bytes` has at least `length + 64` bytes.
#[derive(Debug, Clone)]
pub struct Chain<'a> {
    pub(super) table: &'a Table,
    /// The renormalization bytes and the bytes of the tensor after them.
    pub(super) bytes: &'a [u8],
    /// The number of renormalization bytes.
    pub(super) length: usize,
    pub(super) at: usize,
    pub(super) high: Register,
    pub(super) low: Register,
    /// The rows whose lanes read bytes.
    pub(super) rows: usize,
    /// The states of dependent codes.
    states: Option<States>,
}

impl<'a> Chain<'a> {
    /// A decoder of the first `length` bytes of `tensor`, which must be followed by at least 64 more.
    pub(in crate::formats::coded) fn new(
        table: &'a Table,
        tensor: &'a [u8],
        length: usize,
        dependent: bool,
    ) -> Chain<'a> {
        let (states, bytes) = tensor.split_at(STATE_BYTES);
        let length = length - STATE_BYTES;
        assert!(bytes.len() >= length + LANES);
        let register = |at: usize| {
            let mut register = Register::ZERO;
            register.0.copy_from_slice(&states[at..at + LANES]);
            register
        };
        Chain {
            table,
            bytes,
            length,
            at: 0,
            high: register(0),
            low: register(LANES),
            rows: BLOCK_ROWS,
            states: dependent.then_some(States::START),
        }
    }

    /// Starts a row block with `rows` rows; lanes of other rows read no bytes.
    #[inline]
    pub fn start_block(&mut self, rows: usize) {
        self.rows = rows.min(BLOCK_ROWS);
        self.states = self.states.as_ref().map(|_| States::START);
    }

    /// Converts symbols to codes, or to the part of codes above their low bits, as signed bytes. `symbols` holds all
    /// symbols decoded since the last call or the start of the row block.
    #[inline]
    pub fn codes(&mut self, isa: Isa, symbols: &mut [Register]) {
        match &mut self.states {
            None => shift(isa, symbols, self.table.lowest()),
            Some(states) => states.codes(isa, self.table, symbols),
        }
    }

    /// Like [`codes`](Self::codes), but converts to non-negative bytes that map to codes by the returned [`Affine`].
    #[inline]
    pub fn counts(&mut self, isa: Isa, symbols: &mut [Register]) -> Affine {
        match &mut self.states {
            None => Affine {
                factor: 1,
                offset: self.table.lowest().into(),
                most: self.table.count,
            },
            Some(states) => states.halves(isa, self.table, symbols),
        }
    }

    /// Returns whether the lanes of some rows are in the initial state of encoding.
    pub(in crate::formats::coded) fn is_initial(&self, rows: Range<usize>) -> bool {
        self.are([1, 0], rows)
    }

    /// Returns whether the states of the lanes of some rows are zero, as for rows that do not exist.
    pub(in crate::formats::coded) fn is_silent(&self, rows: Range<usize>) -> bool {
        self.are([0, 0], rows)
    }

    fn are(&self, state: [u8; 2], rows: Range<usize>) -> bool {
        let lanes = rows.start * QUAD..rows.end * QUAD;
        let [high, low] = [&self.high, &self.low].map(|register| &register.0[lanes.clone()]);
        high.iter().all(|&byte| byte == state[0]) && low.iter().all(|&byte| byte == state[1])
    }

    /// Returns whether all bytes have been read.
    pub(in crate::formats::coded) fn is_read(&self) -> bool {
        self.at == self.length
    }
}

vectorized! {
    /// Converts symbols to integers as signed bytes by adding the lowest integer.
    fn shift(registers: &mut [Register], lowest: i8) = shift_portable;
}

#[inline(always)]
fn shift_portable(registers: &mut [Register], lowest: i8) {
    for register in registers {
        let shifted = register.0.iter_mut();
        shifted.for_each(|byte| *byte = byte.wrapping_add(lowest as u8));
    }
}
