//! Records as the rows of an ordinary matrix, for products with any packed tensor.

use std::ops::Range;
use std::sync::Arc;

use super::rows::{self, RUN};
use super::term::Term;
use super::token::Token;
use crate::Result;
use crate::formats::channels::{View, Width};
use crate::gemm::layer::{Cache, Job, Kernel, Products, Projection, Shared, Slots, Work, direct};
use crate::gemm::require_mode;
use crate::simd::Isa;
use crate::types::{Activations, Mode, Shape};

/// The compute modes of records, both exact.
pub const MODES: [Mode; 2] = [Mode::Auto, Mode::Exact];

/// A tensor of records, with the instruction set of its products.
#[derive(Debug, Clone, Copy)]
pub struct Records<'a> {
    view: View<'a>,
    isa: Isa,
}

impl<'a> Records<'a> {
    /// Products with `isa`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if the mode does not exist or the processor lacks the instruction
    /// set.
    pub fn new(view: View<'a>, mode: Mode, isa: Isa) -> Result<Records<'a>> {
        require_mode(mode, &MODES, "a tensor of channels")?;
        Ok(Records {
            view,
            isa: isa.vectors(),
        })
    }
}

impl Projection for Records<'_> {
    fn shape(&self) -> Shape {
        self.view.layout().shape()
    }

    fn row_bytes(&self) -> usize {
        self.view.layout().record_bytes()
    }

    fn memory(&self, expert: usize, rows: Range<usize>) -> &[u8] {
        let first = expert * self.shape().rows;
        self.view.records(first + rows.start..first + rows.end)
    }

    fn granule(&self) -> usize {
        1
    }

    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's> {
        direct(self, job)
    }
}

/// Both halves of each token of a job, by width and length of a half.
static TOKENS: Cache<(Width, usize), Slots<[Token; 2]>> = Cache::new();

impl Kernel for Records<'_> {
    type Prepared = Slots<[Token; 2]>;
    type Scratch<'w>
        = ()
    where
        Self: 'w;

    fn prepared(&self, job: &Arc<Job>) -> Shared<Self::Prepared> {
        let layout = self.view.layout();
        TOKENS.get(job, (layout.width(), layout.half()), |_| Slots::new(job.tokens))
    }

    fn stages(&self, tokens: &Self::Prepared) -> [usize; 2] {
        [tokens.len(), 0]
    }

    fn prepare(&self, _: &Job, tokens: &Self::Prepared, _: usize, token: usize, x: Activations) {
        let (width, half) = (self.view.layout().width(), self.view.layout().half());
        tokens.fill(token, || {
            [0, 1].map(|number| Token::new(width, x, (2 * token + number) * half, half))
        });
    }

    fn multiply(&self, work: Work<'_, Self::Prepared>, _: &mut (), rows: Range<usize>, out: &mut [f32]) {
        let (width, count) = (self.view.layout().width(), rows.len());
        let first = work.expert() * self.shape().rows;
        let last = first + rows.end - 1;
        for (&token, out) in work.tokens().iter().zip(out.chunks_exact_mut(count)) {
            let [gate, down] = work.prepared.get(token);
            for (run, out) in out.chunks_mut(RUN).enumerate() {
                let first = first + rows.start + run * RUN;
                let product = |number: usize, x: &Token| {
                    let mut sums = [0.0; RUN];
                    let terms = std::array::from_fn::<_, RUN, _>(|i| {
                        let [half, next] =
                            [i, i + RUN].map(|i| self.view.halves((first + i).min(last))[number]);
                        Term {
                            half,
                            next,
                            factor: 0.0,
                        }
                    });
                    rows::dot(self.isa, width, &terms[..out.len()], x, &mut sums[..out.len()]);
                    sums
                };
                let (gates, downs) = (product(0, gate), product(1, down));
                let sums = gates.iter().zip(downs).map(|(gate, down)| gate + down);
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum);
            }
        }
    }
}
