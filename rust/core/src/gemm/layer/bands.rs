//! The down projection and the weighted sum of many tokens in one phase: a unit of work is some rows of all experts.
//!
//! The outputs of all places x rows exceed the caches: 17 MB for 256 tokens with eight experts of 2,048 rows each, to
//! be cleared, written and read. Instead, the thread that computes the outputs of a band of rows sums them before
//! they leave its caches. Terms are added in the order of a token's list, so sums have the same bits.

use super::output::Output;
use super::projection::{Products, Projection};
use super::region::Thread;
use super::routing::Job;

/// The minimum number of outputs (4 MB) for summing by bands: fewer outputs stay in caches anyway.
const MANY: usize = 1 << 20;
/// The maximum number of outputs of a band (1 MB). With half as many, a layer of 2,048 places by 2,048 rows takes 1
/// to 3% longer, with a quarter 8%, because runs of an expert's weights get short.
const OUTPUTS: usize = 1 << 18;
/// The minimum number of bands per thread, for even load.
const BANDS: usize = 8;
/// The minimum number of rows of a band, because each band reads the activations of all experts.
const ROWS: usize = 64;

/// The division of a projection's rows into bands.
pub(super) struct Bands {
    step: usize,
    rows: usize,
}

impl Bands {
    /// The bands of a job's outputs; `None` if there are too few outputs, or if bands would be too narrow.
    pub fn new(down: &dyn Projection, job: &Job, threads: usize) -> Option<Bands> {
        let (rows, places, granule) = (down.shape().rows, job.list.len(), down.granule());
        // Narrower bands would be slower even if their outputs stay in the cache.
        let wide = down.wide().min(rows / (2 * threads));
        let most = (OUTPUTS / places.max(1)).min(rows / (BANDS * threads)).max(wide);
        let step = most / granule * granule;
        (places * rows >= MANY && step >= ROWS).then_some(Bands { step, rows })
    }

    /// The number of bands.
    pub fn units(&self) -> usize {
        self.rows.div_ceil(self.step)
    }

    /// The phase: `terms` are each token's places and weights, `y` is tokens x rows.
    pub fn fill(
        &self,
        thread: &mut Thread,
        down: &dyn Products,
        job: &Job,
        terms: &[Vec<(usize, f32)>],
        y: &Output,
    ) {
        let (mut down, mut outputs, mut sums) = (down.worker(), Vec::new(), Vec::new());
        thread.phase(self.units(), |unit| {
            let rows = unit * self.step..((unit + 1) * self.step).min(self.rows);
            outputs.resize(job.list.len() * rows.len(), 0.0);
            for (number, task) in job.tasks.iter().enumerate() {
                let places = task.places.start * rows.len()..task.places.end * rows.len();
                down.multiply(number, rows.clone(), &mut outputs[places]);
            }
            sums.clear();
            sums.resize(terms.len() * rows.len(), 0.0);
            for (sums, terms) in sums.chunks_exact_mut(rows.len()).zip(terms) {
                add(sums, terms, &outputs);
            }
            // SAFETY: units have disjoint rows.
            unsafe { y.fill(unit, 0..terms.len(), rows, &sums) }
        });
    }
}

/// Adds a token's weighted outputs; each output has as many values as `sums`.
fn add(sums: &mut [f32], terms: &[(usize, f32)], outputs: &[f32]) {
    for &(place, weight) in terms {
        let outputs = &outputs[place * sums.len()..][..sums.len()];
        sums.iter_mut()
            .zip(outputs)
            .for_each(|(sum, value)| *sum += weight * value);
    }
}
