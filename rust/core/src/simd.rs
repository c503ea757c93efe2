//! Instruction sets: detected once, or forced by `MOEPACK_ISA`.
//!
//! Every kernel family has a scalar version and versions for the sets that benefit from one. Callers pass the [`Isa`]
//! to use, so that tests can run all versions on one machine.
//!
//! # Safety by type
//! An [`Isa`] proves that the processor supports its set: its field is private, and every constructor either detects
//! the set or returns [`Isa::SCALAR`]. Safe functions may therefore match [`Isa::kind`] and call a
//! `#[target_feature]` function of that kind. Kernels never detect a set themselves; features beyond those of
//! [`Kind`] (bf16 products, AVX-VNNI, products of bytes on Arm) are detected where they are used.

use std::sync::OnceLock;

use crate::{Error, Result};

/// The name of an instruction set with kernels, from the most general to the most specific. Whether the processor
/// supports it is the matter of [`Isa`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Portable Rust.
    Scalar,
    /// 64-bit Arm with NEON; most such processors also have dot products of bytes, and newer ones matrix products.
    Neon,
    /// x86-64 with AVX2, FMA, F16C, BMI1, BMI2 and POPCNT.
    Avx2,
    /// x86-64 with [`Kind::Avx2`] and AVX-512 F, BW, DQ, VL, VBMI, VBMI2 and VNNI (Ice Lake, Zen 4 and later).
    Avx512,
    /// [`Kind::Avx512`] with AMX byte tiles that the operating system permits the process to use (Sapphire Rapids and
    /// later).
    Amx,
}

/// The environment variable that forces an instruction set: `scalar`, `neon`, `avx2`, `avx512` or `amx`.
pub const ISA_VARIABLE: &str = "MOEPACK_ISA";

impl Kind {
    /// All sets, in ascending order.
    pub const ALL: [Kind; 5] = [Kind::Scalar, Kind::Neon, Kind::Avx2, Kind::Avx512, Kind::Amx];

    /// The name in `MOEPACK_ISA` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Scalar => "scalar",
            Kind::Neon => "neon",
            Kind::Avx2 => "avx2",
            Kind::Avx512 => "avx512",
            Kind::Amx => "amx",
        }
    }

    /// Parses [`Kind::name`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no set has the name.
    pub fn from_name(name: &str) -> Result<Kind> {
        Kind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| {
                Error::InvalidArgument(format!(
                    "unknown instruction set {name:?}: use scalar, neon, avx2, avx512 or amx"
                ))
            })
    }

    /// Returns whether this processor (and its operating system) supports the set.
    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Kind::Scalar => true,
            Kind::Neon => false,
            Kind::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("popcnt")
            }
            Kind::Avx512 => {
                Kind::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vbmi2")
                    && is_x86_feature_detected!("avx512vnni")
            }
            Kind::Amx => Kind::Avx512.is_available() && crate::gemm::tiles::available(),
        }
    }

    /// Returns whether this processor (and its operating system) supports the set.
    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        match self {
            Kind::Scalar => true,
            // Kernels load words as stored, the least significant byte first.
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Kind::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            _ => false,
        }
    }
}

/// An instruction set that this processor supports.
///
/// ```
/// use moepack_core::simd::{Isa, Kind};
///
/// let isa = Isa::new(Kind::Avx512).unwrap_or(Isa::SCALAR);
/// assert!(matches!(isa.kind(), Kind::Avx512 | Kind::Scalar));
/// ```
///
/// Only detection makes one:
///
/// ```compile_fail,E0451
/// use moepack_core::simd::{Isa, Kind};
///
/// let isa = Isa { kind: Kind::Avx512 };
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa {
    /// Invariant: the processor supports it.
    kind: Kind,
}

impl Isa {
    /// Portable Rust, which every processor supports.
    pub const SCALAR: Isa = Isa { kind: Kind::Scalar };

    /// A set, or `None` if this processor (or its operating system) does not support it.
    pub fn new(kind: Kind) -> Option<Isa> {
        kind.is_available().then_some(Isa { kind })
    }

    /// The set with a name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no set has the name, or if this processor does not support the set.
    pub fn named(name: &str) -> Result<Isa> {
        let kind = Kind::from_name(name)?;
        Isa::new(kind)
            .ok_or_else(|| Error::InvalidArgument(format!("this processor does not support {name}")))
    }

    /// The sets that this processor supports, in ascending order.
    pub fn all_available() -> impl DoubleEndedIterator<Item = Isa> {
        Kind::ALL.into_iter().filter_map(Isa::new)
    }

    /// The most specific set that this processor supports.
    pub fn best() -> Isa {
        Isa::all_available().next_back().unwrap_or(Isa::SCALAR)
    }

    /// Which set it is.
    #[inline]
    pub fn kind(self) -> Kind {
        self.kind
    }

    /// The name in `MOEPACK_ISA` and in reports.
    pub fn name(self) -> &'static str {
        self.kind.name()
    }

    /// The set for vector kernels: AVX-512 for [`Kind::Amx`], which includes it, otherwise the set itself.
    pub fn vectors(self) -> Isa {
        match self.kind {
            Kind::Amx => Isa { kind: Kind::Avx512 },
            _ => self,
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

/// Returns whether NEON has dot products of bytes.
#[cfg(not(target_arch = "aarch64"))]
pub(crate) fn has_dot_products() -> bool {
    false
}

/// Returns whether NEON has matrix products of bytes (Armv8.6 and later), in addition to dot products.
#[cfg(target_arch = "aarch64")]
pub(crate) fn has_matrix_products() -> bool {
    has_dot_products() && std::arch::is_aarch64_feature_detected!("i8mm")
}

/// Returns whether NEON has matrix products of bytes.
#[cfg(not(target_arch = "aarch64"))]
pub(crate) fn has_matrix_products() -> bool {
    false
}

/// The name of an instruction set for kernels with dot products of bytes: `neon-dotprod`, or [`Isa::name`].
pub(crate) fn name_with_dot_products(isa: Isa) -> &'static str {
    match isa.kind() {
        Kind::Neon if has_dot_products() => "neon-dotprod",
        _ => isa.name(),
    }
}

/// The name of an instruction set for kernels that also have matrix products: `neon-i8mm`, or
/// [`name_with_dot_products`].
pub(crate) fn name_with_matrix_products(isa: Isa) -> &'static str {
    match isa.kind() {
        Kind::Neon if has_matrix_products() => "neon-i8mm",
        _ => name_with_dot_products(isa),
    }
}

/// Returns whether the processor reads ascending streams at full speed without software prefetching: AMD from Zen 4
/// on. Zen 3 stalls at the end of each page.
pub(crate) fn reads_ahead() -> bool {
    is_amd() && Kind::Avx512.is_available()
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

/// The instruction set in use: the one forced by `MOEPACK_ISA`, otherwise [`Isa::best`].
///
/// The variable is read once in the life of the process.
///
/// # Errors
/// As [`Isa::named`], if the variable is set.
pub fn active() -> Result<Isa> {
    static ACTIVE: OnceLock<Result<Isa>> = OnceLock::new();
    ACTIVE
        .get_or_init(|| match std::env::var(ISA_VARIABLE) {
            Ok(name) if !name.is_empty() => Isa::named(&name),
            _ => Ok(Isa::best()),
        })
        .clone()
}

/// Defines a function whose first argument is an [`Isa`], and which calls `$body` (always inlined) compiled for that
/// set, or, after `in 256 bits`, for AVX2 on every x86-64 set with vectors. This suffices for loops that compilers
/// vectorize. NEON belongs to every 64-bit Arm target, so `$body` itself is compiled for it.
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
            match isa.kind() {
                // SAFETY: `isa` proves that the processor has AVX2.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Kind::Avx2 => unsafe { avx2($($argument),*) },
                // SAFETY: `isa` proves that the processor has AVX-512 F, BW, DQ and VL, which both sets include.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Kind::Avx512 | $crate::simd::Kind::Amx => unsafe { avx512($($argument),*) },
                _ => $body($($argument),*),
            }
        }
    };
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?
        = $body:path, in 256 bits;) => {
        $(#[$attribute])*
        $visibility fn $name(isa: $crate::simd::Isa, $($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                $body($($argument),*)
            }
            match isa.kind() {
                // SAFETY: `isa` proves that the processor has AVX2, which all three sets include.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Kind::Avx2 | $crate::simd::Kind::Avx512 | $crate::simd::Kind::Amx => unsafe {
                    avx2($($argument),*)
                },
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
        for kind in Kind::ALL {
            assert_eq!(Kind::from_name(kind.name()), Ok(kind));
            assert_eq!(Isa::named(kind.name()).ok(), Isa::new(kind));
        }
        assert!(Kind::from_name("avx1024").is_err() && Isa::named("avx1024").is_err());
    }

    #[test]
    fn an_isa_exists_only_if_the_processor_supports_its_set() {
        assert!(
            Isa::all_available().all(|isa| isa.kind().is_available() && isa.vectors().kind().is_available())
        );
        assert_eq!(Isa::all_available().next(), Some(Isa::SCALAR));
        assert_eq!(Isa::all_available().next_back(), Some(Isa::best()));
        assert!(active().unwrap().kind().is_available());
        let foreign = if cfg!(target_arch = "x86_64") {
            Kind::Neon
        } else {
            Kind::Avx2
        };
        assert!(Isa::new(foreign).is_none() && Isa::named(foreign.name()).is_err());
    }

    #[inline(always)]
    fn sum_of(values: &[u32]) -> u32 {
        values.iter().sum()
    }

    vectorized! {
        fn sum(values: &[u32]) -> u32 = sum_of;
    }

    vectorized! {
        fn short_sum(values: &[u32]) -> u32 = sum_of, in 256 bits;
    }

    #[test]
    fn vectorized_functions_run_on_every_set() {
        let values: Vec<u32> = (0..1000).collect();
        assert!(Isa::all_available().all(|isa| sum(isa, &values) == 499_500));
        assert!(Isa::all_available().all(|isa| short_sum(isa, &values) == 499_500));
    }
}
