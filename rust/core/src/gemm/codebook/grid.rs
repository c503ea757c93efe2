//! The integer grid for rounding a token's activations.

/// The quantization of a token: a value's code is `value * inverse + shift`, clamped to 0 and `top`, truncated.
pub(super) struct Grid {
    pub step: f32,
    pub zero: i32,
    pub inverse: f32,
    pub shift: f32,
    pub top: f32,
}

impl Grid {
    /// The grid of values between `low <= 0` and `high >= 0`; `None` if they are not finite. If the range is so small
    /// that its step has no finite inverse, all codes are zero.
    pub fn of((low, high): (f32, f32), finite: bool, bits: u8) -> Option<Grid> {
        let top = f32::from((1u16 << bits) - 1);
        let step = (high - low) / top;
        let inverse = 1.0 / step;
        if !finite || !step.is_finite() {
            return None;
        }
        if !inverse.is_finite() {
            return Some(Grid {
                step: 0.0,
                zero: 0,
                inverse: 0.0,
                shift: 0.0,
                top,
            });
        }
        let zero = (-low * inverse + 0.5).floor().clamp(0.0, top);
        Some(Grid {
            step,
            zero: zero as i32,
            inverse,
            shift: zero + 0.5,
            top,
        })
    }
}
