//! Sixteen lanes in portable Rust.

use super::Out;
use super::cursor::Weights;
use super::kernel;
use super::lanes::Lanes;
use super::tile::{Steps, Tile};

/// Multiplies a block by a tile.
///
/// # Safety
/// `steps` belong to `weights.layout`, and the tile belongs to `steps` ([`Tile::is_of`]).
pub(super) unsafe fn compute(weights: &[Weights; 1], steps: &Steps, tile: &Tile, out: &mut [Out; 1]) {
    let ([weights], [out]) = (weights, out);
    // SAFETY: portable code needs no instruction set; the caller guarantees the rest.
    unsafe {
        match weights.layout.bits() {
            2 => kernel::multiply_in_loops::<Portable, 2>(weights, steps, tile, out),
            3 => kernel::multiply_in_loops::<Portable, 3>(weights, steps, tile, out),
            4 => kernel::multiply_in_loops::<Portable, 4>(weights, steps, tile, out),
            _ => kernel::multiply_in_loops::<Portable, 8>(weights, steps, tile, out),
        }
    }
}

/// Arrays of 16.
#[derive(Clone, Copy)]
struct Portable;

#[inline(always)]
fn each<T: Copy, U: Copy + Default>(a: [T; 16], f: impl Fn(T) -> U) -> [U; 16] {
    let mut out = [U::default(); 16];
    out.iter_mut().zip(a).for_each(|(out, a)| *out = f(a));
    out
}

#[inline(always)]
fn pairs<T: Copy, U: Copy + Default>(a: [T; 16], b: [T; 16], f: impl Fn(T, T) -> U) -> [U; 16] {
    let mut out = [U::default(); 16];
    out.iter_mut()
        .zip(a)
        .zip(b)
        .for_each(|((out, a), b)| *out = f(a, b));
    out
}

impl Lanes for Portable {
    type Int = [u32; 16];
    type Float = [f32; 16];

    #[inline(always)]
    unsafe fn int_zero() -> [u32; 16] {
        [0; 16]
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> [u32; 16] {
        // SAFETY: the caller guarantees 64 readable bytes at `from`, and an array of bytes needs no alignment.
        let bytes = unsafe { from.cast::<[[u8; 4]; 16]>().read() };
        each(bytes, u32::from_le_bytes)
    }
    #[inline(always)]
    unsafe fn shift(words: [u32; 16], shift: u32) -> [u32; 16] {
        each(words, |word| word >> shift)
    }
    #[inline(always)]
    unsafe fn mask(words: [u32; 16], mask: u32) -> [u32; 16] {
        each(words, |word| word & mask)
    }
    #[inline(always)]
    unsafe fn blend(low: [u32; 16], high: [u32; 16], mask: u32) -> [u32; 16] {
        pairs(low, high, |low, high| low & mask | high & !mask)
    }
    #[inline(always)]
    unsafe fn store_int(words: [u32; 16], to: *mut u8) {
        // SAFETY: the caller guarantees 64 writable bytes at `to`, and an array of bytes needs no alignment.
        unsafe { to.cast::<[[u8; 4]; 16]>().write(each(words, u32::to_le_bytes)) }
    }
    #[inline(always)]
    unsafe fn int_add(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        pairs(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn dot<const BITS: usize>(sum: [u32; 16], codes: [u32; 16], x: *const i32) -> [u32; 16] {
        // SAFETY: the caller guarantees a readable word at `x`.
        let x = unsafe { x.read_unaligned() }
            .to_le_bytes()
            .map(|byte| i32::from(byte as i8));
        pairs(sum, codes, |sum, codes| {
            let codes = codes.to_le_bytes().map(i32::from);
            let dot = codes[0] * x[0] + codes[1] * x[1] + codes[2] * x[2] + codes[3] * x[3];
            sum.wrapping_add(dot as u32)
        })
    }
    #[inline(always)]
    unsafe fn to_float(words: [u32; 16]) -> [f32; 16] {
        each(words, |word| word as i32 as f32)
    }

    #[inline(always)]
    unsafe fn zero() -> [f32; 16] {
        [0.0; 16]
    }
    #[inline(always)]
    unsafe fn broadcast(from: *const f32) -> [f32; 16] {
        // SAFETY: the caller guarantees a readable float at `from`.
        [unsafe { from.read_unaligned() }; 16]
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> [f32; 16] {
        // SAFETY: the caller guarantees 32 readable bytes at `from`, and an array of bytes needs no alignment.
        let bytes = unsafe { from.cast::<[[u8; 2]; 16]>().read() };
        each(bytes, |bytes| half::f16::from_le_bytes(bytes).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> [f32; 16] {
        // SAFETY: the caller guarantees 32 readable bytes at `from`, and an array of bytes needs no alignment.
        let bytes = unsafe { from.cast::<[[u8; 2]; 16]>().read() };
        each(bytes, |bytes| half::bf16::from_le_bytes(bytes).to_f32())
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        pairs(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn add_product(sum: [f32; 16], a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        let mut out = sum;
        out.iter_mut()
            .zip(a)
            .zip(b)
            .for_each(|((out, a), b)| *out = a.mul_add(b, *out));
        out
    }
    #[inline(always)]
    unsafe fn store(values: [f32; 16], to: *mut f32) {
        // SAFETY: the caller guarantees 64 writable bytes at `to`.
        unsafe { to.cast::<[f32; 16]>().write_unaligned(values) }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}
