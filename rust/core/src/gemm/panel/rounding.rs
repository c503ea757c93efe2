//! Rounds activations to bf16 lines.

use super::{LANES, Line, Tile, pair};
use crate::simd::{Isa, vectorized};
use crate::types::Activations;

/// Writes token `token` of `x`, `columns` values rounded to bf16, into lane `lane` of a tile. `change` is applied to
/// the values before rounding.
pub(crate) fn round_token(
    isa: Isa,
    x: &Activations,
    (token, columns): (usize, usize),
    change: impl FnOnce(&mut [f32]),
    lane: usize,
    tile: &mut Tile,
) {
    let mut values = vec![0.0; columns];
    x.widen(token * columns, &mut values);
    change(&mut values);
    round(isa, &values, &mut tile.lines[lane..]);
}

vectorized! {
    /// Writes values, rounded to bf16, into lines with a stride of 16.
    pub(super) fn round(x: &[f32], lines: &mut [Line]) = round_portable, in 256 bits;
}

/// Writes values into lines like [`round`].
#[inline(always)]
fn round_portable(x: &[f32], lines: &mut [Line]) {
    for (x, line) in x.chunks(2 * LANES).zip(lines.iter_mut().step_by(LANES)) {
        let mut values = [0.0; 2 * LANES];
        values[..x.len()].copy_from_slice(x);
        for (word, two) in line.0.iter_mut().zip(values.as_chunks::<2>().0) {
            *word = pair(two[0], two[1]);
        }
    }
}
