//! Decodes registers of symbols, with the same result on every instruction set.
//!
//! A single stream is bound by the latency of its state, so decoders interleave several streams.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::layout::STATE_BYTES;
use super::table::Table;
use super::trellis::{self, States};
use super::{BLOCK_ROWS, LANES, QUAD};
use crate::simd::{Isa, Kind, vectorized};

/// One byte per lane: 16 rows by four columns of symbols, rows first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Register(pub [u8; LANES]);

impl Register {
    /// All zeros.
    pub const ZERO: Register = Register([0; LANES]);
}

/// A stream during decoding.
///
/// Invariants: `at <= length`, and `bytes` has at least `length + 64` bytes.
#[derive(Debug, Clone)]
pub struct Chain<'a> {
    table: &'a Table,
    /// The renormalization bytes and the bytes of the tensor after them.
    bytes: &'a [u8],
    /// The number of renormalization bytes.
    length: usize,
    at: usize,
    high: Register,
    low: Register,
    /// The rows whose lanes read bytes.
    rows: usize,
    /// The states of dependent codes.
    states: Option<States>,
}

/// Maps bytes to codes: a code is `factor` times the byte plus `offset`.
#[derive(Debug, Clone, Copy)]
pub struct Affine {
    /// 1, or 2 for dependent codes, whose bytes are below 128.
    pub factor: i32,
    /// The code of byte zero.
    pub offset: i32,
    /// The exclusive upper bound of all bytes.
    pub most: usize,
}

impl<'a> Chain<'a> {
    /// A decoder of the first `length` bytes of `tensor`, which must be followed by at least 64 more.
    pub(super) fn new(table: &'a Table, tensor: &'a [u8], length: usize, dependent: bool) -> Chain<'a> {
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
            Some(states) => states.pass::<false>(isa, self.table.lowest(), symbols),
        }
    }

    /// Like [`codes`](Self::codes), but converts to non-negative bytes that map to codes by the returned [`Affine`].
    #[inline]
    pub fn counts(&mut self, isa: Isa, symbols: &mut [Register]) -> Affine {
        match &mut self.states {
            None => Affine {
                factor: 1,
                offset: self.table.lowest().into(),
                most: self.table.levels,
            },
            Some(states) => {
                states.pass::<true>(isa, self.table.lowest(), symbols);
                Affine {
                    factor: 2,
                    offset: trellis::OFFSET,
                    most: 128,
                }
            }
        }
    }

    /// Returns whether the lanes of some rows are in the initial state of encoding.
    pub(super) fn is_initial(&self, rows: Range<usize>) -> bool {
        self.are([1, 0], rows)
    }

    /// Returns whether the states of the lanes of some rows are zero, as for rows that do not exist.
    pub(super) fn is_silent(&self, rows: Range<usize>) -> bool {
        self.are([0, 0], rows)
    }

    fn are(&self, state: [u8; 2], rows: Range<usize>) -> bool {
        let lanes = rows.start * QUAD..rows.end * QUAD;
        let [high, low] = [&self.high, &self.low].map(|register| &register.0[lanes.clone()]);
        high.iter().all(|&byte| byte == state[0]) && low.iter().all(|&byte| byte == state[1])
    }

    /// Returns whether all bytes have been read.
    pub(super) fn is_read(&self) -> bool {
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

/// Decodes the next `registers` registers of several streams of a tensor: first those of the first stream, then those
/// of the second, and so on. Registers hold symbols, or the digits of symbols of two weights; an odd number of the
/// latter ends a row block.
#[inline]
pub fn decode(isa: Isa, chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    // The decoders rely on this bound.
    assert!(out.len() >= chains.len() * registers);
    if !chains.iter().any(|chain| chain.table.pairs) {
        return symbols(isa, chains, registers, out);
    }
    let steps = registers.div_ceil(2);
    symbols(isa, chains, steps, out);
    // From last to first, so that the source of a split is never overwritten before it is read.
    for (number, chain) in chains.iter().enumerate().rev() {
        let places = Split {
            from: number * steps,
            to: number * registers,
            registers,
        };
        split(isa, chain.table, places, out);
    }
}

/// The position of registers of symbols of two weights and the destination of their digits, which may overlap.
#[derive(Debug, Clone, Copy)]
struct Split {
    from: usize,
    to: usize,
    /// The number of registers of digits.
    registers: usize,
}

impl Split {
    /// The position of each register of symbols, the destination of its first digits, and whether the second digits
    /// follow, from last to first.
    #[inline(always)]
    fn places(self) -> impl Iterator<Item = (usize, usize, bool)> {
        let place = move |step| {
            (
                self.from + step,
                self.to + 2 * step,
                2 * step + 1 < self.registers,
            )
        };
        (0..self.registers.div_ceil(2)).rev().map(place)
    }
}

/// Splits symbols of two weights into digits.
fn split(isa: Isa, table: &Table, split: Split, registers: &mut [Register]) {
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { avx2::split(table, split, registers) },
        // SAFETY: `isa` proves that the processor has AVX-512, which both sets include.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 | Kind::Amx => unsafe { avx512::split(table, split, registers) },
        // SAFETY: `isa` proves that the processor has NEON.
        #[cfg(target_arch = "aarch64")]
        Kind::Neon => unsafe { neon::split(table, split, registers) },
        _ => scalar::split(table, split, registers),
    }
}

/// Decodes registers of symbols; `out` has room for the registers of all chains.
fn symbols(isa: Isa, chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { avx2::decode(chains, registers, out) },
        // SAFETY: `isa` proves that the processor has AVX-512, which both sets include.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 | Kind::Amx => unsafe { avx512::decode(chains, registers, out) },
        // SAFETY: `isa` proves that the processor has NEON.
        #[cfg(target_arch = "aarch64")]
        Kind::Neon => unsafe { neon::decode(chains, registers, out) },
        _ => scalar::decode(chains, registers, out),
    }
}

/// The number of streams to interleave for best throughput.
pub fn side_by_side(isa: Isa) -> usize {
    match isa.kind() {
        Kind::Scalar => 1,
        Kind::Neon | Kind::Avx2 => 4,
        Kind::Avx512 | Kind::Amx => 8,
    }
}
