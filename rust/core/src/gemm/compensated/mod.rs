//! Products by compensated weights: y = Wq x + U (V x), the compensator read packed.
//!
//! The group-wise product fills y; then z = V x, one row of V a unit of work, and y += U z, one run of y a unit. A row of
//! V or U^T is unpacked 64 values at a time for all tokens that share it, so its bytes are read once a call for up to 8
//! tokens. A small compensator is done by the calling thread. Each z and each y is summed by one task in a fixed order, so results
//! depend neither on the number of threads nor on the instruction set, except as the group-wise product does.
//!
//! Accuracy: z is a sum of C products in eight lanes, then y a sum of r; with u = 2^-24 and S the sum over ranks and
//! columns of |u v x|, the error of the compensator's part is at most (C / 8 + r + 16) u S.
//!
//! Scales and codes are unchecked bytes: any of them gives a number (perhaps NaN) and no access out of bounds.

mod kernel;
#[cfg(target_arch = "x86_64")]
mod x86;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::groupwise::{self, Mode};
use super::ternary::Activations;
use crate::compensated::View;
use crate::compensated::chunk::CHUNK;
use crate::simd::Isa;
use crate::{Error, Result};

/// Tokens that share the unpacking of a chunk.
const TOKENS: usize = 8;
/// Products of a weight and an activation below which the calling thread does them all: waking another costs as much.
const SHARED_PRODUCTS: usize = 1 << 21;
/// Products of a weight and an activation that a task is worth: some 20 microseconds.
const TASK_PRODUCTS: usize = 1 << 17;

/// y = (Wq + U V) x with each expert's own tokens.
///
/// `x` is N x C sorted by expert; `offsets` has E + 1 entries that ascend from 0 to N; `y` is N x R. `mode` is that of
/// the group-wise part; the compensator always multiplies f32 activations.
///
/// # Errors
/// [`Error::InvalidArgument`]: sizes do not match, or the processor lacks the instruction set.
pub fn matmul_grouped<'a>(
    view: &View,
    x: impl Into<Activations<'a>>,
    offsets: &[usize],
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (x, vectors) = (x.into(), isa.require()?);
    groupwise::matmul_grouped(view.base(), x, offsets, y, mode, isa, pool)?;
    compensate(view, x, offsets, y, vectors, pool);
    Ok(())
}

/// y = (Wq + U V) x for all tokens of one expert: `x` is T x C, `y` is T x R.
///
/// # Errors
/// As [`matmul_grouped`], or there is no such expert.
#[allow(clippy::too_many_arguments)] // what a product is made of
pub fn matmul<'a>(
    view: &View,
    expert: usize,
    x: impl Into<Activations<'a>>,
    tokens: usize,
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (x, vectors) = (x.into(), isa.require()?);
    let experts = view.layout().shape().experts;
    if expert >= experts {
        return Err(Error::InvalidArgument(format!(
            "there is no expert {expert} of {experts}"
        )));
    }
    groupwise::matmul(view.base(), expert, x, tokens, y, mode, isa, pool)?;
    let offsets: Vec<usize> = (0..=experts)
        .map(|e| if e <= expert { 0 } else { tokens })
        .collect();
    compensate(view, x, &offsets, y, vectors, pool);
    Ok(())
}

/// The tokens of an expert with a compensator: its activations, padded to whole chunks, and where its z lies.
struct Task<'a> {
    expert: usize,
    rank: usize,
    tokens: usize,
    x: &'a [f32],
    z: std::ops::Range<usize>,
}

fn compensate(view: &View, x: Activations, offsets: &[usize], y: &mut [f32], isa: Isa, pool: &ThreadPool) {
    let shape = view.layout().shape();
    let width = shape.columns.next_multiple_of(CHUNK);
    if shape.rows == 0 || shape.columns == 0 || view.layout().total_rank() == 0 {
        return;
    }
    let padded = padded(x, shape.columns, width, y.len() / shape.rows);
    let mut tasks = Vec::new();
    let mut end = 0;
    for (expert, pair) in offsets.windows(2).enumerate() {
        let (rank, tokens) = (view.rank(expert), pair[1] - pair[0]);
        if rank * tokens > 0 {
            let (x, z) = (
                &padded[pair[0] * width..pair[1] * width],
                end..end + rank * tokens,
            );
            end = z.end;
            tasks.push(Task {
                expert,
                rank,
                tokens,
                x,
                z,
            });
        }
    }
    let mut z = vec![0.0; end];
    let pool = (end * (shape.rows + shape.columns) >= SHARED_PRODUCTS && pool.current_num_threads() > 1)
        .then_some(pool);
    project(view, &tasks, &mut z, isa, pool);
    expand(view, &tasks, &z, offsets, y, isa, pool);
}

/// z = V x: rank x tokens of each task.
fn project(view: &View, tasks: &[Task], z: &mut [f32], isa: Isa, pool: Option<&ThreadPool>) {
    let mut rows = Vec::new();
    let mut rest = z;
    for task in tasks {
        let (mine, others) = rest.split_at_mut(task.z.len());
        rest = others;
        rows.extend(
            mine.chunks_exact_mut(task.tokens)
                .enumerate()
                .map(|(k, z)| (task, k, z)),
        );
    }
    let width = view.layout().shape().columns;
    let most = tasks.iter().map(|task| task.tokens).max().unwrap_or(1);
    let least = (TASK_PRODUCTS / (width * most)).max(1);
    let work = |(task, index, z): (&Task, usize, &mut [f32])| {
        kernel::project(isa, &view.right(task.expert, index), task.x, z);
    };
    match pool {
        None => rows.into_iter().for_each(work),
        Some(pool) => pool.install(|| rows.into_par_iter().with_min_len(least).for_each(work)),
    }
}

/// A run of y of a few tokens: all columns of several tokens, or a part of one token's.
struct Run<'a> {
    task: &'a Task<'a>,
    first_token: usize,
    first_chunk: usize,
    y: &'a mut [f32],
}

/// y += U z.
fn expand(
    view: &View,
    tasks: &[Task],
    z: &[f32],
    offsets: &[usize],
    y: &mut [f32],
    isa: Isa,
    pool: Option<&ThreadPool>,
) {
    let rows = view.layout().shape().rows;
    let mut runs = Vec::new();
    let (mut rest, mut at) = (y, 0);
    for task in tasks {
        let first = offsets[task.expert];
        let (_, from) = rest.split_at_mut((first - at) * rows);
        let (mine, others) = from.split_at_mut(task.tokens * rows);
        (rest, at) = (others, first + task.tokens);
        // Without tokens to share a row, cut the row; a run is then a whole number of chunks.
        let chunks = match task.tokens {
            1 => (TASK_PRODUCTS / (task.rank * CHUNK)).max(1),
            _ => rows.div_ceil(CHUNK),
        };
        let step = if task.tokens == 1 {
            chunks * CHUNK
        } else {
            TOKENS * rows
        };
        runs.extend(mine.chunks_mut(step).enumerate().map(|(i, y)| Run {
            task,
            first_token: if task.tokens == 1 { 0 } else { i * TOKENS },
            first_chunk: if task.tokens == 1 { i * chunks } else { 0 },
            y,
        }));
    }
    let work = |run: Run| {
        let task = run.task;
        let tokens = TOKENS.min(task.tokens - run.first_token);
        let left = |index: usize| view.left(task.expert, index);
        let z = &z[task.z.clone()];
        kernel::expand(
            isa,
            &left,
            kernel::Coefficients {
                z,
                ranks: task.rank,
                stride: task.tokens,
                first: run.first_token,
            },
            tokens,
            run.first_chunk,
            run.y,
        );
    };
    match pool {
        None => runs.into_iter().for_each(work),
        Some(pool) => pool.install(|| runs.into_par_iter().for_each(work)),
    }
}

/// The activations as f32, each token padded with zeros to `width` values.
fn padded(x: Activations, columns: usize, width: usize, tokens: usize) -> Vec<f32> {
    let mut out = vec![0.0; tokens * width];
    for (token, out) in out.chunks_exact_mut(width).enumerate() {
        match x {
            Activations::F32(x) => out[..columns].copy_from_slice(&x[token * columns..][..columns]),
            Activations::Bf16(x) => {
                let bits = &x[token * columns..][..columns];
                for (out, &bits) in out.iter_mut().zip(bits) {
                    *out = f32::from_bits(u32::from(bits) << 16);
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests;
