//! Half a record in a product.

use crate::formats::channels::Half;
use crate::simd;
use crate::types::from_bf16;

/// The number of parallel sums of a product.
pub const LANES: usize = 16;

/// Half a record and the factor for adding it to a token's sums.
pub struct Term<'a> {
    pub half: Half<'a>,
    /// Half of an upcoming record, to prefetch.
    pub next: Half<'a>,
    pub factor: f32,
}

/// A group of half a record with its scale, or 1 for values without scales; prefetches the same group of `next`.
#[inline(always)]
pub fn group<'a, const N: usize>(half: Half<'a>, next: Half<'a>, number: usize) -> (&'a [u8; N], f32) {
    simd::fetch(&next.values.as_chunks::<N>().0[number]);
    let scale = half.scales.get(number);
    (
        &half.values.as_chunks().0[number],
        scale.map_or(1.0, |bits| from_bf16(u16::from_le_bytes(*bits))),
    )
}
