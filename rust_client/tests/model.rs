//! A model's memory: what it is made of, and that whoever reads sees one version.

use weightbus::layout::Layout;
use weightbus::{Dtype, Error, Model, Tensor, BF16};

#[test]
fn tensors_are_found_by_name_and_type() {
    let model = Model::new([
        Tensor::new("a", &[2, 2], vec![1f32, 2.0, 3.0, 4.0]),
        Tensor::new("b", &[], vec![BF16(0x3f80)]),
        Tensor::zeros("c", Dtype::F4, &[4]),
    ])
    .unwrap();
    let weights = model.read();
    assert_eq!(weights.get::<f32>("a").unwrap(), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(weightbus::to_f32(weights.get::<BF16>("b").unwrap()), [1.0]);
    assert_eq!(weights.tensor("c").unwrap().bytes(), [0, 0]);
    assert_eq!(model.nbytes(), 20);
    let text = |error: Error| error.to_string();
    assert!(text(weights.get::<f64>("a").unwrap_err()).contains("has dtype F32, but F64 was requested"));
    assert!(text(weights.get::<f32>("z").unwrap_err()).contains("a, b, c"));
}

#[test]
fn tensors_that_cannot_be_are_refused() {
    let short = Model::new([Tensor::new("a", &[2], vec![0f32])]);
    assert!(short.unwrap_err().to_string().contains("4 bytes, which do not fill F32 [2]"));
    let twice = Model::new([Tensor::new("a", &[], vec![0u8]), Tensor::new("a", &[], vec![0u8])]);
    assert!(twice.unwrap_err().to_string().contains("two tensors"));
    assert!(Model::new([Tensor::zeros("a", Dtype::F64, &[u64::MAX, 8])]).is_err());
    let much = Model::new([Tensor::zeros("a", Dtype::U8, &[1 << 60])]).unwrap_err();
    assert!(
        matches!(much, Error::Io { .. }) && much.to_string().contains("\"a\" of U8 [1152921504606846976]")
    );
}

#[test]
fn differences_are_named() {
    let json = r#"{"__metadata__":{"tied":"a"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(json.as_bytes());
    let layout = Layout::parse(&header).unwrap();
    let fault_of =
        |tensors: Vec<Tensor>, partial, casts| Model::new(tensors).unwrap().fault(&layout, partial, casts);
    let fault = |tensors: Vec<Tensor>| fault_of(tensors, false, false);
    let a = || Tensor::new("a", &[1], vec![0f32]);
    let tied = || Tensor::new("tied", &[1], vec![0f32]);
    assert_eq!(fault(vec![a(), tied()]), None);
    assert_eq!(fault(vec![a()]), None); // by one of its names it is there
    let other = fault(vec![Tensor::new("a", &[2], vec![0i32; 2]), tied(), Tensor::new("z", &[], vec![0u8])]);
    let lines = "a: shape [1] published, [2] here\na: dtype F32 published, I32 here\nz: U8 [] in the target, not published";
    assert_eq!(other.unwrap(), lines);
    assert_eq!(fault_of(vec![a()], true, false), None);
    let lacking = fault_of(vec![tied(), Tensor::new("z", &[], vec![0u8])], true, false);
    assert_eq!(lacking.unwrap(), "z: U8 [] in the target, not published");
    let halves = || vec![Tensor::new("a", &[1], vec![BF16(0)]), Tensor::new("tied", &[1], vec![0f64])];
    assert_eq!(fault_of(halves(), false, true), None);
    assert!(fault_of(halves(), false, false).unwrap().contains("dtype F32 published, BF16 here"));
    let whole = fault_of(vec![Tensor::new("a", &[1], vec![0i32])], true, true);
    assert_eq!(whole.unwrap(), "a: dtype F32 published, I32 here");
    let many = (0..30).map(|i| Tensor::new(format!("x{:02}", i), &[], vec![0u8])).collect();
    assert!(fault(many).unwrap().ends_with("... and 13 more"));
}

/// A type of the user's, as `half::bf16` is.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(transparent)]
struct MyBf16(u16);

// SAFETY: it is a number, whatever its bits.
unsafe impl weightbus::Plain for MyBf16 {}

impl weightbus::Element for MyBf16 {
    const DTYPE: weightbus::Dtype = weightbus::Dtype::BF16;
}

#[test]
fn memory_of_any_kind_is_a_tensor() {
    let mut raw = vec![7u8; 4];
    // SAFETY: it outlives the model, and nobody else uses it until then.
    let part =
        unsafe { Tensor::from_raw_parts("raw", weightbus::Dtype::U8, &[4], raw.as_mut_ptr(), raw.len()) };
    let leaked: &'static mut [f32] = Box::leak(vec![1f32, 2.0].into_boxed_slice());
    let model = Model::new([
        part,
        Tensor::new("leaked", &[2], leaked),
        Tensor::new("boxed", &[1], vec![5i64].into_boxed_slice()),
        Tensor::new("mine", &[1], vec![MyBf16(0x3f80)]),
    ])
    .unwrap();
    let weights = model.read();
    assert_eq!(weights.get::<u8>("raw").unwrap(), [7; 4]);
    assert_eq!(weights.get::<f32>("leaked").unwrap(), [1.0, 2.0]);
    assert_eq!(weights.get::<i64>("boxed").unwrap(), [5]);
    assert_eq!(weights.get::<MyBf16>("mine").unwrap(), [MyBf16(0x3f80)]);
    assert_eq!(weights.get::<weightbus::BF16>("mine").unwrap(), [weightbus::BF16(0x3f80)]);
    assert!(weights.get::<u16>("mine").is_err());
}

#[cfg(feature = "half")]
#[test]
fn halves_of_the_crate_half_are_elements() {
    use half::{bf16, f16};
    let numbers = Tensor::new("f", &[2], vec![f16::from_f32(1.5), f16::MAX]);
    let model = Model::new([numbers, Tensor::new("b", &[], vec![bf16::from_f32(-2.0)])]).unwrap();
    let weights = model.read();
    assert_eq!(weights.get::<f16>("f").unwrap(), [f16::from_f32(1.5), f16::MAX]);
    assert_eq!(weightbus::to_f32(weights.get::<BF16>("b").unwrap()), [-2.0]);
}

/// Libraries built for fast arithmetic set this in threads that call others.
#[cfg(target_arch = "x86_64")]
#[test]
fn half_floats_are_what_they_are_where_subnormals_are_flushed() {
    let flush = |mxcsr: u32| {
        // SAFETY: it reads four bytes, and this thread computes as ever at the end.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &mxcsr) }
    };
    let all: Vec<weightbus::F16> = (0..=u16::MAX).map(weightbus::F16).collect();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<u32>>();
    let plain = weightbus::to_f32(&all);
    flush(0x9fc0);
    let flushed = weightbus::to_f32(&all);
    flush(0x1f80);
    assert!(bits(plain) == bits(flushed));
}
