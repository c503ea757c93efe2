//! Panels of group-wise weights for [`crate::gemm::panel`], for the mode `bf16`.
//!
//! Panels hold weights rounded to bf16 ([`super::rounded`]), whose products add up over the whole row. Scaling the
//! sums of codes group by group instead, in matrix registers, decodes faster but took twice as long with 64 tokens
//! and more.
//!
//! Experts with few tokens are multiplied exactly: they are bound by reading, and their kernels need no panel. The
//! number of tokens above which panels are faster was measured on 14336 x 4096, with AVX2 on 512 x 4096 ([`fewest`]).

use std::ops::Range;

use super::part::Part;
use super::rounded;
use crate::formats::groupwise::{Layout, View};
use crate::gemm::panel::{
    Backend, Element, Instructions, Line, Section, Source, Square, Tile, TokenForm, round_token,
};
use crate::simd::Isa;
use crate::types::Activations;
use crate::types::Shape;

/// The minimum number of tokens of an expert for which panels are faster than exact products of `bits`-bit codes.
pub(super) fn fewest(backend: Backend, bits: usize) -> usize {
    match (backend.instructions(), bits) {
        (Instructions::Matrix, _) => 5,
        (Instructions::Avx512, _) => 10,
        (Instructions::Avx2, 8) => 8,
        (Instructions::Avx2, _) => 32,
        _ => 2,
    }
}

/// A tensor and the settings of its panels.
pub(super) struct Panels<'a> {
    view: View<'a>,
    layout: Layout,
    /// The instruction set for decoding.
    isa: Isa,
}

impl<'a> Panels<'a> {
    /// Panels for a backend.
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
