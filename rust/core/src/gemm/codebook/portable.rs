//! The kernel in portable Rust: a row at a time, its codes looked up into a buffer of one row, then dotted with every
//! token. Compiled again with AVX2 enabled, where [`Lookup`] shuffles bytes.

use super::Epilogue;
use super::drive::Unit;
use super::tokens::Tokens;
use crate::codebook::bits::LANE;
use crate::codebook::{Block, PANEL};

/// Rows of codes, and what they stand for.
#[derive(Default)]
pub(crate) struct Buffers {
    codes: Vec<u8>,
    bytes: [Vec<i8>; 2],
    values: Vec<f32>,
}

/// How codes become centroids. Codes are below 16; lengths are multiples of 16.
pub(super) trait Lookup {
    /// `out[i] = table[codes[i]]`.
    fn bytes(codes: &[u8], table: &[u8; LANE], out: &mut [i8]);
    /// `out[i] = table[codes[i]]`.
    fn values(codes: &[u8], table: &[f32; LANE], out: &mut [f32]);
}

/// Look-ups one by one.
pub(super) struct Loops;

impl Lookup for Loops {
    #[inline(always)]
    fn bytes(codes: &[u8], table: &[u8; LANE], out: &mut [i8]) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = table[usize::from(code & 15)] as i8;
        }
    }

    #[inline(always)]
    fn values(codes: &[u8], table: &[f32; LANE], out: &mut [f32]) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = table[usize::from(code & 15)];
        }
    }
}

/// Computes panel `panel` of a unit into `out` (tokens x 16 rows), which is zero.
#[inline(always)]
pub(super) fn panel<L: Lookup>(unit: &Unit, panel: usize, buffers: &mut Buffers, out: &mut [f32]) {
    let layout = unit.view.layout();
    for index in 0..layout.blocks() {
        let block = unit.view.block(unit.expert, panel, index);
        let columns = index * layout.block_size()..index * layout.block_size() + block.columns();
        buffers.codes.resize(block.columns(), 0);
        for row in 0..PANEL.min(layout.shape().rows - panel * PANEL) {
            block.decode_row(row, &mut buffers.codes);
            match unit.mode.planes() {
                _ if unit.mode.activation_bits().is_none() => {
                    exact_row::<L>(unit, &block, row, columns.start, buffers, out)
                }
                1 => integer_row::<L, 1>(unit, &block, row, columns.start, buffers, out),
                _ => integer_row::<L, 2>(unit, &block, row, columns.start, buffers, out),
            }
        }
    }
}

/// The columns of the codes in `buffers` of a token.
#[inline(always)]
fn part<'a, T>(all: &'a [T], tokens: &Tokens, token: usize, first: usize, columns: usize) -> &'a [T] {
    &all[token * tokens.stride + first..][..columns]
}

#[inline(always)]
fn exact_row<L: Lookup>(
    unit: &Unit,
    block: &Block,
    row: usize,
    first: usize,
    buffers: &mut Buffers,
    out: &mut [f32],
) {
    let columns = buffers.codes.len();
    buffers.values.resize(columns, 0.0);
    L::values(&buffers.codes, &value_table(block, row), &mut buffers.values);
    for (token, out) in unit.range.clone().zip(out.chunks_exact_mut(PANEL)) {
        out[row] += dot(
            &buffers.values,
            part(&unit.tokens.values, unit.tokens, token, first, columns),
        );
    }
}

/// The values of a row's 16 table entries.
#[inline(always)]
pub(super) fn value_table(block: &Block, row: usize) -> [f32; LANE] {
    let (high, low, scale) = (block.table(0, row), block.table(1, row), block.scales()[row]);
    std::array::from_fn(|i| scale * (256 * i32::from(high[i] as i8) + i32::from(low[i] as i8)) as f32)
}

/// The sum of products, 16 partial sums first.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANE];
    for (a, b) in a.as_chunks::<LANE>().0.iter().zip(b.as_chunks::<LANE>().0) {
        for i in 0..LANE {
            sums[i] += a[i] * b[i];
        }
    }
    tree_sum(sums)
}

/// The sum of the lanes, in an order that does not depend on the instruction set.
#[inline(always)]
pub(super) fn tree_sum(mut lanes: [f32; LANE]) -> f32 {
    let mut width = LANE / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn integer_row<L: Lookup, const PLANES: usize>(
    unit: &Unit,
    block: &Block,
    row: usize,
    first: usize,
    buffers: &mut Buffers,
    out: &mut [f32],
) {
    let columns = buffers.codes.len();
    for plane in 0..PLANES {
        buffers.bytes[plane].resize(columns, 0);
        L::bytes(
            &buffers.codes,
            &block.table(plane, row),
            &mut buffers.bytes[plane],
        );
    }
    let epilogue = Epilogue::<PLANES>::new(block);
    for (token, out) in unit.range.clone().zip(out.chunks_exact_mut(PANEL)) {
        let codes = part(&unit.tokens.codes, unit.tokens, token, first, columns);
        let sums = std::array::from_fn(|plane| integer_dot(&buffers.bytes[plane], codes));
        out[row] += epilogue.product(row, sums, unit.tokens.scales[token]);
    }
}

#[inline(always)]
fn integer_dot(weights: &[i8], codes: &[u8]) -> i32 {
    let products = weights
        .iter()
        .zip(codes)
        .map(|(&w, &q)| i32::from(w) * i32::from(q));
    // At most 2^16 products of less than 2^15 each: nothing wraps.
    products.sum()
}
