//! Chooses the kernels: the tokens of a tile, and the tile's product with a block.

use super::cursor::Weights;
#[cfg(target_arch = "x86_64")]
use super::kernel::by_pairs;
#[cfg(target_arch = "x86_64")]
use super::matrix::{self, Multiplier, Panel};
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::tile::{Form, Steps, Tile};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{MODES, Out, Precision, scalar, tile};
use crate::Result;
use crate::gemm::panel::Backend;
use crate::gemm::require_mode;
use crate::simd::{self, Isa, Kind};
use crate::types::{Activations, Mode};

/// The name of the kernel for an instruction set.
pub fn kernel_name(isa: Isa) -> &'static str {
    match isa.kind() {
        Kind::Neon => simd::name_with_matrix_products(isa),
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 if x86::has_avx_vnni() => "avx-vnni",
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 if Backend::of_bf16(isa).is_some() => "avx512-vnni, avx512-bf16 in the mode bf16",
        Kind::Avx512 => "avx512-vnni",
        Kind::Amx => "avx512-vnni, amx-int8 for 5 tokens and more, amx-bf16 in the mode bf16",
        _ => isa.name(),
    }
}

/// The kernels of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Engine {
    pub precision: Precision,
    /// The instruction set of the vector kernels.
    pub isa: Isa,
    pub matrix: Matrix,
    /// The backend for experts with many tokens, which are rounded to bf16; `None` uses integer products for all.
    pub panels: Option<Backend>,
}

/// Whether several tokens use matrix registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Matrix {
    Off,
    On,
    #[cfg(test)]
    Emulated,
}

/// The tokens of a tile of matrix registers.
pub(super) const ROW_TOKENS: usize = 16;
/// Fewer tokens use the vector kernels: scaling sums costs the same for 5 tokens as for 16, as much as the whole
/// vector kernel for 5.
const FEWEST_ROWS: usize = 5;

/// The buffers that a thread reuses for all blocks.
#[derive(Default)]
pub struct Scratch {
    #[cfg(target_arch = "x86_64")]
    panels: [Panel; 2],
    #[cfg(target_arch = "x86_64")]
    multiplier: Option<Multiplier>,
}

impl Engine {
    /// An engine for an instruction set.
    pub fn new(mode: Mode, isa: Isa) -> Result<Engine> {
        require_mode(mode, &MODES, "a group-wise tensor")?;
        let vectors = isa.vectors();
        let rounds = matches!(mode, Mode::Auto | Mode::Bf16);
        let matrix = if isa.kind() == Kind::Amx {
            Matrix::On
        } else {
            Matrix::Off
        };
        Ok(Engine {
            precision: match mode {
                Mode::Int8 => Precision::Int8,
                _ => Precision::Exact,
            },
            isa: vectors,
            matrix,
            panels: rounds.then(|| Backend::of_bf16(isa)).flatten(),
        })
    }

    /// The maximum number of tokens of a tile for vectors, limited by the registers that are free for sums.
    fn widest(&self) -> usize {
        match (self.precision, self.isa.kind()) {
            (Precision::Int8, Kind::Avx512) => 8,
            (Precision::Int8, Kind::Neon) => 6,
            (Precision::Int8, _) | (_, Kind::Avx512) => 4,
            _ => 2,
        }
    }

    /// The next tile of `left` tokens, at least one: the number of tokens it takes, the number with padding, and its
    /// form.
    pub fn next_tile(&self, left: usize) -> (usize, usize, Form) {
        if self.matrix != Matrix::Off && left >= FEWEST_ROWS {
            return (left.min(ROW_TOKENS), ROW_TOKENS, Form::Rows);
        }
        // As even as possible: the fewer tokens share weights, the longer each takes.
        let tokens = left.div_ceil(left.div_ceil(self.widest()));
        let pairs = self.isa.kind() == Kind::Neon && simd::has_matrix_products();
        if !(pairs && tokens > 1 && self.precision == Precision::Int8) {
            return (tokens, tokens, Form::Words);
        }
        // Matrix products take two lines at a time.
        let padded = tokens.next_multiple_of(2);
        (padded.min(left), padded, Form::Words)
    }

    /// Configures matrix registers for a few blocks if the tiles use them; [`Engine::rest`] releases them.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub fn start(&self, scratch: &mut Scratch, steps: &Steps, tiles: &[&Tile]) {
        #[cfg(target_arch = "x86_64")]
        if tiles.iter().any(|tile| tile.form == Form::Rows) {
            scratch.multiplier = match self.matrix {
                Matrix::Off => None,
                Matrix::On => crate::gemm::tiles::Configured::new(steps.chunk()).map(Multiplier::Registers),
                #[cfg(test)]
                Matrix::Emulated => Some(Multiplier::Emulated),
            };
        }
    }

    /// Ends what [`Engine::start`] began, because another matrix may have steps of another size.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub fn rest(&self, scratch: &mut Scratch) {
        #[cfg(target_arch = "x86_64")]
        {
            scratch.multiplier = None;
        }
    }

    /// Multiplies one or two neighbouring blocks, starting at `block` (counted over all experts), by a tile.
    ///
    /// # Safety
    /// `steps` belong to the blocks' layout, and the tile belongs to `steps` ([`Tile::is_of`]).
    #[inline]
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub unsafe fn compute(
        &self,
        scratch: &mut Scratch,
        block: usize,
        weights: &[Weights],
        steps: &Steps,
        tile: &Tile,
        out: &mut [Out; 2],
    ) {
        #[cfg(target_arch = "x86_64")]
        if let (Form::Rows, Some(multiplier)) = (tile.form, &scratch.multiplier) {
            for (i, (weights, out)) in weights.iter().zip(out).enumerate() {
                // SAFETY: the caller guarantees steps and tile.
                unsafe {
                    scratch.panels[i].expand(self.isa, weights, steps, block + i);
                    matrix::compute(
                        self.isa,
                        weights,
                        steps,
                        tile,
                        &scratch.panels[i],
                        multiplier,
                        out,
                    );
                }
            }
            return;
        }
        #[cfg(target_arch = "x86_64")]
        if let (Kind::Avx512, Ok(pair), true) = (self.isa.kind(), weights.try_into(), by_pairs(tile.lines()))
        {
            // SAFETY: `isa` proves that the processor has AVX-512; the caller guarantees steps and tile.
            return unsafe { x86::pair_avx512(pair, steps, tile, out) };
        }
        for (weights, out) in weights.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
            // SAFETY: `isa` proves that the processor has AVX-512, AVX2 or NEON, and AVX-VNNI has been detected; the
            // caller guarantees steps and tile.
            unsafe {
                match self.isa.kind() {
                    #[cfg(target_arch = "x86_64")]
                    Kind::Avx512 => x86::compute_avx512(weights, steps, tile, out),
                    #[cfg(target_arch = "x86_64")]
                    Kind::Avx2 if x86::has_avx_vnni() => x86::compute_avx_vnni(weights, steps, tile, out),
                    #[cfg(target_arch = "x86_64")]
                    Kind::Avx2 => x86::compute_avx2(weights, steps, tile, out),
                    #[cfg(target_arch = "aarch64")]
                    Kind::Neon => neon::compute(weights, steps, tile, out),
                    _ => scalar::compute(weights, steps, tile, out),
                }
            }
        }
    }

    /// Quantizes token `token` of `x`, of `columns` columns.
    pub fn quantized(&self, steps: &Steps, columns: usize, x: &Activations, token: usize) -> Tile {
        let mut tile = Tile::single(steps, self.precision.planes());
        tile::fill(self.isa, steps, columns, x, token, self.precision, &mut tile);
        tile
    }
}
