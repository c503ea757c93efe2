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
use super::{BLOCK_ROWS, LANES, QUAD};
use crate::simd::Isa;

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
}

impl<'a> Chain<'a> {
    /// A decoder of the first `length` bytes of `tensor`, behind which there are at least 64 more.
    pub(super) fn new(table: &'a Table, tensor: &'a [u8], length: usize) -> Chain<'a> {
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
        }
    }

    /// The stream's table.
    #[inline]
    pub fn table(&self) -> &'a Table {
        self.table
    }

    /// Says how many rows the row block has that is decoded next: lanes of others read no bytes.
    #[inline]
    pub fn set_rows(&mut self, rows: usize) {
        self.rows = rows.min(BLOCK_ROWS);
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

/// Decodes the next registers of some streams: those of the first stream, then those of the second, and so on. `isa` must
/// have been found available.
#[inline]
pub fn decode(isa: Isa, chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    // Decoders rely on it.
    assert!(out.len() >= chains.len() * registers);
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
