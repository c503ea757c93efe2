//! The vectors that the kernels are written over: 8 or 16 lanes of 32 bits, a lane being a row of a block.

/// Registers of integers and floats.
///
/// # Safety
/// Every function needs the instruction set of its implementor. Pointers are valid for what the function reads or
/// writes and need no alignment.
pub(super) trait Lanes: Copy {
    /// Rows that a register holds: 16, or 8 for half a block.
    const LANES: usize;
    /// 32-bit integers, or words of codes.
    type Int: Copy;
    /// Single-precision floats.
    type Float: Copy;

    /// Integers of zero.
    unsafe fn int_zero() -> Self::Int;
    /// `LANES` words from memory.
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
    /// What a unit's dot products are added to, given the sum before them: sets without dot products into 32 bits add up to
    /// eight of them in 16 bits.
    #[inline(always)]
    unsafe fn open<const BITS: usize>(sum: Self::Int) -> Self::Int {
        sum
    }
    /// The sum before a unit with what [`Lanes::open`] has become.
    #[inline(always)]
    unsafe fn close<const BITS: usize>(_sum: Self::Int, opened: Self::Int) -> Self::Int {
        opened
    }
    /// `sum`, which was opened, + the dot product of four unsigned bytes of codes, each below `2^BITS`, with the four
    /// signed bytes of the one word at `x`.
    unsafe fn dot<const BITS: usize>(sum: Self::Int, codes: Self::Int, x: *const i32) -> Self::Int;
    /// Integers as floats.
    unsafe fn to_float(words: Self::Int) -> Self::Float;

    /// Floats of zero.
    unsafe fn zero() -> Self::Float;
    /// A float from memory in all lanes.
    unsafe fn broadcast(from: *const f32) -> Self::Float;
    /// `LANES` f16 values.
    unsafe fn load_f16(from: *const u8) -> Self::Float;
    /// `LANES` bf16 values.
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
