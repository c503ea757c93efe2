//! Products of a register of tokens by up to two of rows, summed over many columns.
//!
//! Four registers are all that they use, on purpose. Measured on virtual cores of a Xeon (model 207), from the first-level
//! cache: while a core is in one state, every form takes 7.0 ns a product, the time of the instruction itself. In another,
//! which varies with what else runs on the host, squares of two by two, which name all eight registers, take 31 ns,
//! in six registers 18.5; a register by two in five 16.5, in four 14.3. That is as if two threads of a core shared the
//! registers behind those that programs name and about nine were left to each.

use std::arch::asm;

use super::Configured;

/// What registers of 16 rows x 64 bytes hold and how they multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// bf16 by bf16, 32 columns, into f32; numbers below 2^-126 count as zero.
    Bf16,
    /// Unsigned bytes of A by signed bytes of B, 64 columns, into i32.
    Byte,
}

/// Where sums start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// At zero.
    Zero,
    /// At what is stored.
    Stored,
    /// At what the registers hold since the call before, of the same shape.
    Kept,
}

/// A register of A (16 tokens) by registers of B (16 rows each), and where their sums are.
#[derive(Debug, Clone, Copy)]
pub struct Square {
    /// Registers of A, one after the other along the columns.
    pub a: *const u8,
    /// Registers of B, one after the other along the columns.
    pub b: *const u8,
    /// Bytes from a register of the first rows to that of the next ones.
    pub b_next: usize,
    /// Sums of the first rows, 16 x 16 words.
    pub c: *mut u8,
    /// Bytes to the sums of the next rows.
    pub c_next: usize,
    /// Registers along the columns, at least 1.
    pub count: usize,
}

/// Runs lines for each of `count` registers, the places moving on by one.
macro_rules! walk {
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

/// The loop of one instruction, by two registers of rows or one.
macro_rules! products {
    ($product:literal, 2, $square:expr) => {
        walk!(
            $square,
            "tileloadd tmm2, [{a} + {row}]",
            "tileloadd tmm3, [{b} + {row}]",
            concat!($product, " tmm0, tmm2, tmm3"),
            "tileloadd tmm3, [{b1} + {row}]",
            concat!($product, " tmm1, tmm2, tmm3"),
        )
    };
    ($product:literal, 1, $square:expr) => {
        walk!(
            $square,
            "tileloadd tmm2, [{a} + {row}]",
            "tileloadd tmm3, [{b} + {row}]",
            concat!($product, " tmm0, tmm2, tmm3"),
        )
    };
}

impl Configured {
    /// Adds the products of `square`, of 1 or 2 registers of rows, to sums, and stores them at c if `store`; otherwise they
    /// are kept for the next call.
    ///
    /// # Safety
    /// The registers are configured by [`Configured::whole`], and all places are valid for `count` registers, those of the
    /// second rows only where they take part.
    #[inline(always)]
    pub unsafe fn accumulate(
        &self,
        element: Element,
        rows: usize,
        (sums, store): (Sums, bool),
        square: Square,
    ) {
        debug_assert!(square.count > 0);
        // SAFETY: the caller's; from one assembly to the next nothing else uses the registers.
        unsafe {
            begin(rows, sums, &square);
            match (element, rows) {
                (Element::Bf16, 2) => products!("tdpbf16ps", 2, square),
                (Element::Bf16, 1) => products!("tdpbf16ps", 1, square),
                (Element::Byte, 2) => products!("tdpbusd", 2, square),
                (Element::Byte, 1) => products!("tdpbusd", 1, square),
                _ => unreachable!("a product by {rows} registers"),
            }
            if store {
                end(rows, &square);
            }
        }
    }
}

/// Fills the registers of sums.
///
/// # Safety
/// As [`Configured::accumulate`].
#[inline(always)]
unsafe fn begin(rows: usize, sums: Sums, square: &Square) {
    let at = square.c.wrapping_add(square.c_next);
    // SAFETY: the caller's.
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
/// As [`Configured::accumulate`].
#[inline(always)]
unsafe fn end(rows: usize, square: &Square) {
    let at = square.c.wrapping_add(square.c_next);
    // SAFETY: the caller's.
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

    /// What element (m, n) of the sums grows by, for bytes of registers A and B.
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

    /// Small whole numbers, so that sums are exact.
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
            return eprintln!("skipped: this processor has no AMX, or the system does not hand it out");
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
