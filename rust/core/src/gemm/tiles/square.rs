//! Products of up to two registers of tokens by up to two of rows, summed over many columns.

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

/// Registers of A (16 tokens each) by registers of B (16 rows each), and where their sums are.
#[derive(Debug, Clone, Copy)]
pub struct Square {
    /// Registers of A, one after the other along the columns, of the first and of the second tokens.
    pub a: [*const u8; 2],
    /// Registers of B, one after the other along the columns.
    pub b: *const u8,
    /// Bytes from a register of the first rows to that of the next ones.
    pub b_next: usize,
    /// Sums of the first tokens and rows, 16 x 16 words.
    pub c: *mut u8,
    /// Bytes to the sums of the next tokens.
    pub c_tokens: usize,
    /// Bytes to the sums of the next rows.
    pub c_rows: usize,
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
            "add {a1}, 1024",
            "add {b}, 1024",
            "add {b1}, 1024",
            "dec {count}",
            "jnz 2b",
            a = inout(reg) square.a[0] => _,
            a1 = inout(reg) square.a[1] => _,
            b = inout(reg) square.b => _,
            b1 = inout(reg) square.b.wrapping_add(square.b_next) => _,
            count = inout(reg) square.count => _,
            row = in(reg) 64usize,
            options(nostack, readonly),
        )
    }};
}

/// The loop of one instruction and one shape (tokens, rows).
macro_rules! products {
    ($product:literal, (2, 2), $square:expr) => {
        walk!(
            $square,
            "tileloadd tmm6, [{b} + {row}]",
            "tileloadd tmm4, [{a} + {row}]",
            "tileloadd tmm7, [{b1} + {row}]",
            concat!($product, " tmm0, tmm4, tmm6"),
            "tileloadd tmm5, [{a1} + {row}]",
            concat!($product, " tmm1, tmm4, tmm7"),
            concat!($product, " tmm2, tmm5, tmm6"),
            concat!($product, " tmm3, tmm5, tmm7"),
        )
    };
    ($product:literal, (2, 1), $square:expr) => {
        walk!(
            $square,
            "tileloadd tmm6, [{b} + {row}]",
            "tileloadd tmm4, [{a} + {row}]",
            concat!($product, " tmm0, tmm4, tmm6"),
            "tileloadd tmm5, [{a1} + {row}]",
            concat!($product, " tmm2, tmm5, tmm6"),
        )
    };
    ($product:literal, (1, 2), $square:expr) => {
        walk!(
            $square,
            "tileloadd tmm6, [{b} + {row}]",
            "tileloadd tmm4, [{a} + {row}]",
            concat!($product, " tmm0, tmm4, tmm6"),
            "tileloadd tmm7, [{b1} + {row}]",
            concat!($product, " tmm1, tmm4, tmm7"),
        )
    };
    ($product:literal, (1, 1), $square:expr) => {
        walk!(
            $square,
            "tileloadd tmm6, [{b} + {row}]",
            "tileloadd tmm4, [{a} + {row}]",
            concat!($product, " tmm0, tmm4, tmm6"),
        )
    };
}

/// Runs an instruction for each register of sums that takes part, with its place.
macro_rules! each_sum {
    ($shape:expr, $square:expr, $(($token:literal, $row:literal) $line:literal),*) => {
        $(if $token < $shape.0 && $row < $shape.1 {
            let at = $square.c.wrapping_add($token * $square.c_tokens + $row * $square.c_rows);
            asm!($line, at = in(reg) at, row = in(reg) 64usize, options(nostack));
        })*
    };
}

impl Configured {
    /// c += the products of `square`, of 1 or 2 registers of tokens and of rows; from zero on if they are `fresh`.
    ///
    /// # Safety
    /// The registers are configured by [`Configured::whole`], and all places are valid for `count` registers, those of the
    /// second tokens or rows only where they take part.
    #[inline(always)]
    pub unsafe fn accumulate(&self, element: Element, shape: (usize, usize), fresh: bool, square: Square) {
        debug_assert!(square.count > 0);
        // SAFETY: the caller's; from one assembly to the next nothing else uses the registers.
        unsafe {
            begin(shape, fresh, &square);
            match (element, shape) {
                (Element::Bf16, (2, 2)) => products!("tdpbf16ps", (2, 2), square),
                (Element::Bf16, (2, 1)) => products!("tdpbf16ps", (2, 1), square),
                (Element::Bf16, (1, 2)) => products!("tdpbf16ps", (1, 2), square),
                (Element::Bf16, (1, 1)) => products!("tdpbf16ps", (1, 1), square),
                (Element::Byte, (2, 2)) => products!("tdpbusd", (2, 2), square),
                (Element::Byte, (2, 1)) => products!("tdpbusd", (2, 1), square),
                (Element::Byte, (1, 2)) => products!("tdpbusd", (1, 2), square),
                (Element::Byte, (1, 1)) => products!("tdpbusd", (1, 1), square),
                _ => unreachable!("a product of {shape:?} registers"),
            }
            end(shape, &square);
        }
    }
}

/// Fills the registers of sums.
///
/// # Safety
/// As [`Configured::accumulate`].
#[inline(always)]
unsafe fn begin(shape: (usize, usize), fresh: bool, square: &Square) {
    // SAFETY: the caller's.
    unsafe {
        if fresh {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem)
            );
        } else {
            each_sum!(shape, square,
                (0, 0) "tileloadd tmm0, [{at} + {row}]", (0, 1) "tileloadd tmm1, [{at} + {row}]",
                (1, 0) "tileloadd tmm2, [{at} + {row}]", (1, 1) "tileloadd tmm3, [{at} + {row}]");
        }
    }
}

/// Stores the registers of sums.
///
/// # Safety
/// As [`Configured::accumulate`].
#[inline(always)]
unsafe fn end(shape: (usize, usize), square: &Square) {
    // SAFETY: the caller's.
    unsafe {
        each_sum!(shape, square,
            (0, 0) "tilestored [{at} + {row}], tmm0", (0, 1) "tilestored [{at} + {row}], tmm1",
            (1, 0) "tilestored [{at} + {row}], tmm2", (1, 1) "tilestored [{at} + {row}], tmm3");
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
        for (element, tokens, rows) in [Element::Byte, Element::Bf16]
            .into_iter()
            .flat_map(|e| [(e, 1, 1), (e, 1, 2), (e, 2, 1), (e, 2, 2)])
        {
            let (a, b) = (numbers(element, 3), numbers(element, 100));
            let mut c = vec![0u32; 4 * 256];
            let square = Square {
                a: [&a[0], &a[COUNT * REGISTER]].map(std::ptr::from_ref),
                b: b.as_ptr(),
                b_next: COUNT * REGISTER,
                c: c.as_mut_ptr().cast(),
                c_tokens: REGISTER,
                c_rows: 2 * REGISTER,
                count: COUNT,
            };
            // SAFETY: two runs of three registers each, and four registers of sums.
            unsafe {
                registers.accumulate(element, (tokens, rows), true, square);
                registers.accumulate(element, (tokens, rows), false, square);
            }
            for (i, &found) in c.iter().enumerate() {
                let (row, token, m, n) = (i / 512, i / 256 % 2, i / 16 % 16, i % 16);
                let found = match element {
                    Element::Byte => f64::from(found as i32),
                    Element::Bf16 => f64::from(f32::from_bits(found)),
                };
                let (a, b) = (&a[token * COUNT * REGISTER..], &b[row * COUNT * REGISTER..]);
                let used = token < tokens && row < rows;
                let expected = if used {
                    2.0 * expected(element, a, b, m, n)
                } else {
                    0.0
                };
                assert_eq!(found, expected, "{element:?} {tokens} {rows} {i}");
            }
        }
    }
}
