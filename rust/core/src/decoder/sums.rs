//! Weighted sums of rows.

/// The number of value columns summed in registers: four of 16.
const LANES: usize = 64;

/// Adds weighted rows to `sums` in order, some columns at a time in registers.
#[inline(always)]
pub(super) fn add_rows<'v, T: Copy + 'v>(
    sums: &mut [f32],
    weights: &[f32],
    row: impl Fn(usize) -> &'v [T],
    wide: impl Fn(T) -> f32,
) {
    let whole = sums.len() - sums.len() % LANES;
    for (number, sums) in sums.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut lanes = *sums;
        for (at, &weight) in weights.iter().enumerate() {
            let row = &row(at)[number * LANES..][..LANES];
            for lane in 0..LANES {
                lanes[lane] += weight * wide(row[lane]);
            }
        }
        *sums = lanes;
    }
    for (at, &weight) in weights.iter().enumerate() {
        let pairs = sums[whole..].iter_mut().zip(&row(at)[whole..]);
        pairs.for_each(|(sum, &value)| *sum += weight * wide(value));
    }
}
