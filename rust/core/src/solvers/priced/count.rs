//! Histograms: by class, of weights in units of their class and of their integers; by run of rows, of symbols.

use std::collections::BTreeMap;
use std::ops::Range;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::envelope::truncated;
use super::{BLOCK_ROWS, CHUNK, CLASSES_AN_OCTAVE, Integer, NARROWEST, class, invalid, sum_of_squares};
use crate::Result;
use crate::simd::{Isa, vectorized};

/// Finite rows of weights, R x C.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// R x C.
    pub values: &'a [f32],
    /// The number of columns C.
    pub columns: usize,
    /// The number of classes; the last one includes all wider rows.
    pub classes: usize,
}

/// The classes that occur, ascending, with their counts.
pub type Counts = Vec<(usize, Vec<u64>)>;

/// Counts weights per class in `bins` bins of equal width from `-reach` to `reach` root mean squares of the class;
/// the first and the last bin include all weights beyond.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) if the rows are incomplete, there are no classes, or there are not 1 to
/// 2^22 bins.
pub fn values(rows: Rows, bins: usize, reach: f32, isa: Isa, pool: &ThreadPool) -> Result<Counts> {
    if !(1..=1 << 22).contains(&bins) {
        return invalid(format!("{bins} bins"));
    }
    count(rows, bins, isa, pool, |class, block, counts| {
        let unit = (NARROWEST + class as f64 / CLASSES_AN_OCTAVE).exp2() as f32;
        let mut places = [0; CHUNK];
        for values in rows.values[block].chunks(CHUNK) {
            find(isa, values, unit, bins as f32, reach, &mut places);
            places[..values.len()]
                .iter()
                .for_each(|&place| counts[place as usize] += 1);
        }
    })
}

/// Counts integers, R x C, from -L - 1, which includes all below, to L + 1, which includes all above.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) if the rows are incomplete, there are no classes, or the number of
/// integers differs.
pub fn integers<T: Integer>(
    rows: Rows,
    integers: &[T],
    largest: u16,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<Counts> {
    if integers.len() != rows.values.len() {
        return invalid(format!(
            "{} integers for {} weights",
            integers.len(),
            rows.values.len()
        ));
    }
    let beyond = i32::from(largest) + 1;
    count(rows, 2 * beyond as usize + 1, isa, pool, |_, block, counts| {
        for &integer in &integers[block] {
            let integer: i32 = integer.into();
            counts[(integer.clamp(-beyond, beyond) + beyond) as usize] += 1;
        }
    })
}

/// Codes to count by run.
#[derive(Debug, Clone, Copy)]
pub struct Coded<'a, T> {
    /// R x C.
    pub codes: &'a [T],
    /// The number of columns C.
    pub columns: usize,
    /// The run of each row.
    pub runs: &'a [i64],
    /// The number of runs.
    pub number: usize,
    /// Whether codes are dependent; their symbols are the indices.
    pub dependent: bool,
}

/// Counts the symbols of each run, N x (2 L + 3), from -L - 1, which includes all below, to L + 1, which includes all
/// above.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) if the rows are incomplete, or a row's run does not exist.
pub fn symbols<T: Integer>(coded: Coded<T>, largest: u16, pool: &ThreadPool) -> Result<Vec<u64>> {
    let Coded {
        codes,
        columns,
        runs,
        number,
        dependent,
    } = coded;
    if runs.len().checked_mul(columns) != Some(codes.len()) {
        let (codes, rows) = (codes.len(), runs.len());
        return invalid(format!(
            "{codes} codes do not form {rows} rows of {columns} columns"
        ));
    }
    if let Some(run) = runs.iter().find(|run| !(0..number as i64).contains(run)) {
        return invalid(format!("there is no run {run} among {number}"));
    }
    let beyond = i32::from(largest) + 1;
    let bins = 2 * beyond as usize + 1;
    let Some(size) = number.checked_mul(bins) else {
        return invalid(format!("{number} runs of {bins} symbols"));
    };
    if codes.is_empty() {
        return Ok(vec![0; size]);
    }
    let place = |code: i32| {
        let fine = if code & 3 == 1 { code } else { code.wrapping_neg() };
        let symbol = if dependent { fine >> 2 } else { code };
        (symbol.clamp(-beyond, beyond) + beyond) as usize
    };
    pool.install(|| {
        // Each thread counts consecutive rows, because counts are large.
        let rows = codes.par_chunks(columns).zip(runs);
        let rows = rows.with_min_len(runs.len().div_ceil(rayon::current_num_threads()));
        let counted = rows.fold(
            || vec![0_u64; size],
            |mut counts, (row, &run)| {
                let own = &mut counts[run as usize * bins..][..bins];
                row.iter().for_each(|&code| own[place(code.into())] += 1);
                counts
            },
        );
        let sum = |mut all: Vec<u64>, counts: Vec<u64>| {
            all.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
            all
        };
        Ok(counted.reduce_with(sum).unwrap_or_else(|| vec![0; size]))
    })
}

/// Adds up `bins` counts per class: `add` gets the class of a row block, the range of its weights, and the counts.
fn count(
    rows: Rows,
    bins: usize,
    isa: Isa,
    pool: &ThreadPool,
    add: impl Fn(usize, Range<usize>, &mut [u64]) + Sync,
) -> Result<Counts> {
    let Rows {
        values,
        columns,
        classes,
    } = rows;
    if classes == 0
        || columns == 0 && !values.is_empty()
        || columns > 0 && !values.len().is_multiple_of(columns)
    {
        let weights = values.len();
        return invalid(format!(
            "{weights} weights do not form rows of {columns} columns, or {classes} classes are too few"
        ));
    }
    let size = (BLOCK_ROWS * columns).max(1);
    let blocks = values.len().div_ceil(size);
    pool.install(|| {
        // Each thread counts a run of row blocks, because counts are large.
        let runs = (0..blocks).into_par_iter();
        let runs = runs.with_min_len(blocks.div_ceil(rayon::current_num_threads()));
        let counted = runs.fold(BTreeMap::new, |mut counts: BTreeMap<_, _>, block| {
            let block = block * size..values.len().min((block + 1) * size);
            let squares = sum_of_squares(isa, &values[block.clone()]);
            let class = class(squares / block.len() as f64, 1.0, classes);
            add(class, block, counts.entry(class).or_insert_with(|| vec![0; bins]));
            counts
        });
        let sum = |mut all: BTreeMap<usize, Vec<u64>>, counts: BTreeMap<usize, Vec<u64>>| {
            for (class, counts) in counts {
                let sums = all.entry(class).or_insert_with(|| vec![0; bins]);
                sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
            }
            all
        };
        Ok(counted.reduce(BTreeMap::new, sum).into_iter().collect())
    })
}

vectorized! {
    /// The bins of values.
    fn find(values: &[f32], unit: f32, bins: f32, reach: f32, places: &mut [i32; CHUNK]) = find_portable;
}

#[inline(always)]
fn find_portable(values: &[f32], unit: f32, bins: f32, reach: f32, places: &mut [i32; CHUNK]) {
    let (scale, middle, last) = (bins / (2.0 * reach), bins / 2.0, bins - 1.0);
    for (value, place) in values.iter().zip(places) {
        let bin = value / unit * scale + middle;
        let bin = if bin > 0.0 { bin } else { 0.0 };
        *place = truncated(if bin < last { bin.floor() } else { last });
    }
}
