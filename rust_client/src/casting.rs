//! Converts values from one float dtype to another, rounded to the nearest value, ties to even.
//!
//! Versions are sent with the dtypes of the publisher. If the user permits casts, values are
//! converted while they are copied into a model with other dtypes.

use crate::dtype::Dtype;
use crate::words::escaped;

const FLOATS: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::BF16];

/// True if values of one dtype can be converted to the other.
pub fn can_cast(from: Dtype, to: Dtype) -> bool {
    FLOATS.contains(&from) && FLOATS.contains(&to)
}

/// Converts little-endian values. Both slices must have the same number of values. Does nothing if
/// `can_cast` returns false.
pub fn cast(from: Dtype, source: &[u8], to: Dtype, target: &mut [u8]) {
    let f32_of = f32::from_le_bytes;
    let (of_f16, of_bf16) = (|b| f16_to_f32(u16::from_le_bytes(b)), |b| bf16_to_f32(u16::from_le_bytes(b)));
    match (from, to) {
        (Dtype::F64, Dtype::F32) => {
            convert_each(source, target, |b| (f64::from_le_bytes(b) as f32).to_le_bytes())
        }
        (Dtype::F64, Dtype::F16) => {
            convert_each(source, target, |b| to_f16(to_odd(f64::from_le_bytes(b))).to_le_bytes())
        }
        (Dtype::F64, Dtype::BF16) => {
            convert_each(source, target, |b| to_bf16(to_odd(f64::from_le_bytes(b))).to_le_bytes())
        }
        (Dtype::F32, Dtype::F64) => convert_each(source, target, |b| f64::from(f32_of(b)).to_le_bytes()),
        (Dtype::F32, Dtype::F16) => convert_each(source, target, |b| to_f16(f32_of(b)).to_le_bytes()),
        (Dtype::F32, Dtype::BF16) => convert_each(source, target, |b| to_bf16(f32_of(b)).to_le_bytes()),
        (Dtype::F16, Dtype::F64) => convert_each(source, target, |b| f64::from(of_f16(b)).to_le_bytes()),
        (Dtype::F16, Dtype::F32) => convert_each(source, target, |b| of_f16(b).to_le_bytes()),
        (Dtype::F16, Dtype::BF16) => convert_each(source, target, |b| to_bf16(of_f16(b)).to_le_bytes()),
        (Dtype::BF16, Dtype::F64) => convert_each(source, target, |b| f64::from(of_bf16(b)).to_le_bytes()),
        (Dtype::BF16, Dtype::F32) => convert_each(source, target, |b| of_bf16(b).to_le_bytes()),
        (Dtype::BF16, Dtype::F16) => convert_each(source, target, |b| to_f16(of_bf16(b)).to_le_bytes()),
        _ => {}
    }
}

fn convert_each<const N: usize, const M: usize>(
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

/// Counts the values that were finite and became infinite. Both slices must have the same number of
/// values.
pub fn lost_values(from: Dtype, source: &[u8], to: Dtype, target: &[u8]) -> u64 {
    // the dtype with the widest range first
    const WIDEST: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::BF16, Dtype::F16];
    let rank = |dtype| WIDEST.iter().position(|&known| known == dtype);
    if rank(from) >= rank(to) {
        return 0;
    }
    let (from_bytes, to_bytes) = (from.bits() as usize / 8, to.bits() as usize / 8);
    let pairs = source.chunks_exact(from_bytes).zip(target.chunks_exact(to_bytes));
    pairs.filter(|(was, is)| is_infinite(to, is) && !is_infinite(from, was)).count() as u64
}

/// True if a little-endian value is infinite: all exponent bits are set, and no fraction bit.
fn is_infinite(dtype: Dtype, value: &[u8]) -> bool {
    let bits = value.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte));
    match dtype {
        Dtype::F64 => bits << 1 == 0x7ff0_0000_0000_0000 << 1,
        Dtype::F32 => bits & 0x7fff_ffff == 0x7f80_0000,
        Dtype::F16 => bits & 0x7fff == 0x7c00,
        _ => bits & 0x7fff == 0x7f80, // BF16
    }
}

/// A tensor in which a cast made `count` finite values infinite.
#[derive(Clone, Debug, PartialEq)]
pub struct Overflow {
    pub name: String,
    pub dtype: Dtype,
    pub count: u64,
}

/// Describes the values that became infinite: for each of the first few tensors, their number and
/// the tensor's range; then the number of further tensors. Returns "" if `lost` is empty.
pub fn overflow_text(lost: &[Overflow]) -> String {
    const SHOWN: usize = 4;
    let words = lost.iter().take(SHOWN).map(|Overflow { name, dtype, count }| {
        let values = if *count == 1 { "value is" } else { "values are" };
        let most = match dtype {
            Dtype::F16 => "65504",
            Dtype::BF16 => "3.38953e+38",
            _ => "3.40282e+38", // F32
        };
        let name: String = escaped(name).chars().take(256).collect();
        format!("{}: {} finite {} beyond {} (at most {})", name, count, values, dtype, most)
    });
    let more = lost.len().saturating_sub(SHOWN);
    let rest = format!("and likewise in {} more tensor{}", more, if more == 1 { "" } else { "s" });
    words.chain(Some(rest).filter(|_| more > 0)).collect::<Vec<_>>().join("; ")
}

/// Rounds to an `f32` so that rounding the result again gives the same value as rounding `value`
/// once: rounds towards zero, and sets the last bit if the result is inexact (round to odd).
fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if value.is_nan() || f64::from(nearest) == value {
        return nearest;
    }
    let above = f64::from(nearest).abs() > value.abs();
    f32::from_bits((nearest.to_bits() - u32::from(above)) | 1)
}

/// Drops the `dropped` lowest bits, and rounds to the nearest, ties to even.
fn rounded(bits: u32, dropped: u32) -> u32 {
    (bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped
}

fn to_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return (value.to_bits() >> 16) as u16 | 0x40; // stays a NaN if all set fraction bits are dropped
    }
    rounded(value.to_bits(), 16) as u16
}

pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn to_f16(value: f32) -> u16 {
    const OVERFLOW: u32 = 0x4780_0000; // 65536
    const NORMAL: u32 = 0x3880_0000; // 2^-14
    let (sign, size) = ((value.to_bits() >> 16) as u16 & 0x8000, value.to_bits() & 0x7fff_ffff);
    let size = match size {
        _ if value.is_nan() => 0x7e00,
        OVERFLOW.. => 0x7c00,
        NORMAL.. => rounded(size - (112 << 23), 13),
        // adding 0.5 rounds: an `f32` between 0.5 and 1 has the precision of a subnormal `f16`
        _ => (f32::from_bits(size) + 0.5).to_bits() - 0.5f32.to_bits(),
    };
    sign | size as u16
}

pub fn f16_to_f32(bits: u16) -> f32 {
    let (sign, size) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff) << 13);
    let size = match bits & 0x7c00 {
        0x7c00 => size | 0x7f80_0000,
        // Adds 0.5 as `to_f16` does, to avoid subnormal values of `f32`, which a processor can be
        // set to treat as zero.
        0 => (f32::from_bits(0.5f32.to_bits() + u32::from(bits & 0x3ff)) - 0.5).to_bits(),
        _ => size + (112 << 23),
    };
    f32::from_bits(sign | size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finite_values_that_become_infinite_are_counted() {
        let values = [65504.0f32, 65519.9, 65520.0, -1e30, f32::INFINITY, f32::NAN, f32::MAX];
        let source: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes().to_vec()).collect();
        for (to, expected) in [(Dtype::F16, 3), (Dtype::BF16, 1), (Dtype::F64, 0)] {
            let mut target = vec![0; to.bits() as usize / 8 * values.len()];
            cast(Dtype::F32, &source, to, &mut target);
            assert_eq!(lost_values(Dtype::F32, &source, to, &target), expected, "{}", to);
        }
        let wide: Vec<u8> =
            [1e39f64, -1e300, 3e38].iter().flat_map(|value| value.to_le_bytes().to_vec()).collect();
        let mut target = vec![0; 12];
        cast(Dtype::F64, &wide, Dtype::F32, &mut target);
        assert_eq!(lost_values(Dtype::F64, &wide, Dtype::F32, &target), 2);
    }

    #[test]
    fn what_is_lost_is_said_of_the_first_tensors() {
        let of = |name: &str, count| Overflow { name: name.to_owned(), dtype: Dtype::F16, count };
        assert_eq!(overflow_text(&[]), "");
        assert_eq!(overflow_text(&[of("w", 1)]), "w: 1 finite value is beyond F16 (at most 65504)");
        let many: Vec<Overflow> = (0..6).map(|at| of(&at.to_string(), 2)).collect();
        assert!(overflow_text(&many).ends_with("(at most 65504); and likewise in 2 more tensors"));
    }

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

    /// Values between two neighbours go to the nearer one, and the middle to the even one.
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
