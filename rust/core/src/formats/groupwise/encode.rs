//! Packs a tensor.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::{BLOCK_ROWS, HEADER_BYTES, Layout, REGISTER_BYTES, Spec, invalid};
use crate::Result;
use crate::bits::{self, UNIT};
use crate::types::Shape;

/// Packs codes and parameters.
///
/// `codes` is E x R x C, each below `2^bits`; `scales` and `offsets` are E x R x G and exactly representable in the
/// parameter type. A tensor without offsets is symmetric and needs `spec.symmetric`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) if a size, code or parameter is out of range; the message names the row.
pub fn encode(
    codes: &[u8],
    scales: &[f32],
    offsets: Option<&[f32]>,
    shape: Shape,
    spec: Spec,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    let layout = Layout::new(shape, spec)?;
    check(codes, scales, offsets, &layout)?;
    let mut out = vec![0; layout.total_bytes()];
    layout.write(&mut out);
    if layout.block_bytes() == 0 {
        return Ok(out);
    }
    let blocks = layout.blocks();
    let source = Source {
        codes,
        scales,
        offsets,
        layout,
    };
    pool.install(|| {
        out[HEADER_BYTES..]
            .par_chunks_exact_mut(layout.block_bytes())
            .enumerate()
            .try_for_each(|(block, out)| source.pack_block(block / blocks, block % blocks, out))
    })?;
    Ok(out)
}

fn check(codes: &[u8], scales: &[f32], offsets: Option<&[f32]>, layout: &Layout) -> Result<()> {
    let shape = layout.shape();
    let rows = shape.experts * shape.rows;
    let parameters = rows * layout.groups();
    let counted = codes.len() == rows * shape.columns
        && scales.len() == parameters
        && offsets.is_none_or(|offsets| offsets.len() == parameters);
    if !counted {
        return invalid(format!(
            "{} codes, {} scales and {:?} offsets for {shape:?} with {} groups per row",
            codes.len(),
            scales.len(),
            offsets.map(<[f32]>::len),
            layout.groups()
        ));
    }
    if offsets.is_none() != layout.spec().symmetric {
        return invalid("asymmetric tensors need offsets, symmetric ones must have none");
    }
    Ok(())
}

struct Source<'a> {
    codes: &'a [u8],
    scales: &'a [f32],
    offsets: Option<&'a [f32]>,
    layout: Layout,
}

impl Source<'_> {
    fn pack_block(&self, expert: usize, block: usize, out: &mut [u8]) -> Result<()> {
        let rows = self.layout.shape().rows;
        for lane in 0..BLOCK_ROWS.min(rows - block * BLOCK_ROWS) {
            let row = expert * rows + block * BLOCK_ROWS + lane;
            self.pack_parameters(row, lane, out)?;
            self.pack_codes(row, lane, out)?;
        }
        Ok(())
    }

    fn pack_parameters(&self, row: usize, lane: usize, out: &mut [u8]) -> Result<()> {
        let groups = self.layout.groups();
        for (kind, values) in [Some(self.scales), self.offsets]
            .into_iter()
            .flatten()
            .enumerate()
        {
            for (group, &value) in values[row * groups..][..groups].iter().enumerate() {
                let kept = self.layout.spec().parameters;
                let Some(stored) = kept.stored(value) else {
                    return invalid(format!(
                        "parameter {value} of group {group} in {} is not exactly a finite {}",
                        self.place(row),
                        kept.name()
                    ));
                };
                let at = self.layout.parameters_at(group) + 2 * (kind * BLOCK_ROWS + lane);
                out[at..at + 2].copy_from_slice(&stored.to_le_bytes());
            }
        }
        Ok(())
    }

    fn pack_codes(&self, row: usize, lane: usize, out: &mut [u8]) -> Result<()> {
        let (bits, columns) = (self.layout.bits(), self.layout.shape().columns);
        let codes = &self.codes[row * columns..][..columns];
        if let Some(&code) = codes.iter().find(|&&code| u32::from(code) >> bits != 0) {
            return invalid(format!(
                "code {code} in {} has more than {bits} bits",
                self.place(row)
            ));
        }
        for (number, codes) in codes.chunks(UNIT).enumerate() {
            let out = &mut out[self.layout.unit_at(number)..][..bits * REGISTER_BYTES];
            let mut unit = [0; UNIT];
            unit[..codes.len()].copy_from_slice(codes);
            let mut words = [0; 8];
            bits::pack(self.layout.spec().bits, &unit, &mut words);
            for (word, register) in words.iter().zip(out.as_chunks_mut::<REGISTER_BYTES>().0) {
                register.as_chunks_mut::<4>().0[lane] = word.to_le_bytes();
            }
        }
        Ok(())
    }

    fn place(&self, row: usize) -> String {
        let rows = self.layout.shape().rows;
        format!("expert {} row {}", row / rows, row % rows)
    }
}
