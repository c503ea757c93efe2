//! Products of one AMX register of tokens with up to two registers of rows, summed over many columns.
//!
//! They deliberately use only four registers. Measured on virtual cores of a Xeon (model 207), from the first-level
//! cache: in one state of a core all variants take 7.0 ns per product, the time of the instruction itself. In another
//! state, which depends on other load on the host, two by two registers take 31 ns per product with all eight
//! registers and 18.5 with six, one by two 16.5 with five and 14.3 with four, as if two threads of a core shared its
//! physical registers and about nine were left to each.

use std::arch::asm;

use super::Configured;

/// The type of the numbers in registers of 16 rows x 64 bytes, and of their products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// bf16 by bf16, 32 columns, into f32; numbers below 2^-126 count as zero.
    Bf16,
    /// Unsigned bytes of A by signed bytes of B, 64 columns, into i32.
    Byte,
}

/// The sums that products are added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// Zeros.
    Zero,
    /// The stored sums.
    Stored,
    /// The sums in the registers after the previous call, of the same shape.
    Kept,
}

/// The operands of a product: registers of A (16 tokens) and of B (16 rows each), and the location of their sums.
#[derive(Debug, Clone, Copy)]
pub struct Square {
    /// The registers of A, contiguous along the columns.
    pub a: *const u8,
    /// The registers of the first 16 rows of B, contiguous along the columns.
    pub b: *const u8,
    /// The bytes from `b` to the registers of the next 16 rows.
    pub b_next: usize,
    /// The sums of the first 16 rows, 16 x 16 words.
    pub c: *mut u8,
    /// The bytes from `c` to the sums of the next 16 rows.
    pub c_next: usize,
    /// The number of registers along the columns, at least 1.
    pub count: usize,
}

/// A loop over `count` registers along the columns with the given lines of assembly.
macro_rules! along_columns {
    ($square:expr, $($line:expr),* $(,)?) => {{
        let square: Square = $square;
        asm!(
            "2:",
            $($line,)*
            "add {a}, 1024",
            "add {b}, 1024",
            "add {b1}, 1024",
            "dec {count}",
            "jnz 2b",
            a = inout(reg) square.a => _,
            b = inout(reg) square.b => _,
            b1 = inout(reg) square.b.wrapping_add(square.b_next) => _,
            count = inout(reg) square.count => _,
            row = in(reg) 64usize,
            options(nostack, readonly),
        )
    }};
}

/// The loop of one product instruction, for two registers of rows or one.
macro_rules! products {
    ($product:literal, 2, $square:expr) => {
        along_columns!(
            $square,
            "tileloadd tmm2, [{a} + {row}]",
            "tileloadd tmm3, [{b} + {row}]",
            concat!($product, " tmm0, tmm2, tmm3"),
            "tileloadd tmm3, [{b1} + {row}]",
            concat!($product, " tmm1, tmm2, tmm3"),
        )
    };
    ($product:literal, 1, $square:expr) => {
        along_columns!(
            $square,
            "tileloadd tmm2, [{a} + {row}]",
            "tileloadd tmm3, [{b} + {row}]",
            concat!($product, " tmm0, tmm2, tmm3"),
        )
    };
}

impl Configured {
    /// Adds the products of `square`, with 1 or 2 registers of rows, to `sums`. They are stored at c if `store`;
    /// otherwise they stay in registers for the next call.
    ///
    /// # Safety
    /// The registers are configured by [`Configured::whole`], and all pointers are valid for `count` registers, those
    /// of the second 16 rows only if `rows` is 2.
    #[inline(always)]
    pub unsafe fn accumulate(
        &self,
        element: Element,
        rows: usize,
        (sums, store): (Sums, bool),
        square: Square,
    ) {
        debug_assert!(square.count > 0);
        // SAFETY: the caller guarantees the configuration and the registers at all pointers; nothing else uses tile
        // registers between these blocks of assembly.
        unsafe {
            begin(rows, sums, &square);
            match (element, rows) {
                (Element::Bf16, 2) => products!("tdpbf16ps", 2, square),
                (Element::Bf16, 1) => products!("tdpbf16ps", 1, square),
                (Element::Byte, 2) => products!("tdpbusd", 2, square),
                (Element::Byte, 1) => products!("tdpbusd", 1, square),
                _ => unreachable!("a product has 1 or 2 registers of rows, not {rows}"),
            }
            if store {
                end(rows, &square);
            }
        }
    }
}

/// Zeroes or loads the registers of sums, or keeps them.
///
/// # Safety
/// The contract of [`Configured::accumulate`].
#[inline(always)]
unsafe fn begin(rows: usize, sums: Sums, square: &Square) {
    let at = square.c.wrapping_add(square.c_next);
    // SAFETY: the caller guarantees the configuration and the sums at `c` of each register of rows.
    unsafe {
        match sums {
            Sums::Zero => asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem)),
            Sums::Stored => {
                asm!("tileloadd tmm0, [{at} + {row}]", at = in(reg) square.c, row = in(reg) 64usize, options(nostack));
                if rows == 2 {
                    asm!("tileloadd tmm1, [{at} + {row}]", at = in(reg) at, row = in(reg) 64usize, options(nostack));
                }
            }
            Sums::Kept => (),
        }
    }
}

/// Stores the registers of sums.
///
/// # Safety
/// The contract of [`Configured::accumulate`].
#[inline(always)]
unsafe fn end(rows: usize, square: &Square) {
    let at = square.c.wrapping_add(square.c_next);
    // SAFETY: the caller guarantees the configuration and the sums at `c` of each register of rows.
    unsafe {
        asm!("tilestored [{at} + {row}], tmm0", at = in(reg) square.c, row = in(reg) 64usize, options(nostack));
        if rows == 2 {
            asm!("tilestored [{at} + {row}], tmm1", at = in(reg) at, row = in(reg) 64usize, options(nostack));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::gemm::tiles::available;

    const COUNT: usize = 3;
    /// Bytes of a register.
    const REGISTER: usize = 1024;

    /// The increase of element (m, n) of the sums by registers of A and B.
    fn expected(element: Element, a: &[u8], b: &[u8], m: usize, n: usize) -> f64 {
        let mut sum = 0.0;
        for (k, word) in (0..COUNT).flat_map(|k| (0..16).map(move |word| (k, word))) {
            let a = &a[k * REGISTER + m * 64 + 4 * word..][..4];
            let b = &b[k * REGISTER + word * 64 + 4 * n..][..4];
            sum += match element {
                Element::Byte => (0..4)
                    .map(|i| f64::from(a[i]) * f64::from(b[i] as i8))
                    .sum::<f64>(),
                Element::Bf16 => {
                    let value = |x: &[u8]| f64::from(bf16::from_le_bytes([x[0], x[1]]).to_f32());
                    value(a) * value(b) + value(&a[2..]) * value(&b[2..])
                }
            };
        }
        sum
    }

    /// The bytes of small integers, so that sums are exact.
    fn numbers(element: Element, seed: usize) -> Vec<u8> {
        let values = (0..2 * COUNT * REGISTER).map(|i| (i * 7919 + seed) % 251);
        match element {
            Element::Byte => values.map(|v| v as u8).collect(),
            Element::Bf16 => {
                let values = values
                    .take(COUNT * REGISTER)
                    .map(|v| bf16::from_f32(v as f32 - 125.0));
                values.flat_map(|v| v.to_le_bytes()).collect()
            }
        }
    }

    #[test]
    fn squares_of_registers_are_sums_of_products() {
        if !available() {
            return eprintln!("skipped: this processor has no AMX, or the system does not permit its use");
        }
        let registers = Configured::whole().unwrap();
        for (element, rows) in [Element::Byte, Element::Bf16]
            .into_iter()
            .flat_map(|e| [(e, 1), (e, 2)])
        {
            let (a, b) = (numbers(element, 3), numbers(element, 100));
            let mut c = vec![0u32; 2 * 256];
            let square = Square {
                a: a.as_ptr(),
                b: b.as_ptr(),
                b_next: COUNT * REGISTER,
                c: c.as_mut_ptr().cast(),
                c_next: REGISTER,
                count: COUNT,
            };
            // SAFETY: three registers of A, two runs of three of B, and two registers of sums.
            unsafe {
                registers.accumulate(element, rows, (Sums::Zero, true), square);
                registers.accumulate(element, rows, (Sums::Stored, true), square);
                registers.accumulate(element, rows, (Sums::Zero, false), square);
                registers.accumulate(element, rows, (Sums::Kept, false), square);
                registers.accumulate(element, rows, (Sums::Kept, true), square);
            }
            for (i, &found) in c.iter().enumerate() {
                let (row, m, n) = (i / 256, i / 16 % 16, i % 16);
                let found = match element {
                    Element::Byte => f64::from(found as i32),
                    Element::Bf16 => f64::from(f32::from_bits(found)),
                };
                let b = &b[row * COUNT * REGISTER..];
                let expected = match row < rows {
                    true => 3.0 * expected(element, &a, b, m, n),
                    false => 0.0,
                };
                assert_eq!(found, expected, "{element:?} {rows} {i}");
            }
        }
    }
}
