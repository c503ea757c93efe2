//! Cuts a call into units of work, runs them, and puts their results into place.

use std::ops::Range;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::tokens::Tokens;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Mode, portable};
use crate::codebook::{PANEL, View};
use crate::gemm::ternary::Activations;
use crate::simd::Isa;

/// About as many products of a weight and a token's activation as a unit is worth: some 20 to 100 microseconds.
const UNIT_PRODUCTS: usize = 1 << 21;
/// More outputs than this are put into place by all threads.
const PARALLEL: usize = 1 << 16;

/// Panels of one expert with its tokens, computed by one thread.
pub(super) struct Unit<'a> {
    pub view: &'a View<'a>,
    pub tokens: &'a Tokens,
    pub expert: usize,
    /// Which tokens of the call.
    pub range: Range<usize>,
    pub panels: Range<usize>,
    pub mode: Mode,
}

/// Buffers that a thread keeps from unit to unit.
#[derive(Default)]
pub(super) struct Scratch {
    pub portable: portable::Buffers,
    #[cfg(target_arch = "x86_64")]
    pub x86: x86::Buffers,
}

/// Computes everything. Sizes have been checked, `isa` is available.
pub(super) fn run(
    view: &View,
    x: Activations,
    offsets: &[usize],
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) {
    let layout = view.layout();
    let rows = layout.shape().rows;
    let count = offsets[layout.shape().experts];
    let tokens = Tokens::new(&layout, x, count, mode, isa, pool);
    let mut units = Vec::new();
    // Cut by sizes alone, so that results do not depend on the threads.
    for expert in 0..layout.shape().experts {
        let range = offsets[expert]..offsets[expert + 1];
        let panel = (PANEL * layout.padded_columns().max(1)).saturating_mul(range.len());
        if range.is_empty() {
            continue;
        }
        let step = (UNIT_PRODUCTS / panel).max(1);
        units.extend((0..layout.panels()).step_by(step).map(|first| Unit {
            view,
            tokens: &tokens,
            expert,
            range: range.clone(),
            panels: first..(first + step).min(layout.panels()),
            mode,
        }));
    }
    let inline = units.len() < 2 || pool.current_num_threads() == 1;
    let outputs: Vec<Vec<f32>> = match inline {
        true => {
            let mut scratch = Scratch::default();
            units
                .iter()
                .map(|unit| compute(isa, unit, &mut scratch))
                .collect()
        }
        false => {
            let work = units.par_iter().with_max_len(1);
            pool.install(|| {
                work.map_init(Scratch::default, |scratch, unit| compute(isa, unit, scratch))
                    .collect()
            })
        }
    };
    place(&units, &outputs, rows, y, pool);
}

/// A unit's outputs: for each panel, for each token, 16 rows.
fn compute(isa: Isa, unit: &Unit, scratch: &mut Scratch) -> Vec<f32> {
    let mut out = vec![0.0; unit.panels.len() * unit.range.len() * PANEL];
    for (panel, out) in unit
        .panels
        .clone()
        .zip(out.chunks_exact_mut(unit.range.len() * PANEL))
    {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86::panel_avx512(unit, panel, &mut scratch.x86, out),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::panel_avx2(unit, panel, &mut scratch.portable, out),
            _ => portable::panel::<portable::Loops>(unit, panel, &mut scratch.portable, out),
        }
    }
    out
}

/// Copies the units' outputs to where they belong in `y` (all tokens x all rows).
fn place(units: &[Unit], outputs: &[Vec<f32>], rows: usize, y: &mut [f32], pool: &ThreadPool) {
    // Units of an expert, and so of a token, are neighbours.
    let experts: Vec<(&[Unit], &[Vec<f32>])> = units
        .chunk_by(|a, b| a.expert == b.expert)
        .scan(0, |first, units| {
            *first += units.len();
            Some((units, &outputs[*first - units.len()..*first]))
        })
        .collect();
    let token_rows = |(token, y): (usize, &mut [f32])| {
        let at = experts.partition_point(|(units, _)| units[0].range.end <= token);
        let Some((units, outputs)) = experts.get(at) else {
            return;
        };
        for (unit, out) in units.iter().zip(*outputs) {
            let panels = out.chunks_exact(unit.range.len() * PANEL);
            let token = token - unit.range.start;
            for (panel, y) in panels.zip(y[unit.panels.start * PANEL..].chunks_mut(PANEL)) {
                y.copy_from_slice(&panel[token * PANEL..][..y.len()]);
            }
        }
    };
    if rows == 0 {
        return;
    }
    if y.len() >= PARALLEL && pool.current_num_threads() > 1 {
        pool.install(|| y.par_chunks_exact_mut(rows).enumerate().for_each(token_rows));
    } else {
        y.chunks_exact_mut(rows).enumerate().for_each(token_rows);
    }
}
