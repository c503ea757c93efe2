//! The integer types of codes.

/// The integer type of an encoder's codes.
pub trait Code: Copy + Default + Send + Sync + PartialOrd + Into<i32> + From<i8> {
    /// The low byte.
    fn low(self) -> u8;
    /// The code without its `bits` lowest bits.
    fn high(self, bits: usize) -> Self;
    /// The index of a dependent code ([`super::trellis`]).
    fn index(self) -> Self;
}

macro_rules! code {
    ($type:ty) => {
        impl Code for $type {
            fn low(self) -> u8 {
                self as u8
            }

            fn high(self, bits: usize) -> Self {
                self >> bits
            }

            fn index(self) -> Self {
                // Bit 1 of a dependent code tells whether it is mirrored. A branch would be mispredicted half of the
                // time.
                let mirror = -(self >> 1 & 1);
                ((self ^ mirror) - mirror) >> 2
            }
        }
    };
}

code!(i8);
code!(i16);
code!(i32);
