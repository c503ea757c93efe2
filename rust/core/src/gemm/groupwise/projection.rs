//! Group-wise tensors as [`crate::gemm::layer`] multiplies them.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::Out;
use super::drive::{Engine, ROW_TOKENS, Scratch};
use super::kernel::Weights;
use super::panels::{self, Panels};
use super::tile::{Form, Steps, Tile};
use crate::Result;
use crate::formats::groupwise::{BLOCK_ROWS, Blocks};
use crate::gemm::layer::{Job, Products, Projection, Worker};
use crate::gemm::panel;
use crate::simd::Isa;
use crate::types::{Activations, Mode, Shape};

/// A group-wise tensor, from wherever its blocks come, with a mode and an instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Groupwise<B> {
    pub(super) view: B,
    pub(super) engine: Engine,
}

impl<B: Blocks> Groupwise<B> {
    /// Products in `mode` with `isa`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error): there is no such mode ([`super::MODES`]), or the processor lacks the set.
    pub fn new(view: B, mode: Mode, isa: Isa) -> Result<Groupwise<B>> {
        let engine = Engine::new(mode, isa)?;
        Ok(Groupwise { view, engine })
    }
}

impl<B: Blocks> Projection for Groupwise<B> {
    fn shape(&self) -> Shape {
        self.view.layout().shape()
    }

    fn row_bytes(&self) -> usize {
        self.view.layout().block_bytes() / BLOCK_ROWS
    }

    /// What kernels of many tokens take at a time.
    fn granule(&self) -> usize {
        2 * BLOCK_ROWS
    }

    fn products<'s>(&'s self, job: &Arc<Job>, sibling: Option<&dyn Products>) -> Box<dyn Products + 's> {
        let by_panels = self.engine.panels.and_then(|backend| {
            let how = (backend, panels::fewest(backend));
            let source = Panels::new(&self.view, backend);
            panel::products(source, how, job, sibling, |few| self.directly(few, None))
        });
        by_panels.unwrap_or_else(|| self.directly(job, sibling))
    }
}

impl<B: Blocks> Groupwise<B> {
    /// Products straight from the packed bytes.
    fn directly<'s>(&'s self, job: &Arc<Job>, sibling: Option<&dyn Products>) -> Box<dyn Products + 's> {
        let steps = Steps::new(&self.view.layout());
        let shared = sibling
            .and_then(|sibling| sibling.shared()?.downcast::<Prepared>().ok())
            .filter(|prepared| prepared.serves(&steps, &self.engine, self.shape().columns));
        Box::new(Multiplication {
            weights: self,
            mine: shared.is_none(),
            prepared: shared
                .unwrap_or_else(|| Arc::new(Prepared::new(job, steps, self.engine, self.shape().columns))),
        })
    }
}

/// The activations of a job: in the first stage tokens become integers, in the second one tokens become tiles.
struct Prepared {
    job: Arc<Job>,
    steps: Steps,
    engine: Engine,
    columns: usize,
    tokens: Vec<OnceLock<Tile>>,
    /// The tiles of all tasks.
    tiles: Vec<Slot>,
    /// For each task, its tiles.
    of_task: Vec<Range<usize>>,
    /// The tiles that are to be made: those of a single token are its own.
    made: Vec<usize>,
}

/// A tile to be made of the tokens at some places.
struct Slot {
    places: Range<usize>,
    /// Its tokens, with padding.
    width: usize,
    form: Form,
    tile: OnceLock<Tile>,
}

impl Slot {
    fn is_single(&self) -> bool {
        self.form == Form::Words && self.width == 1
    }
}

impl Prepared {
    fn new(job: &Arc<Job>, steps: Steps, engine: Engine, columns: usize) -> Prepared {
        let (mut tiles, mut of_task) = (Vec::new(), Vec::with_capacity(job.tasks.len()));
        for task in &job.tasks {
            let (first, mut place) = (tiles.len(), task.places.start);
            while place < task.places.end {
                let (tokens, width, form) = engine.next_tile(task.places.end - place);
                let places = place..place + tokens;
                place = places.end;
                tiles.push(Slot {
                    places,
                    width,
                    form,
                    tile: OnceLock::new(),
                });
            }
            of_task.push(first..tiles.len());
        }
        Prepared {
            job: job.clone(),
            steps,
            engine,
            columns,
            tokens: (0..job.tokens).map(|_| OnceLock::new()).collect(),
            made: (0..tiles.len()).filter(|&i| !tiles[i].is_single()).collect(),
            tiles,
            of_task,
        }
    }

    /// Whether a matrix with other steps and columns can use these activations.
    fn serves(&self, steps: &Steps, engine: &Engine, columns: usize) -> bool {
        (self.steps, self.engine, self.columns) == (*steps, *engine, columns)
    }

    fn quantize(&self, token: usize, x: &Activations) {
        let make = || self.engine.quantized(&self.steps, self.columns, x, token);
        self.tokens[token].get_or_init(make);
    }

    fn token(&self, place: usize) -> &Tile {
        let token = &self.tokens[self.job.list[place]];
        token.get().expect("the first stage has made it")
    }

    fn interleave(&self, slot: &Slot) {
        let tokens = slot.places.clone().map(|place| self.token(place));
        let planes = self.engine.precision.planes();
        let make = || Tile::interleaved(tokens, &self.steps, planes, slot.width, slot.form);
        slot.tile.get_or_init(make);
    }

    fn tile<'a>(&'a self, slot: &'a Slot) -> &'a Tile {
        match slot.is_single() {
            true => self.token(slot.places.start),
            false => slot.tile.get().expect("the second stage has made it"),
        }
    }
}

/// A tensor and the tokens of a job.
struct Multiplication<'a, B> {
    weights: &'a Groupwise<B>,
    prepared: Arc<Prepared>,
    /// The activations are not a sibling's.
    mine: bool,
}

impl<B: Blocks> Products for Multiplication<'_, B> {
    fn stages(&self) -> [usize; 2] {
        match self.mine {
            true => [self.prepared.job.tokens, self.prepared.made.len()],
            false => [0, 0],
        }
    }

    fn prepare(&self, stage: usize, unit: usize, x: Activations) {
        match stage {
            0 => self.prepared.quantize(unit, &x),
            _ => self
                .prepared
                .interleave(&self.prepared.tiles[self.prepared.made[unit]]),
        }
    }

    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(self.prepared.clone())
    }

    fn worker(&self) -> Box<dyn Worker + '_> {
        Box::new(Thread {
            weights: self.weights,
            prepared: &self.prepared,
            scratch: Scratch::default(),
            buffers: [Vec::new(), Vec::new()],
        })
    }
}

struct Thread<'a, B> {
    weights: &'a Groupwise<B>,
    prepared: &'a Prepared,
    scratch: Scratch,
    buffers: [Vec<u8>; 2],
}

impl<B: Blocks> Worker for Thread<'_, B> {
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]) {
        let prepared = self.prepared;
        let (view, engine) = (&self.weights.view, &prepared.engine);
        let (layout, expert) = (view.layout(), prepared.job.tasks[task].expert);
        let slots = &prepared.tiles[prepared.of_task[task].clone()];
        let tiles: Vec<&Tile> = slots.iter().map(|slot| prepared.tile(slot)).collect();
        let first = slots[0].places.start;
        engine.start(&mut self.scratch, &prepared.steps, &tiles);
        let mut sums: [Out; 2] = [[[0.0; BLOCK_ROWS]; ROW_TOKENS]; 2];
        for start in rows.clone().step_by(2 * BLOCK_ROWS) {
            let end = (start + 2 * BLOCK_ROWS).min(rows.end);
            let block = expert * layout.blocks() + start / BLOCK_ROWS;
            let [first_buffer, second_buffer] = &mut self.buffers;
            let one = view.fetch(block, first_buffer);
            // The last rows may be those of one block.
            let count = (end - start).div_ceil(BLOCK_ROWS);
            let two = if count == 2 {
                view.fetch(block + 1, second_buffer)
            } else {
                one
            };
            let weights = [one, two].map(|block| Weights { block, layout });
            for (slot, tile) in slots.iter().zip(&tiles) {
                engine.compute(
                    &mut self.scratch,
                    block,
                    &weights[..count],
                    &prepared.steps,
                    tile,
                    &mut sums,
                );
                for (i, sums) in sums[..count].iter().enumerate() {
                    let at = start + i * BLOCK_ROWS;
                    let at = at - rows.start..(at + BLOCK_ROWS).min(rows.end) - rows.start;
                    for (place, values) in slot.places.clone().zip(sums) {
                        let out = &mut out[(place - first) * rows.len()..][at.clone()];
                        out.copy_from_slice(&values[..at.len()]);
                    }
                }
            }
        }
        engine.rest(&mut self.scratch);
    }
}
