//! Cuts a call into units of work and runs them.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::ThreadPool;

use super::kernel::Weights;
use super::output::Output;
use super::tile::{Steps, Tile};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Mode, scalar};
use crate::gemm::ternary::Activations;
use crate::groupwise::{BLOCK_ROWS, View};
use crate::simd::Isa;

/// One expert's share of a call: which tokens of the call go through it.
#[derive(Debug, Clone)]
pub(super) struct Task {
    pub expert: usize,
    pub tokens: Range<usize>,
}

/// Bytes of codes that a unit reads at least: long enough a run for the memory, short enough to share work evenly.
const UNIT_BYTES: usize = 64 << 10;
/// Activations whose preparation is worth waking other threads.
const PARALLEL_ACTIVATIONS: usize = 1 << 16;

/// Most tokens of a tile: what the sums of a kernel leave of the registers.
fn widest(mode: Mode, isa: Isa) -> usize {
    match (mode, isa) {
        (Mode::Int8, Isa::Avx512) => 8,
        (Mode::Int8, _) | (Mode::Exact, Isa::Avx512) => 4,
        (Mode::Exact, _) => 2,
    }
}

/// The first token and the number of tokens of each tile of a task.
fn tiles(tokens: &Range<usize>, widest: usize) -> impl Iterator<Item = Range<usize>> {
    let end = tokens.end;
    tokens
        .clone()
        .step_by(widest)
        .map(move |first| first..(first + widest).min(end))
}

/// Runs `work` for 0..count on all threads of the pool, or right here if there is little of it.
pub(super) fn share(pool: &ThreadPool, count: usize, work: impl Fn(usize) + Sync) {
    if count < 2 || pool.current_num_threads() == 1 {
        return (0..count).for_each(work);
    }
    let next = AtomicUsize::new(0);
    pool.broadcast(|_| {
        loop {
            let unit = next.fetch_add(1, Ordering::Relaxed);
            if unit >= count {
                break;
            }
            work(unit);
        }
    });
}

/// Computes all tasks. Sizes and the instruction set have been checked.
pub(super) fn run(
    view: &View,
    tasks: &[Task],
    x: Activations,
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) {
    let layout = view.layout();
    let (shape, steps) = (layout.shape(), Steps::new(&layout));
    let widest = widest(mode, isa);
    let prepared = prepare(&steps, shape.columns, tasks, x, mode, isa, pool);
    let run_blocks = (UNIT_BYTES / layout.block_bytes().max(1)).max(1);
    let runs = layout.blocks().div_ceil(run_blocks);
    let output = Output::new(y, shape.rows);
    share(pool, tasks.len() * runs, |unit| {
        let (task, tiles_of_task) = (&tasks[unit / runs], &prepared[unit / runs]);
        let first = unit % runs * run_blocks;
        for block in first..(first + run_blocks).min(layout.blocks()) {
            let weights = Weights {
                block: view.block(task.expert * layout.blocks() + block),
                layout,
            };
            let rows = block * BLOCK_ROWS..((block + 1) * BLOCK_ROWS).min(shape.rows);
            for (tokens, tile) in tiles(&task.tokens, widest).zip(tiles_of_task) {
                let mut out = [[0.0; BLOCK_ROWS]; 8];
                compute(&weights, &steps, tile, isa, &mut out);
                for (token, values) in tokens.zip(&out) {
                    // SAFETY: this unit alone has this block of this task's expert, and a token is in one task.
                    unsafe { output.write(token, rows.clone(), values) }
                }
            }
        }
    });
}

/// The tiles of every task.
fn prepare(
    steps: &Steps,
    columns: usize,
    tasks: &[Task],
    x: Activations,
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Vec<Vec<Tile>> {
    let widest = widest(mode, isa);
    let all: Vec<(usize, Range<usize>)> = tasks
        .iter()
        .enumerate()
        .flat_map(|(task, t)| tiles(&t.tokens, widest).map(move |tokens| (task, tokens)))
        .collect();
    let slots: Vec<std::sync::OnceLock<Tile>> = all.iter().map(|_| std::sync::OnceLock::new()).collect();
    let make = |i: usize| {
        let tokens = all[i].1.clone();
        let width = tokens.len().next_power_of_two();
        let tile = tile(steps, columns, x, tokens, width, mode, isa);
        assert!(slots[i].set(tile).is_ok(), "a tile is made once");
    };
    match x.len() < PARALLEL_ACTIVATIONS {
        true => (0..all.len()).for_each(make),
        false => share(pool, all.len(), make),
    }
    let mut prepared: Vec<Vec<Tile>> = tasks.iter().map(|_| Vec::new()).collect();
    for ((task, _), slot) in all.iter().zip(slots) {
        prepared[*task].extend(slot.into_inner());
    }
    prepared
}

#[cfg(target_arch = "x86_64")]
fn tile(
    steps: &Steps,
    columns: usize,
    x: Activations,
    tokens: Range<usize>,
    width: usize,
    mode: Mode,
    isa: Isa,
) -> Tile {
    match isa {
        Isa::Scalar => Tile::new(steps, columns, x, tokens, width, mode),
        _ => x86::tile(steps, columns, x, tokens, width, mode),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn tile(
    steps: &Steps,
    columns: usize,
    x: Activations,
    tokens: Range<usize>,
    width: usize,
    mode: Mode,
    _: Isa,
) -> Tile {
    Tile::new(steps, columns, x, tokens, width, mode)
}

/// A block by a tile.
#[cfg(target_arch = "x86_64")]
fn compute(weights: &Weights, steps: &Steps, tile: &Tile, isa: Isa, out: &mut [[f32; BLOCK_ROWS]; 8]) {
    match isa {
        Isa::Scalar => scalar::compute(weights, steps, tile, out),
        _ => x86::compute(weights, steps, tile, isa, out),
    }
}

/// A block by a tile. No other instruction set passes the check here.
#[cfg(not(target_arch = "x86_64"))]
fn compute(weights: &Weights, steps: &Steps, tile: &Tile, _: Isa, out: &mut [[f32; BLOCK_ROWS]; 8]) {
    scalar::compute(weights, steps, tile, out);
}
