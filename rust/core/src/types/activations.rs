//! The activations of a product.

/// The value of bf16 bits.
#[inline(always)]
pub(crate) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Activations, token by token.
#[derive(Debug, Clone, Copy)]
pub enum Activations<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// The bits of bf16 values.
    Bf16(&'a [u16]),
}

impl<'a> From<&'a [f32]> for Activations<'a> {
    fn from(x: &'a [f32]) -> Self {
        Activations::F32(x)
    }
}

impl<'a> From<&'a [u16]> for Activations<'a> {
    fn from(x: &'a [u16]) -> Self {
        Activations::Bf16(x)
    }
}

impl Activations<'_> {
    /// The number of values.
    #[allow(clippy::len_without_is_empty)] // No caller needs it.
    pub fn len(&self) -> usize {
        match self {
            Activations::F32(x) => x.len(),
            Activations::Bf16(x) => x.len(),
        }
    }

    /// Copies values from `start` on in f32, as many as `out` has.
    #[inline(always)]
    pub(crate) fn widen(&self, start: usize, out: &mut [f32]) {
        match self {
            Activations::F32(x) => out.copy_from_slice(&x[start..][..out.len()]),
            Activations::Bf16(x) => {
                let from = &x[start..][..out.len()];
                out.iter_mut()
                    .zip(from)
                    .for_each(|(out, &bits)| *out = from_bf16(bits));
            }
        }
    }
}
