//! Group-wise weights as [`crate::gemm::panel`] multiplies them, for the mode `bf16`.
//!
//! Panels hold weights rounded to bf16 ([`super::rounded`]), whose products add up over the whole row. Scaling the sums of
//! codes group by group instead, in matrix registers, decodes faster but took twice as long with 64 tokens and more.
//!
//! Experts with few tokens are multiplied exactly: reading takes the time, and their kernels need no panel. From how many
//! tokens on panels are faster was measured on 14336 x 4096 ([`fewest`]).

use std::ops::Range;

use super::part::Part;
use super::rounded;
use crate::formats::groupwise::{Blocks, Layout};
use crate::gemm::panel::{Backend, Element, Line, Section, Source, Square, Tile, TokenForm, round_token};
use crate::simd::Isa;
use crate::types::Activations;
use crate::types::Shape;

/// The tokens of an expert from which on panels are faster.
pub(super) fn fewest(backend: Backend) -> usize {
    match backend {
        Backend::Matrix => 5,
        Backend::Avx512 => 10,
        Backend::Avx2 => 8,
        _ => 2,
    }
}

/// A tensor, and how its panels are made.
pub(super) struct Panels<'a, B> {
    blocks: &'a B,
    layout: Layout,
    /// The set that decodes it.
    isa: Isa,
}

impl<'a, B: Blocks> Panels<'a, B> {
    /// The panels that a backend, which was found available, multiplies.
    pub fn new(blocks: &'a B, backend: Backend) -> Self {
        Panels {
            blocks,
            layout: blocks.layout(),
            isa: backend.vectors(),
        }
    }

    fn part<'s>(
        &'s self,
        block: usize,
        buffer: &'s [u8],
        units: Range<usize>,
        unused: &'s mut Vec<u8>,
    ) -> Part<'s> {
        Part {
            block: match buffer.is_empty() {
                true => self.blocks.fetch(block, unused),
                false => buffer,
            },
            layout: &self.layout,
            units,
        }
    }
}

impl<B: Blocks> Source for Panels<'_, B> {
    /// The block's bytes where they are coded.
    type Open = Vec<u8>;

    fn shape(&self) -> Shape {
        self.layout.shape()
    }

    fn form(&self) -> TokenForm {
        TokenForm {
            element: Element::Bf16,
            columns: self.layout.shape().columns,
            section: self.layout.units().max(1),
            variant: 0,
        }
    }

    fn token(&self, x: &Activations, token: usize, lane: usize, tile: &mut Tile) {
        let columns = self.layout.shape().columns;
        round_token(self.isa, x, (token, columns, 1), lane, tile);
    }

    fn open(&self, block: usize, buffer: &mut Vec<u8>) {
        self.blocks.fetch(block, buffer);
    }

    fn decode(&self, block: usize, buffer: &mut Vec<u8>, chunks: Range<usize>, to: &mut [Line]) {
        let mut unused = Vec::new();
        let part = self.part(block, buffer, chunks, &mut unused);
        rounded::decode(self.isa, &part, to);
    }

    fn finish(&self, _: &Section, _: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
        *out = sums.floats();
    }
}
