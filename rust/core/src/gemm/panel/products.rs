//! Products of a job by panels, its experts with few tokens by another way.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::strip::Thread;
use super::tokens::Tokens;
use super::{Backend, Source};
use crate::gemm::layer::{Job, Products, Task, Worker};
use crate::types::Activations;

/// The products of a job whose experts with at least `fewest` tokens go by panels, the others as `few` says. `None` where
/// no expert has so many. `sibling` is another matrix's products of the same job.
pub(crate) fn products<'s, S: Source + 's>(
    source: S,
    (backend, fewest): (Backend, usize),
    job: &Arc<Job>,
    sibling: Option<&dyn Products>,
    few: impl FnOnce(&Arc<Job>) -> Box<dyn Products + 's>,
) -> Option<Box<dyn Products + 's>> {
    let is_many = |task: &Task| task.places.len() >= fewest;
    let (many, rest): (Vec<Task>, Vec<Task>) = job.tasks.iter().cloned().partition(is_many);
    if many.is_empty() {
        return None;
    }
    let mut counts = [0; 2];
    let which = job.tasks.iter().map(|task| {
        let count = &mut counts[usize::from(is_many(task))];
        *count += 1;
        (is_many(task), *count - 1)
    });
    let form = source.form();
    let shared = sibling
        .and_then(|sibling| sibling.shared()?.downcast::<Tokens>().ok())
        .filter(|tokens| tokens.form == form);
    Some(Box::new(Multiplication {
        which: which.collect(),
        experts: many.iter().map(|task| task.expert).collect(),
        mine: shared.is_none(),
        tokens: shared.unwrap_or_else(|| Arc::new(Tokens::new(&many, form))),
        few: (!rest.is_empty()).then(|| {
            few(&Arc::new(Job {
                tokens: job.tokens,
                list: job.list.clone(),
                tasks: rest,
            }))
        }),
        job: job.clone(),
        source,
        backend,
    }))
}

/// A tensor and the tokens of a job.
struct Multiplication<'s, S> {
    source: S,
    backend: Backend,
    job: Arc<Job>,
    tokens: Arc<Tokens>,
    /// The tokens are not a sibling's.
    mine: bool,
    /// For each task, whether it goes by panels, and its number among those that do or do not.
    which: Vec<(bool, usize)>,
    /// The experts of those that do.
    experts: Vec<usize>,
    /// Those that do not.
    few: Option<Box<dyn Products + 's>>,
}

impl<S: Source> Multiplication<'_, S> {
    /// Tiles to be made in the first stage.
    fn tiles(&self) -> usize {
        if self.mine { self.tokens.len() } else { 0 }
    }
}

impl<S: Source> Products for Multiplication<'_, S> {
    fn stages(&self) -> [usize; 2] {
        let [first, second] = self.few.as_ref().map_or([0, 0], |few| few.stages());
        [self.tiles() + first, second]
    }

    fn prepare(&self, stage: usize, unit: usize, x: Activations) {
        match (stage, unit.checked_sub(self.tiles())) {
            (0, None) => self.tokens.make(unit, |place, lane, tile| {
                self.source.token(&x, self.job.list[place], lane, tile);
            }),
            (_, left) => {
                let unit = if stage == 0 { left.unwrap_or(0) } else { unit };
                if let Some(few) = &self.few {
                    few.prepare(stage, unit, x);
                }
            }
        }
    }

    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(self.tokens.clone())
    }

    fn worker(&self) -> Box<dyn Worker + '_> {
        Box::new(Both {
            which: &self.which,
            many: Thread::new(&self.source, &self.tokens, &self.experts, self.backend),
            few: self.few.as_ref().map(|few| few.worker()),
        })
    }
}

/// A thread's state of both kinds.
struct Both<'a, S: Source> {
    which: &'a [(bool, usize)],
    many: Thread<'a, S>,
    few: Option<Box<dyn Worker + 'a>>,
}

impl<S: Source> Worker for Both<'_, S> {
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]) {
        match (self.which[task], &mut self.few) {
            ((false, task), Some(few)) => few.multiply(task, rows, out),
            ((_, task), _) => self.many.multiply(task, rows, out),
        }
    }
}
