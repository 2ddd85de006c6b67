//! The dtypes of the bus, by their safetensors names.

use std::fmt;

macro_rules! dtypes {
    ($($variant:ident $name:literal $bits:literal,)*) => {
        /// A dtype, named as in safetensors.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types)]
        pub enum Dtype { $(#[doc = $name] $variant,)* }

        impl Dtype {
            /// All dtypes, in the order of safetensors.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant,)*];

            /// Returns the name that this dtype has in a layout.
            pub fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name,)* }
            }

            /// Returns the number of bits of one element.
            pub fn bits(self) -> u64 {
                match self { $(Dtype::$variant => $bits,)* }
            }

            /// Returns the dtype with this name, if there is one.
            pub fn named(name: &str) -> Option<Dtype> {
                match name { $($name => Some(Dtype::$variant),)* _ => None }
            }
        }
    };
}

dtypes! {
    Bool "BOOL" 8,
    F4 "F4" 4,
    F6_E2M3 "F6_E2M3" 6,
    F6_E3M2 "F6_E3M2" 6,
    U8 "U8" 8,
    I8 "I8" 8,
    F8_E5M2 "F8_E5M2" 8,
    F8_E4M3 "F8_E4M3" 8,
    F8_E8M0 "F8_E8M0" 8,
    F8_E4M3FNUZ "F8_E4M3FNUZ" 8,
    F8_E5M2FNUZ "F8_E5M2FNUZ" 8,
    I16 "I16" 16,
    U16 "U16" 16,
    F16 "F16" 16,
    BF16 "BF16" 16,
    I32 "I32" 32,
    U32 "U32" 32,
    F32 "F32" 32,
    C64 "C64" 64,
    F64 "F64" 64,
    I64 "I64" 64,
    U64 "U64" 64,
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}
