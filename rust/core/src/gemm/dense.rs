//! Dense matrices, f32 or bf16, for [`crate::gemm::layer`]. A model's unpacked weights take part in the same parallel
//! regions. They are read in place, from bytes of any alignment.
//!
//! y = W x in f32, for few tokens: each token reads the matrix again (from the cache if a unit's rows fit). With u =
//! 2^-24, n columns and S = sum of |w x|, the error is at most (n / 64 + 8) u S. The order of the sum is fixed and
//! operations are not fused, so every instruction set gives the same bits. For one token, speed is bound by memory,
//! not by arithmetic.

use std::ops::Range;
use std::sync::Arc;

use super::layer::{Cache, Job, Kernel, Products, Projection, Shared, Slots, Work, direct};
use super::require_mode;
use crate::simd::{Isa, vectorized};
use crate::types::{Activations, Mode, Shape, from_bf16};
use crate::{Error, Result};

/// The number of parallel sums in a matrix's product: four registers of 16, or eight of 8.
const LANES: usize = 64;
/// The number of parallel sums in a product of a head's width: fewer to add up at the end.
const FEW_LANES: usize = 16;

/// The type of values, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Single precision.
    F32,
    /// bf16.
    Bf16,
}

impl Kind {
    fn bytes(self) -> usize {
        match self {
            Kind::F32 => 4,
            Kind::Bf16 => 2,
        }
    }
}

/// A matrix, or a stack of one matrix per expert, read in place.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    bytes: &'a [u8],
    kind: Kind,
    shape: Shape,
}

impl<'a> View<'a> {
    /// A rows x columns matrix over `bytes`, row by row.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are not rows x columns values.
    pub fn new(bytes: &'a [u8], kind: Kind, rows: usize, columns: usize) -> Result<View<'a>> {
        let shape = Shape {
            experts: 1,
            rows,
            columns,
            ndim: 2,
        };
        View::of_experts(bytes, kind, shape)
    }

    /// The matrices over `bytes`, expert by expert.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the number of values does not match the shape.
    pub fn of_experts(bytes: &'a [u8], kind: Kind, shape: Shape) -> Result<View<'a>> {
        let size = shape.weights().and_then(|size| size.checked_mul(kind.bytes()));
        match size == Some(bytes.len()) {
            true => Ok(View { bytes, kind, shape }),
            false => {
                let Shape {
                    experts,
                    rows,
                    columns,
                    ..
                } = shape;
                Err(Error::InvalidArgument(format!(
                    "{} bytes do not hold {experts} x {rows} x {columns} values of {kind:?}",
                    bytes.len()
                )))
            }
        }
    }

    /// The bytes of a range of rows of an expert.
    fn rows(&self, expert: usize, rows: Range<usize>) -> &'a [u8] {
        let (first, bytes) = (expert * self.shape.rows, self.shape.columns * self.kind.bytes());
        &self.bytes[(first + rows.start) * bytes..(first + rows.end) * bytes]
    }
}

/// The compute modes of dense matrices.
pub const MODES: [Mode; 2] = [Mode::Auto, Mode::Exact];

/// A matrix with the instruction set of its products.
#[derive(Debug, Clone, Copy)]
pub struct Dense<'a> {
    view: View<'a>,
    isa: Isa,
}

impl<'a> Dense<'a> {
    /// Products with `isa`; both modes of dense matrices are exact.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the mode does not exist or the processor lacks the instruction set.
    pub fn new(view: View<'a>, mode: Mode, isa: Isa) -> Result<Dense<'a>> {
        require_mode(mode, &MODES, "a dense matrix")?;
        Ok(Dense {
            view,
            isa: isa.vectors(),
        })
    }
}

impl Projection for Dense<'_> {
    fn shape(&self) -> Shape {
        self.view.shape
    }

    fn row_bytes(&self) -> usize {
        self.view.shape.columns * self.view.kind.bytes()
    }

    fn memory(&self, expert: usize, rows: Range<usize>) -> &[u8] {
        self.view.rows(expert, rows)
    }

    fn granule(&self) -> usize {
        1
    }

    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's> {
        direct(self, job)
    }
}

/// The tokens of a job in f32.
static TOKENS: Cache<usize, Slots<Vec<f32>>> = Cache::new();

impl Kernel for Dense<'_> {
    type Prepared = Slots<Vec<f32>>;
    type Scratch<'w>
        = ()
    where
        Self: 'w;

    fn prepared(&self, job: &Arc<Job>) -> Shared<Self::Prepared> {
        TOKENS.get(job, self.view.shape.columns, |_| Slots::new(job.tokens))
    }

    fn stages(&self, tokens: &Self::Prepared) -> [usize; 2] {
        [tokens.len(), 0]
    }

    fn prepare(&self, _: &Job, tokens: &Self::Prepared, _: usize, token: usize, x: Activations) {
        tokens.fill(token, || {
            let mut values = vec![0.0; self.view.shape.columns];
            x.widen(token * self.view.shape.columns, &mut values);
            values
        });
    }

    fn multiply(&self, work: Work<'_, Self::Prepared>, _: &mut (), rows: Range<usize>, out: &mut [f32]) {
        let (bytes, count) = (self.view.rows(work.expert(), rows.clone()), rows.len());
        for (&token, out) in work.tokens().iter().zip(out.chunks_exact_mut(count)) {
            products(self.isa, bytes, self.view.kind, work.prepared.get(token), out);
        }
    }
}

vectorized! {
    /// The products of rows with a token.
    fn products(bytes: &[u8], kind: Kind, x: &[f32], out: &mut [f32]) = products_loop;
}

#[inline(always)]
fn products_loop(bytes: &[u8], kind: Kind, x: &[f32], out: &mut [f32]) {
    for (row, out) in bytes.chunks_exact((x.len() * kind.bytes()).max(1)).zip(out) {
        *out = match kind {
            Kind::F32 => sum::<LANES, _>(row.as_chunks().0, x, f32::from_le_bytes),
            Kind::Bf16 => sum::<LANES, _>(row.as_chunks().0, x, |bytes| from_bf16(u16::from_le_bytes(bytes))),
        };
    }
}

/// The product of `x` with as many values from `start` on; inlined, to be compiled for the caller's instruction set.
#[inline(always)]
pub(crate) fn dot(values: Activations, start: usize, x: &[f32]) -> f32 {
    match values {
        Activations::F32(values) => sum::<FEW_LANES, _>(&values[start..][..x.len()], x, |value| value),
        Activations::Bf16(values) => sum::<FEW_LANES, _>(&values[start..][..x.len()], x, from_bf16),
    }
}

#[inline(always)]
fn sum<const LANES: usize, T: Copy>(values: &[T], x: &[f32], wide: impl Fn(T) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (runs, rest) = values.as_chunks::<LANES>();
    let (x_runs, x_rest) = x.as_chunks::<LANES>();
    for (values, x) in runs.iter().zip(x_runs) {
        for lane in 0..LANES {
            lanes[lane] += wide(values[lane]) * x[lane];
        }
    }
    for (lane, (&value, x)) in rest.iter().zip(x_rest).enumerate() {
        lanes[lane] += wide(value) * x;
    }
    fold(lanes)
}

/// The sum of all lanes, by repeated halving.
#[inline(always)]
pub(crate) fn fold<const LANES: usize>(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::matmul;
    use crate::pool;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        let number = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.0 - 1.0;
        (0..count).map(number).collect()
    }

    fn narrow(values: &[f32]) -> Vec<u16> {
        values
            .iter()
            .map(|value| (value.to_bits() >> 16) as u16)
            .collect()
    }

    fn product(matrix: &Dense, x: Activations, tokens: usize) -> Vec<f32> {
        let mut y = vec![f32::NAN; tokens * matrix.view.shape.rows];
        let pool = pool::current().unwrap();
        matmul(matrix, 0, x, tokens, &mut y, &pool).unwrap();
        y
    }

    #[test]
    fn products_are_within_their_bound_and_the_same_on_all_sets() {
        for (rows, columns, tokens) in [(1, 1, 1), (5, 63, 2), (70, 64, 1), (33, 1000, 3)] {
            let (weights, x) = (numbers(rows * columns, 1), numbers(tokens * columns, 2));
            let (short, short_x) = (narrow(&weights), narrow(&x));
            let bytes: Vec<u8> = weights.iter().flat_map(|value| value.to_le_bytes()).collect();
            let short_bytes: Vec<u8> = short.iter().flat_map(|value| value.to_le_bytes()).collect();
            let forms: [(Activations, &[u8], Kind, Activations); 3] = [
                ((&weights[..]).into(), &bytes, Kind::F32, (&x[..]).into()),
                ((&short[..]).into(), &short_bytes, Kind::Bf16, (&x[..]).into()),
                (
                    (&short[..]).into(),
                    &short_bytes,
                    Kind::Bf16,
                    (&short_x[..]).into(),
                ),
            ];
            for (values, bytes, kind, x) in forms {
                let view = View::new(bytes, kind, rows, columns).unwrap();
                let run = |isa| product(&Dense::new(view, Mode::Auto, isa).unwrap(), x, tokens);
                let scalar = run(Isa::SCALAR);
                let (mut wide, mut wide_x) = (vec![0.0; rows * columns], vec![0.0; tokens * columns]);
                values.widen(0, &mut wide);
                x.widen(0, &mut wide_x);
                for (i, &found) in scalar.iter().enumerate() {
                    let (row, token) = (&wide[i % rows * columns..], &wide_x[i / rows * columns..]);
                    let terms = row[..columns].iter().zip(token);
                    let terms: Vec<f64> = terms.map(|(&w, &x)| f64::from(w) * f64::from(x)).collect();
                    let size: f64 = terms.iter().map(|term| term.abs()).sum();
                    let bound = (columns as f64 / 64.0 + 8.0) * 2f64.powi(-24) * size;
                    assert!((f64::from(found) - terms.iter().sum::<f64>()).abs() <= bound);
                }
                for isa in Isa::all_available() {
                    assert_eq!(run(isa), scalar);
                }
            }
        }
    }

    #[test]
    fn a_matrix_of_another_size_is_refused() {
        let new = |rows, columns| View::new(&[0; 24], Kind::F32, rows, columns);
        assert!(new(2, 3).is_ok());
        assert!(new(2, 4).is_err() && new(usize::MAX, 2).is_err());
        assert!(Dense::new(new(2, 3).unwrap(), Mode::Int8, Isa::SCALAR).is_err());
    }
}
