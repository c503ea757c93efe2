//! Instruction sets: detected once, or forced by `MOEPACK_ISA`.
//!
//! Every kernel family has a scalar version and versions for the sets that benefit from one. Callers pass the [`Isa`]
//! to use, so that tests can run all versions on one machine. Forcing a set that the processor lacks is an error,
//! never an illegal instruction. Matrix registers ([`Isa::Amx`]) extend AVX-512: kernels that do not use them run as
//! on AVX-512, which is the result of [`Isa::require`].

use std::sync::OnceLock;

use crate::{Error, Result};

/// An instruction set with kernels, from the most general to the most specific.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust.
    Scalar,
    /// 64-bit Arm with NEON; most such processors also have dot products of bytes.
    Neon,
    /// x86-64 with AVX2, FMA, F16C, BMI1, BMI2 and POPCNT.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VBMI, VBMI2 and VNNI (Ice Lake, Zen 4 and later).
    Avx512,
    /// [`Isa::Avx512`] with AMX byte tiles that the operating system permits the process to use (Sapphire Rapids and
    /// later).
    Amx,
}

/// The environment variable that forces an instruction set: `scalar`, `neon`, `avx2`, `avx512` or `amx`.
pub const ISA_VARIABLE: &str = "MOEPACK_ISA";

impl Isa {
    /// All sets, in ascending order.
    pub const ALL: [Isa; 5] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The name in `MOEPACK_ISA` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }

    /// Parses [`Isa::name`].
    pub fn from_name(name: &str) -> Result<Isa> {
        Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| {
                Error::InvalidArgument(format!(
                    "unknown instruction set {name:?}: use scalar, neon, avx2, avx512 or amx"
                ))
            })
    }

    /// Returns whether this processor (and its operating system) supports the set.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Neon => false,
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("popcnt")
            }
            Isa::Avx512 => {
                Isa::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vbmi2")
                    && is_x86_feature_detected!("avx512vnni")
            }
            Isa::Amx => Isa::Avx512.available() && crate::gemm::tiles::available(),
        }
    }

    /// Returns whether this processor (and its operating system) supports the set.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            // Kernels load words as stored, the least significant byte first.
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            _ => false,
        }
    }

    /// The instruction set for vector kernels: AVX-512 for [`Isa::Amx`], otherwise the set itself. Fails if the
    /// processor does not support the set.
    pub fn require(self) -> Result<Isa> {
        match (self.available(), self) {
            (true, Isa::Amx) => Ok(Isa::Avx512),
            (true, isa) => Ok(isa),
            (false, isa) => Err(Error::InvalidArgument(format!(
                "this processor does not support {}",
                isa.name()
            ))),
        }
    }
}

/// Returns whether the processor's vendor is AMD. Cached, because in virtual machines the instruction costs
/// microseconds.
#[cfg(target_arch = "x86_64")]
pub(crate) fn is_amd() -> bool {
    static AMD: OnceLock<bool> = OnceLock::new();
    *AMD.get_or_init(|| {
        let leaf = std::arch::x86_64::__cpuid(0);
        [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    })
}

/// Returns whether the processor's vendor is AMD.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn is_amd() -> bool {
    false
}

/// Returns whether NEON has dot products of bytes (Armv8.2 and later).
#[cfg(target_arch = "aarch64")]
pub(crate) fn has_dot_products() -> bool {
    std::arch::is_aarch64_feature_detected!("dotprod")
}

/// Returns whether the processor reads ascending streams at full speed without software prefetching: AMD from Zen 4
/// on. Zen 3 stalls at the end of each page.
pub(crate) fn reads_ahead() -> bool {
    is_amd() && Isa::Avx512.available()
}

/// Prefetches memory that is needed soon into the second-level cache.
#[cfg(target_arch = "x86_64")]
pub(crate) fn fetch(bytes: &[u8]) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    for line in bytes.chunks(64) {
        // SAFETY: a prefetch may use any address, and every x86-64 processor supports it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) }
    }
}

/// Prefetches nothing on other architectures.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn fetch(_: &[u8]) {}

/// The instruction set in use: the one forced by `MOEPACK_ISA`, otherwise the most specific one that the processor
/// supports.
///
/// The variable is read once in the life of the process.
pub fn active() -> Result<Isa> {
    static ACTIVE: OnceLock<Result<Isa>> = OnceLock::new();
    ACTIVE
        .get_or_init(|| match std::env::var(ISA_VARIABLE) {
            Ok(name) if !name.is_empty() => {
                let isa = Isa::from_name(&name)?;
                isa.require().map(|_| isa)
            }
            _ => Ok(Isa::ALL
                .into_iter()
                .rev()
                .find(|isa| isa.available())
                .unwrap_or(Isa::Scalar)),
        })
        .clone()
}

/// Defines a function whose first argument is an instruction set, which the processor must support, and which calls
/// `$body` (always inlined) compiled for it. This suffices for loops that compilers vectorize.
macro_rules! vectorized {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?
        = $body:path;) => {
        $(#[$attribute])*
        $visibility fn $name(isa: $crate::simd::Isa, $($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                $body($($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($argument: $type),*) $(-> $result)? {
                $body($($argument),*)
            }
            match isa {
                $crate::simd::Isa::Scalar => $body($($argument),*),
                // SAFETY: the caller guarantees that the processor supports the set.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Avx2 => unsafe { avx2($($argument),*) },
                // SAFETY: as above; the other sets include the AVX-512 features used here.
                #[cfg(target_arch = "x86_64")]
                _ => unsafe { avx512($($argument),*) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => $body($($argument),*),
            }
        }
    };
}
pub(crate) use vectorized;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_others_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(Isa::from_name(isa.name()), Ok(isa));
        }
        assert!(Isa::from_name("avx1024").is_err());
    }

    #[test]
    fn the_active_set_is_available() {
        assert!(active().unwrap().available());
    }
}
