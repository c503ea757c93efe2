//! The matrix register (AMX) kernel for many tokens: a block of 16 rows by 8 or 16 tokens.
//!
//! The codes of a block are expanded to bytes once, into [`Panel`]: a register of 16 rows with four neighbouring
//! columns each is a row of the right factor. The products of a step are stored as integers and then processed with
//! the same operations as in [`super::kernel`], so results have the same bits.
//!
//! While the vector units scale the sums of a step, the matrix unit computes the next one. With groups of 64, scaling
//! takes most of the time: four operations per token and step of 16 rows, compared with 16 cycles of products for 16
//! tokens.

use super::Out;
use super::cursor::{Cursor, Weights};
use super::kernel::add_step;
use super::lanes::Lanes;
use super::tile::{DIGIT, Steps, Tile};
use super::x86::Avx512;
use crate::bits::UNIT;
use crate::formats::groupwise::{BLOCK_ROWS, REGISTER_BYTES};
use crate::gemm::tiles::{Configured, ROWS};
use crate::simd::{Isa, Kind};

/// The multiplier: the processor's registers, or, in tests, a loop that emulates them.
pub(super) enum Multiplier {
    Registers(Configured),
    #[cfg(test)]
    Emulated,
}

impl Multiplier {
    /// As [`Configured::multiply`].
    ///
    /// # Safety
    /// As [`Configured::multiply`].
    #[inline(always)]
    unsafe fn multiply(
        &self,
        depth: usize,
        a: *const u8,
        stride: usize,
        b: *const u8,
        count: usize,
        c: *mut i32,
    ) {
        // SAFETY: the caller guarantees the contract of both multipliers.
        unsafe {
            match self {
                Multiplier::Registers(registers) => registers.multiply(depth, a, stride, b, count, c),
                #[cfg(test)]
                Multiplier::Emulated => super::tests::emulate(depth, a, stride, b, count, c),
            }
        }
    }
}

/// The codes of a block as bytes: for each chunk of columns, for each four of them, 16 rows x 4; zeros at the end. A
/// worker has one panel per matrix of a call.
#[derive(Default)]
pub(super) struct Panel {
    bytes: Vec<u8>,
    /// The block that it holds, counted over all experts.
    block: Option<usize>,
}

impl Panel {
    /// Expands a block with AVX-512 unless the panel already holds it.
    ///
    /// # Safety
    /// `steps` belong to `weights.layout`.
    pub unsafe fn expand(&mut self, isa: Isa, weights: &Weights, steps: &Steps, block: usize) {
        if self.block == Some(block) {
            return;
        }
        assert!(isa.kind() == Kind::Avx512);
        self.bytes.resize(steps.chunks() * steps.chunk() * BLOCK_ROWS, 0);
        let used = steps.units * UNIT * BLOCK_ROWS;
        self.bytes[used..].fill(0);
        // SAFETY: `isa` proves that the processor has AVX-512; the caller guarantees the steps.
        unsafe { super::x86::expand(weights, steps, &mut self.bytes[..used]) }
        self.block = Some(block);
    }
}

/// The integer sums of a step, [planes, 16 tokens, 16 rows].
#[repr(align(64))]
struct Sums([[[i32; BLOCK_ROWS]; ROWS]; 3]);

/// Multiplies a block, expanded in `panel`, by a tile of rows, with AVX-512 and a multiplier.
///
/// # Safety
/// `steps` belong to `weights.layout`, and the tile belongs to `steps` ([`Tile::is_of`]).
pub(super) unsafe fn compute(
    isa: Isa,
    weights: &Weights,
    steps: &Steps,
    tile: &Tile,
    panel: &Panel,
    multiplier: &Multiplier,
    out: &mut Out,
) {
    assert!(isa.kind() == Kind::Avx512);
    assert!(panel.bytes.len() == steps.chunks() * steps.chunk() * BLOCK_ROWS);
    assert!(tile.tokens == ROWS && tile.words.len() * 4 == steps.chunks() * steps.chunk() * tile.lines());
    // SAFETY: `isa` proves that the processor has AVX-512. As asserted, panel and tile have all rows of all chunks, and
    // the tile has the planes of the arm; the caller guarantees the rest.
    unsafe {
        match tile.planes {
            1 => walk::<1>(weights, steps, tile, panel, multiplier, out),
            3 => walk::<3>(weights, steps, tile, panel, multiplier, out),
            planes => unreachable!("no mode has {planes} planes"),
        }
    }
}

/// # Safety
/// The processor has AVX-512. `steps` belong to `weights.layout`; panel and tile have 16 rows of each chunk, and the tile
/// has 16 tokens, P planes, and the scales and sums of `steps`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn walk<const P: usize>(
    weights: &Weights,
    steps: &Steps,
    tile: &Tile,
    panel: &Panel,
    multiplier: &Multiplier,
    out: &mut Out,
) {
    let mut sums = [const { Sums([[[0; BLOCK_ROWS]; ROWS]; 3]) }; 2];
    // SAFETY: each step is below `steps.count`, so the block has its parameters, and the tile 16 scales and sums; an
    // output has 16 floats. The caller guarantees the rest.
    unsafe {
        let cursor = Cursor::<Avx512>::new(weights);
        let mut totals = [Avx512::zero(); ROWS];
        for step in 0..steps.count {
            products::<P>(steps, step, tile, panel, multiplier, &mut sums[step % 2]);
            if step > 0 {
                let scales = cursor.scales(step - 1);
                add::<P>(&sums[(step - 1) % 2], scales, tile, step - 1, &mut totals);
            }
        }
        if let Some(last) = steps.count.checked_sub(1) {
            add::<P>(&sums[last % 2], cursor.scales(last), tile, last, &mut totals);
        }
        for (total, out) in totals.iter().zip(out) {
            Avx512::store(*total, out.as_mut_ptr());
        }
    }
}

/// The integer sums of a step.
///
/// # Safety
/// As [`walk`].
#[inline(always)]
unsafe fn products<const P: usize>(
    steps: &Steps,
    step: usize,
    tile: &Tile,
    panel: &Panel,
    multiplier: &Multiplier,
    sums: &mut Sums,
) {
    let (depth, chunks) = (steps.chunk(), steps.chunks_of(step));
    let bytes = depth * ROWS;
    for (plane, sums) in sums.0[..P].iter_mut().enumerate() {
        // SAFETY: the chunks belong to panel and tile, whose lengths the caller guarantees.
        unsafe {
            let a = tile
                .words
                .as_ptr()
                .cast::<u8>()
                .add((chunks.start * P + plane) * bytes);
            let b = panel.bytes.as_ptr().add(chunks.start * bytes);
            multiplier.multiply(depth, a, P * bytes, b, chunks.len(), sums.as_mut_ptr().cast());
        }
    }
}

/// Adds the sums of a step to the totals of all tokens.
///
/// # Safety
/// As [`walk`].
#[inline(always)]
unsafe fn add<const P: usize>(
    sums: &Sums,
    scales: (<Avx512 as Lanes>::Float, <Avx512 as Lanes>::Float),
    tile: &Tile,
    step: usize,
    totals: &mut [<Avx512 as Lanes>::Float; ROWS],
) {
    for (token, total) in totals.iter_mut().enumerate() {
        // SAFETY: 16 sums have 64 bytes; the caller guarantees AVX-512, and that the tile has the step.
        unsafe {
            let digit = |plane: usize| Avx512::to_float(Avx512::load(sums.0[plane][token].as_ptr().cast()));
            let mut sum = digit(0);
            for plane in 1..P {
                sum = Avx512::add_product(digit(plane), sum, Avx512::broadcast(&DIGIT));
            }
            *total = add_step::<Avx512>(*total, sum, scales, tile, step * ROWS + token);
        }
    }
}

const _: () = assert!(REGISTER_BYTES == 4 * ROWS);
