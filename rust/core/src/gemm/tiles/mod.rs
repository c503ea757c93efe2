//! AMX registers of x86-64: permission to use them, and their instructions.
//!
//! Compilers do not use these registers; only the assembly in this module does. Linux grants their use on request
//! ([`available`] asks once for the whole process). A thread configures them for the shapes of its products and
//! releases them when it is done ([`Configured`]).
//!
//! Two uses, each with its own configuration:
//! * [`Configured::multiply`]: C = A B of bytes into 32-bit integers, where A is 16 x k bytes (signed) and B k / 4
//!   rows of 16 words of four bytes (unsigned) each. Registers: 0 is C, 1 is A, 2 is B.
//! * [`Configured::accumulate`]: one or two C, which share the loads of A. Registers: 0 and 1 are C, 2 is A, 3 is B,
//!   all of them 16 x 64 bytes.

mod square;

use std::arch::asm;
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};

pub use square::{Element, Square, Sums};

/// The rows of a register, and the words of a row.
pub const ROWS: usize = 16;

/// Returns whether the processor and the operating system let this process use AMX. The first call asks the operating
/// system.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && is_saved() && permitted())
}

/// Returns whether CPUID leaf 7 lists AMX-BF16 (bit 22 of EDX), AMX-TILE (24) and AMX-INT8 (25). All processors with
/// AMX do.
fn has_instructions() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    let all = 1 << 22 | 1 << 24 | 1 << 25;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & all == all
}

/// Returns whether the operating system saves the registers: bits 17 and 18 of XCR0.
fn is_saved() -> bool {
    let low: u32;
    if !is_x86_feature_detected!("xsave") {
        return false;
    }
    // SAFETY: reads a register that every system with XSAVE lets programs read.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack)) };
    low >> 17 & 3 == 3
}

/// Requests the registers from Linux by `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    let mut status: isize = 158;
    // SAFETY: the call changes the permissions of this process and no memory; `syscall` overwrites rcx and r11.
    unsafe {
        asm!("syscall", inout("rax") status, in("rdi") 0x1023, in("rsi") 18, out("rcx") _, out("r11") _,
            options(nostack));
    }
    status == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    const EMPTY: Configuration = Configuration {
        palette: 1,
        start: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
}

/// The configured registers of this thread; dropping releases them.
pub struct Configured(std::marker::PhantomData<*const ()>);

impl Configured {
    /// Configures registers for A of 16 x `depth` bytes; `depth` is 16, 32 or 64. `None` if AMX is not [`available`].
    pub fn new(depth: usize) -> Option<Configured> {
        if !available() {
            return None;
        }
        assert!(matches!(depth, 16 | 32 | 64));
        let mut shape = Configuration::EMPTY;
        shape.row_bytes[..3].copy_from_slice(&[64, depth as u16, 64]);
        shape.rows[..3].copy_from_slice(&[16, 16, (depth / 4) as u8]);
        Some(Configured::load(&shape))
    }

    /// Configures all eight registers for 16 x 64 bytes. `None` if AMX is not [`available`].
    pub fn whole() -> Option<Configured> {
        if !available() {
            return None;
        }
        let mut shape = Configuration::EMPTY;
        shape.row_bytes[..8].fill(64);
        shape.rows[..8].fill(16);
        Some(Configured::load(&shape))
    }

    /// Loads a configuration, which must be valid for palette 1; AMX must be [`available`].
    fn load(shape: &Configuration) -> Configured {
        // Compilers moved the stores of the shape after the instruction, or dropped them, because they do not see its
        // load.
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the caller has asked `available`, and both shapes are valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) std::ptr::from_ref(shape), options(nostack)) };
        Configured(std::marker::PhantomData)
    }

    /// Stores the sum of `count` products at `c`: of A, 16 x `depth` bytes every `stride` bytes from `a`, and of B,
    /// every 16 x `depth` bytes from `b`.
    ///
    /// # Safety
    /// `depth` is the configured one. `a` is valid for reads of `(count - 1) * stride + 16 * depth` bytes and `b` of
    /// `count * 16 * depth`, `count` is at least 1, and `c` is valid for writes of 16 x 16 words.
    #[inline(always)]
    pub unsafe fn multiply(
        &self,
        depth: usize,
        a: *const u8,
        stride: usize,
        b: *const u8,
        count: usize,
        c: *mut i32,
    ) {
        // SAFETY: the caller guarantees the configuration and the bytes at all pointers; besides AMX registers only integer registers and memory at `c` change.
        unsafe {
            asm!(
                "tilezero tmm0",
                "2:",
                "tileloadd tmm1, [{a} + {depth}]",
                "tileloadd tmm2, [{b} + {row}]",
                "tdpbsud tmm0, tmm1, tmm2",
                "add {a}, {stride}",
                "add {b}, {size}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{c} + {row}], tmm0",
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                count = inout(reg) count => _,
                c = in(reg) c,
                depth = in(reg) depth,
                row = in(reg) 64usize,
                stride = in(reg) stride,
                size = in(reg) 16 * depth,
                options(nostack),
            );
        }
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: the registers were configured, so they exist.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_match_bytes() {
        if !available() {
            return eprintln!("skipped: this processor has no AMX, or the system does not permit its use");
        }
        for depth in [16, 32, 64] {
            let registers = Configured::new(depth).unwrap();
            let count = 3;
            let a: Vec<i8> = (0..count * 16 * depth)
                .map(|i| (i * 37 % 255) as u8 as i8)
                .collect();
            let b: Vec<u8> = (0..count * 16 * depth).map(|i| (i * 101 % 256) as u8).collect();
            let mut c = [[0i32; 16]; 16];
            // SAFETY: the buffers have the required sizes.
            unsafe {
                registers.multiply(
                    depth,
                    a.as_ptr().cast(),
                    16 * depth,
                    b.as_ptr(),
                    count,
                    c.as_mut_ptr().cast(),
                )
            };
            for (m, c) in c.iter().enumerate() {
                for (n, &found) in c.iter().enumerate() {
                    let term = |i: usize| {
                        let (part, k) = (i / depth, i % depth);
                        let left = a[(part * 16 + m) * depth + k];
                        let right = b[part * 16 * depth + k / 4 * 64 + n * 4 + k % 4];
                        i32::from(left) * i32::from(right)
                    };
                    assert_eq!(found, (0..count * depth).map(term).sum::<i32>());
                }
            }
        }
    }
}
