//! Packs codes and codebooks.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::bits::{QUADS, pack, step_columns, step_registers};
use super::{HEADER_BYTES, Layout, MAX_CENTROID, PANEL, invalid, split};
use crate::Result;
use crate::types::Shape;

/// The contents of a tensor to pack.
#[derive(Debug, Clone, Copy)]
pub struct Content<'a> {
    /// Experts, rows, columns, ndim.
    pub shape: Shape,
    /// Bits per code: 2, 3 or 4.
    pub bits: u8,
    /// Bits of the activations in products: 4 or 8, or 0 if they are not rounded.
    pub activation_bits: u8,
    /// The number of columns that share a codebook, a multiple of 128; a block larger than the row means the whole
    /// row.
    pub block: usize,
    /// The width of the Hadamard rotation of weights and activations, a power of two that divides the columns; 1
    /// means no rotation. Codes and centroids are those of the rotated weights.
    pub hadamard: usize,
    /// E x R x C codes below 2^bits.
    pub codes: &'a [u8],
    /// E x R x B x K centroids, -32639 to 32639; multiples of 256 if products round activations.
    pub centroids: &'a [i16],
    /// E x R x B scales, finite and not negative.
    pub scales: &'a [f32],
}

/// Packs a tensor.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] if a size, code, centroid or scale is out of range.
pub fn encode(content: Content, pool: &ThreadPool) -> Result<Vec<u8>> {
    let Content { shape, bits, .. } = content;
    let layout = Layout::new(
        shape,
        bits,
        content.activation_bits,
        content.block,
        content.hadamard,
    )?;
    check(&layout, &content)?;
    let mut out = vec![0; layout.total_bytes()];
    layout.write(&mut out);
    if layout.panel_bytes() > 0 {
        let row_blocks = out[HEADER_BYTES..]
            .par_chunks_exact_mut(layout.panel_bytes())
            .enumerate();
        pool.install(|| row_blocks.for_each(|(index, out)| write_row_block(&layout, &content, index, out)));
    }
    Ok(out)
}

/// Checks the sizes of the content and every code, centroid and scale.
fn check(layout: &Layout, content: &Content) -> Result<()> {
    let Content {
        shape,
        codes,
        centroids,
        scales,
        ..
    } = content;
    let books = shape.experts * shape.rows * layout.blocks();
    let sizes = [
        shape.experts * shape.rows * shape.columns,
        books * layout.clusters(),
        books,
    ];
    if [codes.len(), centroids.len(), scales.len()] != sizes {
        return invalid(format!(
            "{} codes, {} centroids and {} scales for {shape:?}",
            codes.len(),
            centroids.len(),
            scales.len()
        ));
    }
    if let Some(at) = codes
        .iter()
        .position(|&code| usize::from(code) >= layout.clusters())
    {
        return invalid(format!(
            "code {} in row {} is out of range",
            codes[at],
            at / shape.columns
        ));
    }
    let one_byte = layout.planes() == 1;
    if let Some(c) = centroids
        .iter()
        .find(|&&c| c.unsigned_abs() > MAX_CENTROID.unsigned_abs() || one_byte && c % 256 != 0)
    {
        let which = if one_byte { "multiples of 256, " } else { "" };
        return invalid(format!(
            "centroid {c} is out of range: centroids are {which}at most {MAX_CENTROID} in magnitude"
        ));
    }
    let largest = layout.largest_scale();
    if let Some(scale) = scales
        .iter()
        .find(|s| s.is_sign_negative() || !(0.0..=largest).contains(*s))
    {
        return invalid(format!("scale {scale} is out of range"));
    }
    Ok(())
}

/// Writes row block `index`, counted over all experts.
fn write_row_block(layout: &Layout, content: &Content, index: usize, out: &mut [u8]) {
    let Shape { rows, columns, .. } = layout.shape();
    let (expert, first) = (index / layout.panels(), index % layout.panels() * PANEL);
    for row in first..rows.min(first + PANEL) {
        let source = expert * rows + row;
        for (block, codes) in content.codes[source * columns..][..columns]
            .chunks(layout.block_size())
            .enumerate()
        {
            let book = source * layout.blocks() + block;
            let centroids = &content.centroids[book * layout.clusters()..][..layout.clusters()];
            let out = &mut out[layout.block_at(block)..];
            let (parameters, rest) = out.split_at_mut(layout.parameter_bytes());
            let steps = &mut rest[..layout.steps(block) * layout.step_bytes()];
            write_parameters(
                (row - first, layout.planes()),
                codes,
                centroids,
                content.scales[book],
                parameters,
            );
            write_codes(layout.bits(), row - first, codes, steps);
        }
    }
}

/// Writes the centroids of `centroid_bytes` bytes, the scale and the sums of a row of a row block.
fn write_parameters(
    (row, centroid_bytes): (usize, usize),
    codes: &[u8],
    centroids: &[i16],
    scale: f32,
    out: &mut [u8],
) {
    let clusters = centroids.len();
    for (code, &centroid) in centroids.iter().enumerate() {
        let (high, low) = split(centroid);
        for (i, byte) in [high, low].into_iter().take(centroid_bytes).enumerate() {
            out[(i * PANEL + row) * clusters + code] = byte as u8;
        }
    }
    let highs = codes
        .iter()
        .map(|&code| i32::from(split(centroids[usize::from(code)]).0))
        .sum::<i32>();
    let wholes = codes
        .iter()
        .map(|&code| i32::from(centroids[usize::from(code)]))
        .sum::<i32>();
    let words = [scale.to_le_bytes(), highs.to_le_bytes(), wholes.to_le_bytes()];
    for (section, word) in words.into_iter().take(1 + centroid_bytes).enumerate() {
        out[centroid_bytes * PANEL * clusters + 4 * (section * PANEL + row)..][..4].copy_from_slice(&word);
    }
}

fn write_codes(bits: u8, row: usize, codes: &[u8], out: &mut [u8]) {
    let mut padded = [0; 128];
    let padded = &mut padded[..step_columns(bits)];
    let steps = out
        .as_chunks_mut()
        .0
        .chunks_exact_mut(QUADS * step_registers(bits));
    for (codes, step) in codes.chunks(step_columns(bits)).zip(steps) {
        padded.fill(0);
        padded[..codes.len()].copy_from_slice(codes);
        pack(bits, padded, row, step);
    }
}
