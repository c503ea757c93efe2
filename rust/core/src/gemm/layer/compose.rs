//! Compositions of products: a different product for experts with many tokens, or two products in sequence.

use std::ops::Range;
use std::sync::Arc;

use super::cache::{Cache, Shared};
use super::projection::{Products, Worker};
use super::routing::{Job, Task};
use crate::types::Activations;

/// A job divided in two.
struct Split {
    /// For each task of the job, whether it has many tokens, and its index among the tasks of the same kind.
    which: Vec<(bool, usize)>,
    many: Arc<Job>,
    few: Arc<Job>,
}

static SPLITS: Cache<usize, Split> = Cache::new();

impl Split {
    fn new(job: &Job, fewest: usize) -> Split {
        let is_many = |task: &&Task| task.places.len() >= fewest;
        let part = |many| {
            let tasks = job.tasks.iter().filter(|task| is_many(task) == many);
            Arc::new(job.part(tasks.cloned().collect()))
        };
        let mut counts = [0; 2];
        let which = job.tasks.iter().map(|task| {
            let many = is_many(&task);
            counts[usize::from(many)] += 1;
            (many, counts[usize::from(many)] - 1)
        });
        Split {
            which: which.collect(),
            many: part(true),
            few: part(false),
        }
    }
}

/// Products that multiply experts with at least `fewest` tokens by `many`, others by `few`.
pub fn by_tokens<'s>(
    job: &Arc<Job>,
    fewest: usize,
    many: impl FnOnce(&Arc<Job>) -> Box<dyn Products + 's>,
    few: impl FnOnce(&Arc<Job>) -> Box<dyn Products + 's>,
) -> Box<dyn Products + 's> {
    let count = |task: &&Task| task.places.len() >= fewest;
    match job.tasks.iter().filter(count).count() {
        0 => few(job),
        all if all == job.tasks.len() => many(job),
        _ => {
            let Shared { prepared: split, .. } = SPLITS.get(job, fewest, |_| Split::new(job, fewest));
            Box::new(Both {
                parts: [few(&split.few), many(&split.many)],
                split: Some(split),
            })
        }
    }
}

/// Products that compute the outputs of `first` and add those of `second`.
pub fn followed<'s>(first: Box<dyn Products + 's>, second: Box<dyn Products + 's>) -> Box<dyn Products + 's> {
    Box::new(Both {
        parts: [first, second],
        split: None,
    })
}

/// Two products: with a split each task uses one of them, without it both.
struct Both<'s> {
    parts: [Box<dyn Products + 's>; 2],
    split: Option<Arc<Split>>,
}

impl Products for Both<'_> {
    fn stages(&self) -> [usize; 2] {
        let [first, second] = self.parts.each_ref().map(|part| part.stages());
        [first[0] + second[0], first[1] + second[1]]
    }

    fn prepare(&self, stage: usize, unit: usize, x: Activations) {
        match unit.checked_sub(self.parts[0].stages()[stage]) {
            None => self.parts[0].prepare(stage, unit, x),
            Some(unit) => self.parts[1].prepare(stage, unit, x),
        }
    }

    fn worker(&self) -> Box<dyn Worker + '_> {
        Box::new(BothWorkers {
            parts: self.parts.each_ref().map(|part| part.worker()),
            split: self.split.as_deref(),
        })
    }
}

struct BothWorkers<'w> {
    parts: [Box<dyn Worker + 'w>; 2],
    split: Option<&'w Split>,
}

impl Worker for BothWorkers<'_> {
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]) {
        if let Some(split) = self.split {
            let (many, task) = split.which[task];
            return self.parts[usize::from(many)].multiply(task, rows, out);
        }
        for part in &mut self.parts {
            part.multiply(task, rows.clone(), out);
        }
    }
}
