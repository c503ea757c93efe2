//! The Hadamard rotation of activations, which spreads outliers over all columns of a block before rounding.
//!
//! Sylvester's matrix of n = 2^k columns, `H[i][j] = (-1)^popcount(i & j) / sqrt(n)`, is symmetric and its own
//! inverse, so `W x = (W H)(H x)`: a tensor stores W H, and products rotate x. Longer rows are rotated in blocks of n
//! columns. The rotation takes k rounds of additions and one multiplication per value, in the same order and not
//! fused on every instruction set, so results have the same bits everywhere.

use crate::simd::vectorized;

vectorized! {
    /// Rotates each block of `width` values, a power of two that divides `values.len()`.
    pub fn rotate(values: &mut [f32], width: usize) = blocks, in 256 bits;
}

#[inline(always)]
fn blocks(values: &mut [f32], width: usize) {
    let unit = 1.0 / (width as f32).sqrt();
    for block in values.chunks_exact_mut(width.max(1)) {
        let mut half = 1;
        while half < width {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        block.iter_mut().for_each(|value| *value *= unit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;

    #[test]
    fn every_set_multiplies_by_sylvesters_matrix() {
        for (length, width) in [(1, 1), (6, 2), (24, 8), (64, 64), (768, 256)] {
            let x: Vec<f32> = (0..length).map(|i| (i * 37 % 23) as f32 - 9.5).collect();
            let mut reference = x.clone();
            rotate(Isa::SCALAR, &mut reference, width);
            for (i, &found) in reference.iter().enumerate() {
                let block = &x[i / width * width..][..width];
                let signed =
                    block
                        .iter()
                        .enumerate()
                        .map(|(j, &x)| match ((i % width) & j).count_ones() % 2 {
                            0 => f64::from(x),
                            _ => -f64::from(x),
                        });
                let expected = signed.sum::<f64>() / (width as f64).sqrt();
                assert!(
                    (f64::from(found) - expected).abs() < 1e-4,
                    "{length} {width} {i}: {found}, not {expected}"
                );
            }
            for isa in Isa::all_available() {
                let mut turned = x.clone();
                rotate(isa, &mut turned, width);
                assert_eq!(turned, reference, "{isa:?}");
                rotate(isa, &mut turned, width);
                assert!(turned.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-4));
            }
        }
    }
}
