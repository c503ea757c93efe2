use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::*;
use crate::gemm::layer::{self, Job, Products, Projection, Task};
use crate::pool;
use crate::simd::{Isa, Kind};

/// A source of unpacked weights, [experts, rows, columns].
struct Plain {
    shape: Shape,
    weights: Vec<bf16>,
}

fn shape(experts: usize, rows: usize, columns: usize) -> Shape {
    Shape {
        experts,
        rows,
        columns,
        ndim: 3,
    }
}

/// Numbers of both signs and several magnitudes.
pub(crate) fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    (0..count)
        .map(|_| (next() as f32 / 2f32.powi(31) - 1.0) * [1.0, 0.01, 30.0][next() as usize % 3])
        .collect()
}

impl Plain {
    fn new(experts: usize, rows: usize, columns: usize) -> Plain {
        let weights = numbers(experts * rows * columns, 17);
        Plain {
            shape: shape(experts, rows, columns),
            weights: weights.into_iter().map(bf16::from_f32).collect(),
        }
    }

    fn row(&self, expert: usize, row: usize) -> Vec<bf16> {
        let columns = self.shape.columns;
        self.weights[(expert * self.shape.rows + row) * columns..][..columns].to_vec()
    }
}

impl Source for &Plain {
    /// The block and its next chunk.
    type Open = (usize, usize);

    fn shape(&self) -> Shape {
        self.shape
    }

    fn form(&self) -> TokenForm {
        TokenForm {
            element: Element::Bf16,
            columns: self.shape.columns,
            section: self.shape.columns.div_ceil(32).max(1),
            variant: 0,
            factors: 0,
        }
    }

    fn token(&self, x: &Activations, _: usize, token: usize, lane: usize, tile: &mut Tile) {
        round_token(Isa::SCALAR, x, (token, self.shape.columns), |_| (), lane, tile);
    }

    fn open(&self, block: usize, open: &mut (usize, usize)) {
        *open = (block, 0);
    }

    fn decode(&self, block: usize, open: &mut (usize, usize), chunks: Range<usize>, to: &mut [Line]) {
        assert_eq!(
            *open,
            (block, chunks.start),
            "each chunk is decoded once, in order"
        );
        open.1 = chunks.end;
        let (blocks, columns) = (self.shape.rows.div_ceil(LANES), self.shape.columns);
        let (expert, first) = (block / blocks, block % blocks * LANES);
        for (pair, line) in (chunks.start * LANES..chunks.end * LANES).zip(to) {
            *line = Line(std::array::from_fn(|i| {
                let at = |column: usize| match first + i < self.shape.rows && column < columns {
                    true => self.weights[(expert * self.shape.rows + first + i) * columns + column].to_bits(),
                    false => 0,
                };
                u32::from(at(2 * pair)) | u32::from(at(2 * pair + 1)) << 16
            }));
        }
    }

    fn finish(&self, section: &Section, _: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
        assert_eq!(section.section, 0);
        *out = sums.floats();
    }
}

/// A source and its backend.
struct By<S>(S, Backend);

impl<S: Source + Clone> Projection for By<S> {
    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn row_bytes(&self) -> usize {
        self.0.shape().columns
    }

    fn granule(&self) -> usize {
        LANES
    }

    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's> {
        products(self.0.clone(), self.1, job)
    }
}

/// Every backend that the processor supports.
pub(crate) fn backends() -> Vec<Backend> {
    let sets = Isa::all_available();
    let found = sets.filter_map(Backend::of_floats);
    found.chain([Backend::emulated()]).collect()
}

/// The tasks of experts with the given numbers of tokens.
pub(crate) fn tasks(counts: &[usize]) -> Vec<Task> {
    let mut end = 0;
    let mut tasks = Vec::new();
    for (expert, &count) in counts.iter().enumerate() {
        if count > 0 {
            tasks.push(Task {
                expert,
                places: end..end + count,
            });
        }
        end += count;
    }
    tasks
}

/// The products of a source, tokens x rows.
pub(crate) fn product<S: Source + Clone>(
    source: S,
    x: &[f32],
    tasks: &[Task],
    backend: Backend,
    threads: usize,
) -> Vec<f32> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap();
    let job = Job::of_tasks(tasks.to_vec());
    let mut y = vec![f32::NAN; job.tokens * source.shape().rows];
    layer::multiply(&By(source, backend), job, x.into(), &mut y, &pool);
    y
}

/// Asserts that outputs are within the module's bound of products in f64; `weights` gives an expert's rounded row.
pub(crate) fn assert_bounds(
    shape: Shape,
    weights: impl Fn(usize, usize) -> Vec<bf16>,
    x: &[f32],
    tasks: &[Task],
    y: &[f32],
    what: &str,
) {
    let Shape { rows, columns, .. } = shape;
    for Task { expert, places } in tasks {
        for row in 0..rows {
            let w = weights(*expert, row);
            for place in places.clone() {
                let terms = w.iter().zip(&x[place * columns..][..columns]);
                let terms =
                    terms.map(|(w, &x)| f64::from(w.to_f32()) * f64::from(bf16::from_f32(x).to_f32()));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                let found = f64::from(y[place * rows + row]);
                let bound = columns as f64 * 2f64.powi(-24) * size + 1e-30;
                assert!(
                    (found - sum).abs() <= bound,
                    "{what}: {found} for {sum} +- {bound}"
                );
            }
        }
    }
}

/// Asserts that panels hold `weights`, as in [`assert_bounds`]; `row` gives the row of a word.
pub(crate) fn assert_panels<S: Source>(
    source: S,
    weights: impl Fn(usize, usize) -> Vec<bf16>,
    row: impl Fn(usize) -> usize,
    what: &str,
) {
    let Shape {
        experts,
        rows,
        columns,
        ..
    } = source.shape();
    let (blocks, chunks) = (rows.div_ceil(LANES), columns.div_ceil(2 * LANES));
    let mut open = S::Open::default();
    for block in 0..experts * blocks {
        source.open(block, &mut open);
        let mut lines = vec![Line([!0; LANES]); chunks * LANES];
        for first in (0..chunks).step_by(3) {
            let chunks = first..(first + 3).min(chunks);
            let to = &mut lines[first * LANES..chunks.end * LANES];
            source.decode(block, &mut open, chunks, to);
        }
        for word in 0..LANES {
            let in_expert = block % blocks * LANES + row(word);
            if in_expert < rows {
                for (column, weight) in weights(block / blocks, in_expert).into_iter().enumerate() {
                    let found = (lines[column / 2].0[word] >> (16 * (column % 2))) as u16;
                    assert_eq!(
                        found,
                        weight.to_bits(),
                        "{what}: row {in_expert}, column {column}"
                    );
                }
            }
        }
    }
}

#[test]
fn products_are_within_their_bound_on_every_backend() {
    for (rows, columns) in [(16, 32), (5, 7), (70, 300), (33, 1030)] {
        let weights = Plain::new(3, rows, columns);
        for counts in [[1, 0, 3], [9, 16, 17], [0, 33, 50]] {
            let tasks = tasks(&counts);
            let x = numbers(counts.iter().sum::<usize>() * columns, 5);
            let reference = product(&weights, &x, &tasks, Backend::PORTABLE, 1);
            for backend in backends() {
                let y = product(&weights, &x, &tasks, backend, 2);
                let row = |expert, row| weights.row(expert, row);
                assert_bounds(weights.shape, row, &x, &tasks, &y, &format!("{backend:?}"));
                if matches!(
                    backend.instructions(),
                    Instructions::Avx2 | Instructions::Emulated
                ) {
                    assert_eq!(
                        y, reference,
                        "{backend:?}: products are exact, sums in the same order"
                    );
                }
            }
        }
    }
}

#[test]
fn neither_threads_nor_other_tokens_change_a_result() {
    // The tokens have more than `FEW` bytes, so that strips have `HIGH` blocks.
    let (rows, columns) = (150, 1100);
    let weights = Plain::new(1, rows, columns);
    let x = numbers(1100 * columns, 8);
    for backend in backends().into_iter().filter(|b| *b != Backend::emulated()) {
        let all = product(&weights, &x, &tasks(&[1100]), backend, 3);
        assert_eq!(all, product(&weights, &x, &tasks(&[1100]), backend, 1));
        for count in [1, 3, 40] {
            let some = product(&weights, &x[..count * columns], &tasks(&[count]), backend, 2);
            assert_eq!(some, all[..count * rows], "{backend:?}");
        }
    }
}

#[test]
fn activations_are_rounded_to_nearest() {
    let mut x = numbers(70, 21);
    let special = [
        f32::INFINITY,
        -0.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        1e-40,
        f32::MAX,
    ];
    x.splice(0..6, special);
    for isa in Isa::all_available().map(Isa::vectors) {
        let mut lines = [Line::ZERO; 3 * LANES];
        rounding::round(isa, &x, &mut lines[2..]);
        for (column, &x) in x.iter().enumerate() {
            let word = lines[column / 32 * LANES + 2].0[column % 32 / 2];
            let expected = bf16::from_f32(x).to_bits();
            assert_eq!((word >> (16 * (column % 2))) as u16, expected, "{isa:?} {column}");
        }
    }
    assert!(bf16::from_bits(pair(f32::from_bits(0x7fff_ffff), 0.0) as u16).is_nan());
}

#[test]
fn nan_and_infinity_affect_only_their_token() {
    let weights = Plain::new(1, 20, 64);
    let mut x = numbers(20 * 64, 3);
    x[5 * 64 + 7] = f32::NAN;
    for backend in backends() {
        let y = product(&weights, &x, &tasks(&[20]), backend, 1);
        for (token, y) in y.chunks(20).enumerate() {
            assert!(
                y.iter().all(|y| y.is_nan() == (token == 5)),
                "{backend:?} {token}"
            );
        }
    }
}

/// A source of bytes with sections of some chunks; an output is the sum over sections of their sums times their
/// numbers.
#[derive(Clone, Copy)]
struct Bytes(Shape, usize);

impl Bytes {
    fn weight(&self, row: usize, column: usize) -> i8 {
        (row * 89 + column * 31 + row * column) as u8 as i8
    }

    fn x(&self, token: usize, column: usize) -> u8 {
        (token * 57 + column * 13) as u8
    }
}

impl Source for Bytes {
    type Open = ();

    fn shape(&self) -> Shape {
        self.0
    }

    fn form(&self) -> TokenForm {
        TokenForm {
            element: Element::Byte,
            columns: self.0.columns,
            section: self.1,
            variant: 0,
            factors: 0,
        }
    }

    fn token(&self, _: &Activations, _: usize, token: usize, lane: usize, tile: &mut Tile) {
        for column in 0..self.0.columns {
            let word = &mut tile.lines[column / 64 * LANES + lane].0[column % 64 / 4];
            *word |= u32::from(self.x(token, column)) << (8 * (column % 4));
        }
        tile.scales[lane] = (1.0, 1);
    }

    fn open(&self, _: usize, _: &mut ()) {}

    fn decode(&self, block: usize, _: &mut (), chunks: Range<usize>, to: &mut [Line]) {
        for (quad, line) in (chunks.start * LANES..chunks.end * LANES).zip(to) {
            *line = Line(std::array::from_fn(|i| {
                let byte = |k: usize| self.weight(block * LANES + i, 4 * quad + k) as u8;
                u32::from_le_bytes(std::array::from_fn(byte))
            }));
        }
    }

    fn finish(&self, section: &Section, tile: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
        for (token, (out, sums)) in out.0.iter_mut().zip(&sums.0).enumerate() {
            let (step, zero) = tile.scales[token];
            let factor = step * (section.section as i32 + zero) as f32;
            let terms = out.iter_mut().zip(sums);
            terms.for_each(|(out, &sum)| *out += sum as i32 as f32 * factor);
        }
    }
}

#[test]
fn bytes_add_up_section_by_section() {
    let (rows, columns) = (40, 1500);
    let pool = pool::current().unwrap();
    // One tile and several; sections that divide a step, that do not, and that are longer.
    for (count, section) in [13, 37]
        .into_iter()
        .flat_map(|n| [1, 2, 6, 8, 20, 24].map(|s| (n, s)))
    {
        let source = Bytes(shape(1, rows, columns), section);
        let matrix = Isa::new(Kind::Amx).and_then(Backend::of_floats);
        for backend in matrix.into_iter().chain([Backend::emulated()]) {
            let mut y = vec![f32::NAN; count * rows];
            let x = vec![0.0; count * columns];
            let job = Job::of_tasks(tasks(&[count]));
            layer::multiply(&By(source, backend), job, (&x[..]).into(), &mut y, &pool);
            for (token, row) in (0..count).flat_map(|token| (0..rows).map(move |row| (token, row))) {
                let mut expected = 0.0;
                for (number, first) in (0..columns).step_by(64 * section).enumerate() {
                    let columns = first..(first + 64 * section).min(columns);
                    let term = |c| i32::from(source.weight(row, c)) * i32::from(source.x(token, c));
                    expected += columns.map(term).sum::<i32>() as f32 * (number + 1) as f32;
                }
                assert_eq!(y[token * rows + row], expected, "{section} {backend:?}");
            }
        }
    }
}

#[test]
fn no_columns_give_zeros_and_no_rows_nothing() {
    for (rows, columns) in [(5, 0), (0, 5)] {
        let weights = Plain::new(2, rows, columns);
        let y = product(
            &weights,
            &numbers(9 * columns, 1),
            &tasks(&[4, 5]),
            Backend::PORTABLE,
            2,
        );
        assert_eq!(y, vec![0.0; 9 * rows]);
    }
}
