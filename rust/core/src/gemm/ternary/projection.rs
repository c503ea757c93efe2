//! Ternary tensors as [`crate::gemm::layer`] multiplies them.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::rounded::{self, Rounded};
use super::table::longest_word;
use super::tile::Tile;
use super::unit::{UNIT_GROUPS, Unit};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Kernel, kernel_for, scalar};
use crate::Result;
use crate::formats::ternary::layout::GROUP_ROWS;
use crate::formats::ternary::{Code, TernaryView};
use crate::gemm::layer::{Job, Products, Projection, Worker};
use crate::gemm::panel::{self, Backend};
use crate::gemm::require_mode;
use crate::simd::Isa;
use crate::types::{Activations, Mode, Shape};

/// The modes that ternary tensors have.
pub const MODES: [Mode; 3] = [Mode::Auto, Mode::Exact, Mode::Bf16];

/// A ternary tensor with a kernel.
#[derive(Debug, Clone)]
pub struct Ternary<'a> {
    view: TernaryView<'a>,
    kernel: Kernel,
    /// What multiplies experts with many tokens by panels of bf16.
    panels: Option<Backend>,
}

impl<'a> Ternary<'a> {
    /// Products by the kernel of an instruction set; the modes auto and bf16 are exact but for many tokens where panels
    /// are faster ([`rounded`]).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error): there is no such mode, or the processor lacks the instruction set.
    pub fn new(view: TernaryView<'a>, mode: Mode, isa: Isa) -> Result<Ternary<'a>> {
        require_mode(mode, &MODES, "a ternary tensor")?;
        let exact = Ternary::with_kernel(kernel_for(view.code(), isa.require()?), view)?;
        let panels = rounded::backend(isa).filter(|_| mode != Mode::Exact);
        Ok(Ternary { panels, ..exact })
    }

    /// Exact products by a kernel of the caller's choice, for tests and benchmarks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error): the processor does not run the kernel.
    pub fn with_kernel(kernel: Kernel, view: TernaryView<'a>) -> Result<Ternary<'a>> {
        kernel.isa().require()?;
        Ok(Ternary {
            view,
            kernel,
            panels: None,
        })
    }

    /// What a tile depends on, besides the tokens.
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

    fn granule(&self) -> usize {
        GROUP_ROWS
    }

    fn products<'s>(&'s self, job: &Arc<Job>, sibling: Option<&dyn Products>) -> Box<dyn Products + 's> {
        let by_panels = self.panels.and_then(|backend| {
            let source = Rounded::new(self.view.clone(), backend);
            let few = |few: &Arc<Job>| self.directly(few, None);
            panel::products(source, (backend, rounded::FEWEST), job, sibling, few)
        });
        by_panels.unwrap_or_else(|| self.directly(job, sibling))
    }
}

impl Ternary<'_> {
    /// Products straight from the codes.
    fn directly<'s>(&'s self, job: &Arc<Job>, sibling: Option<&dyn Products>) -> Box<dyn Products + 's> {
        let shared = sibling
            .and_then(|sibling| sibling.shared()?.downcast::<Prepared>().ok())
            .filter(|prepared| prepared.form == self.form());
        let make = || Prepared {
            job: job.clone(),
            form: self.form(),
            tiles: job.tasks.iter().map(|_| OnceLock::new()).collect(),
        };
        Box::new(Multiplication {
            weights: self,
            mine: shared.is_none(),
            prepared: shared.unwrap_or_else(|| Arc::new(make())),
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    kernel: Kernel,
    code: Code,
    longest_word: usize,
    columns: usize,
}

/// The tiles of a job's tasks.
struct Prepared {
    job: Arc<Job>,
    form: Form,
    tiles: Vec<OnceLock<Tile>>,
}

/// A tensor and the tokens of a job.
struct Multiplication<'a> {
    weights: &'a Ternary<'a>,
    prepared: Arc<Prepared>,
    /// The tiles are not a sibling's.
    mine: bool,
}

impl Products for Multiplication<'_> {
    fn stages(&self) -> [usize; 2] {
        [0, if self.mine { self.prepared.tiles.len() } else { 0 }]
    }

    fn prepare(&self, _: usize, task: usize, x: Activations) {
        let job = &self.prepared.job;
        let tokens = &job.list[job.tasks[task].places.clone()];
        let make = || Tile::new(self.weights.kernel, &self.weights.view, x, tokens);
        self.prepared.tiles[task].get_or_init(make);
    }

    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(self.prepared.clone())
    }

    fn worker(&self) -> Box<dyn Worker + '_> {
        Box::new(Thread {
            products: self,
            sums: Vec::new(),
        })
    }
}

struct Thread<'a> {
    products: &'a Multiplication<'a>,
    /// A unit's outputs, rows x tokens.
    sums: Vec<f32>,
}

impl Worker for Thread<'_> {
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]) {
        let Multiplication {
            weights, prepared, ..
        } = self.products;
        let tile = prepared.tiles[task].get().expect("the second stage has made it");
        let groups = rows.start / GROUP_ROWS..rows.end.div_ceil(GROUP_ROWS);
        for first in groups.clone().step_by(UNIT_GROUPS) {
            let unit = Unit {
                view: &weights.view,
                expert: prepared.job.tasks[task].expert,
                groups: first..(first + UNIT_GROUPS).min(groups.end),
                tile,
            };
            self.sums.clear();
            self.sums.resize(unit.rows().len() * tile.tokens(), 0.0);
            compute(weights.kernel, &unit, &mut self.sums);
            let at = unit.rows().start - rows.start..unit.rows().end - rows.start;
            for (token, out) in out.chunks_exact_mut(rows.len()).enumerate() {
                let sums = self.sums[token..].iter().step_by(tile.tokens());
                out[at.clone()]
                    .iter_mut()
                    .zip(sums)
                    .for_each(|(out, &sum)| *out = sum);
            }
        }
    }
}

/// Computes a unit into `out` (rows x tokens).
#[cfg(target_arch = "x86_64")]
fn compute(kernel: Kernel, unit: &Unit, out: &mut [f32]) {
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
fn compute(_kernel: Kernel, unit: &Unit, out: &mut [f32]) {
    scalar::rows(unit, out);
}
