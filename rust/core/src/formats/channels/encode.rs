//! Packs a tensor.

use half::bf16;
use rayon::ThreadPool;
use rayon::prelude::*;

use super::{GROUP, HEADER_BYTES, Layout, Width, invalid};
use crate::Result;
use crate::types::Shape;

/// The values of records, E x I x 2 H: for each channel the gate row, then the down column.
#[derive(Debug, Clone, Copy)]
pub enum Content<'a> {
    /// The bits of bf16 values, all finite.
    Bf16(&'a [u16]),
    /// Integer codes: a value is `scale * (code - 2^(bits - 1))`.
    Integers {
        /// 4 or 8.
        bits: u8,
        /// E x I x 2 H, below `2^bits`.
        codes: &'a [u8],
        /// E x I x 2 G, exactly representable in bf16: one scale per 64 columns of the gate row, then of the down
        /// column.
        scales: &'a [f32],
    },
}

/// Packs records; `shape` is E x I x 2 H, and `thresholds` holds one value per expert.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) if a size, code, scale or threshold is out of range; the message names
/// the channel.
pub fn encode(content: Content, thresholds: &[f32], shape: Shape, pool: &ThreadPool) -> Result<Vec<u8>> {
    let width = match content {
        Content::Bf16(_) => Width::Bf16,
        Content::Integers { bits: 16, .. } => return invalid("integers have 4 or 8 bits, not 16"),
        Content::Integers { bits, .. } => Width::from_bits(bits)?,
    };
    let layout = Layout::new(shape, width)?;
    check(content, thresholds, &layout)?;
    let mut out = vec![0; layout.total_bytes()];
    layout.write(&mut out);
    for (place, threshold) in out[HEADER_BYTES..]
        .as_chunks_mut::<4>()
        .0
        .iter_mut()
        .zip(thresholds)
    {
        *place = threshold.to_le_bytes();
    }
    if layout.record_bytes() > 0 {
        let records = out[layout.record_at(0)..].par_chunks_exact_mut(layout.record_bytes());
        let numbered = records.enumerate();
        pool.install(|| numbered.try_for_each(|(number, record)| pack(content, &layout, number, record)))?;
    }
    Ok(out)
}

fn check(content: Content, thresholds: &[f32], layout: &Layout) -> Result<()> {
    let Shape {
        experts,
        rows,
        columns,
        ..
    } = layout.shape();
    let records = experts * rows;
    let counted = thresholds.len() == experts
        && match content {
            Content::Bf16(values) => values.len() == records * columns,
            Content::Integers { codes, scales, .. } => {
                codes.len() == records * columns && scales.len() == 2 * records * layout.groups()
            }
        };
    if !counted {
        return invalid(format!(
            "values, scales or thresholds do not fit {:?}",
            layout.shape()
        ));
    }
    match thresholds
        .iter()
        .position(|threshold| threshold.is_nan() || *threshold < 0.0)
    {
        Some(expert) => invalid(format!(
            "the threshold of expert {expert} is invalid: {}",
            thresholds[expert]
        )),
        None => Ok(()),
    }
}

fn pack(content: Content, layout: &Layout, number: usize, record: &mut [u8]) -> Result<()> {
    let columns = layout.shape().columns;
    let place = |what: String| {
        let channels = layout.shape().rows;
        invalid(format!(
            "expert {} channel {}: {what}",
            number / channels,
            number % channels
        ))
    };
    match content {
        Content::Bf16(values) => {
            let values = &values[number * columns..][..columns];
            if let Some(bits) = values.iter().find(|&&bits| !bf16::from_bits(bits).is_finite()) {
                return place(format!("the value {}", bf16::from_bits(*bits)));
            }
            for (half, values) in values.chunks_exact(layout.half().max(1)).enumerate() {
                let out = &mut record[half * layout.half_bytes()..];
                out.as_chunks_mut::<2>()
                    .0
                    .iter_mut()
                    .zip(values)
                    .for_each(|(out, bits)| *out = bits.to_le_bytes());
            }
            Ok(())
        }
        Content::Integers { bits, codes, scales } => {
            let codes = &codes[number * columns..][..columns];
            if let Some(code) = codes.iter().find(|&&code| u32::from(code) >> bits != 0) {
                return place(format!("the code {code} has more than {bits} bits"));
            }
            for (half, codes) in codes.chunks_exact(layout.half().max(1)).enumerate() {
                pack_codes(
                    layout.width(),
                    codes,
                    &mut record[half * layout.half_bytes()..][..layout.half_bytes()],
                );
            }
            let scales = &scales[2 * number * layout.groups()..][..2 * layout.groups()];
            let out = record[2 * layout.half_bytes()..].as_chunks_mut::<2>().0;
            for (out, &scale) in out.iter_mut().zip(scales) {
                let stored = bf16::from_f32(scale);
                if !scale.is_finite() || stored.to_f32() != scale {
                    return place(format!("the scale {scale} is not exactly a finite bfloat16"));
                }
                *out = stored.to_bits().to_le_bytes();
            }
            Ok(())
        }
    }
}

/// Packs the codes of a half; the padding after the last column gets codes of zero.
fn pack_codes(width: Width, codes: &[u8], out: &mut [u8]) {
    match width {
        Width::Int4 => {
            for (codes, out) in codes.chunks(GROUP).zip(out.as_chunks_mut::<{ GROUP / 2 }>().0) {
                let code = |column: usize| codes.get(column).copied().unwrap_or(8);
                for (i, out) in out.iter_mut().enumerate() {
                    *out = code(i) | code(GROUP / 2 + i) << 4;
                }
            }
        }
        _ => out
            .iter_mut()
            .zip(codes)
            .for_each(|(out, code)| *out = code ^ 0x80),
    }
}
