//! Group-wise tensors as projections for [`crate::gemm::layer`].

use std::ops::Range;
use std::sync::Arc;

use super::Out;
use super::cursor::Weights;
use super::drive::{Engine, ROW_TOKENS, Scratch};
use super::panels::{self, Panels};
use super::tile::{Form, Steps, Tile};
use crate::Result;
use crate::formats::groupwise::{BLOCK_ROWS, View};
use crate::gemm::layer::{Cache, Job, Kernel, Products, Projection, Shared, Slots, Work, by_tokens, direct};
use crate::gemm::panel;
use crate::simd::Isa;
use crate::types::{Activations, Mode, Shape};

/// A group-wise tensor with a mode and an instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Groupwise<'a> {
    pub(super) view: View<'a>,
    pub(super) engine: Engine,
}

impl<'a> Groupwise<'a> {
    /// Products in `mode` with `isa`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if the mode does not exist ([`super::MODES`]) or the processor lacks
    /// the set.
    pub fn new(view: View<'a>, mode: Mode, isa: Isa) -> Result<Groupwise<'a>> {
        let engine = Engine::new(mode, isa)?;
        Ok(Groupwise { view, engine })
    }
}

impl Projection for Groupwise<'_> {
    fn shape(&self) -> Shape {
        self.view.layout().shape()
    }

    fn row_bytes(&self) -> usize {
        self.view.layout().block_bytes() / BLOCK_ROWS
    }

    fn memory(&self, expert: usize, rows: Range<usize>) -> &[u8] {
        let first = expert * self.view.layout().blocks();
        self.view
            .memory(first + rows.start / BLOCK_ROWS..first + rows.end.div_ceil(BLOCK_ROWS))
    }

    /// The rows that kernels for many tokens take at a time.
    fn granule(&self) -> usize {
        2 * BLOCK_ROWS
    }

    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's> {
        let few = |few: &Arc<Job>| direct(self, few);
        let Some(backend) = self.engine.panels else {
            return few(job);
        };
        let source = Panels::new(self.view, backend);
        by_tokens(
            job,
            panels::fewest(backend, self.view.layout().bits()),
            |many| panel::products(source, backend, many),
            few,
        )
    }
}

/// Everything that prepared activations depend on, besides the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    steps: Steps,
    engine: Engine,
    columns: usize,
}

static ACTIVATIONS: Cache<Key, Prepared> = Cache::new();

/// The prepared activations of a job: the first stage quantizes tokens, the second one arranges them in tiles.
pub struct Prepared {
    key: Key,
    tokens: Slots<Tile>,
    /// The tiles of all tasks.
    plans: Vec<Plan>,
    tiles: Slots<Tile>,
    /// The range of tiles of each task.
    of_task: Vec<Range<usize>>,
    /// The tiles to build: a tile of a single token is the token itself.
    made: Vec<usize>,
}

/// A tile to build from the tokens at some places.
struct Plan {
    places: Range<usize>,
    /// The number of tokens, including padding.
    width: usize,
    form: Form,
}

impl Plan {
    fn is_single(&self) -> bool {
        self.form == Form::Words && self.width == 1
    }
}

impl Prepared {
    fn new(job: &Job, key: Key) -> Prepared {
        let (mut plans, mut of_task) = (Vec::new(), Vec::with_capacity(job.tasks.len()));
        for task in &job.tasks {
            let (first, mut place) = (plans.len(), task.places.start);
            while place < task.places.end {
                let (tokens, width, form) = key.engine.next_tile(task.places.end - place);
                let places = place..place + tokens;
                place = places.end;
                plans.push(Plan { places, width, form });
            }
            of_task.push(first..plans.len());
        }
        Prepared {
            key,
            tokens: Slots::new(job.tokens),
            tiles: Slots::new(plans.len()),
            made: (0..plans.len()).filter(|&i| !plans[i].is_single()).collect(),
            plans,
            of_task,
        }
    }

    fn quantize(&self, token: usize, x: &Activations) {
        let Key {
            steps,
            engine,
            columns,
        } = &self.key;
        self.tokens
            .fill(token, || engine.quantized(steps, *columns, x, token));
    }

    fn interleave(&self, job: &Job, tile: usize) {
        let plan = &self.plans[tile];
        let tokens = job.list[plan.places.clone()]
            .iter()
            .map(|&token| self.tokens.get(token));
        let planes = self.key.engine.precision.planes();
        let make = || Tile::interleaved(tokens, &self.key.steps, planes, plan.width, plan.form);
        self.tiles.fill(tile, make);
    }

    fn tile(&self, job: &Job, tile: usize) -> &Tile {
        let plan = &self.plans[tile];
        match plan.is_single() {
            true => self.tokens.get(job.list[plan.places.start]),
            false => self.tiles.get(tile),
        }
    }
}

impl Kernel for Groupwise<'_> {
    type Prepared = Prepared;
    type Scratch<'w>
        = Scratch
    where
        Self: 'w;

    fn prepared(&self, job: &Arc<Job>) -> Shared<Prepared> {
        let key = Key {
            steps: Steps::new(&self.view.layout()),
            engine: self.engine,
            columns: self.shape().columns,
        };
        ACTIVATIONS.get(job, key, |&key| Prepared::new(job, key))
    }

    fn stages(&self, prepared: &Prepared) -> [usize; 2] {
        [prepared.tokens.len(), prepared.made.len()]
    }

    fn prepare(&self, job: &Job, prepared: &Prepared, stage: usize, unit: usize, x: Activations) {
        match stage {
            0 => prepared.quantize(unit, &x),
            _ => prepared.interleave(job, prepared.made[unit]),
        }
    }

    fn multiply(&self, work: Work<'_, Prepared>, scratch: &mut Scratch, rows: Range<usize>, out: &mut [f32]) {
        let (engine, steps) = (&self.engine, &work.prepared.key.steps);
        let (layout, first) = (self.view.layout(), work.places().start);
        let numbers = work.prepared.of_task[work.task].clone();
        let plans = &work.prepared.plans[numbers.clone()];
        let tiles: Vec<&Tile> = numbers.map(|tile| work.prepared.tile(work.job, tile)).collect();
        // The kernels rely on this check.
        assert!(*steps == Steps::new(&layout) && tiles.iter().all(|tile| tile.is_of(steps)));
        engine.start(scratch, steps, &tiles);
        let mut sums: [Out; 2] = [[[0.0; BLOCK_ROWS]; ROW_TOKENS]; 2];
        for start in rows.clone().step_by(2 * BLOCK_ROWS) {
            let end = (start + 2 * BLOCK_ROWS).min(rows.end);
            let block = work.expert() * layout.blocks() + start / BLOCK_ROWS;
            // The last rows may belong to a single block.
            let count = (end - start).div_ceil(BLOCK_ROWS);
            let weights = [block, block + count - 1].map(|block| Weights::new(&self.view, block));
            for (plan, tile) in plans.iter().zip(&tiles) {
                // SAFETY: as asserted, `steps` belong to the layout, and all tiles to `steps`.
                unsafe { engine.compute(scratch, block, &weights[..count], steps, tile, &mut sums) };
                for (i, sums) in sums[..count].iter().enumerate() {
                    let at = start + i * BLOCK_ROWS;
                    let at = at - rows.start..(at + BLOCK_ROWS).min(rows.end) - rows.start;
                    for (place, values) in plan.places.clone().zip(sums) {
                        let out = &mut out[(place - first) * rows.len()..][at.clone()];
                        out.copy_from_slice(&values[..at.len()]);
                    }
                }
            }
        }
        engine.rest(scratch);
    }
}
