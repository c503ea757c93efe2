//! The weights of a block and the positions in it.
//!
//! A block is one ascending stream of records: parameters of some steps, followed by the codes of these steps
//! ([`crate::formats::groupwise`]). Kernels ask a [`Cursor`] for the parameters and the codes of a step, and it prefetches
//! the memory ahead of them.

use super::STEP_COLUMNS;
use super::lanes::Lanes;
use crate::bits::UNIT;
use crate::formats::groupwise::{BLOCK_ROWS, Layout, ParameterType, REGISTER_BYTES, View};
use crate::simd;

/// The prefetch distance in bytes, on processors for which prefetching is faster than relying on the hardware.
///
/// A block is one ascending stream of alternating parameters and codes. On Zen 4 two threads read it at 98% of the
/// speed of plain sums without prefetching, and at 92% with it; on Xeons, 1 to 2 KB gave up to a quarter, as on Zen
/// 3.
const AHEAD: usize = 1536;
/// Like [`AHEAD`], for two blocks read side by side for few lines.
pub(super) const PAIR_AHEAD: usize = 2560;

/// The prefetch distance: `bytes`, or 0 if the processor does not need it.
pub(super) fn ahead(bytes: usize) -> usize {
    if simd::reads_ahead() { 0 } else { bytes }
}

/// The weights that a kernel reads.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    /// The bytes of the rows. Invariant: a whole block of `layout`.
    block: &'a [u8],
    pub layout: Layout,
}

impl<'a> Weights<'a> {
    /// Block `block` of a tensor, counted over all experts.
    pub fn new(view: &View<'a>, block: usize) -> Weights<'a> {
        Weights {
            block: view.block(block),
            layout: view.layout(),
        }
    }
}

/// The positions in a block while a kernel walks through it, step by step.
#[derive(Clone, Copy)]
pub(super) struct Cursor<V: Lanes> {
    codes: *const u8,
    parameters: *const u8,
    /// The bytes of a record.
    record: usize,
    /// A step's record is its number shifted right by `shift`; its position in the record is the rest, masked.
    shift: u32,
    mask: usize,
    /// The distances from a step's parameters, and from its codes, to those of the next step in the same record.
    strides: [usize; 2],
    ahead: usize,
    symmetric: bool,
    half_range: f32,
    bf16: bool,
    lanes: std::marker::PhantomData<V>,
}

impl<V: Lanes> Cursor<V> {
    /// A block with columns starts with a record's parameters, of 2 bytes each, followed by registers of 16 lanes. A
    /// block without columns has no steps, so nothing is read.
    #[inline(always)]
    pub fn new(weights: &Weights) -> Self {
        Cursor::with(weights, ahead(AHEAD))
    }

    /// Like [`Cursor::new`], with a prefetch distance of `ahead` bytes, or without prefetching.
    #[inline(always)]
    pub fn with(weights: &Weights, ahead: usize) -> Self {
        let (spec, record) = (weights.layout.spec(), weights.layout.record());
        // All steps of a whole row belong to its only record and share its parameters; two groups of 16 share a unit.
        let (shift, mask, columns) = match spec.group {
            0 => (usize::BITS - 1, usize::MAX, STEP_COLUMNS),
            group => (record.groups as u32 - 1, record.groups - 1, group),
        };
        let parameters = if spec.group == 0 { 0 } else { record.group_bytes };
        Cursor {
            codes: weights.block.as_ptr().wrapping_add(record.parameter_bytes),
            parameters: weights.block.as_ptr(),
            record: record.bytes,
            shift,
            mask,
            strides: [
                parameters,
                columns / UNIT * weights.layout.bits() * REGISTER_BYTES,
            ],
            ahead,
            symmetric: spec.symmetric,
            half_range: -((1u32 << (spec.bits - 1)) as f32),
            bf16: spec.parameters == ParameterType::Bf16,
            lanes: std::marker::PhantomData,
        }
    }

    /// The offsets of a step's parameters and codes from those of the first one.
    #[inline(always)]
    fn places(&self, step: usize) -> [usize; 2] {
        let record = (step >> self.shift) * self.record;
        self.strides.map(|stride| record + (step & self.mask) * stride)
    }

    /// The codes of a step; for a group of 16 columns, those of the unit that contains it.
    ///
    /// # Safety
    /// The step exists.
    #[inline(always)]
    pub unsafe fn codes(&self, step: usize) -> *const u8 {
        // SAFETY: the caller's step exists, so its codes do.
        unsafe { self.codes.add(self.places(step)[1]) }
    }

    /// The scales and offsets of a step.
    ///
    /// # Safety
    /// The step exists, and the processor supports the set of `V`.
    #[inline(always)]
    pub unsafe fn scales(&self, step: usize) -> (V::Float, V::Float) {
        // SAFETY: the caller's step exists, so its parameters do; the caller guarantees the trait's set. A prefetch
        // may use any address.
        unsafe {
            let at = self.parameters.add(self.places(step)[0]);
            if self.ahead > 0 {
                V::prefetch(at.wrapping_add(self.ahead));
            }
            let scale = self.parameter(at);
            let offset = match self.symmetric {
                true => V::mul(scale, V::broadcast(&self.half_range)),
                false => self.parameter(at.add(2 * BLOCK_ROWS)),
            };
            (scale, offset)
        }
    }

    /// Loads a parameter of 16 rows.
    ///
    /// # Safety
    /// 32 bytes are readable at `at`, and the processor supports the set of `V`.
    #[inline(always)]
    unsafe fn parameter(&self, at: *const u8) -> V::Float {
        // SAFETY: the caller guarantees the bytes and the set.
        unsafe {
            match self.bf16 {
                true => V::load_bf16(at),
                false => V::load_f16(at),
            }
        }
    }

    /// The start of a unit of `BITS` bits of a step; the memory ahead of its registers is prefetched.
    ///
    /// # Safety
    /// The unit belongs to the step, and the processor supports the set of `V`.
    #[inline(always)]
    pub unsafe fn unit<const BITS: usize>(&self, step: usize, unit: usize) -> *const u8 {
        // SAFETY: the caller's unit exists; a prefetch may use any address.
        unsafe {
            let at = self.codes(step).add(unit * BITS * REGISTER_BYTES);
            if self.ahead > 0 {
                for i in 0..BITS {
                    V::prefetch(at.wrapping_add(self.ahead + i * REGISTER_BYTES));
                }
            }
            at
        }
    }
}
