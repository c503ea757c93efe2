//! Cuts a call into units of work and runs them.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::ThreadPool;
use rayon::prelude::*;

use super::kernel::Weights;
use super::output::Output;
use super::tile::{Rows, Steps, Tile};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Mode, activation, scalar, tile};
use crate::gemm::ternary::Activations;
use crate::groupwise::{BLOCK_ROWS, Blocks};
use crate::simd::Isa;

/// One expert's share of a call: which places of the call's list of tokens go through it.
#[derive(Debug, Clone)]
pub(super) struct Task {
    pub expert: usize,
    pub places: Range<usize>,
}

/// How a call computes.
#[derive(Clone, Copy)]
pub(super) struct Engine<'a> {
    pub mode: Mode,
    pub isa: Isa,
    pub pool: &'a ThreadPool,
}

/// What a kernel writes: a tile of tokens by the rows of a block.
type Out = [[f32; BLOCK_ROWS]; 8];

/// Bytes of codes that a unit reads at least: long enough a run for the memory, short enough to share work evenly.
const UNIT_BYTES: usize = 64 << 10;
/// Activations whose preparation is worth waking other threads.
const PARALLEL_ACTIVATIONS: usize = 1 << 16;

/// The activations of a call, for one group size: each task's tiles, and the places of the list that a tile holds.
pub(super) struct Prepared {
    steps: Steps,
    tiles: Vec<Vec<(Range<usize>, Tile)>>,
}

impl Engine<'_> {
    /// Most tokens of a tile: what the sums of a kernel leave of the registers.
    fn widest(&self) -> usize {
        match (self.mode, self.isa) {
            (Mode::Int8, Isa::Avx512) => 8,
            (Mode::Int8, _) | (Mode::Exact, Isa::Avx512) => 4,
            (Mode::Exact, _) => 2,
        }
    }

    /// Runs `work` for 0..count on all threads of the pool, or right here if there is little of it.
    pub fn share(&self, count: usize, work: impl Fn(usize) + Sync) {
        if count < 2 || self.pool.current_num_threads() == 1 {
            return (0..count).for_each(work);
        }
        let next = AtomicUsize::new(0);
        self.pool.broadcast(|_| {
            loop {
                let unit = next.fetch_add(1, Ordering::Relaxed);
                if unit >= count {
                    break;
                }
                work(unit);
            }
        });
    }

    /// Brings activations into the form that products by `view` read. `list` names the tokens of `x`, in the order of
    /// the tasks.
    pub fn prepare(&self, view: &dyn Blocks, tasks: &[Task], x: Activations, list: &[usize]) -> Prepared {
        let (columns, steps) = (view.layout().shape().columns, Steps::new(&view.layout()));
        let tokens = x.len() / columns.max(1);
        let mut rows = Rows::new(&steps, tokens, self.mode);
        let places = rows.rows();
        let fill = |(token, row)| self.fill(&steps, columns, &x, token, row);
        match x.len() < PARALLEL_ACTIVATIONS {
            true => places.into_iter().enumerate().for_each(fill),
            false => self
                .pool
                .install(|| places.into_par_iter().enumerate().for_each(fill)),
        }
        Prepared {
            steps,
            tiles: self.cut(tasks, &rows, list, columns),
        }
    }

    /// The tiles of every task.
    fn cut(
        &self,
        tasks: &[Task],
        rows: &Rows,
        list: &[usize],
        columns: usize,
    ) -> Vec<Vec<(Range<usize>, Tile)>> {
        let widest = self.widest();
        let mut all = Vec::new();
        for (number, task) in tasks.iter().enumerate() {
            let starts = task.places.clone().step_by(widest);
            all.extend(starts.map(|first| (number, first..(first + widest).min(task.places.end))));
        }
        let slots: Vec<OnceLock<Tile>> = all.iter().map(|_| OnceLock::new()).collect();
        let make = |i: usize| {
            let places = all[i].1.clone();
            let width = places.len().next_power_of_two();
            slots[i].get_or_init(|| rows.tile(list[places].iter().copied(), width));
        };
        match list.len() * columns < PARALLEL_ACTIVATIONS {
            true => (0..all.len()).for_each(make),
            false => self.share(all.len(), make),
        }
        let mut tiles: Vec<Vec<_>> = tasks.iter().map(|_| Vec::new()).collect();
        for ((task, places), slot) in all.into_iter().zip(slots) {
            tiles[task].extend(slot.into_inner().map(|tile| (places, tile)));
        }
        tiles
    }

    /// y = W x for all tasks; `y` has a row for each place of the list.
    pub fn products(&self, view: &dyn Blocks, tasks: &[Task], prepared: &Prepared, y: &mut [f32]) {
        self.blocks([view], tasks, prepared, y, |_, [weights], tile, out| {
            self.compute(weights, &prepared.steps, tile, out);
        });
    }

    /// silu(gate x) * (up x) for all tasks; the two matrices have the same shape.
    pub fn gated(&self, views: [&dyn Blocks; 2], tasks: &[Task], prepared: [&Prepared; 2], y: &mut [f32]) {
        self.blocks(views, tasks, prepared[0], y, |at, [gate, up], tile, out| {
            let mut other = [[0.0; BLOCK_ROWS]; 8];
            self.compute(gate, &prepared[0].steps, tile, out);
            let (task, number) = at;
            let (_, tile) = &prepared[1].tiles[task][number];
            self.compute(up, &prepared[1].steps, tile, &mut other);
            self.gate(out.as_flattened_mut(), other.as_flattened());
        });
    }

    /// Runs `work` for every block and tile of all tasks, in one parallel region, and puts the outputs into place.
    /// It gets the numbers of the task and of its tile, the block of each view, and the tile. The views have the same
    /// shape.
    fn blocks<const N: usize>(
        &self,
        views: [&dyn Blocks; N],
        tasks: &[Task],
        prepared: &Prepared,
        y: &mut [f32],
        work: impl Fn((usize, usize), &[Weights; N], &Tile, &mut Out) + Sync,
    ) {
        let layout = views[0].layout();
        let rows = layout.shape().rows;
        let step = (UNIT_BYTES / layout.block_bytes().max(1)).max(1);
        let runs = layout.blocks().div_ceil(step);
        let output = Output::new(y, rows);
        self.share(tasks.len() * runs, |unit| {
            let (task, first) = (unit / runs, unit % runs * step);
            let mut buffers = [const { Vec::new() }; N];
            for block in first..(first + step).min(layout.blocks()) {
                let place = block * BLOCK_ROWS..((block + 1) * BLOCK_ROWS).min(rows);
                let among_all = tasks[task].expert * layout.blocks() + block;
                let mut buffer = buffers.iter_mut();
                let weights = views.map(|view| Weights {
                    block: view.fetch(among_all, buffer.next().expect("one a view")),
                    layout: view.layout(),
                });
                for (number, (places, tile)) in prepared.tiles[task].iter().enumerate() {
                    let mut out = [[0.0; BLOCK_ROWS]; 8];
                    work((task, number), &weights, tile, &mut out);
                    for (token, values) in places.clone().zip(&out) {
                        // SAFETY: this unit alone has this block of this task, and a place is of one task.
                        unsafe { output.write(token, place.clone(), values) }
                    }
                }
            }
        });
    }

    /// A block by a tile.
    #[inline]
    fn compute(&self, weights: &Weights, steps: &Steps, tile: &Tile, out: &mut Out) {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 => x86::compute(weights, steps, tile, self.isa, out),
            _ => scalar::compute(weights, steps, tile, out),
        }
    }

    fn fill(&self, steps: &Steps, columns: usize, x: &Activations, token: usize, row: tile::Row) {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 => x86::fill(steps, columns, x, token, self.mode, row),
            _ => tile::fill(steps, columns, x, token, self.mode, row),
        }
    }

    fn gate(&self, gate: &mut [f32], up: &[f32]) {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 => x86::gated(gate, up),
            _ => activation::gated(gate, up),
        }
    }
}
