//! The backends that multiply a panel by tiles of tokens.

use super::{LANES, Line, Square};
use crate::simd::{self, Isa, Kind};

/// The instructions for products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Instructions {
    /// AMX registers.
    Matrix,
    /// bf16 dot products of AVX-512.
    Avx512,
    /// f32 products of AVX2 after expanding bf16.
    Avx2,
    /// f32 products of NEON after expanding bf16.
    Neon,
    /// Portable loops over f32.
    Portable,
    /// Portable loops that emulate AMX registers.
    #[cfg(test)]
    Emulated,
}

/// Instructions for products that this processor supports: like an [`Isa`], only detection makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Backend {
    /// Invariant: the processor supports them.
    instructions: Instructions,
    vectors: Isa,
}

impl Backend {
    /// Portable loops over f32.
    #[cfg(test)]
    pub const PORTABLE: Backend = Backend {
        instructions: Instructions::Portable,
        vectors: Isa::SCALAR,
    };

    /// Portable loops that emulate AMX registers, with panels decoded by AVX-512 if the processor has it.
    #[cfg(test)]
    pub fn emulated() -> Backend {
        Backend {
            instructions: Instructions::Emulated,
            vectors: Isa::new(Kind::Avx512).unwrap_or(Isa::SCALAR),
        }
    }

    /// The bf16 backend for an instruction set. `None` for AVX-512 without bf16, for which kernels that multiply f32
    /// or bytes without panels are faster.
    pub fn of_floats(isa: Isa) -> Option<Backend> {
        let instructions = match isa.kind() {
            Kind::Amx => Instructions::Matrix,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 if is_x86_feature_detected!("avx512bf16") => Instructions::Avx512,
            Kind::Avx512 => return None,
            Kind::Avx2 => Instructions::Avx2,
            Kind::Neon => Instructions::Neon,
            Kind::Scalar => Instructions::Portable,
        };
        Some(Backend {
            instructions,
            vectors: isa.vectors(),
        })
    }

    /// The backend of AMX registers, if the set has them.
    pub fn of_matrix(isa: Isa) -> Option<Backend> {
        Backend::of_floats(isa).filter(|backend| backend.instructions == Instructions::Matrix)
    }

    /// Like [`Backend::of_floats`], for a format whose exact mode has integer dot products. Also `None` if those are
    /// faster: with AVX2 that has them, and with AVX-512 on Intel, which starts twice as many of them as dot products
    /// of bf16 (256 tokens by 14336 x 4096 in int4 took 175 ms exactly and 289 with panels). NEON has not been
    /// measured: for 16 weights its exact mode takes three dot products, while floats take four multiplications after
    /// conversions.
    pub fn of_bf16(isa: Isa) -> Option<Backend> {
        let integers = match isa.kind() {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => simd::has_dot_products(),
            Kind::Avx512 => !simd::is_amd(),
            _ => false,
        };
        if integers { None } else { Backend::of_floats(isa) }
    }

    /// The instructions for products, which the processor supports.
    #[inline]
    pub fn instructions(self) -> Instructions {
        self.instructions
    }

    /// Whether sums can stay in registers from one product to the next.
    pub fn keeps_sums(self) -> bool {
        match self.instructions {
            Instructions::Matrix => true,
            #[cfg(test)]
            Instructions::Emulated => true,
            _ => false,
        }
    }

    /// The vector instructions for decoding its panels.
    pub fn vectors(self) -> Isa {
        self.vectors
    }
}

/// The initial sums of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// Zeros.
    Zero,
    /// The stored sums.
    Stored,
    /// The sums of the previous product, with the same blocks and tile, in registers ([`Backend::keeps_sums`]).
    Kept,
}

/// A product of one or two blocks with a tile, over some chunks of a step.
pub(super) struct Product<'a> {
    /// The lines of the tile.
    pub tokens: &'a [Line],
    /// The number of tokens, at most 16.
    pub count: usize,
    /// The lines of the first block; those of the second start `block_lines` after them.
    pub panel: &'a [Line],
    pub block_lines: usize,
    /// The number of blocks, 1 or 2.
    pub blocks: usize,
    pub chunks: usize,
    pub start: Start,
    /// Whether to store `sums`; not needed if the next product starts from [`Start::Kept`].
    pub store: bool,
    /// The sums of the blocks, `block_sums` squares apart.
    pub sums: &'a mut [Square<u32>],
    pub block_sums: usize,
}

impl Product<'_> {
    /// Panics if the lengths do not match: kernels rely on them.
    pub fn check(&self) {
        let lines = self.chunks * LANES;
        assert!(self.chunks > 0 && (1..=2).contains(&self.blocks) && (1..=LANES).contains(&self.count));
        assert!(self.tokens.len() >= lines);
        assert!(self.panel.len() >= (self.blocks - 1) * self.block_lines + lines);
        assert!(self.sums.len() > (self.blocks - 1) * self.block_sums);
    }

    /// The line of a token at chunk `chunk`.
    #[inline(always)]
    pub fn token(&self, token: usize, chunk: usize) -> &Line {
        &self.tokens[chunk * LANES + token]
    }

    /// The sums of a token and a block.
    #[inline(always)]
    pub fn row(&mut self, token: usize, block: usize) -> &mut [u32; LANES] {
        &mut self.sums[block * self.block_sums].0[token]
    }
}

/// The bits of an f32 rounded to bf16, to nearest, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    match x.is_nan() {
        true => bits >> 16 | 0x40,
        false => bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16,
    }
}

/// Two f32 rounded to bf16.
#[inline(always)]
pub(crate) fn pair(low: f32, high: f32) -> u32 {
    bf16(low) | bf16(high) << 16
}

/// The two bf16 values of a word.
#[inline(always)]
pub(super) fn values(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// Computes a bf16 product in portable Rust. Products of two bf16 numbers are exact in f32, so sums are the same with
/// and without fused additions.
pub(super) fn multiply_portable(product: &mut Product) {
    let (blocks, count) = (product.blocks, product.count);
    for (block, token) in (0..blocks).flat_map(|b| (0..count).map(move |t| (b, t))) {
        let mut sums = match product.start == Start::Zero {
            true => [0.0; LANES],
            false => product.row(token, block).map(f32::from_bits),
        };
        for chunk in 0..product.chunks {
            let words = product.token(token, chunk).0;
            let lines = &product.panel[block * product.block_lines + chunk * LANES..][..LANES];
            for (word, line) in words.into_iter().zip(lines) {
                let x = values(word);
                for (sum, &weights) in sums.iter_mut().zip(&line.0) {
                    let [even, odd] = values(weights);
                    *sum += even * x[0];
                    *sum += odd * x[1];
                }
            }
        }
        *product.row(token, block) = sums.map(f32::to_bits);
    }
}

/// Computes a product like AMX registers, for all 16 tokens of the tile.
#[cfg(test)]
pub(super) fn multiply_emulated(element: super::Element, product: &mut Product) {
    let (blocks, count, chunks) = (product.blocks, LANES, product.chunks);
    if element == super::Element::Bf16 {
        product.count = count;
        return multiply_portable(product);
    }
    for (block, token) in (0..blocks).flat_map(|b| (0..count).map(move |t| (b, t))) {
        let mut sums = match product.start == Start::Zero {
            true => [0; LANES],
            false => *product.row(token, block),
        };
        for (chunk, word) in (0..chunks).flat_map(|c| (0..LANES).map(move |w| (c, w))) {
            let x = product.token(token, chunk).0[word].to_le_bytes();
            let line = &product.panel[block * product.block_lines + chunk * LANES + word];
            for (sum, weights) in sums.iter_mut().zip(line.0) {
                let terms = weights.to_le_bytes().into_iter().zip(x);
                let dot: i32 = terms.map(|(w, x)| i32::from(w as i8) * i32::from(x)).sum();
                *sum = sum.wrapping_add(dot as u32);
            }
        }
        *product.row(token, block) = sums;
    }
}
