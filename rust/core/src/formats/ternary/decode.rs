//! Decodes rows to ternary codes and to values. Every stored code is checked before use.

use half::bf16;
use rayon::ThreadPool;
use rayon::prelude::*;

use super::{Row, TernaryView, dict16, fsv8, fsv8::Lut};
use crate::{Error, Result};

/// The ternary codes of the symbols 0, 1 and 2.
const CODES: [i8; 3] = [0, -1, 1];

/// Decodes a row into `out`, whose length is the number of columns: -1, 0 and 1.
///
/// # Errors
/// [`Error::Corruption`] if a code does not exist, or if the codes do not cover exactly the columns of a row.
pub fn decode_row(view: &TernaryView, expert: usize, row: usize, out: &mut [i8]) -> Result<()> {
    decode_row_as(view, view.row(expert, row), out, CODES).map_err(|fault| fault.of_row(expert, row))
}

/// Decodes a row into the values of its weights.
///
/// # Errors
/// The errors of [`decode_row`].
pub fn decode_row_values(view: &TernaryView, expert: usize, row: usize, out: &mut [f32]) -> Result<()> {
    let (negative, positive) = view.levels(expert * view.rows() + row);
    decode_row_as(view, view.row(expert, row), out, [0.0, negative, positive])
        .map_err(|fault| fault.of_row(expert, row))
}

/// Decodes the whole tensor into `out` (E x R x C).
///
/// # Errors
/// [`Error::InvalidArgument`] if `out` has another size, and the errors of [`decode_row`].
pub fn decode_codes(view: &TernaryView, out: &mut [i8], pool: &ThreadPool) -> Result<()> {
    for_rows(view, out, pool, |_, row, out| {
        decode_row_as(view, row, out, CODES)
    })
}

/// Decodes the whole tensor into `out` (E x R x C) like [`decode_codes`]; each byte is the bits of an `i8`.
///
/// # Errors
/// The errors of [`decode_codes`].
pub fn decode_bytes(view: &TernaryView, out: &mut [u8], pool: &ThreadPool) -> Result<()> {
    for_rows(view, out, pool, |_, row, out| {
        decode_row_as(view, row, out, [0, 255, 1])
    })
}

/// Decodes the whole tensor into values (E x R x C).
///
/// # Errors
/// The errors of [`decode_codes`].
pub fn decode_values_f32(view: &TernaryView, out: &mut [f32], pool: &ThreadPool) -> Result<()> {
    decode_values(view, out, pool, |level| level)
}

/// Decodes the whole tensor into the bits of bf16 values (E x R x C), rounded to nearest even if levels are wider.
///
/// # Errors
/// The errors of [`decode_codes`].
pub fn decode_values_bf16(view: &TernaryView, out: &mut [u16], pool: &ThreadPool) -> Result<()> {
    decode_values(view, out, pool, |level| bf16::from_f32(level).to_bits())
}

fn decode_values<T: Copy + Send>(
    view: &TernaryView,
    out: &mut [T],
    pool: &ThreadPool,
    convert: impl Fn(f32) -> T + Sync,
) -> Result<()> {
    for_rows(view, out, pool, |index, row, out| {
        let (negative, positive) = view.levels(index);
        decode_row_as(view, row, out, [0.0, negative, positive].map(&convert))
    })
}

/// Calls `decode(row counted over all experts, codes, slice of out)` for every row, in parallel by row groups.
fn for_rows<T: Send>(
    view: &TernaryView,
    out: &mut [T],
    pool: &ThreadPool,
    decode: impl Fn(usize, Row, &mut [T]) -> std::result::Result<(), Fault> + Sync,
) -> Result<()> {
    if view.shape().weights() != Some(out.len()) {
        return Err(Error::InvalidArgument(format!(
            "the output has {} values for {} x {} x {} weights",
            out.len(),
            view.experts(),
            view.rows(),
            view.columns()
        )));
    }
    if out.is_empty() {
        return Ok(());
    }
    let decode_expert = |(expert, out): (usize, &mut [T])| {
        out.par_chunks_mut(super::layout::GROUP_ROWS * view.columns())
            .enumerate()
            .try_for_each(|(group, out)| {
                let rows = view
                    .group_rows(expert, group)
                    .zip(out.chunks_exact_mut(view.columns()));
                rows.into_iter().try_for_each(|(placed, out)| {
                    decode(expert * view.rows() + placed.row, placed.codes, out)
                        .map_err(|fault| fault.of_row(expert, placed.row))
                })
            })
    };
    pool.install(|| {
        out.par_chunks_mut(view.rows() * view.columns())
            .enumerate()
            .try_for_each(decode_expert)
    })
}

/// Decodes a row with `values` for zero, negative and positive weights.
fn decode_row_as<T: Copy>(
    view: &TernaryView,
    row: Row,
    out: &mut [T],
    values: [T; 3],
) -> std::result::Result<(), Fault> {
    out.fill(values[0]);
    visit(view, row, out.len(), |column, symbol| {
        out[column] = values[usize::from(symbol)]
    })
    .map(|_| ())
}

/// A fault in a row's bytes: the offset of the byte and a description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fault {
    byte: usize,
    what: &'static str,
}

impl Fault {
    /// The fault as an error that names the row.
    pub fn of_row(self, expert: usize, row: usize) -> Error {
        let Fault { byte, what } = self;
        Error::Corruption(format!(
            "ternary tensor: expert {expert}, row {row}, byte {byte} of the row: {what}"
        ))
    }
}

fn fault<T>(byte: usize, what: &'static str) -> std::result::Result<T, Fault> {
    Err(Fault { byte, what })
}

/// Calls `found(column, 1 for negative or 2 for positive)` for every non-zero of a row, in order, and returns their
/// number. For arbitrary bytes, columns are below `columns`.
pub(super) fn visit(
    view: &TernaryView,
    row: Row,
    columns: usize,
    found: impl FnMut(usize, u8),
) -> std::result::Result<u64, Fault> {
    match row {
        Row::Zero => Ok(0),
        Row::Raw(bytes) => visit_raw(bytes, columns, found),
        Row::Fsv8 {
            codes,
            dictionary,
            swapped,
        } => {
            let lut = Lut::embedded(usize::from(view.dictionaries()[dictionary]));
            visit_fsv8(codes, lut, swapped, columns, found)
        }
        Row::Dict16(bytes) => visit_dict16(bytes, columns, found),
    }
}

fn visit_raw(
    bytes: &[u8],
    columns: usize,
    mut found: impl FnMut(usize, u8),
) -> std::result::Result<u64, Fault> {
    let mut nonzeros = 0;
    for (i, &byte) in bytes.iter().enumerate() {
        for place in 0..4 {
            let column = 4 * i + place;
            match byte >> (2 * place) & 3 {
                0 => continue,
                3 => return fault(i, "bits 11 are not a ternary weight"),
                _ if column >= columns => return fault(i, "the padding is not zero"),
                symbol => found(column, symbol),
            }
            nonzeros += 1;
        }
    }
    Ok(nonzeros)
}

fn visit_fsv8(
    codes: &[u8],
    lut: &Lut,
    swapped: bool,
    columns: usize,
    mut found: impl FnMut(usize, u8),
) -> std::result::Result<u64, Fault> {
    let (mut at, mut previous, mut nonzeros) = (0, 0, 0);
    for (i, &code) in codes.iter().enumerate() {
        let index = lut.index(code, previous);
        if at >= columns {
            return fault(i, "a code after the row's end");
        }
        if !lut.possible(index) {
            return fault(i, "the code does not exist in this state");
        }
        let entry = lut.entries[index];
        for (position, symbol) in fsv8::lut::nonzeros(entry, lut.three_slots) {
            if at + position >= columns {
                return fault(i, "a non-zero weight after the row's end");
            }
            found(at + position, if swapped { 3 - symbol } else { symbol });
            nonzeros += 1;
        }
        at += (entry >> 24) as usize;
        previous = code;
    }
    if at < columns {
        return fault(codes.len(), "the codes end before the row");
    }
    if !lut.ends_row(previous) {
        return fault(codes.len() - 1, "the last code leaves a promise open");
    }
    Ok(nonzeros)
}

fn visit_dict16(
    bytes: &[u8],
    columns: usize,
    mut found: impl FnMut(usize, u8),
) -> std::result::Result<u64, Fault> {
    let entries = dict16::sparse();
    let (mut at, mut nonzeros) = (0, 0);
    for (i, code) in bytes.chunks_exact(2).enumerate() {
        if at >= columns {
            return fault(2 * i, "a code after the row's end");
        }
        let entry = entries[usize::from(u16::from_le_bytes([code[0], code[1]]))];
        for (position, symbol) in fsv8::lut::nonzeros(entry, true) {
            if at + position >= columns {
                return fault(2 * i, "a non-zero weight after the row's end");
            }
            found(at + position, symbol);
            nonzeros += 1;
        }
        at += (entry >> 24) as usize;
    }
    match at {
        _ if at < columns => fault(bytes.len(), "the codes end before the row"),
        // Words are pairs of weights, so an odd row ends in one zero of padding, and no row has more.
        _ if at > columns + columns % 2 => fault(bytes.len(), "the last code runs past the row's end"),
        _ => Ok(nonzeros),
    }
}
