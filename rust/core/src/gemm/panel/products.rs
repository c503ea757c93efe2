//! The panel kernel for [`crate::gemm::layer`].

use std::ops::Range;
use std::sync::Arc;

use super::strip::Thread;
use super::tokens::Tokens;
use super::{Backend, Source, TokenForm};
use crate::gemm::layer::{Cache, Job, Kernel, Products, Shared, Work, Worker, direct};
use crate::types::Activations;

/// The products of a job with the panels of a source, by a backend.
pub(crate) fn products<'s, S: Source + 's>(
    source: S,
    backend: Backend,
    job: &Arc<Job>,
) -> Box<dyn Products + 's> {
    direct(Panels { source, backend }, job)
}

struct Panels<S> {
    source: S,
    backend: Backend,
}

/// The tokens of a job in tiles, and the expert of each task.
struct Tiles {
    tokens: Tokens,
    experts: Vec<usize>,
}

/// The prepared activations of jobs.
static TILES: Cache<TokenForm, Tiles> = Cache::new();

impl<S: Source> Kernel for Panels<S> {
    type Prepared = Tiles;
    type Scratch<'w>
        = Option<Thread<'w, S>>
    where
        Self: 'w;

    fn prepared(&self, job: &Arc<Job>) -> Shared<Tiles> {
        TILES.get(job, self.source.form(), |&form| Tiles {
            tokens: Tokens::new(&job.tasks, form),
            experts: job.tasks.iter().map(|task| task.expert).collect(),
        })
    }

    fn stages(&self, tiles: &Tiles) -> [usize; 2] {
        [tiles.tokens.len(), 0]
    }

    fn prepare(&self, job: &Job, tiles: &Tiles, _: usize, unit: usize, x: Activations) {
        tiles.tokens.make(unit, |expert, place, lane, tile| {
            self.source.token(&x, expert, job.list[place], lane, tile);
        });
    }

    fn multiply<'w>(
        &'w self,
        work: Work<'w, Tiles>,
        thread: &mut Option<Thread<'w, S>>,
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        let Tiles { tokens, experts } = work.prepared;
        let thread = thread.get_or_insert_with(|| Thread::new(&self.source, tokens, experts, self.backend));
        thread.multiply(work.task, rows, out);
    }
}
