//! The vectors that the kernels are written over: 16 lanes of 32 bits, a lane being a row of a block.

/// One or several registers of integers and of floats, 16 lanes together.
///
/// # Safety
/// Every function needs the instruction set of its implementor. Pointers are valid for what the function reads or
/// writes and need no alignment.
pub(super) trait Lanes: Copy {
    /// Whether a dot product takes so long that sums of few are worth several chains.
    const CHAINS: bool = true;
    /// 32-bit integers, or words of codes.
    type Int: Copy;
    /// Single-precision floats.
    type Float: Copy;

    /// Integers of zero.
    unsafe fn int_zero() -> Self::Int;
    /// 16 words from memory.
    unsafe fn load(from: *const u8) -> Self::Int;
    /// Each word shifted right, zeros coming in. `shift` is below 32.
    unsafe fn shift(words: Self::Int, shift: u32) -> Self::Int;
    /// Each word and a mask.
    unsafe fn mask(words: Self::Int, mask: u32) -> Self::Int;
    /// Bits of `low` where `mask` is set, of `high` elsewhere.
    unsafe fn blend(low: Self::Int, high: Self::Int, mask: u32) -> Self::Int;
    /// Words to memory.
    unsafe fn store_int(words: Self::Int, to: *mut u8);
    /// Sums of integers.
    unsafe fn int_add(a: Self::Int, b: Self::Int) -> Self::Int;
    /// What the dot products of a unit start from, of which [`Lanes::end`] makes `sum` and them: `sum` itself, unless
    /// they add up in another form.
    #[inline(always)]
    unsafe fn begin<const BITS: usize>(sum: Self::Int) -> Self::Int {
        sum
    }
    /// `sum` + the dot product of four unsigned bytes of codes, each below `2^BITS`, with the four signed bytes of the
    /// one word at `x`; between [`Lanes::begin`] and [`Lanes::end`], at most eight times.
    unsafe fn dot<const BITS: usize>(sum: Self::Int, codes: Self::Int, x: *const i32) -> Self::Int;
    /// `sum` with the dot products of a unit, which started from what `begin` made of it.
    #[inline(always)]
    unsafe fn end<const BITS: usize>(_sum: Self::Int, dots: Self::Int) -> Self::Int {
        dots
    }
    /// Integers as floats.
    unsafe fn to_float(words: Self::Int) -> Self::Float;

    /// Floats of zero.
    unsafe fn zero() -> Self::Float;
    /// A float from memory in all lanes.
    unsafe fn broadcast(from: *const f32) -> Self::Float;
    /// 16 f16 values.
    unsafe fn load_f16(from: *const u8) -> Self::Float;
    /// 16 bf16 values.
    unsafe fn load_bf16(from: *const u8) -> Self::Float;
    /// Products.
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `sum + a * b`, rounded once.
    unsafe fn add_product(sum: Self::Float, a: Self::Float, b: Self::Float) -> Self::Float;
    /// To memory.
    unsafe fn store(values: Self::Float, to: *mut f32);
    /// Asks for the cache line at an address, which need not be one.
    unsafe fn prefetch(at: *const u8);
}
