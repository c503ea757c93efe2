//! Encodes a whole tensor: row groups are encoded in parallel, rows independently, and joined in order.
//!
//! The result does not depend on the number of threads: groups are determined by the shape, and choices for a row
//! depend only on its own counts and on the tensor's dictionaries, which are chosen first.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::layout::{GROUP_ROWS, SWAPPED, Sections, raw_bytes, row_groups};
use super::scan::{self, Counts};
use super::{Code, choose, dict16, fsv8, levels};
use crate::types::Shape;
use crate::{Error, Result, limits};

/// Encodes `codes` (E x R x C, each -1, 0 or 1) with the `levels` (negative, positive) of its E x R rows.
///
/// # Errors
/// [`Error::InvalidArgument`] if the sizes do not match the shape, a code is not -1, 0 or 1, or levels are not finite
/// with negative <= 0 <= positive. The message names expert and row.
pub fn encode(
    codes: &[i8],
    levels: &[(f32, f32)],
    shape: Shape,
    code: Code,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    check(codes, levels, shape)?;
    pool.install(|| match code {
        Code::Fsv8 => encode_fsv8(codes, levels, shape),
        Code::Dict16 => encode_dict16(codes, levels, shape),
    })
}

fn check(codes: &[i8], row_levels: &[(f32, f32)], shape: Shape) -> Result<()> {
    let Shape {
        experts,
        rows,
        columns,
        ndim,
    } = shape;
    let invalid = |what: String| Err(Error::InvalidArgument(what));
    if experts.max(rows) as u64 > limits::MAX_ROWS || columns as u64 > limits::MAX_COLUMNS {
        return invalid(format!(
            "shape {experts} x {rows} x {columns} is too large for a ternary tensor"
        ));
    }
    if !matches!((ndim, experts), (2, 1) | (3, _)) {
        return invalid(format!(
            "a ternary tensor of {experts} experts cannot have ndim {ndim}"
        ));
    }
    if shape.weights() != Some(codes.len()) || shape.all_rows() != Some(row_levels.len()) {
        let (codes, pairs) = (codes.len(), row_levels.len());
        return invalid(format!(
            "shape {experts} x {rows} x {columns} with {codes} codes and {pairs} pairs of levels"
        ));
    }
    match row_levels.iter().position(|&pair| !levels::valid(pair)) {
        Some(row) => invalid(format!(
            "expert {}, row {}: levels {:?} are not finite with negative <= 0 <= positive",
            row / rows,
            row % rows,
            row_levels[row]
        )),
        None => Ok(()),
    }
}

/// The encoded rows of a row group.
#[derive(Default)]
struct Group {
    /// The length of each row, and its dictionary field in FSV8.
    rows: Vec<(u32, u32)>,
    payload: Vec<u8>,
    nonzeros: u64,
}

/// The error for a code that is not ternary; `row` is counted over all experts.
fn invalid_code(shape: Shape, row: usize, column: usize) -> Error {
    let (expert, row) = (row / shape.rows, row % shape.rows);
    Error::InvalidArgument(format!(
        "expert {expert}, row {row}, column {column}: a ternary code is -1, 0 or 1"
    ))
}

/// The codes of a row, counted over all experts.
fn row_codes(codes: &[i8], shape: Shape, row: usize) -> &[i8] {
    &codes[row * shape.columns..][..shape.columns]
}

/// Encodes all row groups in parallel; `encode_row` appends one row to its group.
fn groups(
    shape: Shape,
    encode_row: impl Fn(usize, &mut Group, &mut Scratch) -> Result<()> + Sync,
) -> Result<Vec<Group>> {
    let units = shape.experts * row_groups(&shape);
    (0..units)
        .into_par_iter()
        .map_init(Scratch::default, |scratch, unit| {
            let (expert, group) = (unit / row_groups(&shape), unit % row_groups(&shape));
            let first = group * GROUP_ROWS;
            let mut encoded = Group::default();
            for row in first..(first + GROUP_ROWS).min(shape.rows) {
                encode_row(expert * shape.rows + row, &mut encoded, scratch)?;
            }
            Ok(encoded)
        })
        .collect()
}

/// The buffers of a thread, reused for every row.
#[derive(Default)]
struct Scratch {
    nonzeros: Vec<u32>,
    slots: Vec<usize>,
    trial: Vec<u8>,
    best: Vec<u8>,
}

fn encode_fsv8(codes: &[i8], levels: &[(f32, f32)], shape: Shape) -> Result<Vec<u8>> {
    let dictionaries = choose::for_tensor(shape.columns, &sample(codes, shape)?);
    let encoders: Vec<_> = dictionaries
        .iter()
        .map(|&id| fsv8::Encoder::embedded(usize::from(id)))
        .collect();
    let groups = groups(shape, |row, group, scratch| {
        let row_codes = row_codes(codes, shape, row);
        let counts =
            scan::list(row_codes, &mut scratch.nonzeros).map_err(|at| invalid_code(shape, row, at))?;
        group.nonzeros += u64::from(counts.negative) + u64::from(counts.positive);
        encode_fsv8_row(row_codes, counts, &dictionaries, &encoders, group, scratch);
        Ok(())
    })?;
    let shift = if raw_bytes(shape.columns) <= 4095 { 12 } else { 28 };
    let mut starts = vec![0];
    for group in &groups {
        starts.push(starts[starts.len() - 1] + group.payload.len() as u64);
    }
    let index = groups
        .iter()
        .flat_map(|group| &group.rows)
        .map(|&(length, field)| length | field << shift)
        .collect();
    write(shape, Code::Fsv8, &dictionaries, levels, index, starts, groups)
}

/// The symbol counts of evenly spaced rows.
fn sample(codes: &[i8], shape: Shape) -> Result<Vec<Counts>> {
    let rows = shape.experts * shape.rows;
    let wanted = rows.min(choose::SAMPLE_ROWS);
    (0..wanted)
        .into_par_iter()
        .map(|i| {
            let row = (i as u128 * rows as u128 / wanted as u128) as usize;
            scan::count(row_codes(codes, shape, row)).map_err(|at| invalid_code(shape, row, at))
        })
        .collect()
}

/// Encodes the row whose non-zeros are in `scratch` with the dictionary of [`choose::for_row`] that gives the fewest
/// bytes, or raw.
fn encode_fsv8_row(
    codes: &[i8],
    counts: Counts,
    dictionaries: &[u8],
    encoders: &[&fsv8::Encoder],
    group: &mut Group,
    scratch: &mut Scratch,
) {
    if counts == Counts::default() {
        group.rows.push((0, 0));
        return;
    }
    let Scratch {
        nonzeros,
        slots,
        trial,
        best,
    } = scratch;
    let swapped = counts.positive > counts.negative;
    choose::for_row(codes.len(), counts, dictionaries, slots);
    let mut shortest = None;
    trial.resize(trial.len().max(codes.len() + 1), 0);
    best.resize(trial.len(), 0);
    for &slot in &*slots {
        let length = encoders[slot].encode(nonzeros, codes.len() as u32, u32::from(swapped), trial);
        if shortest.is_none_or(|(least, _)| length < least) {
            shortest = Some((length, slot));
            std::mem::swap(trial, best);
        }
    }
    let raw_bytes = codes.len().div_ceil(4);
    match shortest.filter(|&(length, _)| length < raw_bytes) {
        Some((length, slot)) => {
            let field = slot as u32 | if swapped { SWAPPED } else { 0 };
            group.rows.push((length as u32, field));
            group.payload.extend_from_slice(&best[..length]);
        }
        None => {
            group.rows.push((raw_bytes as u32, 0));
            group.payload.extend(codes.chunks(4).map(raw_byte));
        }
    }
}

/// Packs up to four codes into a byte: 0 zero, 1 negative, 2 positive, low bits first.
fn raw_byte(codes: &[i8]) -> u8 {
    let symbol = |code: i8| [1, 0, 2][(code + 1) as usize];
    codes
        .iter()
        .enumerate()
        .fold(0, |byte, (i, &code)| byte | symbol(code) << (2 * i))
}

fn encode_dict16(codes: &[i8], levels: &[(f32, f32)], shape: Shape) -> Result<Vec<u8>> {
    let encoder = dict16::Encoder::get();
    let groups = groups(shape, |row, group, Scratch { nonzeros, .. }| {
        let counts =
            scan::list(row_codes(codes, shape, row), nonzeros).map_err(|at| invalid_code(shape, row, at))?;
        group.nonzeros += u64::from(counts.negative) + u64::from(counts.positive);
        let before = group.payload.len();
        encoder.encode(nonzeros, shape.columns, &mut group.payload);
        group.rows.push((((group.payload.len() - before) / 2) as u32, 0));
        Ok(())
    })?;
    let mut starts = vec![0];
    let mut index = Vec::with_capacity(levels.len());
    for (expert, groups) in groups.chunks(row_groups(&shape).max(1)).enumerate() {
        let mut at = 0u64;
        for &(length, _) in groups.iter().flat_map(|group| &group.rows) {
            index.push(u32::try_from(at).map_err(|_| {
                Error::InvalidArgument(format!("expert {expert} has more than 2^32 codes of dict16"))
            })?);
            at += u64::from(length);
        }
        starts.push(starts[expert] + at);
    }
    starts.resize(shape.experts + 1, 0);
    write(shape, Code::Dict16, &[], levels, index, starts, groups)
}

fn write(
    shape: Shape,
    code: Code,
    dictionaries: &[u8],
    levels: &[(f32, f32)],
    index: Vec<u32>,
    starts: Vec<u64>,
    groups: Vec<Group>,
) -> Result<Vec<u8>> {
    let nonzeros = groups.iter().map(|group| group.nonzeros).sum();
    let payload: Vec<_> = groups.into_iter().map(|group| group.payload).collect();
    Sections {
        shape,
        code,
        dictionaries,
        levels,
        index,
        starts,
        payload: &payload,
        nonzeros,
    }
    .write()
}
