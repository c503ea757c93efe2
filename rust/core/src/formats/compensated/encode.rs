//! Packs a group-wise tensor with its factors.

use super::chunk::{CHUNK, Width, pack_halves};
use super::layout::{Layout, Side};
use super::{HEADER_BYTES, invalid};
use crate::Result;
use crate::formats::groupwise;

/// The rows of one factor for all experts, T rows of n values.
#[derive(Debug, Clone, Copy)]
pub enum Factor<'a> {
    /// Codes, T x n, and scales, T x ceil(n / 64), exactly representable in f16.
    Codes {
        /// Below 2^bits.
        codes: &'a [u8],
        /// One per chunk of 64 codes.
        scales: &'a [f32],
    },
    /// Values, T x n, exactly representable in f16.
    Values(&'a [f32]),
}

/// Packs the group-wise tensor `base` and each expert's factors.
///
/// `ranks` has E entries; the rows of `right` (V, of C values) and `left` (U^T, of R values) are ordered by expert.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) if a size, rank, code, scale or value is out of range; errors of
/// [`groupwise::View::parse`] for `base`.
pub fn encode(base: &[u8], ranks: &[usize], right: Factor, left: Factor, width: Width) -> Result<Vec<u8>> {
    let layout = groupwise::View::parse(base)?.layout();
    let shape = layout.shape();
    if ranks.len() != shape.experts {
        return invalid(format!("{} ranks for {} experts", ranks.len(), shape.experts));
    }
    let most = shape.rows.min(shape.columns);
    if let Some(rank) = ranks.iter().find(|&&rank| rank > most) {
        return invalid(format!(
            "rank {rank} is too large for {} x {}",
            shape.rows, shape.columns
        ));
    }
    let total_rank = ranks.iter().try_fold(0usize, |sum, &rank| sum.checked_add(rank));
    let Some(layout) = total_rank.and_then(|total| Layout::of(layout, width, total)) else {
        return invalid("the factors are too large");
    };
    let mut out = vec![0; layout.total_bytes()];
    layout.write(&mut out);
    out[HEADER_BYTES..][..base.len()].copy_from_slice(base);
    for (expert, &rank) in ranks.iter().enumerate() {
        out[layout.ranks_at() + 4 * expert..][..4].copy_from_slice(&(rank as u32).to_le_bytes());
    }
    write_side(&mut out, layout.right(), layout, right)?;
    write_side(&mut out, layout.left(), layout, left)?;
    Ok(out)
}

fn write_side(out: &mut [u8], side: Side, layout: Layout, factor: Factor) -> Result<()> {
    let (rows, width) = (layout.total_rank(), layout.width());
    match factor {
        Factor::Codes { codes, scales } if width != Width::Half => {
            if codes.len() != rows * side.length || scales.len() != rows * side.chunks {
                return invalid(format!(
                    "{} codes and {} scales for {rows} rows of {}",
                    codes.len(),
                    scales.len(),
                    side.length
                ));
            }
            write_scales(&mut out[side.scales_at..], scales)?;
            write_codes(&mut out[side.codes_at..side.end], codes, side, width)
        }
        Factor::Values(values) if width == Width::Half => {
            if values.len() != rows * side.length {
                return invalid(format!(
                    "{} values for {rows} rows of {}",
                    values.len(),
                    side.length
                ));
            }
            write_values(&mut out[side.codes_at..side.end], values, side)
        }
        _ => invalid("factors of 3 or 8 bits need codes, factors of 16 bits need values"),
    }
}

fn stored(value: f32) -> Result<half::f16> {
    let half = half::f16::from_f32(value);
    match half.to_f32() == value && value.is_finite() {
        true => Ok(half),
        false => invalid(format!("{value} is not exactly a finite float16")),
    }
}

fn write_scales(out: &mut [u8], scales: &[f32]) -> Result<()> {
    for (bytes, &scale) in out.as_chunks_mut::<2>().0.iter_mut().zip(scales) {
        *bytes = stored(scale)?.to_le_bytes();
    }
    Ok(())
}

fn write_codes(out: &mut [u8], codes: &[u8], side: Side, width: Width) -> Result<()> {
    if width == Width::Three
        && let Some(code) = codes.iter().find(|&&code| code > 7)
    {
        return invalid(format!("code {code} is out of range"));
    }
    if side.length == 0 {
        return Ok(());
    }
    let rows = out.chunks_exact_mut(side.chunks * width.chunk_bytes());
    for (out, codes) in rows.zip(codes.chunks_exact(side.length)) {
        for (out, codes) in out.chunks_exact_mut(width.chunk_bytes()).zip(codes.chunks(CHUNK)) {
            let mut padded = [width.middle(); CHUNK];
            padded[..codes.len()].copy_from_slice(codes);
            width.pack(&padded, out);
        }
    }
    Ok(())
}

fn write_values(out: &mut [u8], values: &[f32], side: Side) -> Result<()> {
    if side.length == 0 {
        return Ok(());
    }
    let rows = out.chunks_exact_mut(side.chunks * Width::Half.chunk_bytes());
    for (out, values) in rows.zip(values.chunks_exact(side.length)) {
        for (out, values) in out
            .chunks_exact_mut(Width::Half.chunk_bytes())
            .zip(values.chunks(CHUNK))
        {
            let mut halves = [half::f16::ZERO; CHUNK];
            for (half, &value) in halves.iter_mut().zip(values) {
                *half = stored(value)?;
            }
            pack_halves(&halves, out);
        }
    }
    Ok(())
}
