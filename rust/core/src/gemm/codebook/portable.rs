//! The kernel in portable Rust: the codes of one row are looked up into a buffer, which is multiplied by every token.
//! The exact modes of AVX2 and NEON also use it, with a [`Lookup`] that permutes registers.

use super::tokens::Prepared;
use super::{Epilogue, Precision, Rows};
use crate::formats::codebook::bits::LANE;
use crate::formats::codebook::{Block, PANEL};

/// The buffers of a thread: a row's codes, and their centroids as bytes or values.
#[derive(Default)]
pub struct Buffers<'a> {
    codes: Vec<u8>,
    bytes: Vec<i8>,
    values: Vec<f32>,
    /// The buffers of the kernels for many tokens.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(super) pieces: super::pieces::Pieces<'a>,
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pieces: std::marker::PhantomData<&'a ()>,
    /// 2-bit codes as words of 16 columns, for 16 rows at a time.
    #[cfg(target_arch = "x86_64")]
    pub(super) words: Vec<[u32; PANEL]>,
}

/// Looks up the values of codes, which are below 16; lengths are multiples of 16.
pub(super) trait Lookup {
    /// `out[i] = table[codes[i]]`.
    fn values(codes: &[u8], table: &[f32; LANE], out: &mut [f32]);
}

/// The portable [`Lookup`], one code at a time.
pub(super) struct Loops;

impl Lookup for Loops {
    #[inline(always)]
    fn values(codes: &[u8], table: &[f32; LANE], out: &mut [f32]) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = table[usize::from(code & 15)];
        }
    }
}

/// Adds the products of a block, whose first column is `first`, with `tokens` to `out`.
pub(super) fn block(
    block: &Block,
    precision: Precision,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    buffers: &mut Buffers,
    out: &mut Rows,
) {
    match precision {
        Precision::Exact => exact::<Loops>(block, first, prepared, tokens, buffers, out),
        Precision::Int16 { .. } => integer::<2>(block, first, prepared, tokens, buffers, out),
        Precision::Int8 { .. } => integer::<1>(block, first, prepared, tokens, buffers, out),
    }
}

/// Adds the products of a block in the exact mode, like [`block`].
#[inline(always)]
pub(super) fn exact<L: Lookup>(
    block: &Block,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    buffers: &mut Buffers,
    out: &mut Rows,
) {
    let columns = block.columns();
    buffers.codes.resize(columns, 0);
    buffers.values.resize(columns, 0.0);
    let mut sums = vec![[0.0; PANEL]; tokens.len()];
    for row in 0..out.count() {
        block.decode_row(row, &mut buffers.codes);
        L::values(&buffers.codes, &value_table(block, row), &mut buffers.values);
        for (&token, sums) in tokens.iter().zip(&mut sums) {
            sums[row] = dot(&buffers.values, &prepared.values(token)[first..][..columns]);
        }
    }
    sums.iter().enumerate().for_each(|(i, sums)| out.add(i, sums));
}

/// The values of a row's codebook, repeated to 16.
#[inline(always)]
pub(super) fn value_table(block: &Block, row: usize) -> [f32; LANE] {
    let (high, low, scale) = (block.table(0, row), block.table(1, row), block.scales()[row]);
    std::array::from_fn(|i| scale * (256 * i32::from(high[i] as i8) + i32::from(low[i] as i8)) as f32)
}

/// The dot product, as 16 partial sums that are added at the end.
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

fn integer<const BYTES: usize>(
    block: &Block,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    buffers: &mut Buffers,
    out: &mut Rows,
) {
    let columns = block.columns();
    buffers.codes.resize(columns, 0);
    buffers.bytes.resize(columns, 0);
    let mut sums = vec![[[0; PANEL]; BYTES]; tokens.len()];
    for row in 0..out.count() {
        block.decode_row(row, &mut buffers.codes);
        for byte in 0..BYTES {
            let table = block.table(byte, row);
            for (weight, &code) in buffers.bytes.iter_mut().zip(&buffers.codes) {
                *weight = table[usize::from(code & 15)] as i8;
            }
            for (&token, sums) in tokens.iter().zip(&mut sums) {
                sums[byte][row] = integer_dot(&buffers.bytes, &prepared.codes(token)[first..][..columns]);
            }
        }
    }
    let epilogue = Epilogue::<BYTES>::new(block);
    for (i, (&token, sums)) in tokens.iter().zip(&sums).enumerate() {
        out.add(i, &epilogue.products(sums, prepared.scale(token)));
    }
}

fn integer_dot(weights: &[i8], codes: &[u8]) -> i32 {
    let products = weights
        .iter()
        .zip(codes)
        .map(|(&w, &q)| i32::from(w) * i32::from(q));
    // At most 2^16 products below 2^15 each: nothing wraps.
    products.sum()
}
