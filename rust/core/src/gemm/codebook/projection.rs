//! Codebook tensors as projections for [`crate::gemm::layer`].

use std::ops::Range;
use std::sync::Arc;

#[cfg(target_arch = "aarch64")]
use super::neon;
#[cfg(target_arch = "x86_64")]
use super::panels::{self, Panels};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::pieces;
#[cfg(target_arch = "x86_64")]
use super::planes::lookups::Lookups;
use super::rounded::{self, Rounded};
use super::tokens::{Form, Prepared};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Precision, Rows, portable};
use crate::Result;
use crate::formats::codebook::{Block, PANEL, View};
use crate::gemm::layer::{Cache, Job, Kernel, Products, Projection, Shared, Work, by_tokens, direct};
use crate::gemm::panel::{self, Backend};
use crate::simd::Isa;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::simd::Kind;
use crate::types::{Activations, Mode, Shape};

/// A codebook tensor with a mode and an instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Codebook<'a> {
    view: View<'a>,
    precision: Precision,
    isa: Isa,
    /// The backend for experts with many tokens: panels of bytes if activations are rounded, otherwise of bf16.
    pub(super) panels: Option<Backend>,
}

/// The compute modes of codebook tensors.
pub const MODES: [Mode; 5] = Mode::ALL;

impl<'a> Codebook<'a> {
    /// Products in `mode` with `isa`. If the mode rounds activations, they have the bits that the tensor states, or
    /// 8.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if the tensor has no product in `mode`.
    pub fn new(view: View<'a>, mode: Mode, isa: Isa) -> Result<Codebook<'a>> {
        Codebook::with_activation_bits(view, mode, None, isa)
    }

    /// Products in `mode` with `isa`, with activations of `activation_bits`, 4 or 8, instead of the tensor's.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) for other bits.
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
            isa: isa.vectors(),
            panels: match (mode, precision) {
                (Mode::Auto | Mode::Bf16, Precision::Exact) => Backend::of_floats(isa),
                (_, Precision::Int8 { .. }) => Backend::of_matrix(isa),
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

    fn memory(&self, expert: usize, rows: Range<usize>) -> &[u8] {
        let size = self.view.layout().panel_bytes();
        &self.view.expert(expert)[rows.start / PANEL * size..rows.end.div_ceil(PANEL) * size]
    }

    fn granule(&self) -> usize {
        PANEL
    }

    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's> {
        let few = |few: &Arc<Job>| direct(self, few);
        let Some(backend) = self.panels else {
            return few(job);
        };
        match self.precision {
            #[cfg(target_arch = "x86_64")]
            Precision::Int8 { .. } => by_tokens(
                job,
                panels::FEWEST,
                |many| panel::products(Panels::new(self.view, self.form()), backend, many),
                few,
            ),
            _ => by_tokens(
                job,
                rounded::fewest(backend),
                |many| panel::products(Rounded::new(self.view, backend), backend, many),
                few,
            ),
        }
    }
}

impl Codebook<'_> {
    /// The form of this projection's prepared activations.
    fn form(&self) -> Form {
        Form::of(&self.view.layout(), self.precision, self.isa)
    }
}

/// The prepared activations of jobs.
static TOKENS: Cache<Form, Prepared> = Cache::new();

impl Kernel for Codebook<'_> {
    type Prepared = Prepared;
    type Scratch<'w>
        = portable::Buffers<'w>
    where
        Self: 'w;

    fn prepared(&self, job: &Arc<Job>) -> Shared<Prepared> {
        TOKENS.get(job, self.form(), |&form| Prepared::new(job.tokens, form))
    }

    fn stages(&self, prepared: &Prepared) -> [usize; 2] {
        [prepared.units(), 0]
    }

    fn prepare(&self, _: &Job, prepared: &Prepared, _: usize, unit: usize, x: Activations) {
        prepared.fill(unit, x);
    }

    fn multiply<'w>(
        &'w self,
        work: Work<'w, Prepared>,
        buffers: &mut portable::Buffers<'w>,
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        let (prepared, tokens) = (work.prepared, work.tokens());
        out.fill(0.0);
        #[cfg(target_arch = "x86_64")]
        if let (true, Some(activation_bits)) = (prepared.form().tables(), self.precision.activation_bits()) {
            let lookups = Lookups {
                view: self.view,
                prepared,
                activation_bits,
                centroid_bytes: if matches!(self.precision, Precision::Int8 { .. }) {
                    1
                } else {
                    2
                },
            };
            return lookups.multiply(self.isa, work.expert(), rows, tokens, out);
        }
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if self.precision != Precision::Exact && tokens.len() >= pieces::FEWEST {
            buffers.pieces.take(prepared, tokens);
        }
        let layout = self.view.layout();
        for start in rows.clone().step_by(PANEL) {
            let mut out = Rows::new(out, rows.len(), start - rows.start);
            for index in 0..layout.blocks() {
                let block = self.view.block(work.expert(), start / PANEL, index);
                self.block(
                    &block,
                    index * layout.block_size(),
                    prepared,
                    tokens,
                    buffers,
                    &mut out,
                );
            }
        }
    }
}

impl Codebook<'_> {
    /// Adds the products of a block, whose first column is `first`, with `tokens` to `out`.
    fn block(
        &self,
        block: &Block,
        first: usize,
        prepared: &Prepared,
        tokens: &[usize],
        buffers: &mut portable::Buffers,
        out: &mut Rows,
    ) {
        match self.isa.kind() {
            // SAFETY: `isa` proves that the processor has AVX-512.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => unsafe {
                x86::avx512(block, self.precision, first, prepared, tokens, buffers, out);
            },
            // SAFETY: `isa` proves that the processor has AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe {
                x86::avx2(block, self.precision, first, prepared, tokens, buffers, out);
            },
            // SAFETY: `isa` proves that the processor has NEON.
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => unsafe {
                neon::block(block, self.precision, first, prepared, tokens, buffers, out);
            },
            _ => portable::block(block, self.precision, first, prepared, tokens, buffers, out),
        }
    }
}
