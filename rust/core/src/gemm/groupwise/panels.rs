//! Group-wise weights as [`crate::gemm::panel`] multiplies them, for the mode `bf16`.
//!
//! Panels hold weights rounded to bf16 ([`super::rounded`]), whose products add up over the whole row. Scaling the sums of
//! codes group by group instead, in matrix registers, decodes faster but took twice as long with 64 tokens and more.
//!
//! Experts with few tokens are multiplied exactly: reading takes the time, and their kernels need no panel. From how many
//! tokens on panels are faster was measured on 14336 x 4096, with AVX2 on 512 x 4096 ([`fewest`]).

use std::ops::Range;

use super::part::Part;
use super::rounded;
use crate::formats::groupwise::{Layout, View};
use crate::gemm::panel::{Backend, Element, Line, Section, Source, Square, Tile, TokenForm, round_token};
use crate::simd::Isa;
use crate::types::Activations;
use crate::types::Shape;

/// The tokens of an expert from which on panels are faster than exact products of codes of so many bits.
pub(super) fn fewest(backend: Backend, bits: usize) -> usize {
    match (backend, bits) {
        (Backend::Matrix, _) => 5,
        (Backend::Avx512, _) => 10,
        (Backend::Avx2, 8) => 8,
        (Backend::Avx2, _) => 32,
        _ => 2,
    }
}

/// A tensor, and how its panels are made.
pub(super) struct Panels<'a> {
    view: View<'a>,
    layout: Layout,
    /// The set that decodes it.
    isa: Isa,
}

impl<'a> Panels<'a> {
    /// The panels that a backend, which was found available, multiplies.
    pub fn new(view: View<'a>, backend: Backend) -> Self {
        Panels {
            view,
            layout: view.layout(),
            isa: backend.vectors(),
        }
    }
}

impl Source for Panels<'_> {
    type Open = ();

    fn shape(&self) -> Shape {
        self.layout.shape()
    }

    fn form(&self) -> TokenForm {
        TokenForm {
            element: Element::Bf16,
            columns: self.layout.shape().columns,
            section: self.layout.units().max(1),
            variant: 0,
            factors: 0,
        }
    }

    fn token(&self, x: &Activations, _: usize, token: usize, lane: usize, tile: &mut Tile) {
        let columns = self.layout.shape().columns;
        round_token(self.isa, x, (token, columns), |_| (), lane, tile);
    }

    fn open(&self, _: usize, (): &mut ()) {}

    fn decode(&self, block: usize, (): &mut (), chunks: Range<usize>, to: &mut [Line]) {
        let part = Part {
            block: self.view.block(block),
            layout: &self.layout,
            units: chunks,
        };
        rounded::decode(self.isa, &part, to);
    }

    fn finish(&self, _: &Section, _: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
        *out = sums.floats();
    }
}
