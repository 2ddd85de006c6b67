//! Rust types of tensor elements, and the values of floats without a Rust type.

use crate::casting::{bf16_to_f32, f16_to_f32};
use crate::dtype::Dtype;
use crate::raw::cast::Plain;

/// A type whose values are the elements of a tensor, bit for bit.
pub trait Element: Plain {
    /// The dtype whose elements have this type.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident,)*) => {
        $(impl Element for $rust { const DTYPE: Dtype = Dtype::$dtype; })*
    };
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f32 => F32, f64 => F64,
    Bool => Bool, F4Pair => F4, F6E2M3Byte => F6_E2M3, F6E3M2Byte => F6_E3M2,
    F8E5M2 => F8_E5M2, F8E4M3 => F8_E4M3, F8E8M0 => F8_E8M0,
    F8E4M3Fnuz => F8_E4M3FNUZ, F8E5M2Fnuz => F8_E5M2FNUZ,
    F16 => F16, BF16 => BF16, C64 => C64,
}

#[cfg(feature = "half")]
elements! { half::f16 => F16, half::bf16 => BF16, }

macro_rules! bits {
    ($($(#[$doc:meta])* $name:ident($bits:ty),)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq)]
            #[repr(transparent)]
            pub struct $name(pub $bits);
        )*
    };
}

bits! {
    /// A truth value: true if the byte is not 0. (A `bool` is unsuitable: bytes from other hosts
    /// may have any value.)
    Bool(u8),
    /// Two four-bit floats.
    F4Pair(u8),
    /// A byte of packed six-bit floats.
    F6E2M3Byte(u8),
    /// A byte of packed six-bit floats.
    F6E3M2Byte(u8),
    /// A float of 8 bits: 5 of exponent, 2 of fraction.
    F8E5M2(u8),
    /// A float of 8 bits: 4 of exponent, 3 of fraction; no infinities.
    F8E4M3(u8),
    /// A power of two, given by 8 bits of exponent.
    F8E8M0(u8),
    /// Like `F8E4M3`, but with another bias, no minus zero, and one NaN.
    F8E4M3Fnuz(u8),
    /// Like `F8E5M2`, but with another bias, no minus zero, no infinities, and one NaN.
    F8E5M2Fnuz(u8),
    /// A half-precision float.
    F16(u16),
    /// The upper half of an `f32`.
    BF16(u16),
    /// A complex number: its real and its imaginary part.
    C64([f32; 2]),
}

/// A float that has no type in Rust.
pub trait SmallFloat: Element {
    /// Returns the value as an `f32`, without rounding.
    fn to_f32(self) -> f32;
}

/// Converts values to `f32`.
pub fn to_f32<T: SmallFloat>(values: &[T]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

impl SmallFloat for BF16 {
    fn to_f32(self) -> f32 {
        bf16_to_f32(self.0)
    }
}

impl SmallFloat for F16 {
    fn to_f32(self) -> f32 {
        f16_to_f32(self.0)
    }
}

impl SmallFloat for F8E5M2 {
    fn to_f32(self) -> f32 {
        f16_to_f32(u16::from(self.0) << 8) // the upper half of an `F16`
    }
}

impl SmallFloat for F8E4M3 {
    fn to_f32(self) -> f32 {
        if self.0 & 0x7f == 0x7f {
            return f32::NAN;
        }
        finite(u32::from(self.0), 4, 3, 7)
    }
}

impl SmallFloat for F8E8M0 {
    fn to_f32(self) -> f32 {
        if self.0 == 0xff {
            return f32::NAN;
        }
        2f32.powi(i32::from(self.0) - 127)
    }
}

impl SmallFloat for F8E4M3Fnuz {
    fn to_f32(self) -> f32 {
        fnuz(u32::from(self.0), 4, 3)
    }
}

impl SmallFloat for F8E5M2Fnuz {
    fn to_f32(self) -> f32 {
        fnuz(u32::from(self.0), 5, 2)
    }
}

/// Returns the value of a float whose only NaN has the bits of minus zero.
fn fnuz(bits: u32, exponent_bits: u32, fraction_bits: u32) -> f32 {
    if bits == 0x80 {
        return f32::NAN;
    }
    finite(bits, exponent_bits, fraction_bits, 1 << (exponent_bits - 1))
}

fn finite(bits: u32, exponent_bits: u32, fraction_bits: u32, bias: i32) -> f32 {
    let exponent = (bits >> fraction_bits & ((1 << exponent_bits) - 1)) as i32;
    let fraction = (bits & ((1 << fraction_bits) - 1)) as f32 / (1 << fraction_bits) as f32;
    let magnitude = if exponent == 0 {
        fraction * 2f32.powi(1 - bias)
    } else {
        (1.0 + fraction) * 2f32.powi(exponent - bias)
    };
    signed(bits >> (exponent_bits + fraction_bits), magnitude)
}

fn signed(sign: u32, magnitude: f32) -> f32 {
    if sign & 1 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: SmallFloat>(make: fn(u16) -> T, values: &[(u16, f32)]) {
        for &(bits, value) in values {
            let found = make(bits).to_f32();
            assert_eq!(found.to_bits(), value.to_bits(), "{:#x}: {} is not {}", bits, found, value);
        }
    }

    #[test]
    fn floats_are_what_their_bits_mean() {
        check(BF16, &[(0x3f80, 1.0), (0xc020, -2.5), (0x8000, -0.0), (0x7f80, f32::INFINITY)]);
        check(F16, &[(0x3c00, 1.0), (0xfbff, -65504.0), (1, 2f32.powi(-24)), (0xfc00, f32::NEG_INFINITY)]);
        check(
            |b| F8E5M2(b as u8),
            &[(0x3c, 1.0), (0x7b, 57344.0), (1, 2f32.powi(-16)), (0xfc, f32::NEG_INFINITY)],
        );
        check(|b| F8E4M3(b as u8), &[(0x38, 1.0), (0x7e, 448.0), (0x81, -(2f32.powi(-9))), (0x80, -0.0)]);
        check(|b| F8E8M0(b as u8), &[(127, 1.0), (0, 2f32.powi(-127)), (254, 2f32.powi(127))]);
        check(|b| F8E4M3Fnuz(b as u8), &[(0x40, 1.0), (0x7f, 240.0), (0xff, -240.0)]);
        check(|b| F8E5M2Fnuz(b as u8), &[(0x40, 1.0), (0x7f, 57344.0)]);
        let nans = [
            BF16(0x7fc1).to_f32(),
            F16(0x7c01).to_f32(),
            F8E5M2(0x7d).to_f32(),
            F8E4M3(0xff).to_f32(),
            F8E8M0(0xff).to_f32(),
            F8E4M3Fnuz(0x80).to_f32(),
            F8E5M2Fnuz(0x80).to_f32(),
        ];
        assert!(nans.iter().all(|value| value.is_nan()));
    }
}
