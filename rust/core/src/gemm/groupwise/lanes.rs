//! The vectors of the kernels: 16 lanes of 32 bits; a lane is a row of a block.

/// One or several registers of integers and of floats, with 16 lanes together.
///
/// # Safety
/// Every function needs the instruction set of its implementor. Pointers are valid for the bytes that the function
/// reads or writes and need no alignment.
pub(super) trait Lanes: Copy {
    /// Whether dot products have such a latency that few sums should use several chains.
    const CHAINS: bool = true;
    /// Whether an even number of lines uses matrix products, which multiply two lines at a time.
    const MATRIX: bool = false;
    /// Whether codes inside of a byte are multiplied where they are, if their sums have chains of their own
    /// ([`Lanes::scale_down`]).
    const IN_PLACE: bool = false;
    /// 32-bit integers, or words of codes.
    type Int: Copy;
    /// Single-precision floats.
    type Float: Copy;

    /// Zeros.
    unsafe fn int_zero() -> Self::Int;
    /// Loads 16 words.
    unsafe fn load(from: *const u8) -> Self::Int;
    /// Shifts each word right and fills with zeros. `shift` is below 32.
    unsafe fn shift(words: Self::Int, shift: u32) -> Self::Int;
    /// Each word AND a mask.
    unsafe fn mask(words: Self::Int, mask: u32) -> Self::Int;
    /// The bits of `low` selected by `mask`, and of `high` elsewhere.
    unsafe fn blend(low: Self::Int, high: Self::Int, mask: u32) -> Self::Int;
    /// Stores words.
    unsafe fn store_int(words: Self::Int, to: *mut u8);
    /// Sums of integers.
    unsafe fn int_add(a: Self::Int, b: Self::Int) -> Self::Int;
    /// The initial value of the dot products of a unit; [`Lanes::end`] combines `sum` with their result. By default
    /// `sum` itself, unless the products add up in another form.
    #[inline(always)]
    unsafe fn begin<const BITS: usize>(sum: Self::Int) -> Self::Int {
        sum
    }
    /// `sum` plus the dot product of four unsigned bytes of codes, each below `2^BITS`, with the four signed bytes of
    /// the word at `x`; at most eight times between [`Lanes::begin`] and [`Lanes::end`].
    unsafe fn dot<const BITS: usize>(sum: Self::Int, codes: Self::Int, x: *const i32) -> Self::Int;
    /// Adds to `sum` the dot products of a unit, which started with the result of `begin`.
    #[inline(always)]
    unsafe fn end<const BITS: usize>(_sum: Self::Int, dots: Self::Int) -> Self::Int {
        dots
    }
    /// `sum` plus the dot product of four codes with word `at` of a unit's words, whose number is a multiple of four.
    #[inline(always)]
    unsafe fn dot_word<const BITS: usize>(
        sum: Self::Int,
        codes: Self::Int,
        words: *const i32,
        at: usize,
    ) -> Self::Int {
        // SAFETY: the caller guarantees the set and the word.
        unsafe { Self::dot::<BITS>(sum, codes, words.wrapping_add(at)) }
    }
    /// Adds to the sums of two lines the products of two neighbouring quads of codes with the lines' words: two words
    /// at `words`, then two words of the next quad, `stride` words later. The sums are in an order of their own until
    /// [`Lanes::separate`]. Only if [`Lanes::MATRIX`].
    #[inline(always)]
    unsafe fn add_matrix(
        _sums: [Self::Int; 2],
        _quads: [Self::Int; 2],
        _words: *const i32,
        _stride: usize,
    ) -> [Self::Int; 2] {
        unreachable!("only for sets with matrix products")
    }
    /// The sums of two lines from those of [`Lanes::add_matrix`].
    #[inline(always)]
    unsafe fn separate(sums: [Self::Int; 2]) -> [Self::Int; 2] {
        sums
    }
    /// Divides sums by `2^bits`, of which they are multiples. Only if [`Lanes::IN_PLACE`].
    #[inline(always)]
    unsafe fn scale_down(_sums: Self::Int, _bits: u32) -> Self::Int {
        unreachable!("only for sets that multiply codes in place")
    }
    /// The codes of `BITS` bits of each byte that start at bit `shift`.
    #[inline(always)]
    unsafe fn extract<const BITS: usize>(words: Self::Int, shift: u32) -> Self::Int {
        // SAFETY: the caller guarantees the set.
        unsafe {
            let words = if shift == 0 {
                words
            } else {
                Self::shift(words, shift)
            };
            Self::mask(words, 0x0101_0101 * ((1 << BITS) - 1))
        }
    }
    /// Codes of three bits: the two low bits are the highest of each byte of `low`, and the high bit is bit `at`, 6 or
    /// 7, of each byte of `high`.
    #[inline(always)]
    unsafe fn join(low: Self::Int, high: Self::Int, at: u32) -> Self::Int {
        // SAFETY: the caller guarantees the set.
        unsafe {
            // The bits above the two low ones, then those below the high one, are masked out.
            let high = Self::shift(high, at - 2);
            Self::mask(Self::blend(Self::shift(low, 6), high, 0x0303_0303), 0x0707_0707)
        }
    }
    /// Converts integers to floats.
    unsafe fn to_float(words: Self::Int) -> Self::Float;

    /// Zeros.
    unsafe fn zero() -> Self::Float;
    /// Loads a float into all lanes.
    unsafe fn broadcast(from: *const f32) -> Self::Float;
    /// Loads 16 f16 values.
    unsafe fn load_f16(from: *const u8) -> Self::Float;
    /// Loads 16 bf16 values.
    unsafe fn load_bf16(from: *const u8) -> Self::Float;
    /// Products.
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `sum + a * b`, rounded once.
    unsafe fn add_product(sum: Self::Float, a: Self::Float, b: Self::Float) -> Self::Float;
    /// Stores floats.
    unsafe fn store(values: Self::Float, to: *mut f32);
    /// Prefetches the cache line at an address, which may be invalid.
    unsafe fn prefetch(at: *const u8);
}
