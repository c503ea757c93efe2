//! Cuts a call into units of work, runs them, and puts their results into place.

use std::ops::Range;
use std::sync::OnceLock;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::tile::Tile;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Kernel, scalar};
use crate::formats::ternary::TernaryView;
use crate::formats::ternary::layout::GROUP_ROWS;
use crate::types::Activations;

/// One expert's share of a call: which tokens of the call go through it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    pub expert: usize,
    pub first: usize,
    pub tokens: usize,
}

/// Row groups of one expert, computed by one thread.
pub(super) struct Unit<'a> {
    pub view: &'a TernaryView<'a>,
    pub expert: usize,
    pub groups: Range<usize>,
    pub tile: &'a Tile,
}

impl Unit<'_> {
    /// The unit's rows.
    pub fn rows(&self) -> Range<usize> {
        self.groups.start * GROUP_ROWS..(self.groups.end * GROUP_ROWS).min(self.view.rows())
    }

    /// The levels of a row.
    #[inline(always)]
    pub fn levels(&self, row: usize) -> (f32, f32) {
        self.view.levels(self.expert * self.view.rows() + row)
    }
}

/// About as many products of a weight and a token's activation as a unit is worth: some 50 microseconds.
const UNIT_PRODUCTS: usize = 1 << 20;

/// The most row groups of a unit; what a unit knows about its rows stays in the cache.
pub(super) const UNIT_GROUPS: usize = 8;

/// The units of all tasks: (task, groups). Cut by sizes alone, so that results do not depend on the threads.
fn cut(view: &TernaryView, tasks: &[Task]) -> Vec<(usize, Range<usize>)> {
    let mut units = Vec::new();
    for (i, task) in tasks.iter().enumerate() {
        let products = (GROUP_ROWS * view.columns().max(1)).saturating_mul(task.tokens);
        let step = (UNIT_PRODUCTS / products).clamp(1, UNIT_GROUPS);
        let starts = (0..view.groups()).step_by(step);
        units.extend(starts.map(|from| (i, from..(from + step).min(view.groups()))));
    }
    units
}

/// Computes all tasks. Sizes have been checked.
pub(super) fn run(
    kernel: Kernel,
    view: &TernaryView,
    tasks: &[Task],
    x: Activations,
    y: &mut [f32],
    pool: &ThreadPool,
) {
    let units = cut(view, tasks);
    // A task's tile is made by the first of its units to start.
    let tiles: Vec<OnceLock<Tile>> = tasks.iter().map(|_| OnceLock::new()).collect();
    let compute = |(task, groups): &(usize, Range<usize>)| {
        let Task {
            expert,
            first,
            tokens,
        } = tasks[*task];
        let make = || Tile::new(kernel, view, x, &(first..first + tokens).collect::<Vec<_>>());
        let tile = tiles[*task].get_or_init(make);
        let unit = Unit {
            view,
            expert,
            groups: groups.clone(),
            tile,
        };
        let mut out = vec![0.0; unit.rows().len() * tokens];
        rows(kernel, &unit, &mut out);
        out
    };
    let inline = units.len() < 2 || pool.current_num_threads() == 1;
    let results: Vec<Vec<f32>> = match inline {
        true => units.iter().map(compute).collect(),
        false => pool.install(|| units.par_iter().with_max_len(1).map(compute).collect()),
    };
    for ((task, groups), out) in units.iter().zip(results) {
        place(&tasks[*task], view.rows(), groups.start * GROUP_ROWS, &out, y);
    }
}

/// Computes a unit into `out` (rows x tokens).
#[cfg(target_arch = "x86_64")]
pub(super) fn rows(kernel: Kernel, unit: &Unit, out: &mut [f32]) {
    let variant = match kernel {
        Kernel::Scalar => return scalar::rows(unit, out),
        Kernel::Avx2 => x86::Variant::Avx2 { ahead: false },
        Kernel::Avx2Ahead => x86::Variant::Avx2 { ahead: true },
        Kernel::Avx512 => x86::Variant::Avx512 { ahead: false },
        Kernel::Avx512Ahead => x86::Variant::Avx512 { ahead: true },
    };
    x86::rows(unit, variant, out);
}

/// Computes a unit into `out` (rows x tokens). No other kernel passes the check of its instruction set here.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn rows(_kernel: Kernel, unit: &Unit, out: &mut [f32]) {
    scalar::rows(unit, out);
}

/// Copies a unit's outputs (rows x tokens) to where they belong in `y` (all tokens x all rows).
fn place(task: &Task, rows: usize, first_row: usize, out: &[f32], y: &mut [f32]) {
    for token in 0..task.tokens {
        let row = &mut y[(task.first + token) * rows + first_row..][..out.len() / task.tokens];
        let from = out[token..].iter().step_by(task.tokens);
        row.iter_mut().zip(from).for_each(|(to, &value)| *to = value);
    }
}
