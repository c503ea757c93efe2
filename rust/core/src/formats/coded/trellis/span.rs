//! The halves that a table's indices stand for, and the constants that decoders of all instruction sets share.

use crate::formats::coded::affine::Affine;
use crate::formats::coded::table::Table;

/// The lowest index of a table, which has at most [`LANES`](crate::formats::coded::LANES).
pub(in crate::formats::coded) const LOWEST: i8 = -32;
/// A code is twice a *half* plus this constant; halves, 0 to 127, are the operands of integer dot products.
pub const OFFSET: i32 = -127;
/// The period of mirrors in registers: a consumed mirror is reused after this many.
pub(super) const PERIOD: usize = 4;

/// The halves of a table's indices. Bytes of halves start at the least one; smaller bytes are multiplied faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    /// The least half.
    pub least: u8,
    /// The byte of symbol 0 in even states, and in odd ones.
    pub even: u8,
    pub odd: u8,
}

impl Span {
    /// The halves of a table that is valid for dependent codes.
    pub fn of(table: &Table) -> Span {
        // The halves of even states rise by two from `first` to `last`, at most 126; those of odd ones are 127 minus
        // these.
        let first = (2 * (table.lowest() - LOWEST)) as u8;
        let last = first + 2 * (table.count as u8 - 1);
        let least = first.min(127 - last);
        Span {
            least,
            even: first - least,
            odd: 127 - first - least,
        }
    }

    /// The map from bytes to codes.
    pub fn affine(self) -> Affine {
        let least = i32::from(self.least);
        Affine {
            factor: 2,
            offset: OFFSET + 2 * least,
            most: (128 - 2 * least) as usize,
        }
    }
}
