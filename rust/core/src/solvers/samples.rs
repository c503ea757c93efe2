//! Rounds samples of many matrices, each with code lengths and a price of its own.
//!
//! A sample is too small for several threads, so each thread rounds whole samples. Invariant: a sample gets the codes
//! that [`priced::round`] or [`trellis::round`] gives it.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::priced::{self, Problem};
use super::trellis;
use crate::simd::Isa;
use crate::{Error, Result};

/// Samples E x R x C in units of the step.
#[derive(Debug, Clone, Copy)]
pub struct Samples<'a> {
    /// E, R and C.
    pub shape: [usize; 3],
    /// E x R x C.
    pub values: &'a [f32],
    /// The bits of the symbols from -L to L of each matrix, E x (2 L + 1).
    pub lengths: &'a [f32],
    /// The cost of a bit in squared steps, for each matrix.
    pub prices: &'a [f32],
    /// Whether codes are dependent.
    pub dependent: bool,
}

/// Rounds the samples to codes E x R x C.
///
/// # Errors
/// [`Error::InvalidArgument`] if sizes do not match, a number is out of range, or a value is NaN or infinite.
pub fn round(samples: Samples, isa: Isa, pool: &ThreadPool) -> Result<Vec<i32>> {
    let Samples {
        shape: [matrices, rows, columns],
        values,
        lengths,
        prices,
        dependent,
    } = samples;
    let size = rows.checked_mul(columns);
    let total = size.and_then(|size| size.checked_mul(matrices));
    if total != Some(values.len()) || prices.len() != matrices {
        let (values, prices) = (values.len(), prices.len());
        return Err(Error::InvalidArgument(format!(
            "rounding: {values} values and {prices} prices for {matrices} matrices of {rows} x {columns}"
        )));
    }
    if values.is_empty() {
        return Ok(Vec::new());
    }
    let (size, integers) = (rows * columns, lengths.len() / matrices);
    if integers * matrices != lengths.len() || integers == 0 {
        let lengths = lengths.len();
        return Err(Error::InvalidArgument(format!(
            "rounding: {lengths} lengths for {matrices} matrices"
        )));
    }
    let mut codes = vec![0; values.len()];
    pool.install(|| {
        let given = values
            .par_chunks(size)
            .zip(lengths.par_chunks(integers))
            .zip(prices);
        let all = codes.par_chunks_mut(size).zip(given);
        all.try_for_each(|(codes, ((values, lengths), &price))| {
            let problem = Problem {
                weights: values.into(),
                columns,
                step: 1.0,
                width: 1.0,
                lengths,
                integers,
                price: f64::from(price),
            };
            match dependent {
                true => trellis::round(problem, codes, isa, pool),
                false => priced::round(problem, codes, isa, pool),
            }
            .map(|_| ())
        })
    })?;
    Ok(codes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool;

    fn samples<'a>(values: &'a [f32], lengths: &'a [f32], prices: &'a [f32], dependent: bool) -> Samples<'a> {
        Samples {
            shape: [prices.len(), 3, 5],
            values,
            lengths,
            prices,
            dependent,
        }
    }

    #[test]
    fn samples_are_rounded_as_alone() {
        let pool = pool::current().unwrap();
        let values: Vec<f32> = (0..30).map(|i| (i * 37 % 23) as f32 / 5.0 - 2.0).collect();
        let lengths: Vec<f32> = (0..14).map(|i| 1.0 + (i * 5 % 7) as f32).collect();
        for isa in Isa::all_available() {
            for dependent in [false, true] {
                let found = round(samples(&values, &lengths, &[0.1, 0.7], dependent), isa, &pool).unwrap();
                for (each, price) in [0.1f32, 0.7].into_iter().enumerate() {
                    let problem = Problem {
                        weights: values[each * 15..][..15].into(),
                        columns: 5,
                        step: 1.0,
                        width: 1.0,
                        lengths: &lengths[each * 7..][..7],
                        integers: 7,
                        price: f64::from(price),
                    };
                    let mut alone = vec![0; 15];
                    match dependent {
                        true => trellis::round(problem, &mut alone, isa, &pool),
                        false => priced::round(problem, &mut alone, isa, &pool),
                    }
                    .unwrap();
                    assert_eq!(found[each * 15..][..15], alone);
                }
            }
        }
    }

    #[test]
    fn wrong_sizes_are_refused() {
        let pool = pool::current().unwrap();
        let (values, lengths) = ([0.0; 30], [1.0; 14]);
        for (values, lengths, prices) in [
            (&values[..29], &lengths[..], &[0.1, 0.1][..]),
            (&values, &lengths[..13], &[0.1, 0.1]),
            (&values, &lengths, &[0.1]),
        ] {
            assert!(round(samples(values, lengths, prices, false), Isa::best(), &pool).is_err());
        }
    }
}
