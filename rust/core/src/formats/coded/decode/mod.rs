//! Decoding registers of symbols, on each instruction set the same.
//!
//! One stream is bound by the latency of its state, so decoders go through several side by side.

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
use crate::simd::{Isa, vectorized};

/// A byte of each lane: 16 rows by four columns of symbols, rows first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Register(pub [u8; LANES]);

impl Register {
    /// All zeros.
    pub const ZERO: Register = Register([0; LANES]);
}

/// A stream that is being decoded.
///
/// Invariants: `at <= length`, and `bytes` has at least `length + 64` bytes.
#[derive(Debug, Clone)]
pub struct Chain<'a> {
    table: &'a Table,
    /// The renormalization bytes, and what follows them in the tensor.
    bytes: &'a [u8],
    /// Renormalization bytes.
    length: usize,
    at: usize,
    high: Register,
    low: Register,
    /// Rows whose lanes read bytes.
    rows: usize,
    /// The states of dependent codes.
    states: Option<States>,
}

/// What bytes of symbols stand for: a code is `factor` times the byte plus `offset`.
#[derive(Debug, Clone, Copy)]
pub struct Affine {
    /// 1, or 2 of dependent codes, whose bytes are below 128.
    pub factor: i32,
    /// The integer of a zero.
    pub offset: i32,
    /// All bytes are below it.
    pub most: usize,
}

impl<'a> Chain<'a> {
    /// A decoder of the first `length` bytes of `tensor`, behind which there are at least 64 more.
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

    /// Starts a row block that has so many rows: lanes of others read no bytes.
    #[inline]
    pub fn start_block(&mut self, rows: usize) {
        self.rows = rows.min(BLOCK_ROWS);
        self.states = self.states.as_ref().map(|_| States::START);
    }

    /// Makes codes, or what is above their low bits, signed bytes, of symbols: all that were decoded since the last call
    /// or the start of the row block. `isa` must have been found available.
    #[inline]
    pub fn codes(&mut self, isa: Isa, symbols: &mut [Register]) {
        match &mut self.states {
            None => shift(isa, symbols, self.table.lowest()),
            Some(states) => states.pass::<false>(isa, self.table.lowest(), symbols),
        }
    }

    /// As [`codes`](Self::codes), but bytes that are not negative and stand for codes.
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

    /// Whether the lanes of some rows are in the state in which encoding started.
    pub(super) fn is_initial(&self, rows: Range<usize>) -> bool {
        self.are([1, 0], rows)
    }

    /// Whether the lanes of some rows are in no state of encoding but zero.
    pub(super) fn is_silent(&self, rows: Range<usize>) -> bool {
        self.are([0, 0], rows)
    }

    fn are(&self, state: [u8; 2], rows: Range<usize>) -> bool {
        let lanes = rows.start * QUAD..rows.end * QUAD;
        let [high, low] = [&self.high, &self.low].map(|register| &register.0[lanes.clone()]);
        high.iter().all(|&byte| byte == state[0]) && low.iter().all(|&byte| byte == state[1])
    }

    /// Whether all bytes have been read.
    pub(super) fn is_read(&self) -> bool {
        self.at == self.length
    }
}

vectorized! {
    /// Makes integers of symbols, as signed bytes: adds the lowest.
    fn shift(registers: &mut [Register], lowest: i8) = shift_portable;
}

#[inline(always)]
fn shift_portable(registers: &mut [Register], lowest: i8) {
    for register in registers {
        let shifted = register.0.iter_mut();
        shifted.for_each(|byte| *byte = byte.wrapping_add(lowest as u8));
    }
}

/// Decodes the next registers of some streams of a tensor: those of the first stream, then those of the second, and so on.
/// They hold symbols, or the digits of symbols of two weights; of these an odd number ends a row block. `isa` must have been
/// found available.
#[inline]
pub fn decode(isa: Isa, chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    // Decoders rely on it.
    assert!(out.len() >= chains.len() * registers);
    if !chains.iter().any(|chain| chain.table.pairs) {
        return symbols(isa, chains, registers, out);
    }
    let steps = registers.div_ceil(2);
    symbols(isa, chains, steps, out);
    // From the last to the first: what is split lies nowhere behind what it becomes.
    for (number, chain) in chains.iter().enumerate().rev() {
        let places = Split {
            from: number * steps,
            to: number * registers,
            registers,
        };
        split(isa, chain.table, places, out);
    }
}

/// Where registers of symbols of two weights lie, and where their digits go, which may be the same memory.
#[derive(Debug, Clone, Copy)]
struct Split {
    from: usize,
    to: usize,
    /// Registers of digits.
    registers: usize,
}

impl Split {
    /// The place of each register of symbols, that of its first digits, and whether the second ones follow, from the last to
    /// the first.
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

/// Makes digits of symbols of two weights.
fn split(isa: Isa, table: &Table, split: Split, registers: &mut [Register]) {
    match isa {
        // SAFETY: the processor runs the set.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::split(table, split, registers) },
        // SAFETY: as above; the other sets have all of AVX-512 that is asked for.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { avx512::split(table, split, registers) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unsafe { neon::split(table, split, registers) },
        _ => scalar::split(table, split, registers),
    }
}

/// Decodes registers of symbols; `out` has room for those of all chains.
fn symbols(isa: Isa, chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    match isa {
        // SAFETY: the processor runs the set.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::decode(chains, registers, out) },
        // SAFETY: as above; the other sets have all of AVX-512 that is asked for.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { avx512::decode(chains, registers, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unsafe { neon::decode(chains, registers, out) },
        _ => scalar::decode(chains, registers, out),
    }
}

/// Streams that are worth decoding side by side.
pub fn side_by_side(isa: Isa) -> usize {
    match isa {
        Isa::Scalar => 1,
        Isa::Neon | Isa::Avx2 => 4,
        Isa::Avx512 | Isa::Amx => 8,
    }
}
