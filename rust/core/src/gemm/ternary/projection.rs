//! Ternary tensors as projections for [`crate::gemm::layer`].

use std::ops::Range;
use std::sync::Arc;

use super::rounded::{self, Rounded};
use super::table::longest_word;
use super::tile::Tile;
use super::unit::{Unit, unit_groups};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Kernel, kernel_for, scalar};
use crate::Result;
use crate::formats::ternary::layout::GROUP_ROWS;
use crate::formats::ternary::{Code, TernaryView};
use crate::gemm::layer::{self, Cache, Job, Products, Projection, Shared, Slots, Work, by_tokens, direct};
use crate::gemm::panel::{self, Backend};
use crate::gemm::require_mode;
use crate::simd::Isa;
use crate::types::{Activations, Mode, Shape};

/// The compute modes of ternary tensors.
pub const MODES: [Mode; 3] = [Mode::Auto, Mode::Exact, Mode::Bf16];

/// A ternary tensor with a kernel, ready for products.
#[derive(Debug, Clone)]
pub struct Ternary<'a> {
    view: TernaryView<'a>,
    kernel: Kernel,
    /// The bf16 backend for experts with many tokens, which are multiplied by panels.
    panels: Option<Backend>,
}

impl<'a> Ternary<'a> {
    /// Products by the kernel of an instruction set. The modes auto and bf16 are exact unless panels
    /// are faster for the number of tokens ([`rounded`]).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if the mode is not in [`MODES`].
    pub fn new(view: TernaryView<'a>, mode: Mode, isa: Isa) -> Result<Ternary<'a>> {
        require_mode(mode, &MODES, "a ternary tensor")?;
        let exact = Ternary::with_kernel(kernel_for(view.code(), isa), view);
        let panels = rounded::backend(isa).filter(|_| mode != Mode::Exact);
        Ok(Ternary { panels, ..exact })
    }

    /// Exact products by a given kernel, for tests and benchmarks.
    pub fn with_kernel(kernel: Kernel, view: TernaryView<'a>) -> Ternary<'a> {
        Ternary {
            view,
            kernel,
            panels: None,
        }
    }

    /// The form of its tiles.
    fn form(&self) -> Form {
        Form {
            kernel: self.kernel,
            code: self.view.code(),
            longest_word: longest_word(&self.view),
            columns: self.view.columns(),
        }
    }
}

impl Projection for Ternary<'_> {
    fn shape(&self) -> Shape {
        self.view.shape()
    }

    fn row_bytes(&self) -> usize {
        self.view.payload_bytes() / (self.view.experts() * self.view.rows()).max(1)
    }

    fn memory(&self, expert: usize, rows: Range<usize>) -> &[u8] {
        self.view
            .codes(expert, rows.start / GROUP_ROWS..rows.end.div_ceil(GROUP_ROWS))
    }

    fn granule(&self) -> usize {
        GROUP_ROWS
    }

    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's> {
        let few = |few: &Arc<Job>| direct(self, few);
        let Some(backend) = self.panels else {
            return few(job);
        };
        by_tokens(
            job,
            rounded::FEWEST,
            |many| panel::products(Rounded::new(self.view.clone(), backend), backend, many),
            few,
        )
    }
}

/// The form of tiles: tensors with equal forms share the tiles of the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    kernel: Kernel,
    code: Code,
    longest_word: usize,
    columns: usize,
}

/// The prepared activations of jobs: one tile per task.
static TILES: Cache<Form, Slots<Tile>> = Cache::new();

impl layer::Kernel for Ternary<'_> {
    type Prepared = Slots<Tile>;
    /// A unit's outputs, rows x tokens.
    type Scratch<'w>
        = Vec<f32>
    where
        Self: 'w;

    fn prepared(&self, job: &Arc<Job>) -> Shared<Slots<Tile>> {
        TILES.get(job, self.form(), |_| Slots::new(job.tasks.len()))
    }

    fn stages(&self, tiles: &Slots<Tile>) -> [usize; 2] {
        [tiles.len(), 0]
    }

    fn prepare(&self, job: &Job, tiles: &Slots<Tile>, _: usize, task: usize, x: Activations) {
        let tokens = &job.list[job.tasks[task].places.clone()];
        tiles.fill(task, || Tile::new(self.kernel, &self.view, x, tokens));
    }

    fn multiply(
        &self,
        work: Work<'_, Slots<Tile>>,
        sums: &mut Vec<f32>,
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        let tile = work.prepared.get(work.task);
        let groups = rows.start / GROUP_ROWS..rows.end.div_ceil(GROUP_ROWS);
        let step = unit_groups(tile.tokens());
        for first in groups.clone().step_by(step) {
            let unit = Unit {
                view: &self.view,
                expert: work.expert(),
                groups: first..(first + step).min(groups.end),
                tile,
            };
            sums.clear();
            sums.resize(unit.rows().len() * tile.tokens(), 0.0);
            compute(self.kernel, &unit, sums);
            let at = unit.rows().start - rows.start..unit.rows().end - rows.start;
            for (token, out) in out.chunks_exact_mut(rows.len()).enumerate() {
                let sums = sums[token..].iter().step_by(tile.tokens());
                out[at.clone()]
                    .iter_mut()
                    .zip(sums)
                    .for_each(|(out, &sum)| *out = sum);
            }
        }
    }
}

/// Computes a unit into `out` (rows x tokens).
fn compute(kernel: Kernel, unit: &Unit, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if kernel != Kernel::SCALAR {
        return x86::rows(unit, kernel, out);
    }
    debug_assert!(kernel == Kernel::SCALAR);
    scalar::rows(unit, out);
}
