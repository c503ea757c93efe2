//! The trellis of `trellis.py`: the cheapest paths through rows of weights, with or without GPTQ along each path.
//!
//! Each state of the trellis keeps its cheapest path so far. Under error compensation a path has errors of its own, and
//! so weights of its own in the columns to come (per-survivor processing: Raheli, Polydoros and Tzou, 1995). After a
//! block of columns the cheapest path is taken as decided, and its errors are spread over all later columns.

use std::slice::{from_raw_parts, from_raw_parts_mut};

const MOST_STATES: usize = 8;
/// With a common zero, the first value of a quantizer with a code of a parity; others are multiples of four from there.
const BASE: [[f32; 2]; 2] = [[0.0, 2.0], [-1.0, 1.0]];
const FOUR: [[u8; 2]; 4] = [[0, 2], [2, 0], [1, 3], [3, 1]];
const EIGHT: [[u8; 2]; 8] = [[0, 2], [5, 7], [1, 3], [6, 4], [2, 0], [4, 6], [3, 1], [7, 5]];

/// What an edge of the trellis stands for.
#[derive(Clone, Copy, Default)]
struct Edge {
    cost: f32,
    code: i32,
    /// In units.
    value: f32,
}

struct Trellis {
    mirrored: bool,
    next: &'static [[u8; 2]],
    largest: i32,
    block: usize,
    /// Columns of a sequence.
    length: usize,
}

/// The row that is solved.
struct Row<'a> {
    /// Bits of codes by quantizer.
    lengths: [&'a [f32]; 2],
    price: f32,
    source: &'a [f32],
    /// Loss of a unit of squared error by column.
    weights: Option<&'a [f32]>,
    upper: Option<&'a [f32]>,
}

/// Codes of a parity and their values `2 code + 1/2`, of the other quantizer the same below zero: the nearest to a value,
/// and the next one inwards.
fn mirrored(value: f32, quantizer: usize, parity: usize) -> [(i32, f32); 2] {
    let sign = if quantizer == 0 { 1.0 } else { -1.0 };
    let outer =
        2 * ((sign * value - 2.0 * parity as f32 - 0.5) * 0.25).round_ties_even() as i32 + parity as i32;
    let inner = if outer > 0 { outer - 2 } else { outer + 2 };
    [outer, inner].map(|code| (code, sign * (2 * code) as f32 + sign * 0.5))
}

/// As `mirrored`, of the quantizers `2 code` and `2 code - sign code`.
fn with_zero(value: f32, quantizer: usize, parity: usize) -> [(i32, f32); 2] {
    let (size, base) = (value.abs(), BASE[quantizer][parity]);
    let steps = ((size - base) * 0.25).round_ties_even().max(0.0);
    [steps, (steps - 1.0).max(0.0)].map(|steps| {
        let exact = (4.0 * steps + base).max(0.0);
        let code = (exact as i32 + (quantizer as i32 & i32::from(exact > 0.0))) / 2;
        (if value < 0.0 { -code } else { code }, exact.copysign(value))
    })
}

impl Trellis {
    fn quantizer(&self, state: usize) -> usize {
        if self.next.len() == 4 {
            state / 2
        } else {
            state % 2
        }
    }

    /// The better of the nearest value with a code of a parity and the next one inwards.
    fn edge(&self, row: &Row, value: f32, weight: f32, quantizer: usize, parity: usize) -> Edge {
        let candidates = match self.mirrored {
            true => mirrored(value, quantizer, parity),
            false => with_zero(value, quantizer, parity),
        };
        let [outer, inner] = candidates.map(|(code, exact)| {
            let place = code.clamp(-self.largest - 1, self.largest + 1) + self.largest + 1;
            let bits = row.lengths[quantizer][place as usize];
            let cost = (value - exact) * (value - exact) * weight + row.price * bits;
            Edge {
                cost,
                code,
                value: exact,
            }
        });
        if inner.cost < outer.cost { inner } else { outer }
    }

    fn solve(&self, row: &Row, codes: &mut [i32], quantizers: &mut [u8], values: &mut [f32]) {
        let columns = row.source.len();
        let (mut work, mut state, mut start) = (row.source.to_vec(), 0, 0);
        while start < columns {
            if start % self.length == 0 {
                state = 0;
            }
            let left = self.length - start % self.length;
            let stop = start
                + if row.upper.is_some() {
                    self.block.min(left)
                } else {
                    left
                };
            let found = (
                &mut codes[start..stop],
                &mut quantizers[start..stop],
                &mut values[start..stop],
            );
            state = self.block(row, &work[start..stop], start, state, found);
            if let Some(upper) = row.upper {
                for j in start..stop {
                    let error = row.source[j] - values[j];
                    let spread = &upper[j * columns + stop..(j + 1) * columns];
                    work[stop..]
                        .iter_mut()
                        .zip(spread)
                        .for_each(|(free, &factor)| *free += error * factor);
                }
            }
            start = stop;
        }
    }

    /// The cheapest path through some columns from a state; returns where it ends.
    fn block(
        &self,
        row: &Row,
        work: &[f32],
        start: usize,
        state: usize,
        out: (&mut [i32], &mut [u8], &mut [f32]),
    ) -> usize {
        let states = self.next.len();
        let mut cost = [f32::INFINITY; MOST_STATES];
        cost[state] = 0.0;
        // What each path holds of each column.
        let mut free: Vec<[f32; MOST_STATES]> = work.iter().map(|&value| [value; MOST_STATES]).collect();
        let mut steps = vec![[(Edge::default(), 0u8); MOST_STATES]; work.len()];
        for column in 0..work.len() {
            let weight = row.weights.map_or(1.0, |weights| weights[start + column]);
            let mut totals = [f32::INFINITY; MOST_STATES];
            let mut chosen = [(Edge::default(), 0u8); MOST_STATES];
            let shared = row.upper.is_none().then(|| {
                [0, 1].map(|q| [0, 1].map(|parity| self.edge(row, free[column][0], weight, q, parity)))
            });
            for from in 0..states {
                if cost[from] == f32::INFINITY {
                    continue;
                }
                let quantizer = self.quantizer(from);
                for parity in 0..2 {
                    let edge = match shared {
                        Some(edges) => edges[quantizer][parity],
                        None => self.edge(row, free[column][from], weight, quantizer, parity),
                    };
                    let (to, total) = (usize::from(self.next[from][parity]), cost[from] + edge.cost);
                    if total < totals[to] {
                        totals[to] = total;
                        chosen[to] = (edge, from as u8);
                    }
                }
            }
            cost = totals;
            steps[column] = chosen;
            if let Some(upper) = row.upper {
                let at = (start + column) * row.source.len() + start;
                let errors = chosen.map(|(edge, _)| row.source[start + column] - edge.value);
                for (free, &factor) in free.iter_mut().zip(&upper[at..at + work.len()]).skip(column + 1) {
                    let old = *free;
                    for to in 0..MOST_STATES {
                        free[to] = old[usize::from(chosen[to].1) % MOST_STATES] + errors[to] * factor;
                    }
                }
            }
        }
        let end = (0..states)
            .min_by(|&a, &b| cost[a].total_cmp(&cost[b]))
            .unwrap_or(0);
        let mut state = end;
        for column in (0..work.len()).rev() {
            let (edge, from) = steps[column][state];
            state = usize::from(from);
            (out.0[column], out.1[column], out.2[column]) =
                (edge.code, self.quantizer(state) as u8, edge.value);
        }
        end
    }
}

/// Solves `rows` rows of `columns` weights in units. `sizes`: rows, columns, rows of an expert, states, whether quantizers
/// are mirrored, the largest code with a length, columns of a block, columns of a sequence. `lengths` has two lists of `2 * largest + 3` a run; `runs`
/// the run of each row; `prices` one an expert. `weights` [experts, columns] and `upper` [experts, columns, columns] may
/// be null.
///
/// # Safety
/// The pointers lead to arrays of these sizes, and every run has its lists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn solve(
    sizes: *const usize,
    source: *const f32,
    runs: *const i64,
    prices: *const f32,
    lengths: *const f32,
    weights: *const f32,
    upper: *const f32,
    codes: *mut i32,
    quantizers: *mut u8,
    values: *mut f32,
) {
    // SAFETY: the caller's arrays.
    unsafe {
        let &[rows, columns, height, states, mirrored, largest, block, length] = &*sizes.cast::<[usize; 8]>();
        let next: &[[u8; 2]] = if states == 4 { &FOUR } else { &EIGHT };
        let (largest, width, mirrored) = (largest as i32, 2 * largest + 3, mirrored == 1);
        let trellis = Trellis {
            mirrored,
            next,
            largest,
            block,
            length,
        };
        for number in 0..rows {
            let (expert, at) = (number / height, number * columns);
            let list =
                |q: usize| from_raw_parts(lengths.add((2 * *runs.add(number) as usize + q) * width), width);
            let part = |whole: *const f32, size: usize| {
                (!whole.is_null()).then(|| from_raw_parts(whole.add(expert * size), size))
            };
            let row = Row {
                lengths: [list(0), list(1)],
                price: *prices.add(expert),
                source: from_raw_parts(source.add(at), columns),
                weights: part(weights, columns),
                upper: part(upper, columns * columns),
            };
            let codes = from_raw_parts_mut(codes.add(at), columns);
            let quantizers = from_raw_parts_mut(quantizers.add(at), columns);
            trellis.solve(
                &row,
                codes,
                quantizers,
                from_raw_parts_mut(values.add(at), columns),
            );
        }
    }
}
