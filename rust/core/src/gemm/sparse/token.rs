//! Prepared activations of a token.

use super::pair::Pair;
use crate::formats::channels::{GROUP, Width};
use crate::types::Activations;

/// The scales of a token are padded to a multiple of this number.
pub const SCALES: usize = 16;

/// Activations in whole groups, padded with zeros, for products with half records.
pub enum Token {
    /// For 4-bit records.
    Quantized(Quantized),
    /// For all other records.
    Floats(Vec<f32>),
}

impl Token {
    /// Prepares some activations for records of a width.
    pub fn new(width: Width, x: Activations, start: usize, count: usize) -> Token {
        let mut values = vec![0.0; count.next_multiple_of(GROUP)];
        x.widen(start, &mut values[..count]);
        match width {
            Width::Int4 => Token::Quantized(Quantized::new(&values)),
            Width::Int8 | Width::Bf16 => Token::Floats(values),
        }
    }
}

/// Activations quantized for integer products with 4-bit rows.
pub struct Quantized {
    /// The activations of two groups each; zeros for a missing second group.
    pub pairs: Vec<Pair>,
    /// The scale of each group's integers, padded with zeros.
    pub scales: Vec<f32>,
}

impl Quantized {
    /// Quantizes activations of whole groups.
    #[inline(always)]
    fn new(values: &[f32]) -> Quantized {
        let groups = values.len() / GROUP;
        let (mut pairs, mut scales) = (
            vec![Pair::ZERO; groups.div_ceil(2)],
            vec![0.0; groups.next_multiple_of(SCALES)],
        );
        for (number, values) in values.as_chunks::<GROUP>().0.iter().enumerate() {
            scales[number] = pairs[number / 2].quantize(number % 2, values);
        }
        Quantized { pairs, scales }
    }
}
