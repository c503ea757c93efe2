//! Codebook tensors as [`crate::gemm::layer`] multiplies them.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

#[cfg(target_arch = "x86_64")]
use super::panels::{self, Panels};
#[cfg(target_arch = "x86_64")]
use super::pieces;
#[cfg(target_arch = "x86_64")]
use super::planes::lookups::Lookups;
use super::rounded::{self, Rounded};
use super::tokens::{Form, Prepared};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Precision, Rows, portable};
use crate::Result;
use crate::formats::codebook::{PANEL, View};
use crate::gemm::layer::{Job, Products, Projection, Worker};
use crate::gemm::panel::{self, Backend};
use crate::simd::Isa;
use crate::types::{Activations, Mode, Shape};

/// A codebook tensor with a mode and an instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Codebook<'a> {
    view: View<'a>,
    precision: Precision,
    isa: Isa,
    /// What multiplies experts with many tokens by panels, of bytes where activations are rounded, otherwise of bf16.
    pub(super) panels: Option<Backend>,
}

/// The modes that codebooks have.
pub const MODES: [Mode; 5] = Mode::ALL;

impl<'a> Codebook<'a> {
    /// Products in `mode` with `isa`. Where the mode rounds activations, they get the bits that the tensor says, or 8.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error): the processor lacks the instruction set.
    pub fn new(view: View<'a>, mode: Mode, isa: Isa) -> Result<Codebook<'a>> {
        Codebook::with_activation_bits(view, mode, None, isa)
    }

    /// Products as [`Codebook::new`] gives them, with so many bits of an activation instead of the tensor's, 4 or 8.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error): other bits, or the processor lacks the instruction set.
    pub fn with_activation_bits(
        view: View<'a>,
        mode: Mode,
        activation_bits: Option<u8>,
        isa: Isa,
    ) -> Result<Codebook<'a>> {
        let precision = Precision::resolve(mode, activation_bits, &view.layout())?;
        Ok(Codebook {
            view,
            precision,
            isa: isa.require()?,
            panels: match (mode, precision) {
                (Mode::Auto | Mode::Bf16, Precision::Exact) => Backend::of_floats(isa),
                #[cfg(target_arch = "x86_64")]
                (_, Precision::Int8 { .. }) if isa == Isa::Amx => Some(Backend::Matrix),
                _ => None,
            },
        })
    }
}

impl Projection for Codebook<'_> {
    fn shape(&self) -> Shape {
        self.view.layout().shape()
    }

    fn row_bytes(&self) -> usize {
        self.view.layout().panel_bytes() / PANEL
    }

    fn memory(&self, expert: usize) -> &[u8] {
        self.view.expert(expert)
    }

    fn granule(&self) -> usize {
        PANEL
    }

    fn products<'s>(&'s self, job: &Arc<Job>, sibling: Option<&dyn Products>) -> Box<dyn Products + 's> {
        let few = |few: &Arc<Job>| self.directly(few, None);
        let by_panels = self.panels.and_then(|backend| match self.precision {
            #[cfg(target_arch = "x86_64")]
            Precision::Int8 { .. } => {
                let source = Panels::new(self.view, Form::of(&self.view.layout(), self.precision, self.isa));
                panel::products(source, (backend, panels::FEWEST), job, sibling, few)
            }
            _ => {
                let (source, fewest) = (Rounded::new(self.view, backend), rounded::fewest(backend));
                panel::products(source, (backend, fewest), job, sibling, few)
            }
        });
        by_panels.unwrap_or_else(|| self.directly(job, sibling))
    }
}

impl Codebook<'_> {
    /// Products straight from the codes.
    fn directly<'s>(&'s self, job: &Arc<Job>, sibling: Option<&dyn Products>) -> Box<dyn Products + 's> {
        let form = Form::of(&self.view.layout(), self.precision, self.isa);
        let shared = sibling
            .and_then(|sibling| sibling.shared()?.downcast::<Prepared>().ok())
            .filter(|prepared| prepared.form() == form);
        let mine = shared.is_none();
        Box::new(Multiplication {
            weights: self,
            job: job.clone(),
            prepared: shared.unwrap_or_else(|| Arc::new(Prepared::new(job.tokens, form))),
            mine,
        })
    }
}

/// A tensor and the tokens of a job.
struct Multiplication<'a> {
    weights: &'a Codebook<'a>,
    job: Arc<Job>,
    prepared: Arc<Prepared>,
    /// The activations are not a sibling's.
    mine: bool,
}

impl Products for Multiplication<'_> {
    fn stages(&self) -> [usize; 2] {
        [if self.mine { self.prepared.parts() } else { 0 }, 0]
    }

    fn prepare(&self, _stage: usize, unit: usize, x: Activations) {
        self.prepared.fill(unit, x);
    }

    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(self.prepared.clone())
    }

    fn worker(&self) -> Box<dyn Worker + '_> {
        Box::new(Thread {
            products: self,
            buffers: portable::Buffers::default(),
        })
    }
}

struct Thread<'a> {
    products: &'a Multiplication<'a>,
    buffers: portable::Buffers<'a>,
}

impl Worker for Thread<'_> {
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]) {
        let products = self.products;
        let (weights, job) = (products.weights, &products.job);
        let (expert, places) = (job.tasks[task].expert, job.tasks[task].places.clone());
        let (layout, list) = (weights.view.layout(), &job.list[places]);
        let prepared: &Prepared = &products.prepared;
        out.fill(0.0);
        #[cfg(target_arch = "x86_64")]
        if let (true, Some(activation_bits)) = (prepared.form().tables(), weights.precision.activation_bits())
        {
            let lookups = Lookups {
                view: weights.view,
                prepared,
                activation_bits,
                planes: if matches!(weights.precision, Precision::Int8 { .. }) {
                    1
                } else {
                    2
                },
            };
            // SAFETY: tables are made for AVX2, which `isa.require()` in `Codebook::new` has found.
            return unsafe { lookups.multiply(expert, rows, list, out) };
        }
        #[cfg(target_arch = "x86_64")]
        if weights.precision != Precision::Exact && list.len() >= pieces::FEWEST {
            self.buffers.pieces.take(prepared, list);
        }
        for start in rows.clone().step_by(PANEL) {
            let mut out = Rows::new(out, rows.len(), start - rows.start);
            for index in 0..layout.blocks() {
                let block = weights.view.block(expert, start / PANEL, index);
                let first = index * layout.block_size();
                match weights.isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => {
                        let buffers = &mut self.buffers;
                        x86::avx512(
                            &block,
                            weights.precision,
                            first,
                            prepared,
                            list,
                            buffers,
                            &mut out,
                        );
                    }
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => {
                        let buffers = &mut self.buffers;
                        x86::avx2(
                            &block,
                            weights.precision,
                            first,
                            prepared,
                            list,
                            buffers,
                            &mut out,
                        );
                    }
                    _ => portable::block(
                        &block,
                        weights.precision,
                        first,
                        prepared,
                        list,
                        &mut self.buffers,
                        &mut out,
                    ),
                }
            }
        }
    }
}
