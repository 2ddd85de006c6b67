//! Values of one float dtype as values of another: the nearest there is, of two the even one.
//!
//! What is published never changes on its way. A user who permits it has values converted while they
//! are copied into a model of other dtypes.

use crate::dtype::Dtype;

const FLOATS: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::BF16];

/// Whether values can be converted.
pub fn can_cast(from: Dtype, to: Dtype) -> bool {
    FLOATS.contains(&from) && FLOATS.contains(&to)
}

/// Converts little-endian values; both slices hold equally many. Nothing happens unless `can_cast`.
pub fn cast(from: Dtype, source: &[u8], to: Dtype, target: &mut [u8]) {
    let f32_of = f32::from_le_bytes;
    let (of_f16, of_bf16) = (|b| f16_to_f32(u16::from_le_bytes(b)), |b| bf16_to_f32(u16::from_le_bytes(b)));
    match (from, to) {
        (Dtype::F64, Dtype::F32) => each(source, target, |b| (f64::from_le_bytes(b) as f32).to_le_bytes()),
        (Dtype::F64, Dtype::F16) => {
            each(source, target, |b| to_f16(to_odd(f64::from_le_bytes(b))).to_le_bytes())
        }
        (Dtype::F64, Dtype::BF16) => {
            each(source, target, |b| to_bf16(to_odd(f64::from_le_bytes(b))).to_le_bytes())
        }
        (Dtype::F32, Dtype::F64) => each(source, target, |b| f64::from(f32_of(b)).to_le_bytes()),
        (Dtype::F32, Dtype::F16) => each(source, target, |b| to_f16(f32_of(b)).to_le_bytes()),
        (Dtype::F32, Dtype::BF16) => each(source, target, |b| to_bf16(f32_of(b)).to_le_bytes()),
        (Dtype::F16, Dtype::F64) => each(source, target, |b| f64::from(of_f16(b)).to_le_bytes()),
        (Dtype::F16, Dtype::F32) => each(source, target, |b| of_f16(b).to_le_bytes()),
        (Dtype::F16, Dtype::BF16) => each(source, target, |b| to_bf16(of_f16(b)).to_le_bytes()),
        (Dtype::BF16, Dtype::F64) => each(source, target, |b| f64::from(of_bf16(b)).to_le_bytes()),
        (Dtype::BF16, Dtype::F32) => each(source, target, |b| of_bf16(b).to_le_bytes()),
        (Dtype::BF16, Dtype::F16) => each(source, target, |b| to_f16(of_bf16(b)).to_le_bytes()),
        _ => {}
    }
}

fn each<const N: usize, const M: usize>(
    source: &[u8],
    target: &mut [u8],
    convert: impl Fn([u8; N]) -> [u8; M],
) {
    for (from, to) in source.chunks_exact(N).zip(target.chunks_exact_mut(M)) {
        if let Ok(from) = from.try_into() {
            to.copy_from_slice(&convert(from));
        }
    }
}

/// Rounds to an `f32` such that rounding that once more is like rounding once: towards zero, and what
/// is lost leaves its mark in the last bit.
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    if value.is_nan() || f64::from(near) == value {
        return near;
    }
    let above = f64::from(near).abs() > value.abs();
    f32::from_bits((near.to_bits() - u32::from(above)) | 1)
}

/// Drops so many bits behind, to the nearest, of two the even.
fn rounded(bits: u32, dropped: u32) -> u32 {
    (bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped
}

fn to_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return (value.to_bits() >> 16) as u16 | 0x40; // what is dropped may have been all that made it one
    }
    rounded(value.to_bits(), 16) as u16
}

pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn to_f16(value: f32) -> u16 {
    const ONE_MORE_THAN_ALL: u32 = 0x4780_0000; // 65536
    const NORMAL: u32 = 0x3880_0000; // 2^-14
    let (sign, size) = ((value.to_bits() >> 16) as u16 & 0x8000, value.to_bits() & 0x7fff_ffff);
    let size = match size {
        _ if value.is_nan() => 0x7e00,
        ONE_MORE_THAN_ALL.. => 0x7c00,
        NORMAL.. => rounded(size - (112 << 23), 13),
        // Beside 0.5 an `f32` has as many places as a subnormal `f16`, and the processor rounds.
        _ => (f32::from_bits(size) + 0.5).to_bits() - 0.5f32.to_bits(),
    };
    sign | size as u16
}

pub fn f16_to_f32(bits: u16) -> f32 {
    let (sign, size) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff) << 13);
    let size = match bits & 0x7c00 {
        0x7c00 => size | 0x7f80_0000,
        // Beside 0.5, as in `to_f16`. No subnormal `f32` is made, which a processor may have been told to take for zero.
        0 => (f32::from_bits(0.5f32.to_bits() + u32::from(bits & 0x3ff)) - 0.5).to_bits(),
        _ => size + (112 << 23),
    };
    f32::from_bits(sign | size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_comes_back() {
        for bits in 0..=u16::MAX {
            let (half, bfloat) = (f16_to_f32(bits), bf16_to_f32(bits));
            assert!(if half.is_nan() { f16_to_f32(to_f16(half)).is_nan() } else { to_f16(half) == bits });
            assert!(if bfloat.is_nan() {
                bf16_to_f32(to_bf16(bfloat)).is_nan()
            } else {
                to_bf16(bfloat) == bits
            });
        }
    }

    /// Between two neighbours all goes to the nearer, and the middle to the even one.
    fn check(to: Dtype, of: fn(u16) -> f32, last: u16) {
        let cast = |value: f64| {
            let mut found = [0; 2];
            super::cast(Dtype::F64, &value.to_le_bytes(), to, &mut found);
            u16::from_le_bytes(found)
        };
        for bits in 0..last {
            let (low, high) = (f64::from(of(bits)), f64::from(of(bits + 1)));
            let middle = low + (high - low) / 2.0;
            let even = bits + bits % 2;
            assert_eq!(cast(middle), even, "{} in {}", middle, to);
            assert_eq!(cast(-middle), even | 0x8000);
            let (before, after) =
                (f64::from_bits(middle.to_bits() - 1), f64::from_bits(middle.to_bits() + 1));
            assert_eq!((cast(before), cast(after)), (bits, bits + 1), "around {} in {}", middle, to);
        }
        let beyond = f64::from(of(last)) * (1.0 + 1.0 / 64.0);
        assert_eq!(cast(beyond), last + 1, "infinity");
        assert_eq!(
            (cast(f64::INFINITY), cast(1e300), cast(-1e300)),
            (last + 1, last + 1, (last + 1) | 0x8000)
        );
    }

    #[test]
    fn what_lies_between_goes_to_the_nearest() {
        check(Dtype::F16, f16_to_f32, 0x7bff);
        check(Dtype::BF16, bf16_to_f32, 0x7f7f);
    }
}
