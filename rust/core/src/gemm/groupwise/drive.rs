//! Cuts a call into units of work and runs them.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::ThreadPool;
use rayon::prelude::*;

use super::kernel::Weights;
#[cfg(target_arch = "x86_64")]
use super::matrix::{self, Multiplier, Panel};
use super::output::Output;
use super::tile::{Form, Rows, Steps, Tile};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Mode, Out, activation, scalar, tile};
use crate::Result;
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
    /// The set of the vectors.
    pub isa: Isa,
    pub matrix: Matrix,
    pub pool: &'a ThreadPool,
}

/// Whether several tokens go through matrix registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Matrix {
    Off,
    On,
    #[cfg(test)]
    Emulated,
}

/// Tokens of a tile of matrix registers.
const ROW_TOKENS: usize = 16;
/// Fewer tokens than this stay with the vectors: scaling sums costs the same for 5 tokens as for 16, as much as
/// vectors need for 5 altogether.
const FEWEST_ROWS: usize = 5;

/// What a kernel computes of a call: numbers of a task, of one of its tiles, and of a block among all experts'.
#[derive(Clone, Copy)]
struct At {
    task: usize,
    tile: usize,
    block: usize,
}

/// What a thread keeps from block to block of a call.
#[derive(Default)]
struct Worker {
    #[cfg(target_arch = "x86_64")]
    panels: [Panel; 2],
    #[cfg(target_arch = "x86_64")]
    multiplier: Option<Multiplier>,
}

/// Most bytes of a unit of work: long enough a run for the memory.
const UNIT_BYTES: usize = 256 << 10;
/// Units that each thread gets at least, where there are as many blocks: the threads end at nearly the same time.
const UNITS: usize = 16;
/// Activations whose preparation is worth waking other threads.
const PARALLEL_ACTIVATIONS: usize = 1 << 16;

/// The activations of a call, for one group size: each task's tiles, and the places of the list that a tile holds.
pub(super) struct Prepared {
    steps: Steps,
    tiles: Vec<Vec<(Range<usize>, Tile)>>,
}

impl<'a> Engine<'a> {
    /// An engine of a set that the processor must run.
    pub fn new(mode: Mode, isa: Isa, pool: &'a ThreadPool) -> Result<Engine<'a>> {
        let vectors = isa.require()?;
        let matrix = if isa == Isa::Amx { Matrix::On } else { Matrix::Off };
        Ok(Engine {
            mode,
            isa: vectors,
            matrix,
            pool,
        })
    }

    /// The same with vectors alone.
    pub fn without_matrix(self) -> Engine<'a> {
        Engine {
            matrix: Matrix::Off,
            ..self
        }
    }

    /// Most tokens of a tile for vectors: what the sums of a kernel leave of the registers.
    fn widest(&self) -> usize {
        match (self.mode, self.isa) {
            (Mode::Int8, Isa::Avx512) => 8,
            (Mode::Int8, _) | (Mode::Exact, Isa::Avx512) => 4,
            (Mode::Exact, _) => 2,
        }
    }

    /// The next tile's tokens of `left`, and their form.
    fn next_tile(&self, left: usize) -> (usize, Form) {
        match self.matrix != Matrix::Off && left >= FEWEST_ROWS {
            true => (left.min(ROW_TOKENS), Form::Rows),
            false => (left.min(self.widest()), Form::Words),
        }
    }

    /// Runs `work` for 0..count on all threads of the pool, or right here if there is little of it. Each thread makes
    /// a state of its own.
    fn share<S>(&self, count: usize, state: impl Fn() -> S + Sync, work: impl Fn(&mut S, usize) + Sync) {
        if count < 2 || self.pool.current_num_threads() == 1 {
            let mut state = state();
            return (0..count).for_each(|unit| work(&mut state, unit));
        }
        let next = AtomicUsize::new(0);
        self.pool.broadcast(|_| {
            let mut state = state();
            loop {
                let unit = next.fetch_add(1, Ordering::Relaxed);
                if unit >= count {
                    break;
                }
                work(&mut state, unit);
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
        let mut all = Vec::new();
        for (number, task) in tasks.iter().enumerate() {
            let mut first = task.places.start;
            while first < task.places.end {
                let (tokens, form) = self.next_tile(task.places.end - first);
                all.push((number, first..first + tokens, form));
                first += tokens;
            }
        }
        let slots: Vec<OnceLock<Tile>> = all.iter().map(|_| OnceLock::new()).collect();
        let make = |i: usize| {
            let (_, places, form) = all[i].clone();
            let width = match form {
                Form::Words => places.len().next_power_of_two(),
                Form::Rows => ROW_TOKENS,
            };
            slots[i].get_or_init(|| rows.tile(list[places].iter().copied(), width, form));
        };
        match list.len() * columns < PARALLEL_ACTIVATIONS {
            true => (0..all.len()).for_each(make),
            false => self.share(all.len(), || (), |(), i| make(i)),
        }
        let mut tiles: Vec<Vec<_>> = tasks.iter().map(|_| Vec::new()).collect();
        for ((task, places, _), slot) in all.into_iter().zip(slots) {
            tiles[task].extend(slot.into_inner().map(|tile| (places, tile)));
        }
        tiles
    }

    /// y = W x for all tasks; `y` has a row for each place of the list.
    pub fn products(&self, view: &dyn Blocks, tasks: &[Task], prepared: &Prepared, y: &mut [f32]) {
        self.blocks([view], tasks, prepared, y, |worker, at, [weights], tile, out| {
            self.compute(worker, (0, at.block), weights, &prepared.steps, tile, out);
        });
    }

    /// silu(gate x) * (up x) for all tasks; the two matrices have the same shape. Where the two differ in group size,
    /// the engine has no matrix registers, which hold one depth at a time.
    pub fn gated(&self, views: [&dyn Blocks; 2], tasks: &[Task], prepared: [&Prepared; 2], y: &mut [f32]) {
        self.blocks(
            views,
            tasks,
            prepared[0],
            y,
            |worker, at, [gate, up], tile, out| {
                let mut other = [[0.0; BLOCK_ROWS]; ROW_TOKENS];
                self.compute(worker, (0, at.block), gate, &prepared[0].steps, tile, out);
                let (_, tile) = &prepared[1].tiles[at.task][at.tile];
                self.compute(worker, (1, at.block), up, &prepared[1].steps, tile, &mut other);
                let used = tile.tokens;
                self.gate(out[..used].as_flattened_mut(), other[..used].as_flattened());
            },
        );
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
        work: impl Fn(&mut Worker, At, &[Weights; N], &Tile, &mut Out) + Sync,
    ) {
        let layout = views[0].layout();
        let (rows, size) = (layout.shape().rows, layout.block_bytes().max(1));
        let units = UNITS * self.pool.current_num_threads();
        let step = (UNIT_BYTES / size)
            .min(tasks.len() * layout.blocks() / units)
            .max(1);
        let runs = layout.blocks().div_ceil(step);
        let output = Output::new(y, rows);
        let state = || self.worker(&prepared.steps);
        self.share(tasks.len() * runs, state, |worker, unit| {
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
                    let mut out = [[0.0; BLOCK_ROWS]; ROW_TOKENS];
                    let at = At {
                        task,
                        tile: number,
                        block: among_all,
                    };
                    work(worker, at, &weights, tile, &mut out);
                    for (token, values) in places.clone().zip(&out) {
                        // SAFETY: this unit alone has this block of this task, and a place is of one task.
                        unsafe { output.write(token, place.clone(), values) }
                    }
                }
            }
        });
    }

    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn worker(&self, steps: &Steps) -> Worker {
        Worker {
            #[cfg(target_arch = "x86_64")]
            multiplier: match self.matrix {
                Matrix::Off => None,
                Matrix::On => crate::gemm::tiles::Configured::new(steps.chunk()).map(Multiplier::Registers),
                #[cfg(test)]
                Matrix::Emulated => Some(Multiplier::Emulated),
            },
            ..Worker::default()
        }
    }

    /// A block by a tile; `number` says which of the call's matrices it is of.
    #[inline]
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn compute(
        &self,
        worker: &mut Worker,
        (number, block): (usize, usize),
        weights: &Weights,
        steps: &Steps,
        tile: &Tile,
        out: &mut Out,
    ) {
        #[cfg(target_arch = "x86_64")]
        if let (Form::Rows, Some(multiplier)) = (tile.form, &worker.multiplier) {
            let panel = &mut worker.panels[number];
            panel.expand(weights, steps, block);
            return matrix::compute(weights, steps, tile, panel, multiplier, out);
        }
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
